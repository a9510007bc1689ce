_base_ = './upernet_nala-t_8xb2-160k_ade20k-512x512.py'

model = dict(
    backbone=dict(arch='b'),
    decode_head=dict(in_channels=_base_.channels.b),
    auxiliary_head=dict(in_channels=_base_.channels.b[2]),
)
