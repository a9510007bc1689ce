_base_ = [
    '../_base_/models/dino_nala.py',
    '../_base_/datasets/coco_detection_ms-crop.py',
    '../_base_/schedules/dino_12e.py',
    '../_base_/mmdet_runtime.py',
]
