# For comparison: ResNet-18 with the same head and budget.
_base_ = './upernet_nala-xt_camvid.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='ResNetV1c',
        depth=18,
        norm_cfg=dict(type='BN', requires_grad=True),
        norm_eval=False,
        style='pytorch',
    ),
    decode_head=dict(in_channels=[64, 128, 256, 512]),
    auxiliary_head=dict(in_channels=256),
)
