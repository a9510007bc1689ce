"""Where single queries attend, from the linear form: one query at a time, never ``N x N``."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import nn

from ..engine.errors import InputError
from .attention import Heads, Layer, attention_weights, visit_attention
from .plotting import label, overlay_weights, panels, show_image
from .subject import Picture

COLUMNS = ('image', 'x', 'y', 'stage', 'block', 'kind', 'head', 'row', 'column', 'weight')
Point = tuple[float, float]


class AttentionMap(NamedTuple):
    """Attention of one query.

    Attributes:
        point: The query's pixel in the image file.
        layer: Where.
        kind: The feature map, or softmax.
        weights: ``(heads, rows, columns)`` over the tokens, times their number: 1 everywhere is
            uniform attention.
    """

    point: Point
    layer: Layer
    kind: str
    weights: NDArray[Any]


def token_at(place: Point, grid: tuple[int, int], size: tuple[int, int]) -> int:
    """The number of the token in whose cell a place of the image is.

    Args:
        place: Horizontal and vertical distance from the left upper corner, in pixels.
        grid: Rows and columns of tokens, which cover the image.
        size: Height and width of the image.
    """
    row = min(int(place[1] * grid[0] / size[0]), grid[0] - 1)
    column = min(int(place[0] * grid[1] / size[1]), grid[1] - 1)
    return row * grid[1] + column


def attention_maps(
    backbone: nn.Module, picture: Picture, points: Sequence[Point], rotated: bool = True
) -> list[AttentionMap]:
    """Attention of the queries at some pixels, in every layer of a NaLaFormer.

    Args:
        backbone: A NaLaFormer.
        picture: The image.
        points: ``x, y`` in pixels of its file.
        rotated: Linear attention with the rotary embedding, as the values are weighted, or without,
            see :func:`~mmnala.analysis.attention.attention_weights`.

    Returns:
        Layer by layer, a map for each point.

    Raises:
        InputError: If a point is outside the image, or the attention is not of a grid of tokens.
    """
    places = [picture.locate(*point) for point in points]
    height, width = picture.tensor.shape[2:]
    found = []

    def visit(layer: Layer, heads: Heads) -> None:
        if heads.grid is None:
            raise InputError(f'layer {layer.name}: attention maps are of NaLaFormer alone')
        for point, place in zip(points, places, strict=True):
            pick = torch.tensor([token_at(place, heads.grid, (height, width))])
            weights = attention_weights(heads, pick.to(heads.query.device), rotated=rotated)
            weights = weights[:, 0].unflatten(-1, heads.grid) * weights.shape[-1]
            found.append(AttentionMap(point, layer, heads.kind, weights.cpu().numpy()))

    visit_attention(backbone, picture.tensor, visit)
    return found


def average_heads(item: AttentionMap) -> AttentionMap:
    """The mean over all heads, as a single one."""
    return item._replace(weights=item.weights.mean(0, keepdims=True))


def rows(name: str, maps: Iterable[AttentionMap], averaged: bool) -> Iterable[dict[str, Any]]:
    """A row of :data:`COLUMNS` for every map, head and token of the image ``name``."""
    for item in maps:
        for head, weights in enumerate(item.weights):
            for row, line in enumerate(weights.tolist()):
                for column, weight in enumerate(line):
                    yield dict(
                        image=name,
                        x=item.point[0],
                        y=item.point[1],
                        stage=item.layer.stage,
                        block=item.layer.block,
                        kind=item.kind,
                        head='mean' if averaged else head,
                        row=row,
                        column=column,
                        weight=weight,
                    )


def draw(picture: Picture, maps: Sequence[AttentionMap], averaged: bool) -> Figure:
    """The image with the points, and each point's attention in a row: stages and their heads."""
    points = list(dict.fromkeys(item.point for item in maps))
    height, width = picture.image.shape[:2]
    padded = picture.tensor.shape[2:]
    columns = 1 + sum(len(item.weights) for item in maps if item.point == points[0])
    figure, axes = panels(len(points), columns, 2.6, 2.6 * height / width + 0.4)
    for line, point in zip(axes, points, strict=True):
        x, y = picture.locate(*point)
        show_image(line[0], picture.image)
        label(line[0], f'query at {point[0]:g}, {point[1]:g}')
        own = [(item, head) for item in maps if item.point == point for head in item.weights]
        for axis, (item, weights) in zip(line[1:], own, strict=True):
            overlay_weights(axis, picture.image, weights, padded)
            label(axis, f'stage {item.layer.stage}, block {item.layer.block}, {item.kind}')
        if not averaged:
            heads = (
                head for item in maps if item.point == point for head in range(len(item.weights))
            )
            for axis, head in zip(line[1:], heads, strict=True):
                axis.set_title(f'{axis.get_title()}, head {head}', fontsize=9)
        for axis in line:
            axis.plot(x - 0.5, y - 0.5, 'o', ms=6, mfc='none', mec='black', mew=2.2)
            axis.plot(x - 0.5, y - 0.5, 'o', ms=6, mfc='none', mec='#ffd400', mew=1.1)
    return figure
