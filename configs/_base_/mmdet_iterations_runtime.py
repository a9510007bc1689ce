# mmdet's runtime for schedules that count iterations instead of epochs.
_base_ = './mmdet_runtime.py'

default_hooks = dict(
    logger=dict(log_metric_by_epoch=False), checkpoint=dict(by_epoch=False, save_last=True)
)
log_processor = dict(by_epoch=False)
