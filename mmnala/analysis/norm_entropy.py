"""Entropy of the attention against the norms of queries and keys (figures 1 and 3 of the paper)."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn

from ..report.drawing import COLOURS
from .attention import Heads, Layer, attention_weights, entropy, visit_attention
from .plotting import label, panels

POINT_COLUMNS = ('stage', 'block', 'kind', 'head', 'image', 'query_norm', 'key_norm', 'entropy')
SCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the queries, their directions held
SCALING_COLUMNS = ('stage', 'block', 'kind', 'head', 'scale', 'entropy')
CORRELATION_COLUMNS = (
    *('stage', 'block', 'kind', 'head', 'queries', 'entropy'),
    *('rho_query', 'p_query', 'rho_key', 'p_key'),
)


@dataclass
class NormsAndEntropies:
    """A layer's sampled queries over all images, ``(heads, queries)`` each.

    ``key_norm`` is that of the query's own token, since a row of attention has all keys in it; None
    where the layer attends to fewer keys than it has queries (spatial reduction). The queries of a
    model differ in direction, too; ``scaled`` has the norms' own effect: the mean entropies if all
    queries were :data:`SCALES` times as long, ``(heads, scales)``.
    """

    layer: Layer
    kind: str
    query_norm: NDArray[Any]
    key_norm: NDArray[Any] | None
    entropy: NDArray[Any]
    scaled: NDArray[Any]
    image: NDArray[Any]  # (queries,), the image's number


def sample_queries(heads: Heads, number: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Norms and entropies of evenly spaced queries of one image.

    Entropies are those of :func:`~mmnala.analysis.attention.attention_weights` without rotary
    embedding, over that of uniform attention to the keys that a mask leaves. Weights exist for one
    group at a time, so that the largest temporary is ``(heads, number, m)``.

    Args:
        heads: The layer's queries and keys.
        number: How many queries to take, of all groups together; smaller layers have fewer.

    Returns:
        Norms of the queries and norms of the keys of the same tokens (None as in
        :class:`NormsAndEntropies`), ``(heads, Q)`` each, and the entropies of the queries scaled by
        :data:`SCALES`, ``(scales, heads, Q)``.
    """
    groups, _, tokens, _ = heads.query.shape
    total = groups * tokens
    picks = torch.linspace(0, total - 1, min(number, total), device=heads.query.device).long()
    query_norms, key_norms, entropies = [], [], []
    for group in torch.unique(picks // tokens).tolist():
        inside = picks[picks // tokens == group] % tokens
        query_norms.append(heads.query[group][:, inside].norm(dim=-1))
        if heads.key.shape[2] == tokens:
            key_norms.append(heads.key[group][:, inside].norm(dim=-1))
        weights = (attention_weights(heads, inside, group, scale=scale) for scale in SCALES)
        visible = None if heads.visible is None else heads.visible[group][inside]
        entropies.append(torch.stack([entropy(w, visible) for w in weights]))
    key_norm = torch.cat(key_norms, -1) if key_norms else None
    return torch.cat(query_norms, -1), key_norm, torch.cat(entropies, -1)


def norms_and_entropies(
    backbone: nn.Module, images: Iterable[Tensor], num_queries: int
) -> list[NormsAndEntropies]:
    """Norms and entropies of every attention layer, in the order of the layers.

    Args:
        backbone: See :func:`~mmnala.analysis.attention.visit_attention`, also for errors.
        images: ``(1, 3, H, W)`` each, of any sizes.
        num_queries: Queries of an image, for each layer.
    """
    samples: dict[tuple[Layer, str], list[Any]] = {}
    for i, image in enumerate(images):

        def visit(layer: Layer, heads: Heads, i: int = i) -> None:
            found = *sample_queries(heads, num_queries), i
            samples.setdefault((layer, heads.kind), []).append(found)

        visit_attention(backbone, image, visit)
    return [_joined(layer, kind, found) for (layer, kind), found in samples.items()]


def _joined(layer: Layer, kind: str, samples: Sequence[Any]) -> NormsAndEntropies:
    query_norm, key_norm, entropies = (
        None if values[0] is None else torch.cat(values, -1).double().cpu().numpy()
        for values in zip(*(sample[:3] for sample in samples), strict=True)
    )
    assert query_norm is not None and entropies is not None
    image = np.concatenate([np.full(norms.shape[-1], i) for norms, _, _, i in samples])
    return NormsAndEntropies(
        layer,
        kind,
        query_norm,
        key_norm,
        entropies[SCALES.index(1.0)],
        entropies.mean(-1).T,
        image,
    )


def rank_correlation(x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float]:
    """Spearman's rho and its p-value; both NaN if a side is constant."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # scipy's, of a constant side
        result = spearmanr(x, y)
    return float(result.statistic), float(result.pvalue)


def correlation_rows(layers: Iterable[NormsAndEntropies]) -> list[dict[str, Any]]:
    """A row of :data:`CORRELATION_COLUMNS` for every layer and head; ``entropy`` is the mean."""
    rows = []
    for values in layers:
        for head, entropies in enumerate(values.entropy):
            row = dict(
                stage=values.layer.stage,
                block=values.layer.block,
                kind=values.kind,
                head=head,
                queries=entropies.size,
                entropy=float(entropies.mean()),
            )
            row['rho_query'], row['p_query'] = rank_correlation(values.query_norm[head], entropies)
            if values.key_norm is not None:
                row['rho_key'], row['p_key'] = rank_correlation(values.key_norm[head], entropies)
            rows.append(row)
    return rows


def scaling_rows(layers: Iterable[NormsAndEntropies]) -> list[dict[str, Any]]:
    """A row of :data:`SCALING_COLUMNS` for every layer, head and scale of the queries."""
    return [
        dict(
            stage=values.layer.stage,
            block=values.layer.block,
            kind=values.kind,
            head=head,
            scale=scale,
            entropy=float(entropy),
        )
        for values in layers
        for head, entropies in enumerate(values.scaled)
        for scale, entropy in zip(SCALES, entropies, strict=True)
    ]


def point_rows(layers: Iterable[NormsAndEntropies], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row of :data:`POINT_COLUMNS` for every sampled query, layer and head."""
    return [
        dict(
            stage=values.layer.stage,
            block=values.layer.block,
            kind=values.kind,
            head=head,
            image=names[number],
            query_norm=values.query_norm[head, i],
            key_norm=None if values.key_norm is None else values.key_norm[head, i],
            entropy=values.entropy[head, i],
        )
        for values in layers
        for head in range(len(values.entropy))
        for i, number in enumerate(values.image)
    ]


def draw(layers: Sequence[NormsAndEntropies]) -> Figure:
    """Panels of entropy with a column for each layer, and a colour for each head.

    The first row is against the norms of the queries, the second against those of the keys, and the
    third against the scale of the queries.
    """
    figure, axes = panels(3, len(layers))
    for column, values in zip(axes.T, layers, strict=True):
        _scatter(column[0], values.query_norm, values.entropy, 'norm of the query')
        if values.key_norm is None:
            column[1].set_axis_off()
        else:
            _scatter(column[1], values.key_norm, values.entropy, "norm of the token's key")
        for head, entropies in enumerate(values.scaled):
            column[2].plot(SCALES, entropies, 'o-', ms=3, color=COLOURS[head % len(COLOURS)])
        column[2].set_xscale('log', base=2)
        column[2].grid(alpha=0.3)
        label(column[2], 'directions held, mean', 'scale of the queries')
        place_name = f'stage {values.layer.stage}, block {values.layer.block}: {values.kind}'
        column[0].set_title(f'{place_name}\n{column[0].get_title()}', fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel('entropy / log N', fontsize=8)
    return figure


def _scatter(axis: Axes, norms: NDArray[Any], entropies: NDArray[Any], name: str) -> None:
    rhos = []
    for head, (x, y) in enumerate(zip(norms, entropies, strict=True)):
        axis.scatter(x, y, s=5, alpha=0.6, lw=0, color=COLOURS[head % len(COLOURS)])
        rhos.append(rank_correlation(x, y)[0])
    axis.grid(alpha=0.3)
    low, high = np.nanmin([*rhos, np.inf]), np.nanmax([*rhos, -np.inf])
    spread = f'{low:+.2f}' if len(rhos) == 1 else f'{low:+.2f} to {high:+.2f}, {len(rhos)} heads'
    label(axis, f'Spearman {spread}' if low <= high else 'Spearman undefined', name)
