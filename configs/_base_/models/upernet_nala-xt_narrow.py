# For short trainings on small data sets, also without a GPU: the smallest backbone without drop
# path, narrow heads without dropout.
_base_ = './upernet_nala.py'

head = dict(channels=64, dropout_ratio=0.0, norm_cfg=dict(type='BN', requires_grad=True))
model = dict(
    backbone=dict(arch='xt', drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    decode_head=dict(in_channels=_base_.channels.xt, **head),
    auxiliary_head=dict(in_channels=_base_.channels.xt[2], **head),
)
