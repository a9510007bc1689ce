# For comparison: PVTv2-B0 with the same neck, head and budget.
_base_ = './retinanet_nala-xt_fpn_bccd.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='PyramidVisionTransformerV2',
        embed_dims=32,
        num_layers=[2, 2, 2, 2],
        out_indices=(1, 2, 3),
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[64, 160, 256]),
)
