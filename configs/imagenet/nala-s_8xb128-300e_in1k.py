_base_ = './nala-t_8xb128-300e_in1k.py'

model = dict(backbone=dict(arch='s'), neck=dict(in_channels=_base_.channels.s[3]))
