# For comparison: SegFormer's MiT-B0 with the same head and budget.
_base_ = './upernet_nala-xt_camvid.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='MixVisionTransformer',
        embed_dims=32,
        num_layers=[2, 2, 2, 2],
        num_heads=[1, 2, 5, 8],
        patch_sizes=[7, 3, 3, 3],
        sr_ratios=[8, 4, 2, 1],
        mlp_ratio=4,
        drop_path_rate=0.0,
    ),
    decode_head=dict(in_channels=[32, 64, 160, 256]),
    auxiliary_head=dict(in_channels=160),
)
