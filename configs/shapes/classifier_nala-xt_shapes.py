# From scratch on CPU or GPU, 8 epochs of 64x64 close-ups.
_base_ = [
    '../_base_/models/nala_classifier.py',
    '../_base_/datasets/shapes_objects.py',
    '../_base_/schedules/adamw_300e.py',
    '../_base_/mmpretrain_runtime.py',
]

model = dict(
    backbone=dict(arch='xt'),
    neck=dict(in_channels=_base_.channels.xt[3]),
    head=dict(num_classes=6),
)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        by_epoch=True,
        begin=0,
        end=1,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=1,
        end=8,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=8)
auto_scale_lr = dict(base_batch_size=32)
