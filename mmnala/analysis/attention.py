"""Queries, keys and attention weights of a model's layers, a few queries at a time.

Reads NaLaFormer's linear and softmax attention and, for comparison, the softmax attention of the
Swin and ViT of mmseg, mmdet, mmpretrain and timm, with the other backbones that attend by
:class:`torch.nn.MultiheadAttention` (MiT, PVT).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.errors import InputError
from ..ops import FEATURE_MAPS, apply_rotary
from ..ops.plain import EPS


class Layer(NamedTuple):
    """An attention layer by its place in a backbone."""

    name: str  # of the module
    stage: int
    block: int


class Heads(NamedTuple):
    """Queries and keys of a layer for one image, float32 at least.

    Tokens attend within their group: a window of Swin, or all tokens of the image.

    Attributes:
        query: ``(groups, heads, n, d)``; in NaLaFormer's softmax attention with rotary embedding.
        key: ``(groups, heads, m, d)``, likewise.
        feature_map: That of a linear attention; None is softmax.
        rotary: Of a linear attention, the tables ``(n, d)``, which its features are turned by.
        scale: Of a softmax attention, what the products are multiplied by.
        bias: Of a softmax attention, what is added to them, ``(groups or 1, heads or 1, n, m)``.
        visible: Of a softmax attention with a mask, which keys it leaves to each query,
            ``(groups, n, m)``, bool; None is all.
        grid: Rows and columns of the tokens, ``n = rows * columns``; None if they are in windows or
            there are tokens of another kind.
    """

    query: Tensor
    key: Tensor
    feature_map: str | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    visible: Tensor | None = None
    grid: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """The feature map's name, or softmax."""
        return self.feature_map or 'softmax'


def attention_weights(
    heads: Heads, picks: Tensor, group: int = 0, rotated: bool = False, scale: float = 1.0
) -> Tensor:
    """Attention weights of some queries, over the keys of their group.

    Those of a softmax attention are its own. Those of a linear attention are the products of its
    features divided by their sum, non-negative and without rotary embedding, as its normaliser has
    them; ``rotated``, they are the factors of the values in its output (arXiv 2506.21137): features
    with rotary embedding over the normaliser without. These can be negative and do not sum to 1.

    Args:
        heads: The layer.
        picks: The queries' numbers in their group, ``(Q,)``, int64.
        group: The group.
        rotated: As above; softmax weights stay the same.
        scale: What to multiply the queries by.

    Returns:
        ``(heads, Q, m)``. A linear attention gives a query that is similar to no key zeros.
    """
    query, key = heads.query[group][:, picks] * scale, heads.key[group]
    if heads.feature_map is None:
        scores = query @ key.mT * heads.scale
        if heads.bias is not None:
            scores = scores + heads.bias[group if len(heads.bias) > 1 else 0][:, picks]
        return scores.softmax(-1)
    features = FEATURE_MAPS[heads.feature_map]
    phi_query, phi_key = features.query(query), features.key(key)
    if not rotated:
        similarity = phi_query @ phi_key.mT
        total = similarity.sum(-1, keepdim=True)
        return similarity / total.clamp_min(torch.finfo(total.dtype).tiny)
    normaliser = phi_query @ phi_key.mean(-2).unsqueeze(-1) + EPS
    if heads.rotary is not None:
        cos, sin = (x.repeat(1, features.parts).to(phi_key.dtype) for x in heads.rotary)
        phi_query = apply_rotary(phi_query, (cos[picks], sin[picks]))
        phi_key = apply_rotary(phi_key, (cos, sin))
    return phi_query @ phi_key.mT / (key.shape[-2] * normaliser)


