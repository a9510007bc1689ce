from .attention_monitor import AttentionMonitorHook
from .hooks import IterationSeedHook
from .instance_tta import InstanceTTAModel
from .label_check import LabelCheckHook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .plot_log import PlotLogHook
from .runner import CPUDistributedRunner

__all__ = [
    'AttentionMonitorHook',
    'CPUDistributedRunner',
    'InstanceTTAModel',
    'IterationSeedHook',
    'LabelCheckHook',
    'LayerDecayOptimWrapperConstructor',
    'PlotLogHook',
]
