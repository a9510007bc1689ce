# From scratch on CPU or GPU, 1000 iterations of 4 images of 128x128.
_base_ = [
    '../_base_/models/mask-rcnn_nala-xt_narrow.py',
    '../_base_/datasets/shapes_instance.py',
    '../_base_/schedules/adamw_short.py',
    '../_base_/mmdet_iterations_runtime.py',
]

model = dict(roi_head=dict(bbox_head=dict(num_classes=6), mask_head=dict(num_classes=6)))
train_dataloader = dict(batch_size=4)
optim_wrapper = dict(optimizer=dict(lr=1e-3), clip_grad=dict(max_norm=10.0, norm_type=2))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=100),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=100, end=1000),
]
train_cfg = dict(max_iters=1000, val_interval=500)
default_hooks = dict(checkpoint=dict(interval=500))
auto_scale_lr = dict(base_batch_size=4)
