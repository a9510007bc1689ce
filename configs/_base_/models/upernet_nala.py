_base_ = './nala_segmentor.py'

head = dict(
    dropout_ratio=0.1,
    num_classes=150,
    norm_cfg=_base_.norm_cfg,
    align_corners=False,
)
model = dict(
    decode_head=dict(
        type='UPerHead',
        in_channels=_base_.channels.t,
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
        **head,
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=_base_.channels.t[2],
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4),
        **head,
    ),
)
