"""mmengine's Runner for several processes on a machine without a GPU."""

import datetime
import inspect

import torch
from mmengine.dist import is_distributed
from mmengine.model import is_model_wrapper, revert_sync_batchnorm
from mmengine.registry import MODEL_WRAPPERS, RUNNERS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@RUNNERS.register_module(force=True)
class CPUDistributedRunner(Runner):
    """Runner whose processes talk over gloo and keep their models on the CPU.

    mmengine selects a CUDA device before it creates the process group, and hands CUDA device ids to
    DistributedDataParallel; these two steps are replaced here, everything else is mmengine's.
    The processes must have been started by torchrun. ``env_cfg.dist_cfg.timeout`` (seconds) is
    honoured, ``env_cfg.dist_cfg.backend`` is not.
    """

    def setup_env(self, env_cfg: dict) -> None:
        """Create the gloo process group, then set up the rest as mmengine does."""
        if self.distributed and not is_distributed():
            if self._launcher != 'pytorch':
                raise ValueError(
                    f"launcher must be 'pytorch' (torchrun) without a GPU, got {self._launcher!r}"
                )
            seconds = env_cfg.get('dist_cfg', {}).get('timeout')
            timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
            torch.distributed.init_process_group('gloo', timeout=timeout)
        super().setup_env(env_cfg)

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap the model for CPU processes; SyncBN, which torch has for GPUs only, becomes BN."""
        if not self.distributed or is_model_wrapper(model):
            return super().wrap_model(model_wrapper_cfg, model)

        if self.cfg.get('sync_bn') is not None or _has_sync_bn(model):
            self.logger.warning(
                'SyncBN needs a GPU: each process normalises with the statistics of its own batch'
            )
            self.cfg.sync_bn = None
            model = revert_sync_batchnorm(model)

        if model_wrapper_cfg is None:
            model_wrapper_cfg = dict(
                broadcast_buffers=False,
                find_unused_parameters=self.cfg.get('find_unused_parameters', False),
            )
        wrapper = model_wrapper_cfg.get('type', 'MMDistributedDataParallel')
        wrapper = wrapper if inspect.isclass(wrapper) else MODEL_WRAPPERS.get(wrapper)
        if inspect.isclass(wrapper) and issubclass(wrapper, DistributedDataParallel):
            model_wrapper_cfg = dict(model_wrapper_cfg, device_ids=None)
        return super().wrap_model(model_wrapper_cfg, model)


def _has_sync_bn(model: nn.Module) -> bool:
    # mmcv's own synchronised layer derives from another class but bears the same name.
    return any(type(module).__name__ == 'SyncBatchNorm' for module in model.modules())
