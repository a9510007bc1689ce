"""Between backbone and linear classifier, as in the ImageNet model of the public release."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..registry import build_norm, register_model


@register_model
class NaLaFormerNeck(BaseModule):
    """A wider linear layer at each position of the last stage, batch norm, SiLU, global average.

    An image classifier is the backbone, this, and a linear layer: mmpretrain's ``LinearClsHead``
    with ``in_channels=out_channels``.

    Args:
        in_channels (int): Channels of the last stage.
        out_channels (int): Channels of the features. Defaults to 1024.
        norm_cfg (dict): Norm layer. Defaults to ``dict(type='BN')``.
        init_cfg (dict | list[dict], optional): As in mmengine.

    Raises:
        ValueError: If a number of channels is no positive integer, or ``norm_cfg`` is unknown.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 1024,
        norm_cfg: Mapping[str, Any] = {'type': 'BN'},
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        for name, value in (('in_channels', in_channels), ('out_channels', out_channels)):
            if type(value) is not int or value < 1:
                raise ValueError(f'{name} must be a positive integer, got {value!r}')
        self.proj = nn.Linear(in_channels, out_channels)
        self.norm = build_norm(norm_cfg, out_channels)

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor]:
        """The features of an image.

        Args:
            inputs: The last stage's output, ``(B, in_channels, H, W)``, or a sequence that ends
                with it.

        Returns:
            A tuple of one tensor, ``(B, out_channels)``.
        """
        x = inputs if isinstance(inputs, Tensor) else inputs[-1]
        return (self.project(x).mean((2, 3)),)

    def project(self, x: Tensor) -> Tensor:
        """``(B, in_channels, H, W)`` to ``(B, out_channels, H, W)``, before the average."""
        x = self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.silu(self.norm(x))
