"""What all processes of a training have to decide alike."""

from functools import lru_cache

import torch
from mmengine.dist import get_world_size
from torch import distributed


def highest(value: int) -> int:
    """The highest of the integers that the ranks give; every rank has to call it."""
    if get_world_size() == 1:
        return value
    number = torch.tensor(value)
    distributed.all_reduce(number, distributed.ReduceOp.MAX, group=_cpu_group())
    return int(number)


@lru_cache(maxsize=1)
def _cpu_group() -> distributed.ProcessGroup | None:
    # Beside NCCL a group of its own, so that nobody waits for what a GPU has queued.
    if distributed.get_backend() == 'gloo':
        return distributed.group.WORLD
    return distributed.new_group(backend='gloo')
