_base_ = [
    '../_base_/models/segformer_nala.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/adamw_160k.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(data_preprocessor=dict(size=_base_.crop_size))
# SegFormer's own: the head learns at ten times the rate.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'head': dict(lr_mult=10.0)}))
default_hooks = dict(checkpoint=dict(interval=16000))
