_base_ = './fpn_nala-t_4xb2-80k_cityscapes-512x1024.py'

model = dict(backbone=dict(arch='xt'), neck=dict(in_channels=_base_.channels.xt))
