# The all-MLP head of SegFormer (Xie et al., 2021).
_base_ = './nala_segmentor.py'

model = dict(
    decode_head=dict(
        type='SegformerHead',
        in_channels=_base_.channels.t,
        in_index=[0, 1, 2, 3],
        channels=256,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=_base_.norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
)
