# From scratch on a small data set in minutes: 600 iterations of 8 images.
_base_ = './adamw_160k.py'

optim_wrapper = dict(optimizer=dict(lr=6e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=50, end=600),
]
train_cfg = dict(max_iters=600, val_interval=200)
auto_scale_lr = dict(base_batch_size=8)
