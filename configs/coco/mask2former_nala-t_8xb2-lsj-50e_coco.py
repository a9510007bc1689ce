_base_ = [
    '../_base_/models/mask2former_nala_instance.py',
    '../_base_/datasets/coco_instance_lsj.py',
    '../_base_/schedules/mask2former_50e.py',
    '../_base_/mmdet_iterations_runtime.py',
]

default_hooks = dict(checkpoint=dict(interval=5000))
