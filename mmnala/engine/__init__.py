from .hooks import IterationSeedHook
from .label_check import LabelCheckHook
from .runner import CPUDistributedRunner

__all__ = ['CPUDistributedRunner', 'IterationSeedHook', 'LabelCheckHook']
