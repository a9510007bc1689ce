# For short trainings on small images, also without a GPU: the smallest backbone without drop path,
# narrow neck and heads, few proposals.
_base_ = './mask-rcnn_nala.py'

# From scratch, neck and heads need norms (He et al., "Rethinking ImageNet Pre-training", 2019).
norm_cfg = dict(type='GN', num_groups=16)
model = dict(
    backbone=dict(arch='xt', drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    neck=dict(in_channels=_base_.channels.xt, out_channels=64, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=64, feat_channels=64),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        bbox_head=dict(
            type='ConvFCBBoxHead',
            num_shared_convs=2,
            num_shared_fcs=1,
            in_channels=64,
            conv_out_channels=64,
            fc_out_channels=256,
            norm_cfg=norm_cfg,
        ),
        mask_roi_extractor=dict(out_channels=64),
        mask_head=dict(num_convs=2, in_channels=64, conv_out_channels=64, norm_cfg=norm_cfg),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100)),
)
