_base_ = './fpn_nala-t_8xb2-80k_ade20k-512x512.py'

model = dict(backbone=dict(arch='s'), neck=dict(in_channels=_base_.channels.s))
