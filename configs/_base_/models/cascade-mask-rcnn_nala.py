# Cascade Mask R-CNN (Cai & Vasconcelos, 2019) with boxes by GIoU and heads of four convolutions
# and one linear layer, the strong form that Swin and ConvNeXt report.
_base_ = './mask-rcnn_nala.py'

box_head = dict(
    type='ConvFCBBoxHead',
    num_shared_convs=4,
    num_shared_fcs=1,
    in_channels=256,
    conv_out_channels=256,
    fc_out_channels=1024,
    roi_feat_size=7,
    num_classes=80,
    reg_class_agnostic=False,
    reg_decoded_bbox=True,
    # Here too, the boxes of one GPU's images are too alike for statistics of their own.
    norm_cfg=_base_.norm_cfg,
    loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    loss_bbox=dict(type='GIoULoss', loss_weight=10.0),
)
assigner = dict(type='MaxIoUAssigner', match_low_quality=False)
sampler = dict(
    type='RandomSampler', num=512, pos_fraction=0.25, neg_pos_ub=-1, add_gt_as_proposals=True
)
# Each step refines the boxes of the one before and is trained with better ones.
steps = dict(
    target_stds=[[0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067]],
    iou=[0.5, 0.6, 0.7],
)
model = dict(
    type='CascadeRCNN',
    rpn_head=dict(
        loss_bbox=dict(_delete_=True, type='SmoothL1Loss', beta=1.0 / 9.0, loss_weight=1.0)
    ),
    roi_head=dict(
        type='CascadeRoIHead',
        num_stages=3,
        stage_loss_weights=[1, 0.5, 0.25],
        bbox_head=[
            dict(bbox_coder=dict(target_stds=stds, **_base_.bbox_coder), **box_head)
            for stds in steps['target_stds']
        ],
    ),
    train_cfg=dict(
        rpn=dict(allowed_border=0),
        rpn_proposal=dict(max_per_img=2000),
        rcnn=[
            dict(
                assigner=dict(pos_iou_thr=iou, neg_iou_thr=iou, min_pos_iou=iou, **assigner),
                sampler=sampler,
                mask_size=28,
                pos_weight=-1,
            )
            for iou in steps['iou']
        ],
    ),
)
