_base_ = [
    '../_base_/models/mask2former_nala_semantic.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/mask2former_160k.py',
    '../_base_/mmseg_runtime.py',
]

custom_imports = dict(imports=['mmnala', 'mmdet.models'])
model = dict(data_preprocessor=dict(size=_base_.crop_size))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(
        type='RandomChoiceResize',
        scales=[int(51.2 * tenth) for tenth in range(5, 21)],
        resize_type='ResizeShortestEdge',
        max_size=2048,
    ),
    dict(type='RandomCrop', crop_size=_base_.crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
default_hooks = dict(checkpoint=dict(interval=5000))
