# Semantic FPN's short schedule, as hierarchical transformers report it.
_base_ = './adamw_160k.py'

optim_wrapper = dict(optimizer=dict(lr=1e-4, weight_decay=1e-4))
param_scheduler = [
    dict(type='PolyLR', power=0.9, eta_min=0.0, by_epoch=False, begin=0, end=80000),
]
train_cfg = dict(max_iters=80000, val_interval=8000)
