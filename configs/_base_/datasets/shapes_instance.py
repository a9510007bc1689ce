# The drawn data set of tools/make_demo_dataset.py, by its COCO annotations.
_base_ = './small_detection.py'

data_root = 'data/shapes'
metainfo = dict(
    classes=('wall', 'window', 'poster', 'striped ball', 'spotted ball', 'star'),
    palette=[
        *((189, 104, 78), (86, 180, 233), (240, 200, 60)),
        *((0, 158, 115), (204, 102, 178), (232, 62, 62)),
    ],
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale_factor=1.0, keep_ratio=True),  # mmdet asks for the factor
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    ann_file='annotations/instances_training.json',
    data_prefix=dict(img='images/training'),
    pipeline=train_pipeline,
)
val_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    ann_file='annotations/instances_validation.json',
    data_prefix=dict(img='images/validation'),
    pipeline=test_pipeline,
)
train_dataloader = dict(dataset=train_dataset)
val_dataloader = dict(dataset=val_dataset)
test_dataloader = dict(dataset=val_dataset)
val_evaluator = dict(
    ann_file=data_root + '/annotations/instances_validation.json', metric=['bbox', 'segm']
)
test_evaluator = val_evaluator
