# CamVid in the SegNet split at 240x180: images/{train,val}/NAME.jpg and annotations/{train,val}/
# NAME.png with class numbers 0 to 10, 255 for void.
_base_ = './small_segmentation.py'

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
train_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    data_prefix=dict(img_path='images/train', seg_map_path='annotations/train'),
    pipeline=train_pipeline,
)
val_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    data_prefix=dict(img_path='images/val', seg_map_path='annotations/val'),
    pipeline=test_pipeline,
)
train_dataloader = dict(dataset=train_dataset)
val_dataloader = dict(dataset=val_dataset)
test_dataloader = dict(dataset=val_dataset)
