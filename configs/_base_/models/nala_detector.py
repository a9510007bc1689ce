# What all detectors share.
_base_ = '../variants.py'

norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
    # The stem and the downsampling are the only batch norms. One or two images on a GPU are too few
    # for their own statistics, so all GPUs share theirs; norm_eval=True, the habit with ResNet,
    # keeps those of a pre-training and is right only with an init_cfg. Without a second process
    # SyncBN is plain BN.
    backbone=dict(type='NaLaFormer', arch='t', norm_cfg=norm_cfg, norm_eval=False),
)
