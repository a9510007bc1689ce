_base_ = './dino-4scale_nala-t_8xb2-12e_coco.py'

model = dict(backbone=dict(arch='s'), neck=dict(in_channels=_base_.channels.s[1:]))
