# Loaders for data sets of a few hundred small images, counted in iterations.
train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(type='CocoDataset', filter_cfg=dict(filter_empty_gt=True)),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CocoDataset', test_mode=True),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='CocoMetric', metric='bbox')
test_evaluator = val_evaluator
