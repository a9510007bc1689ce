"""The effective receptive field of a backbone's stages.

"Understanding the Effective Receptive Field in Deep Convolutional Neural Networks", Luo et al.,
arXiv 1701.04128: how much each pixel of the input changes the central pixel of an output.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from ..engine.errors import InputError
from .plotting import SEQUENTIAL, label, panels, show_image
from .subject import stage_outputs

SHARES = (0.2, 0.3, 0.5, 0.99)
COLUMNS = ('stage', 'share', 'side', 'side_ratio', 'area_ratio')


def fit(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale ``(1, C, H, W)`` to cover the size, its proportions kept, and cut out the centre."""
    scale = max(target / side for target, side in zip(size, image.shape[2:], strict=True))
    scaled = [
        max(round(side * scale), target) for target, side in zip(size, image.shape[2:], strict=True)
    ]
    image = F.interpolate(image, scaled, mode='bilinear', antialias=True)
    top, left = ((a - b) // 2 for a, b in zip(scaled, size, strict=True))
    return image[..., top : top + size[0], left : left + size[1]].contiguous()


def receptive_fields(
    backbone: nn.Module, images: Iterable[Tensor], seed: int = 0
) -> list[NDArray[np.float64]]:
    """Mean size of the gradients of each stage's central output by the input.

    The channels of the output are added with random signs, anew for each image: behind a LayerNorm
    their plain sum is a constant, without gradient.

    Args:
        backbone: In eval mode, see :func:`~mmnala.analysis.subject.stage_outputs`.
        images: ``(1, C, H, W)`` each, all of one size.
        seed: Of the signs.

    Returns:
        For each output ``(H, W)``: the absolute gradients of the signed sum of the channels of its
        central pixel (row ``h // 2``, column ``w // 2``), summed over the channels of the input and
        averaged over the images.

    Raises:
        InputError: If the backbone returns no feature maps, does not take the images, or there are
            none.
    """
    generator = torch.Generator().manual_seed(seed)
    totals: list[NDArray[np.float64]] = []
    number = 0
    for image in images:
        image = image.detach().clone().requires_grad_()
        with torch.enable_grad():
            outputs = stage_outputs(backbone, image)
            centres = [
                (x[0, :, x.shape[2] // 2, x.shape[3] // 2] * _signs(x, generator)).sum()
                for x in outputs
            ]
        number += 1
        for i, centre in enumerate(centres):
            (grad,) = torch.autograd.grad(centre, image, retain_graph=i < len(centres) - 1)
            field = grad[0].abs().sum(0).double().cpu().numpy()
            if len(totals) <= i:
                totals.append(np.zeros_like(field))
            totals[i] += field
    if not number:
        raise InputError('--images: there are none')
    return [total / number for total in totals]


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, (x.shape[1],), generator=generator) * 2 - 1).to(x)


def side_of_share(field: NDArray[np.float64], share: float) -> int:
    """Side of the smallest square that holds at least ``share`` of the field's sum.

    The square is around the pixel ``(H // 2, W // 2)`` and has an odd side; it may reach over the
    field's edges. A field of zeros has the side 0.
    """
    height, width = field.shape
    row, column = height // 2, width // 2
    rows, columns = np.indices(field.shape)
    distance = np.maximum(np.abs(rows - row), np.abs(columns - column))
    mass = np.bincount(distance.ravel(), field.ravel()).cumsum()
    if mass[-1] == 0:
        return 0
    return 2 * int(np.searchsorted(mass, share * mass[-1] * (1 - 1e-12))) + 1


def rows(fields: Sequence[NDArray[np.float64]]) -> list[dict[str, Any]]:
    """A row of :data:`COLUMNS` for every stage and share of the gradients.

    ``side_ratio`` is over the image's shorter side, at most 1 in a square one, and ``area_ratio``
    its square.
    """
    found = []
    for stage, field in enumerate(fields):
        for share in SHARES:
            side = side_of_share(field, share)
            ratio = min(side / min(field.shape), 1.0)
            found.append(
                dict(stage=stage, share=share, side=side, side_ratio=ratio, area_ratio=ratio**2)
            )
    return found


def draw(fields: Sequence[NDArray[np.float64]], table: Sequence[Mapping[str, Any]]) -> Figure:
    """Every stage's field over its maximum, the fourth root of it, with its squares."""
    figure, axes = panels(1, len(fields), 3.0, 3.2)
    for stage, (axis, field) in enumerate(zip(axes[0], fields, strict=True)):
        shown = show_image(
            axis, (field / (field.max() or 1)) ** 0.25, cmap=SEQUENTIAL, vmin=0, vmax=1
        )
        own = [row for row in table if row['stage'] == stage]
        row, column = field.shape[0] // 2, field.shape[1] // 2
        for line in own:
            reach = line['side'] / 2
            corners = (column - reach, column + reach), (row - reach, row + reach)
            (left, right), (top, bottom) = corners
            axis.plot(
                [left, right, right, left, left], [top, top, bottom, bottom, top], 'w', lw=0.8
            )
        axis.set(xlim=(-0.5, field.shape[1] - 0.5), ylim=(field.shape[0] - 0.5, -0.5))
        label(axis, f'output {stage}', ', '.join(f'{r["share"]:.0%}: {r["side"]}' for r in own))
    bar = figure.colorbar(shown, ax=axes, shrink=0.7)
    bar.set_ticks([0, 0.5, 1], labels=['0', '1/16', '1'])
    bar.set_label('gradient / largest', fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure
