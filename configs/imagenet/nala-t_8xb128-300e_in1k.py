_base_ = [
    '../_base_/models/nala_classifier.py',
    '../_base_/datasets/imagenet.py',
    '../_base_/schedules/adamw_300e.py',
    '../_base_/mmpretrain_runtime.py',
]

model = dict(
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])
)
# Evaluated and saved is the average of the weights and of the batch norms' statistics.
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='EMAHook', momentum=1e-4, update_buffers=True, priority='ABOVE_NORMAL'),
]
