# What all segmentors share; a head is added by each.
_base_ = '../variants.py'

# One or two images on a GPU are too few for their own statistics, so all GPUs share theirs. Without
# a second process SyncBN is plain BN.
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
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
