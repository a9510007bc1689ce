_base_ = [
    '../_base_/models/cascade-mask-rcnn_nala.py',
    '../_base_/datasets/coco_instance_ms-crop.py',
    '../_base_/schedules/adamw_3x.py',
    '../_base_/mmdet_runtime.py',
]
