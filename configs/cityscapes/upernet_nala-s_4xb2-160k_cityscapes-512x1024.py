_base_ = './upernet_nala-t_4xb2-160k_cityscapes-512x1024.py'

model = dict(
    backbone=dict(arch='s'),
    decode_head=dict(in_channels=_base_.channels.s),
    auxiliary_head=dict(in_channels=_base_.channels.s[2]),
)
