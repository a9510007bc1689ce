# DINO (Zhang et al., 2023) with four feature levels.
_base_ = './nala_detector.py'

ffn_cfg = dict(embed_dims=256, feedforward_channels=2048, ffn_drop=0.0)
deformable_attn_cfg = dict(embed_dims=256, num_levels=4, dropout=0.0)
model = dict(
    type='DINO',
    num_queries=900,
    with_box_refine=True,
    as_two_stage=True,
    data_preprocessor=dict(pad_size_divisor=1),
    # Stride 4 is not used, and an output that is not used would leave a norm without gradient.
    backbone=dict(out_indices=(1, 2, 3)),
    neck=dict(
        type='ChannelMapper',
        in_channels=_base_.channels.t[1:],
        kernel_size=1,
        out_channels=256,
        act_cfg=None,
        norm_cfg=dict(type='GN', num_groups=32),
        num_outs=4,
    ),
    encoder=dict(num_layers=6, layer_cfg=dict(self_attn_cfg=deformable_attn_cfg, ffn_cfg=ffn_cfg)),
    decoder=dict(
        num_layers=6,
        return_intermediate=True,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=256, num_heads=8, dropout=0.0),
            cross_attn_cfg=deformable_attn_cfg,
            ffn_cfg=ffn_cfg,
        ),
        post_norm_cfg=None,
    ),
    positional_encoding=dict(num_feats=128, normalize=True, offset=0.0, temperature=20),
    bbox_head=dict(
        type='DINOHead',
        num_classes=80,
        sync_cls_avg_factor=True,
        loss_cls=dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type='L1Loss', loss_weight=5.0),
        loss_iou=dict(type='GIoULoss', loss_weight=2.0),
    ),
    dn_cfg=dict(
        label_noise_scale=0.5,
        box_noise_scale=1.0,
        group_cfg=dict(dynamic=True, num_groups=None, num_dn_queries=100),
    ),
    train_cfg=dict(
        assigner=dict(
            type='HungarianAssigner',
            match_costs=[
                dict(type='FocalLossCost', weight=2.0),
                dict(type='BBoxL1Cost', weight=5.0, box_format='xywh'),
                dict(type='IoUCost', iou_mode='giou', weight=2.0),
            ],
        )
    ),
    test_cfg=dict(max_per_img=300),
)
