from .attention_monitor import AttentionMonitorHook
from .hooks import IterationSeedHook
from .instance_tta import InstanceTTAModel
from .label_check import LabelCheckHook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .non_finite_loss import NonFiniteLossHook
from .plot_log import PlotLogHook
from .preemption import PreemptionHook
from .runner import CPUDistributedRunner
from .safe_checkpoint import SafeCheckpointHook
from .strategies import DataParallelStrategy, ShardedStrategy
from .unreadable_image import UnreadableImageHook

__all__ = [
    'AttentionMonitorHook',
    'CPUDistributedRunner',
    'DataParallelStrategy',
    'InstanceTTAModel',
    'IterationSeedHook',
    'LabelCheckHook',
    'LayerDecayOptimWrapperConstructor',
    'NonFiniteLossHook',
    'PlotLogHook',
    'PreemptionHook',
    'SafeCheckpointHook',
    'ShardedStrategy',
    'UnreadableImageHook',
]
