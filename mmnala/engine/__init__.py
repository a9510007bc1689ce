from .data_check import DataCheckHook
from .hooks import IterationSeedHook
from .runner import CPUDistributedRunner

__all__ = ['CPUDistributedRunner', 'DataCheckHook', 'IterationSeedHook']
