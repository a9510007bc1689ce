# For short trainings on small data sets, also without a GPU: the smallest backbone without drop
# path, heads of 64 channels.
_base_ = './upernet_nala.py'

model = dict(
    backbone=dict(arch='xt', drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    decode_head=dict(
        in_channels=_base_.channels.xt, channels=64, norm_cfg=dict(type='BN', requires_grad=True)
    ),
    auxiliary_head=dict(
        in_channels=_base_.channels.xt[2], channels=64, norm_cfg=dict(type='BN', requires_grad=True)
    ),
)
