_base_ = './mask-rcnn_nala-t_fpn_ms-crop-3x_coco.py'

model = dict(backbone=dict(arch='l'), neck=dict(in_channels=_base_.channels.l))
