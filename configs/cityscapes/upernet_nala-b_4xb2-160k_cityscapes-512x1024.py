_base_ = './upernet_nala-t_4xb2-160k_cityscapes-512x1024.py'

model = dict(
    backbone=dict(arch='b'),
    decode_head=dict(in_channels=_base_.channels.b),
    auxiliary_head=dict(in_channels=_base_.channels.b[2]),
)
