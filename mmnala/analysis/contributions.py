"""Which channels contribute to the similarity of a query and a key (figure 4 of the paper)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from ..ops import FEATURE_MAPS
from ..report.drawing import COLOURS
from .plotting import label, panels

STRATEGIES = ('product', *FEATURE_MAPS)
SIGNS = ('both positive', 'both negative', 'opposite')
COLUMNS = ('strategy', 'channel', 'query', 'key', 'signs', 'contribution', 'share')
SUMMARY_COLUMNS = ('strategy', 'similarity', *SIGNS)
SURVIVES = 0.01  # of the largest contribution


def contributions(query: Tensor, key: Tensor, strategy: str) -> Tensor:
    """What each channel adds to the similarity of queries and keys.

    Args:
        query: ``(..., d)``, floating.
        key: The same.
        strategy: ``'product'``, the plain q_i k_i, or a feature map of
            :data:`~mmnala.ops.FEATURE_MAPS`: the products of the channel's features. Those of a map
            with two parts are added.

    Returns:
        ``(..., d)``; the sum is the similarity, ``q . k`` or ``phi(q) . phi(k)``, without rotary
        embedding.

    Raises:
        ValueError: If there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f'strategy must be one of {STRATEGIES}, got {strategy!r}')
    if strategy == 'product':
        return query * key
    features = FEATURE_MAPS[strategy]
    return (features.query(query) * features.key(key)).unflatten(-1, (features.parts, -1)).sum(-2)


def example_pair(channels: int, seed: int) -> tuple[Tensor, Tensor]:
    """A query and a key ``(channels,)`` drawn from a normal distribution, float32."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, channels, generator=generator)
    return query, key


def _signs(query: Tensor, key: Tensor) -> list[str]:
    """Of each channel; a zero counts as opposite, as nothing can come of it."""
    return [
        SIGNS[0] if q > 0 and k > 0 else SIGNS[1] if q < 0 and k < 0 else SIGNS[2]
        for q, k in zip(query.tolist(), key.tolist(), strict=True)
    ]


def rows(query: Tensor, key: Tensor) -> list[dict[str, Any]]:
    """A row of :data:`COLUMNS` for every strategy and channel of one pair ``(d,)``.

    ``share`` is the contribution over the sum of all contributions' sizes.
    """
    signs = _signs(query, key)
    return [
        dict(
            strategy=strategy,
            channel=channel,
            query=query[channel].item(),
            key=key[channel].item(),
            signs=signs[channel],
            contribution=part,
            share=part / size if size else 0.0,
        )
        for strategy in STRATEGIES
        for parts in [contributions(query, key, strategy).tolist()]
        for size in [sum(map(abs, parts))]
        for channel, part in enumerate(parts)
    ]


def summary(of_pair: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row of :data:`SUMMARY_COLUMNS` for every strategy, from :func:`rows`.

    It has how many channels survive, of all that have these signs: those that contribute more than
    :data:`SURVIVES` times as much as the largest.
    """
    found = []
    for strategy in STRATEGIES:
        own = [row for row in of_pair if row['strategy'] == strategy]
        threshold = SURVIVES * max(abs(row['contribution']) for row in own)
        line: dict[str, Any] = dict(
            strategy=strategy, similarity=sum(row['contribution'] for row in own)
        )
        for signs in SIGNS:
            sizes = [abs(row['contribution']) for row in own if row['signs'] == signs]
            line[signs] = f'{sum(size > threshold for size in sizes)} of {len(sizes)}'
        found.append(line)
    return found


def draw(of_pair: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The pair, and below it a panel of shares for each strategy, coloured by the signs."""
    colours = dict(zip(SIGNS, (COLOURS[0], COLOURS[2], COLOURS[1]), strict=True))
    pair = [row for row in of_pair if row['strategy'] == 'product']
    channels = range(len(pair))
    figure, axes = panels(1 + len(STRATEGIES), 1, width=min(14, 3 + 0.2 * len(pair)), height=1.25)
    for offset, name, colour in ((-0.2, 'query', '#555555'), (0.2, 'key', '#bbbbbb')):
        places = [i + offset for i in channels]
        axes[0, 0].bar(places, [row[name] for row in pair], 0.4, color=colour, label=name)
    axes[0, 0].legend(fontsize=7, loc='upper right', ncols=2)
    label(axes[0, 0], title)
    for axis, strategy in zip(axes[1:, 0], STRATEGIES, strict=True):
        own = [row for row in of_pair if row['strategy'] == strategy]
        axis.bar(
            channels, [row['share'] for row in own], color=[colours[row['signs']] for row in own]
        )
        label(axis, y=strategy)
    for axis in axes[:, 0]:
        axis.axhline(0, color='black', lw=0.6)
        axis.set_xlim(-0.7, len(pair) - 0.3)
        axis.set_xticks([])
    axes[-1, 0].set_xlabel('channel', fontsize=8)
    figure.legend(
        handles=[Patch(color=colour, label=signs) for signs, colour in colours.items()],
        loc='outside lower center',
        ncols=3,
        fontsize=8,
    )
    return figure
