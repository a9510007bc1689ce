"""Multiply-adds, activations and parameters of a backbone, by stage and operation.

Counted on the meta device, which takes no time and memory, from what torch's flop counter knows:
matrix products and convolutions. Half of its FLOPs are the multiply-adds that papers report. An
activation, as in fvcore, is an element of what such an operation puts out. A linear attention is
counted by its plain formula; its feature maps are elementwise and count nothing.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..backbones.nalaformer import STAGE_ATTENTIONS, GatedAttention
from ..engine.errors import InputError
from ..report.drawing import COLOURS
from .plotting import label, panels

COLUMNS = ('height', 'width', 'attention', 'stage', 'op', 'macs', 'activations', 'parameters')
TOTAL_COLUMNS = (
    'height',
    'width',
    'attention',
    'gmacs',
    'attention_gmacs',
    'share',
    'mactivations',
)
OPERATIONS = ('attention', 'linear', 'convolution', 'depthwise', 'other')
OUTSIDE = 'other'  # of parts that are in no stage
Size = tuple[int, int]


def parameters(module: nn.Module) -> int:
    """Number of parameters, frozen ones too, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def count(model: nn.Module, size: Size, channels: int = 3) -> list[dict[str, Any]]:
    """What a forward pass of one image costs.

    Args:
        model: In eval mode. It is moved to the meta device, and loses its weights.
        size: Height and width of the image.
        channels: Of the image.

    Returns:
        ``stage``, ``op``, ``macs``, ``activations`` and ``parameters`` of every pair of a stage and
        an operation of :data:`OPERATIONS` that costs any: products in attention, linear layers,
        convolutions of all channels (stem, downsampling), depthwise convolutions, and ``other``:
        products elsewhere, norms and scales. The projections of
        :class:`torch.nn.MultiheadAttention`, which has no layers of its own for them, count as
        attention.

    Raises:
        InputError: If the model does not take such an image, or cannot be counted.
    """
    model.to('meta')
    for module in model.modules():
        if isinstance(module, GatedAttention):
            module.attn_impl = 'plain'  # no autograd function, which hides its products
    macs = {name: flops // 2 for name, flops in _count_with(model, size, channels, None).items()}
    elements = _count_with(model, size, channels, dict.fromkeys(flop_registry, _elements))
    rows: dict[tuple[int | str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        cost = macs.get(name, 0), elements.get(name, 0), own
        if any(cost):
            key = _stage(name), _operation(module, cost[0])
            rows[key] = [a + b for a, b in zip(rows[key], cost, strict=True)]
    return [
        dict(stage=stage, op=op, macs=cost[0], activations=cost[1], parameters=cost[2])
        for (stage, op), cost in sorted(rows.items(), key=_order)
    ]


def _order(item: tuple[tuple[int | str, str], Any]) -> tuple[float, int]:
    stage, op = item[0]
    return float('inf') if isinstance(stage, str) else stage, OPERATIONS.index(op)


def _elements(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    shape = out_shape
    while len(shape) and not isinstance(shape[0], int):  # of several outputs the first
        shape = shape[0]
    return math.prod(shape)


def _count_with(
    model: nn.Module, size: Size, channels: int, mapping: dict[Any, Any] | None
) -> dict[str, int]:
    """The counter's sums of the modules by their names, without those of their parts."""
    image = torch.zeros(1, channels, *size, device='meta')
    try:
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            model(image)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0]
        raise InputError(
            f'--sizes {size[0]}x{size[1]}: {type(model).__name__} cannot be counted: {line}'
        ) from error
    root = type(model).__name__
    sums = {
        name.removeprefix(root).removeprefix('.'): sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name != 'Global'
    }
    own = dict(sums)
    for name, total in sums.items():
        parents = [other for other in sums if name != other and _is_inside(name, other)]
        if parents:
            own[max(parents, key=len)] -= total
    return own


def _is_inside(name: str, other: str) -> bool:
    return other == '' or name.startswith(f'{other}.')


def _stage(name: str) -> int | str:
    """The first number of the module's name if it is in a list of stages."""
    match = re.match(r'(?:backbone\.)?(?:layers?|stages?|blocks)[._]?(\d+)(?:[._]|$)', name)
    return int(match[1]) if match else OUTSIDE


def _operation(module: nn.Module, macs: int) -> str:
    if isinstance(module, nn.Linear):
        return 'linear'
    if isinstance(module, nn.Conv2d):
        return 'depthwise' if module.groups == module.in_channels > 1 else 'convolution'
    attends = re.search(r'Att|MSA', type(module).__name__)
    return 'attention' if macs and attends else 'other'


def compare(model: nn.Module, sizes: Iterable[Size]) -> list[dict[str, Any]]:
    """:func:`count` at several sizes, of a NaLaFormer with three kinds of attention.

    Those are its own (``configured``) and the same in all stages, linear (``nala``) and
    ``softmax``. Other models have ``configured`` alone.

    Args:
        model: See :func:`count`.
        sizes: Heights and widths.

    Returns:
        Rows of :data:`COLUMNS`.
    """
    layers = [module for module in model.modules() if isinstance(module, GatedAttention)]
    own = [layer.attention for layer in layers]
    kinds = {'configured': own}
    if layers:
        kinds |= {kind: [kind] * len(layers) for kind in STAGE_ATTENTIONS}
    rows = []
    for size in sizes:
        for name, attentions in kinds.items():
            for layer, attention in zip(layers, attentions, strict=True):
                layer.attention = attention
            rows += [
                dict(height=size[0], width=size[1], attention=name, **row)
                for row in count(model, size)
            ]
    for layer, attention in zip(layers, own, strict=True):
        layer.attention = attention
    return rows


def totals(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row of :data:`TOTAL_COLUMNS` for every size and kind of attention, in 10^9 and 10^6.

    ``attention_gmacs`` are those of the products in attention, and ``share`` theirs of all.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row['height'], row['width'], row['attention']].append(row)
    found = []
    for (height, width, attention), group in groups.items():
        macs = sum(row['macs'] for row in group)
        products = sum(row['macs'] for row in group if row['op'] == 'attention')
        found.append(
            dict(
                height=height,
                width=width,
                attention=attention,
                gmacs=macs / 1e9,
                attention_gmacs=products / 1e9,
                share=products / macs if macs else 0.0,
                mactivations=sum(row['activations'] for row in group) / 1e6,
            )
        )
    return found


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Multiply-adds over the pixels, and as configured, of every stage's operations."""
    figure, axes = panels(1, 2, 4.6, 3.4)
    sums = totals(rows)
    for colour, kind in zip(COLOURS, dict.fromkeys(row['attention'] for row in sums), strict=False):
        of_kind = [row for row in sums if row['attention'] == kind]
        of_kind.sort(key=lambda row: row['height'] * row['width'])
        pixels = [row['height'] * row['width'] for row in of_kind]
        axes[0, 0].plot(
            pixels,
            [row['gmacs'] for row in of_kind],
            'o-',
            ms=4,
            color=colour,
            label=f'{kind}, all',
        )
        axes[0, 0].plot(
            pixels,
            [row['attention_gmacs'] for row in of_kind],
            's--',
            ms=3,
            color=colour,
            label=f'{kind}, in attention',
        )
    axes[0, 0].set(xscale='log', yscale='log')
    axes[0, 0].legend(fontsize=7)
    axes[0, 0].grid(alpha=0.3)
    label(axes[0, 0], '', 'pixels of the image', '10⁹ multiply-adds')

    last = rows[-1]['height'], rows[-1]['width']
    own = [
        row
        for row in rows
        if (row['height'], row['width'], row['attention']) == (*last, 'configured')
    ]
    stages = list(dict.fromkeys(row['stage'] for row in own))
    left = [0.0] * len(stages)
    for colour, op in zip(COLOURS, OPERATIONS, strict=False):
        parts = [
            sum(row['macs'] for row in own if (row['stage'], row['op']) == (stage, op)) / 1e9
            for stage in stages
        ]
        if any(parts):
            axes[0, 1].bar(range(len(stages)), parts, bottom=left, color=colour, label=op)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes[0, 1].set_xticks(
        range(len(stages)),
        ['outside' if stage == OUTSIDE else f'stage {stage}' for stage in stages],
    )
    axes[0, 1].legend(fontsize=7)
    axes[0, 1].grid(axis='y', alpha=0.3)
    label(axes[0, 1], f'configured, {last[0]}x{last[1]}', '', '10⁹ multiply-adds')
    return figure
