# Mask2Former as an mmseg decode head; it is built from mmdet's parts.
_base_ = ['./nala_segmentor.py', './mask2former_head.py']

num_classes = 150
model = dict(
    # Its predictions are scaled up by whole factors.
    data_preprocessor=dict(test_cfg=dict(size_divisor=32)),
    decode_head=dict(
        in_channels=_base_.channels.t,
        num_classes=num_classes,
        align_corners=False,
        loss_cls=dict(class_weight=[1.0] * num_classes + [0.1], **_base_.mask2former_loss_cls),
        train_cfg=_base_.mask2former_train_cfg,
        **_base_.mask2former_head,
    ),
)
