_base_ = './default_runtime.py'

default_scope = 'mmpretrain'
default_hooks = dict(
    checkpoint=dict(interval=1, save_best='accuracy/top1'),
    visualization=dict(type='VisualizationHook', enable=False),
)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='UniversalVisualizer', vis_backends=vis_backends, name='visualizer')
