# CamVid in the SegNet split at 240x180: images/{train,val}/NAME.jpg and annotations/{train,val}/
# NAME.png with class numbers 0 to 10, 255 for void.
dataset_type = 'BaseSegDataset'
data_root = 'data/camvid_small'
crop_size = (128, 160)
metainfo = dict(
    classes=(
        *('sky', 'building', 'pole', 'road', 'pavement', 'tree'),
        *('sign', 'fence', 'car', 'pedestrian', 'bicyclist'),
    ),
    palette=[
        *([128, 128, 128], [128, 0, 0], [192, 192, 128], [128, 64, 128]),
        *([60, 40, 222], [128, 128, 0], [192, 128, 128], [64, 64, 128]),
        *([64, 0, 128], [64, 64, 0], [0, 128, 192]),
    ],
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomCrop', crop_size=crop_size),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
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
        data_prefix=dict(img_path='images/train', seg_map_path='annotations/train'),
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
        data_prefix=dict(img_path='images/val', seg_map_path='annotations/val'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
