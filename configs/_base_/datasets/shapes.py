# The drawn data set of tools/make_demo_dataset.py, in ADE20K's layout.
dataset_type = 'BaseSegDataset'
data_root = 'data/shapes'
crop_size = (128, 128)
metainfo = dict(
    classes=('background', 'wall', 'window', 'poster', 'striped ball', 'spotted ball', 'star'),
    palette=[
        *([70, 70, 78], [189, 104, 78], [86, 180, 233], [240, 200, 60]),
        *([0, 158, 115], [204, 102, 178], [232, 62, 62]),
    ],
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomCrop', crop_size=crop_size),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        metainfo=metainfo,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        img_suffix='.jpg',
        seg_map_suffix='.png',
        reduce_zero_label=True,
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        metainfo=metainfo,
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        img_suffix='.jpg',
        seg_map_suffix='.png',
        reduce_zero_label=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
