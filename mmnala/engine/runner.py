"""mmengine's Runner for several processes on a machine without a GPU."""

import datetime

import torch
from mmengine.dist import is_distributed
from mmengine.model import convert_sync_batchnorm, is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS, RUNNERS
from mmengine.runner import Runner
from torch import nn

from .errors import InputError
from .sync_bn import CPUSyncBatchNorm


def init_gloo(launcher: str, timeout: float | None = None) -> None:
    """Create the process group of CPU processes.

    Args:
        launcher: Who started them, as in mmengine.
        timeout: Seconds after which waiting for another process fails; None is torch's default.

    Raises:
        ValueError: If they were not started by torchrun.
        InputError: If ``timeout`` is no positive number.
    """
    if launcher != 'pytorch':
        raise ValueError(f"launcher must be 'pytorch' (torchrun) without a GPU, got {launcher!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InputError(
            f'env_cfg.dist_cfg.timeout must be a positive number of seconds, got {timeout!r}'
        )
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    torch.distributed.init_process_group('gloo', timeout=limit)


@RUNNERS.register_module(force=True)
class CPUDistributedRunner(Runner):
    """Runner whose processes talk over gloo and keep their models on the CPU.

    mmengine selects a CUDA device before it creates the process group, and hands CUDA device ids to
    DistributedDataParallel; these two steps are replaced here, and torch's SyncBN, which is for
    GPUs only, by :class:`CPUSyncBatchNorm`. Everything else is mmengine's.
    The processes must have been started by torchrun. ``env_cfg.dist_cfg.timeout`` (seconds) is
    honoured, ``env_cfg.dist_cfg.backend`` is not.
    """

    def setup_env(self, env_cfg: dict) -> None:
        """Create the gloo process group, then set up the rest as mmengine does."""
        if self.distributed and not is_distributed():
            init_gloo(self._launcher, env_cfg.get('dist_cfg', {}).get('timeout'))
        super().setup_env(env_cfg)

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap the model for CPU processes, synchronised batch norms included."""
        if not self.distributed or is_model_wrapper(model):
            return super().wrap_model(model_wrapper_cfg, model)
        sync_bn = self.cfg.get('sync_bn')
        if sync_bn is not None:
            model = convert_sync_batchnorm(model, sync_bn)
        model = CPUSyncBatchNorm.convert(model)
        if model_wrapper_cfg is None:
            model_wrapper_cfg = dict(
                broadcast_buffers=False,
                find_unused_parameters=self.cfg.get('find_unused_parameters', False),
            )
        return MODEL_WRAPPERS.build(
            model_wrapper_cfg, default_args=dict(type='MMDistributedDataParallel', module=model)
        )
