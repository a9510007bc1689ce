_base_ = './nala-t_8xb128-300e_in1k.py'

model = dict(backbone=dict(arch='b'), neck=dict(in_channels=_base_.channels.b[3]))