def entropy(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Entropy of attention weights over that of uniform attention, the log of the number of keys.

    Args:
        weights: ``(..., m)``.
        visible: Which keys a mask leaves, bool, broadcast with ``weights``; None is all.

    Returns:
        ``(...)`` in [0, 1]: 0 is attention to one key, 1 to all alike. A row of zeros has 0.
    """
    keys = weights.new_tensor(weights.shape[-1]) if visible is None else visible.sum(-1)
    return torch.special.entr(weights).sum(-1) / keys.to(weights.dtype).clamp_min(2).log()


def attention_layers(backbone: nn.Module) -> list[Layer]:
    """Every attention layer of a backbone that :func:`visit_attention` shows.

    Raises:
        InputError: If there are none that are known here.
    """
    return [_place(name) for name in _readable(backbone)]


def select_block(
    layers: Iterable[Layer], block: int, stages: Sequence[int] | None = None, option: str = 'stages'
) -> list[Layer]:
    """The layers of one block of each stage, for the options ``--block`` and ``--stages``.

    Args:
        layers: All of a backbone.
        block: The block's number in its stage, negative from the last.
        stages: Which stages; None is all.
        option: The name of the option with the stages.

    Raises:
        InputError: If there is no such stage, or one of the stages has no such block.
    """
    of_stages: dict[int, list[Layer]] = {}
    for layer in layers:
        of_stages.setdefault(layer.stage, []).append(layer)
    for stage in stages or ():
        if stage not in of_stages:
            raise InputError(f'--{option} {stage}: expected {", ".join(map(str, of_stages))}')
    chosen = [of for stage, of in of_stages.items() if stages is None or stage in stages]
    depth = min(map(len, chosen))
    if not -depth <= block < depth:
        raise InputError(f'--block {block}: expected {-depth} to {depth - 1}')
    return [of_stage[block] for of_stage in chosen]


@torch.no_grad()
def visit_attention(
    backbone: nn.Module, image: Tensor, visit: Callable[[Layer, Heads], None]
) -> None:
    """Run a backbone, and show each attention layer's queries and keys as it runs.

    Args:
        backbone: In eval mode.
        image: ``(1, 3, H, W)``.
        visit: Called with every layer. What it does not keep is freed before the next.

    Raises:
        InputError: If the backbone has no attention that is known here, or does not take the image.
    """
    handles = []
    for name, (module, reader) in _readable(backbone).items():
        layer = _place(name)

        def hook(
            module: nn.Module,
            args: tuple,
            kwargs: dict,
            layer: Layer = layer,
            reader: Callable[..., Heads] = reader,
        ) -> None:
            visit(layer, reader(module, *args, **kwargs))

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        backbone(image)
    except AssertionError as error:  # fixed sizes
        raise InputError(f'the backbone does not take the image: {error}') from error
    finally:
        for handle in handles:
            handle.remove()


def _readable(backbone: nn.Module) -> dict[str, tuple[nn.Module, Callable[..., Heads]]]:
    """The attention modules by name, with what reads their queries and keys."""
    readers = {
        name: (module, reader)
        for name, module in backbone.named_modules()
        if (reader := _READERS.get(f'{type(module).__module__}.{type(module).__name__}'))
    }
    if not readers:
        raise InputError(
            f'{type(backbone).__name__}: it has no attention that is known here, which is that of '
            'NaLaFormer, Swin, ViT and torch.nn.MultiheadAttention'
        )
    return readers


def _place(name: str) -> Layer:
    """Stage and block by the first and last number in a module's name; a ViT has one stage."""
    numbers = [int(n) for n in re.findall(r'(?<![^._])\d+(?![^.])', name)]
    return Layer(name, numbers[0] if len(numbers) > 1 else 0, numbers[-1] if numbers else 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _read_gated(module: Any, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Heads:
    query, key, _, _ = module.qkvg(x).chunk(4, -1)
    query, key = (_wide(module._split_heads(part)) for part in (query, key))
    grid = (x.shape[1], x.shape[2])
    if module.attention == 'nala':
        return Heads(query, key, module.feature_map, rotary, grid=grid)
    query, key = (apply_rotary(part, rotary) for part in (query, key))
    return Heads(query, key, scale=query.shape[-1] ** -0.5, grid=grid)


def _read_qkv(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Heads:
    """mmpretrain's and timm's layers; the projection's channels are those of q, k and v."""
    qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))
    query, key, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if hasattr(module, 'q_norm'):
        query, key = module.q_norm(query), module.k_norm(key)
    scale = getattr(module, 'scale', query.shape[-1] ** -0.5)
    return Heads(_wide(query), _wide(key), scale=scale)


def _read_window(module: Any, x: Tensor, mask: Tensor | None = None) -> Heads:
    heads = _read_qkv(module, x)
    tokens = x.shape[1]
    index = module.relative_position_index.view(-1)
    bias = (
        module.relative_position_bias_table[index].view(tokens, tokens, -1).permute(2, 0, 1)[None]
    )
    if mask is None:
        return heads._replace(bias=_wide(bias))
    return heads._replace(bias=_wide(bias + mask[:, None]), visible=mask == 0)


def _read_torch(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
) -> Heads:
    if not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight]
    else:
        weights = list(module.in_proj_weight.chunk(3))[:2]
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    query, key = (
        _wide(nn.functional.linear(x, weight, bias))
        .unflatten(-1, (module.num_heads, -1))
        .transpose(1, 2)
        for x, weight, bias in zip((query, key), weights, biases, strict=False)
    )
    return Heads(query, key, scale=query.shape[-1] ** -0.5)


_READERS: dict[str, Callable[..., Heads]] = {
    'mmnala.backbones.nalaformer.GatedAttention': _read_gated,
    'mmdet.models.backbones.swin.WindowMSA': _read_window,
    'mmseg.models.backbones.swin.WindowMSA': _read_window,
    'mmpretrain.models.utils.attention.WindowMSA': _read_window,
    'mmpretrain.models.utils.attention.MultiheadAttention': _read_qkv,
    'timm.layers.attention.Attention': _read_qkv,
    'timm.models.swin_transformer.WindowAttention': _read_window,
    'timm.models.vision_transformer.Attention': _read_qkv,  # where older versions have it
    'torch.nn.modules.activation.MultiheadAttention': _read_torch,
}
