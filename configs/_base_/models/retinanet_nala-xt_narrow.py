# For short trainings on small images, also without a GPU: the smallest backbone without drop path,
# narrow neck and head, with the norms that training from scratch needs.
_base_ = './retinanet_nala.py'

norm_cfg = dict(type='GN', num_groups=16)
model = dict(
    backbone=dict(arch='xt', drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    neck=dict(in_channels=_base_.channels.xt[1:], out_channels=64, norm_cfg=norm_cfg),
    bbox_head=dict(in_channels=64, feat_channels=64, stacked_convs=2, norm_cfg=norm_cfg),
)
