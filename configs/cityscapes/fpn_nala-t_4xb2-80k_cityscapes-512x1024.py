_base_ = [
    '../_base_/models/fpn_nala.py',
    '../_base_/datasets/cityscapes.py',
    '../_base_/schedules/adamw_80k.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(data_preprocessor=dict(size=_base_.crop_size), decode_head=dict(num_classes=19))
default_hooks = dict(checkpoint=dict(interval=8000))
auto_scale_lr = dict(base_batch_size=8)
