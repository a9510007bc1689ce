_base_ = './mask-rcnn_nala-t_fpn_1x_coco.py'

model = dict(backbone=dict(arch='s'), neck=dict(in_channels=_base_.channels.s))
