# The drawn data set of tools/make_demo_dataset.py, in ADE20K's layout.
_base_ = './small_segmentation.py'

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
train_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
    reduce_zero_label=True,
    pipeline=train_pipeline,
)
val_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
    reduce_zero_label=True,
    pipeline=test_pipeline,
)
train_dataloader = dict(dataset=train_dataset)
val_dataloader = dict(dataset=val_dataset)
test_dataloader = dict(dataset=val_dataset)
