# DINO's own: the backbone learns at a tenth of the rate, as if it were pre-trained.
_base_ = './adamw_1x.py'

optim_wrapper = dict(
    optimizer=dict(weight_decay=1e-4),
    clip_grad=dict(max_norm=0.1, norm_type=2),
    paramwise_cfg=dict(_delete_=True, custom_keys={'backbone': dict(lr_mult=0.1)}),
)
param_scheduler = [
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=12, milestones=[11], gamma=0.1),
]
