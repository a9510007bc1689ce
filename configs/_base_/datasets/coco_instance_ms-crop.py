_base_ = ['./coco_instance.py', './coco_ms-crop.py']

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    *_base_.ms_crop,
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
