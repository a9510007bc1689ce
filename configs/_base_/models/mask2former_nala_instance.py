# Mask2Former for instances: the toolbox's panoptic form without "stuff" classes.
_base_ = ['./nala_detector.py', './mask2former_head.py']

num_classes = 80
image_size = (1024, 1024)
classes = dict(num_things_classes=num_classes, num_stuff_classes=0)
model = dict(
    type='Mask2Former',
    data_preprocessor=dict(
        pad_mask=True,
        mask_pad_value=0,
        pad_seg=False,
        batch_augments=[
            dict(
                type='BatchFixedSizePad',
                size=image_size,
                img_pad_value=0,
                pad_mask=True,
                mask_pad_value=0,
                pad_seg=False,
            )
        ],
    ),
    panoptic_head=dict(
        in_channels=_base_.channels.t,
        loss_cls=dict(class_weight=[1.0] * num_classes + [0.1], **_base_.mask2former_loss_cls),
        **classes,
        **_base_.mask2former_head,
    ),
    panoptic_fusion_head=dict(type='MaskFormerFusionHead', loss_panoptic=None, **classes),
    train_cfg=_base_.mask2former_train_cfg,
    test_cfg=dict(
        panoptic_on=False,
        semantic_on=False,
        instance_on=True,
        max_per_image=100,
        iou_thr=0.8,
        filter_low_score=True,
    ),
)
