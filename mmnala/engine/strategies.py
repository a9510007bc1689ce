"""mmengine's strategies for its FlexibleRunner, with NaLaFormer as the unit and on CPUs too."""

import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from mmengine._strategy import DDPStrategy, FSDPStrategy
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_main_process
from mmengine.optim import BaseOptimWrapper
from mmengine.registry import FUNCTIONS, MODELS, STRATEGIES
from mmengine.runner import FlexibleRunner
from mmengine.runner.checkpoint import weights_to_cpu
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..backbones.nalaformer import Block
from .errors import InputError
from .runner import init_gloo
from .sync_bn import CPUSyncBatchNorm

# Entries of a config that mmengine's Runner reads and its FlexibleRunner passes over.
_NOT_READ = {
    'compile': 'leave it out',
    'find_unused_parameters': 'give strategy.model_wrapper.find_unused_parameters',
    'model_wrapper_cfg': 'give strategy.model_wrapper',
    'sync_bn': 'give strategy.sync_bn',
}


@FUNCTIONS.register_module(force=True)
def is_nalaformer_block(
    module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0
) -> bool:
    """Whether a module is a block of NaLaFormer: FSDP's ``auto_wrap_policy``, and the ``check_fn``
    of its activation checkpointing."""
    return recurse or isinstance(module, Block)


class _AnyDevice(DDPStrategy):
    """What both strategies below have: CPU processes, and checkpoints that are written whole.

    mmengine selects a CUDA device before it creates the process group, and wraps the model for it.
    """

    cpu_placement: dict[str, Any]  # for the model wrapper
    model_wrapper: dict[str, Any]

    def _setup_distributed(self, launcher: str = 'pytorch', backend: str = 'nccl', **kwargs: Any):
        if get_device() == 'cpu':
            init_gloo(launcher, kwargs.get('timeout'))
        else:
            super()._setup_distributed(launcher, backend, **kwargs)

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Synchronise batch norms as ``sync_bn`` asks, on the CPU by our own layer."""
        model = super().convert_model(model)
        return CPUSyncBatchNorm.convert(model) if get_device() == 'cpu' else model

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if get_device() == 'cpu':
            self.model_wrapper = dict(self.model_wrapper, **self.cpu_placement)
        return super()._wrap_model(model)

    def save_checkpoint(self, filename: str, **kwargs: Any) -> None:
        """Save as mmengine does, but under another name until the file is whole."""
        if '://' in filename:
            super().save_checkpoint(filename, **kwargs)
            return
        part = os.path.join(os.path.dirname(filename), f'.{uuid.uuid4().hex}.partial')
        super().save_checkpoint(part, **kwargs)
        if is_main_process():
            os.replace(part, filename)


@STRATEGIES.register_module(force=True)
class DataParallelStrategy(_AnyDevice):
    """mmengine's ``DDPStrategy``, which also saves the states of a ``ZeroRedundancyOptimizer``.

    Those are in parts on all processes, and mmengine lets only the first one save, which then waits
    for the others for ever.

    Args:
        model_wrapper (dict, optional): As in mmengine, with ``broadcast_buffers=False`` and
            ``find_unused_parameters=False`` unless it says otherwise.
        **kwargs: As in mmengine.
    """

    cpu_placement = dict(device_ids=None)

    def __init__(self, *, model_wrapper: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        wrapper = dict(type='MMDistributedDataParallel', broadcast_buffers=False)
        super().__init__(model_wrapper=wrapper | dict(model_wrapper or {}), **kwargs)

    def model_state_dict(self) -> dict:
        """The model's weights by its own names; mmengine puts ``module.`` before them."""
        return weights_to_cpu(self.model.module.state_dict())

    def save_checkpoint(self, filename: str, *, save_optimizer: bool = True, **kwargs: Any) -> None:
        """Save on the first process what the others send it."""
        if save_optimizer and not is_main_process():
            self.optim_state_dict()
        super().save_checkpoint(filename, save_optimizer=save_optimizer, **kwargs)


