# Channels of the four stages of each variant, for necks and heads.
channels = dict(
    xt=[32, 64, 128, 384],
    t=[64, 128, 256, 512],
    s=[64, 128, 320, 512],
    b=[96, 192, 384, 512],
    l=[96, 192, 448, 640],
)

# Two images on a GPU are too few for their own statistics. Without a second process, or without a
# GPU, SyncBN is plain BN.
norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
    ),
    backbone=dict(type='NaLaFormer', arch='t', norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=channels['t'],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=channels['t'][2],
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
