_base_ = './mask2former_nala-t_8xb2-lsj-50e_coco.py'

model = dict(backbone=dict(arch='s'), panoptic_head=dict(in_channels=_base_.channels.s))
