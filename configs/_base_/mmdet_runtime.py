_base_ = './default_runtime.py'

default_scope = 'mmdet'
# The images differ in size, so timing the convolutions of each size would not pay.
env_cfg = dict(cudnn_benchmark=False)
default_hooks = dict(
    checkpoint=dict(interval=1, save_best='coco/bbox_mAP'),
    visualization=dict(type='DetVisualizationHook'),
)
log_processor = dict(type='LogProcessor', by_epoch=True)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='DetLocalVisualizer', vis_backends=vis_backends, name='visualizer')
