# The ImageNet model of the release: backbone, neck and a linear layer.
_base_ = '../variants.py'

model = dict(
    type='ImageClassifier',
    backbone=dict(type='NaLaFormer', arch='t', out_indices=(3,), out_norm=False),
    neck=dict(type='NaLaFormerNeck', in_channels=_base_.channels.t[3]),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=1024,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        # As the release draws its convolutions, of which the last layer is one.
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
    ),
)
