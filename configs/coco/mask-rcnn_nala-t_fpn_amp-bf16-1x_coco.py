_base_ = './mask-rcnn_nala-t_fpn_1x_coco.py'

# bfloat16 has float32's range, so the loss needs no scale.
optim_wrapper = dict(type='AmpOptimWrapper', dtype='bfloat16', loss_scale=dict(enabled=False))
