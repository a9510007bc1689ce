# 50 epochs of COCO, counted in iterations of 16 images.
_base_ = './mask2former_optim.py'

max_iters = 368750
interval = 5000
param_scheduler = dict(
    type='MultiStepLR',
    by_epoch=False,
    begin=0,
    end=max_iters,
    milestones=[327778, 355092],
    gamma=0.1,
)
train_cfg = dict(
    type='IterBasedTrainLoop',
    max_iters=max_iters,
    val_interval=interval,
    # The last iterations are no whole interval: evaluate at the end, too.
    dynamic_intervals=[(max_iters // interval * interval + 1, max_iters)],
)
