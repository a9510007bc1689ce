# For comparison: ResNet-18 with the same neck, head and budget.
_base_ = './retinanet_nala-xt_fpn_bccd.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='ResNet',
        depth=18,
        out_indices=(1, 2, 3),
        norm_cfg=dict(type='BN', requires_grad=True),
        norm_eval=False,
        style='pytorch',
    ),
    neck=dict(in_channels=[128, 256, 512]),
)
