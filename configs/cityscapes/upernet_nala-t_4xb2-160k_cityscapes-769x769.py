_base_ = [
    '../_base_/models/upernet_nala.py',
    '../_base_/datasets/cityscapes_769x769.py',
    '../_base_/schedules/adamw_160k.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=_base_.crop_size),
    decode_head=dict(num_classes=19, align_corners=True),
    auxiliary_head=dict(num_classes=19, align_corners=True),
    test_cfg=dict(mode='slide', crop_size=_base_.crop_size, stride=(513, 513)),
)
default_hooks = dict(checkpoint=dict(interval=16000))
auto_scale_lr = dict(base_batch_size=8)
