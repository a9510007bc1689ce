_base_ = './default_runtime.py'

default_scope = 'mmseg'
default_hooks = dict(
    logger=dict(log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, save_best='mIoU'),
    visualization=dict(type='SegVisualizationHook'),
)
log_processor = dict(by_epoch=False)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='SegLocalVisualizer', vis_backends=vis_backends, name='visualizer')
tta_model = dict(type='SegTTAModel')
