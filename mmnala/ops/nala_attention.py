"""Norm-aware linear attention (NaLa) as an operator: checks, and the choice of the path.

The formula is in ``plain.py``; ``lean.py`` and ``triton_path.py`` compute the same with less
memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .lean import lean_attention
from .plain import FEATURE_MAPS, plain_attention
from .tracing import is_traced


def _triton_attention(*args: Any) -> Tensor:
    from .triton_path import triton_attention  # only here is triton needed

    return triton_attention(*args)


ATTN_IMPLS: dict[str, Callable[..., Tensor]] = {
    'plain': plain_attention,
    'lean': lean_attention,
    'triton': _triton_attention,
}


def nala_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None = None,
    feature_map: str = 'signed',
    attn_impl: str = 'auto',
) -> Tensor:
    r"""Norm-aware linear attention, linear in the number of tokens ``N``.

    .. math::
        o_t = \frac{R(\phi_q)_t \, \frac1N \sum_i R(\phi_k)_i^\top v_i}
                   {\phi_{q,t} \cdot \frac1N \sum_i \phi_{k,i} + 10^{-6}}

    with the feature maps :math:`\phi: R^d \to R^{2d}` (the paper's own; :math:`R^d` those it is
    compared with) of ``feature_map`` and the rotary embedding :math:`R` on each ``d`` of their
    channels; the normaliser is not rotated.

    Args:
        query: Floating tensor of shape ``(B, heads, N, d)``, as in
            :func:`torch.nn.functional.scaled_dot_product_attention`.
        key: Like ``query``.
        value: Like ``query``.
        rotary: ``(cos, sin)``, each of shape ``(N, d)`` with ``d`` even; ``None`` for no position.
        feature_map: ``'signed'`` (the release) or ``'cosine'`` (the paper); for comparison
            ``'elu'`` (1 + ELU, arXiv 2006.16236), ``'relu'`` or ``'focused'`` (FLatten, arXiv
            2308.00442), which do not know the query's norm.
        attn_impl: ``'plain'`` (the formula), ``'lean'`` (chunks of tokens, little memory),
            ``'triton'`` (fused kernels for CUDA), or ``'auto'``: lean on the CPU, plain elsewhere
            and under a compiler.

    Returns:
        Tensor of shape ``(B, heads, N, d)`` in the dtype of ``value``. The computation runs in
        float32 at least, also under autocast: the cube of a key overflows float16 above 40.3.
        A zero query returns zero, where the release returns NaN. What is not finite, or overflows,
        makes all it reaches NaN or infinite; limits and tolerances are in docs/numerics.md.

    Raises:
        ValueError: If the shapes differ, ``N`` or ``d`` is 0, or ``feature_map`` or
            ``attn_impl`` is unknown; or if ``'triton'`` is asked for a feature map for comparison.
        TypeError: If a tensor is not real floating point.
    """
    _check_inputs(query, key, value, rotary, feature_map, attn_impl)
    # Autocast knows no meta device (shape and FLOP counting), so there the CPU's is switched off.
    device_type = 'cpu' if value.is_meta else value.device.type
    with torch.autocast(device_type, enabled=False):
        if attn_impl == 'auto':
            attn_impl = _default_impl(value)
        return ATTN_IMPLS[attn_impl](query, key, value, rotary, feature_map)


def _default_impl(value: Tensor) -> str:
    # A compiler or tracer sees through the plain formula and would unroll the loop over chunks. On
    # a GPU no other path has been measured yet.
    return 'lean' if value.device.type == 'cpu' and not is_traced() else 'plain'


def _check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    feature_map: str,
    attn_impl: str,
) -> None:
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f'feature_map must be one of {sorted(FEATURE_MAPS)}, got {feature_map!r}')
    if attn_impl != 'auto' and attn_impl not in ATTN_IMPLS:
        raise ValueError(
            f"attn_impl must be 'auto' or one of {sorted(ATTN_IMPLS)}, got {attn_impl!r}"
        )
    for name, x in (('query', query), ('key', key), ('value', value)):
        if not x.is_floating_point():
            raise TypeError(f'{name} must be a floating tensor, got {x.dtype}')
        if x.dim() != 4 or x.shape != query.shape:
            raise ValueError(
                'query, key and value must share one shape (B, heads, N, d), '
                f'got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}'
            )
    tokens, head_dim = query.shape[-2:]
    if not tokens or not head_dim:
        raise ValueError(f'query must have tokens and channels, got shape {tuple(query.shape)}')
    if rotary is not None:
        if head_dim % 2:
            raise ValueError(f'query must have an even head dim with rotary, got {head_dim}')
        shapes = [tuple(table.shape) for table in rotary]
        if shapes != [(tokens, head_dim)] * 2:
            raise ValueError(
                f'rotary must be (cos, sin), each of shape {(tokens, head_dim)}, got {shapes}'
            )
