from .hooks import IterationSeedHook
from .runner import CPUDistributedRunner

__all__ = ['CPUDistributedRunner', 'IterationSeedHook']
