"""Feature maps as colours: their first three principal components."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from .plotting import label, panels, show_image
from .subject import Picture

COLUMNS = ('image', 'stage', 'channels', 'component', 'explained')


class Components(NamedTuple):
    """Principal components of a feature map.

    Attributes:
        scores: ``(h, w, k)``, float64, of mean 0.
        explained: ``(C,)``, the share of the variance of every component, falling.
    """

    scores: NDArray[np.float64]
    explained: NDArray[np.float64]


@torch.no_grad()
def principal_components(features: Tensor, number: int = 3) -> Components:
    """The leading principal components of the positions of a feature map.

    From the eigenvectors of the channels' covariance in float64. An eigenvector's sign is
    arbitrary: here its largest entry is positive, so that equal features have equal colours.

    Args:
        features: ``(C, h, w)``.
        number: How many, ``k``; further than C they are 0.
    """
    channels, height, width = features.shape
    x = features.double().flatten(1).cpu()
    x = x - x.mean(1, keepdim=True)
    variances, vectors = torch.linalg.eigh(x @ x.mT / x.shape[1])
    variances, vectors = variances.flip(0).clamp_min(0), vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = vectors * largest.sign()
    scores = torch.zeros(height * width, number, dtype=torch.float64)
    kept = min(number, channels)
    scores[:, :kept] = x.mT @ vectors[:, :kept]
    total = variances.sum()
    explained = variances / total if total > 0 else variances
    return Components(scores.unflatten(0, (height, width)).numpy(), explained.numpy())


def as_colours(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Red, green and blue in [0, 1] from three components, 1st to 99th percentile of each."""
    low, high = np.percentile(scores, (1, 99), axis=(0, 1))
    spread = np.where(high > low, high - low, 1)
    return np.clip((scores - low) / spread, 0, 1)


def rows(name: str, stages: Iterable[Components], number: int = 3) -> list[dict[str, Any]]:
    """A row of :data:`COLUMNS` for every output and component of the image ``name``."""
    return [
        dict(
            image=name,
            stage=stage,
            channels=len(components.explained),
            component=i,
            explained=float(share),
        )
        for stage, components in enumerate(stages)
        for i, share in enumerate(components.explained[:number])
    ]


def draw(pictures: Sequence[Picture], found: Sequence[Sequence[Components]]) -> Figure:
    """A row for each image: the image and its outputs, without their padding."""
    shape = pictures[0].image.shape
    figure, axes = panels(
        len(pictures), 1 + len(found[0]), 2.6, 2.6 * min(shape[0] / shape[1], 2) + 0.4
    )
    for line, picture, stages in zip(axes, pictures, found, strict=True):
        height, width = picture.image.shape[:2]
        show_image(line[0], picture.image)
        label(line[0], picture.name)
        padded = picture.tensor.shape[2:]
        for stage, (axis, components) in enumerate(zip(line[1:], stages, strict=True)):
            extent = (-0.5, padded[1] - 0.5, padded[0] - 0.5, -0.5)
            show_image(axis, as_colours(components.scores), extent=extent, interpolation='nearest')
            axis.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
            label(axis, f'output {stage}, {components.explained[:3].sum():.0%} of the variance')
    return figure
