# BCCD: photographs of blood cells, 640x480, boxes of three kinds: images/NAME.jpg and
# annotations/{train,val}.json.
_base_ = './small_detection.py'

data_root = 'data/bccd'
metainfo = dict(
    classes=('RBC', 'WBC', 'Platelets'),
    palette=[(220, 20, 60), (65, 105, 225), (255, 165, 0)],
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(320, 240), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(320, 240), keep_ratio=True),
    # After Resize: predictions are scaled back and compared at the original size.
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    ann_file='annotations/train.json',
    data_prefix=dict(img='images'),
    pipeline=train_pipeline,
)
val_dataset = dict(
    data_root=data_root,
    metainfo=metainfo,
    ann_file='annotations/val.json',
    data_prefix=dict(img='images'),
    pipeline=test_pipeline,
)
train_dataloader = dict(batch_size=4, dataset=train_dataset)
val_dataloader = dict(dataset=val_dataset)
test_dataloader = dict(dataset=val_dataset)
val_evaluator = dict(ann_file=data_root + '/annotations/val.json')
test_evaluator = val_evaluator
