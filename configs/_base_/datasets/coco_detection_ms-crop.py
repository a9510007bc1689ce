_base_ = ['./coco_detection.py', './coco_ms-crop.py']

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    *_base_.ms_crop,
]
# Images without objects are examples too.
train_dataloader = dict(
    dataset=dict(filter_cfg=dict(filter_empty_gt=False), pipeline=train_pipeline)
)
