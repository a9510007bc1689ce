# From scratch on CPU or GPU: 600 iterations of 8 crops of 128x160.
_base_ = [
    '../_base_/models/upernet_nala-xt_narrow.py',
    '../_base_/datasets/camvid.py',
    '../_base_/schedules/adamw_short.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=_base_.crop_size),
    decode_head=dict(num_classes=11),
    auxiliary_head=dict(num_classes=11),
)
default_hooks = dict(checkpoint=dict(interval=200))
