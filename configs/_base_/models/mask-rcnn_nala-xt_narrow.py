# For short trainings on small images, also without a GPU: the smallest backbone without drop path,
# narrow neck and heads, few proposals.
_base_ = './mask-rcnn_nala.py'

# From scratch, the neck needs norms (He et al., "Rethinking ImageNet Pre-training", 2019).
norm_cfg = dict(type='GN', num_groups=16)
model = dict(
    backbone=dict(arch='xt', drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    neck=dict(in_channels=_base_.channels.xt, out_channels=64, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=64, feat_channels=64),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        # Classes share boxes and masks, so that few objects teach them.
        bbox_head=dict(in_channels=64, fc_out_channels=256, reg_class_agnostic=True),
        mask_roi_extractor=dict(out_channels=64),
        mask_head=dict(
            num_convs=2,
            in_channels=64,
            conv_out_channels=64,
            norm_cfg=norm_cfg,
            class_agnostic=True,
        ),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=64, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100)),
)
