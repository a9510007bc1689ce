_base_ = [
    '../_base_/models/upernet_nala.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/adamw_160k.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(data_preprocessor=dict(size=_base_.crop_size))
default_hooks = dict(checkpoint=dict(interval=16000))
