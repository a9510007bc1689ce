# The demo: from scratch on CPU or GPU, 1000 iterations of 8 crops of 128x128.
_base_ = [
    '../_base_/models/upernet_nala-xt_narrow.py',
    '../_base_/datasets/shapes.py',
    '../_base_/schedules/adamw_short.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=_base_.crop_size),
    decode_head=dict(num_classes=7),
    auxiliary_head=dict(num_classes=7),
)
# These images are many and varied enough for a higher rate. Without a bound on the gradients it
# has thrown a training back that did not recover.
optim_wrapper = dict(optimizer=dict(lr=2e-3), clip_grad=dict(max_norm=1.0, norm_type=2))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=50, end=1000),
]
train_cfg = dict(max_iters=1000)
default_hooks = dict(checkpoint=dict(interval=200))
