_base_ = './mask-rcnn_nala-t_fpn_1x_coco.py'

optim_wrapper = dict(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')