@STRATEGIES.register_module(force=True)
class ShardedStrategy(_AnyDevice, FSDPStrategy):
    """mmengine's ``FSDPStrategy`` with a NaLaFormer's blocks as the units.

    Checkpoints are those of a plain training: whole, for any number of processes. Beyond mmengine,
    ``clip_grad`` by norm measures the norm of all shards, ``sync_bn`` is honoured, and optimiser
    states are saved and resumed with torch 2.1 or newer, whose interface differs from the one that
    mmengine calls.

    Args:
        model_wrapper (dict, optional): Options of ``MMFullyShardedDataParallel``, such as
            ``sharding_strategy``: ``'FULL_SHARD'`` (the default) or ``'SHARD_GRAD_OP'``. The
            ``auto_wrap_policy`` defaults to :func:`is_nalaformer_block`.
        state_dict_cfg (str): ``'full'``.
        **kwargs: As in mmengine, such as
            ``activation_checkpointing=dict(check_fn='is_nalaformer_block')``.

    Raises:
        InputError: If ``state_dict_cfg`` has another value.
    """

    cpu_placement = dict(device_id=torch.device('cpu'))

    def __init__(
        self,
        *,
        model_wrapper: Mapping[str, Any] | None = None,
        state_dict_cfg: str = 'full',
        **kwargs: Any,
    ) -> None:
        if state_dict_cfg != 'full':
            raise InputError(f"strategy.state_dict_cfg must be 'full', got {state_dict_cfg!r}")
        wrapper = dict(
            type='MMFullyShardedDataParallel', auto_wrap_policy=is_nalaformer_block.__name__
        )
        super().__init__(
            model_wrapper=wrapper | dict(model_wrapper or {}),
            state_dict_cfg=state_dict_cfg,
            **kwargs,
        )
        # Moving to the CPU copies nothing that is there, and torch frees or reuses its memory: it
        # crashed, and saved the second moments as the first.
        for config in (self.state_dict_config, self.optim_state_dict_config):
            config.offload_to_cpu = get_device() != 'cpu'

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        return super()._wrap_model(self.convert_model(model))

    def build_optim_wrapper(self, optim_wrapper: Any, model: Any = None) -> BaseOptimWrapper:
        """Build mmengine's, which clips by the norm of the gradients of all processes."""
        wrapper: Any = super().build_optim_wrapper(optim_wrapper, model)
        if getattr(wrapper, 'clip_func', None) is nn.utils.clip_grad_norm_:
            wrapper.clip_func = lambda params, **kwargs: model.clip_grad_norm_(**kwargs)
        return wrapper

    def model_state_dict(self) -> dict:
        """The model's weights, whole on the first process."""
        # torch marks each of them with an attribute, which safe readers of the file do not know.
        return {name: value.detach() for name, value in super().model_state_dict().items()}

    def optim_state_dict(self) -> dict:
        """The optimiser's states, whole on the first process, by the parameters' names."""
        states = FullyShardedDataParallel.optim_state_dict(self.model, self.optim_wrapper.optimizer)
        return self._beside_the_states(self.optim_wrapper.state_dict()) | states

    def load_optim_state_dict(self, state_dict: dict) -> None:
        """Take this process's part of whole states."""
        states = FullyShardedDataParallel.optim_state_dict_to_load(
            self.model,
            self.optim_wrapper.optimizer,
            {name: state_dict[name] for name in ('state', 'param_groups')},
        )
        self.optim_wrapper.load_state_dict(self._beside_the_states(state_dict) | states)

    @staticmethod
    def _beside_the_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """What wrappers keep: the base learning rate, the scale of the loss."""
        return {k: v for k, v in state_dict.items() if k not in ('state', 'param_groups')}


def uses_flexible_runner(cfg: Config) -> bool:
    """Whether a config asks for mmengine's FlexibleRunner."""
    return kind_name(cfg.get('runner_type')) == FlexibleRunner.__name__


def build_flexible_runner(cfg: Config) -> FlexibleRunner:
    """Build the FlexibleRunner of a config for several processes, with its model.

    Without a ``strategy``, it is :class:`DataParallelStrategy`.

    Raises:
        InputError: If it was not started as several processes, or if the config has an entry that
            FlexibleRunner does not read or that its strategy cannot serve.
    """
    strategy = cfg.setdefault('strategy', dict(type=DataParallelStrategy.__name__))
    name = kind_name(strategy.get('type'))
    ours = [DataParallelStrategy.__name__, ShardedStrategy.__name__]
    if cfg.launcher == 'none':
        raise InputError(
            f"runner_type='FlexibleRunner' with strategy.type={name!r} needs processes to share "
            'the work: tools/dist_train.sh CONFIG GPUS or tools/slurm_train.sh'
        )
    if get_device() == 'cpu' and name not in ours:
        raise InputError(f'strategy.type must be one of {ours} without a GPU, got {name!r}')
    for key in sorted(_NOT_READ.keys() & cfg.keys()):
        raise InputError(f"{key}: runner_type='FlexibleRunner' does not read it, {_NOT_READ[key]}")
    hooks = [kind_name(hook.get('type')) for hook in cfg.get('custom_hooks') or []]
    if name == ShardedStrategy.__name__ and 'EMAHook' in hooks:
        raise InputError(
            'custom_hooks: EMAHook averages whole weights, of which a process of ShardedStrategy '
            f'has a part: take strategy.type={ours[0]!r} or leave the hook out'
        )
    cfg.setdefault('env_cfg', {})
    runner = FlexibleRunner.from_cfg(cfg)
    # At once, as Runner does, so that the weights it is to load can be compared with it.
    runner.model = MODELS.build(runner.model)
    return runner


def kind_name(kind: Any) -> Any:
    """The name of a class that a config gives, itself or by name with or without a scope."""
    return kind.rsplit('.')[-1] if isinstance(kind, str) else getattr(kind, '__name__', kind)
