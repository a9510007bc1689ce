"""Batch norm over the batches of all processes, on the CPU."""

from typing import Any

import torch
from mmengine.dist import get_world_size
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class CPUSyncBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm is to GPUs, for CPU processes that talk over gloo.

    A process counts by the size of its batch, so that all together compute, forwards and backwards,
    what one process with the whole batch does. Arguments, weights, running statistics and
    evaluation are torch's. It cannot be derived from torch's, which DistributedDataParallel refuses
    on the CPU.

    Attributes:
        process_group: The processes that are synchronised; None stands for all.
    """

    process_group: distributed.ProcessGroup | None = None
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace torch's and mmcv's synchronised layers in a module; weights are kept."""
        # mmcv's own layer derives from another class but bears the same name.
        if type(module).__name__ == 'SyncBatchNorm':
            layer: Any = module
            converted = cls(
                layer.num_features,
                layer.eps,
                layer.momentum,
                layer.affine,
                layer.track_running_stats,
            )
            converted.process_group = getattr(layer, 'process_group', getattr(layer, 'group', None))
            converted._parameters = layer._parameters
            converted._buffers = layer._buffers
            return converted.train(layer.training)
        for name, child in module.named_children():
            module.add_module(name, cls.convert(child))
        return module

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, ...)`` to the same shape, dtype and memory format.

        Raises:
            ValueError: If ``x`` has fewer than two dimensions.
        """
        group = self.process_group or distributed.group.WORLD
        if not self.training or get_world_size(group) == 1:
            return super().forward(x)
        self._check_input_dim(x)

        values = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.dim())]
        total, count = all_reduce(
            torch.cat([values.sum(dims), values.new_tensor([x.numel() / x.shape[1]])]), group=group
        ).split([x.shape[1], 1])
        count = count.detach()
        centred = values - _per_channel(total / count, x)
        var = all_reduce(centred.square().sum(dims), group=group) / count
        if self.track_running_stats:
            self._update_running_stats(total.detach() / count, var.detach() * count / (count - 1))

        out = centred * _per_channel((var + self.eps).rsqrt(), x)
        if self.affine:
            out = out * _per_channel(self.weight, x) + _per_channel(self.bias, x)
        return out.to(x.dtype)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f'input must be (N, C, ...), got {tuple(x.shape)}')

    def _update_running_stats(self, mean: Tensor, unbiased_var: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the average of all batches
            momentum = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_(unbiased_var.to(self.running_var), momentum)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """``(C,)`` in a shape that broadcasts over ``x``."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
