from .hooks import IterationSeedHook
from .label_check import LabelCheckHook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .runner import CPUDistributedRunner

__all__ = [
    'CPUDistributedRunner',
    'IterationSeedHook',
    'LabelCheckHook',
    'LayerDecayOptimWrapperConstructor',
]
