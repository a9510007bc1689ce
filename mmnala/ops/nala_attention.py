"""Norm-aware linear attention (NaLa), the plain formula of arXiv 2506.21137.

Softmax attention gets sharper as the query norm grows; an ordinary linear attention divides that
norm away. NaLa puts it back: the norm of a query sets the exponent of its feature map, its
direction sets the similarity.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .rotary import apply_rotary

POWER = 3.0  # lambda: power of the keys, and slope of the query's exponent
OFFSET = 0.5  # tau: exponents lie in [lambda tau, lambda (tau + 1)) = [1.5, 4.5)
SHARPNESS = 20.0  # alpha of the cosine map's angle
EPS = 1e-6  # added to the normaliser
# A zero vector has no direction. Below this norm float32 cannot represent the square, so dividing
# by it gives a zero query the direction 0 (and output 0) and leaves every other query exact.
MIN_NORM = 1e-20


def _direction(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(MIN_NORM), norm


def _exponent(query_norm: Tensor) -> Tensor:
    return POWER * (OFFSET + torch.tanh(query_norm))


def signed_map(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Positive and negative parts side by side (the release).

    Only channels in which query and key have the same sign contribute to their similarity.
    """
    direction, norm = _direction(query)
    exponent = _exponent(norm)
    phi_query = torch.cat((direction.relu() ** exponent, (-direction).relu() ** exponent), dim=-1)
    phi_key = torch.cat((key.relu() ** POWER, (-key).relu() ** POWER), dim=-1)
    return phi_query, phi_key


def cosine_map(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Signs as angles (the paper): a channel contributes ``|q|^p |k|^3 cos(a_q - a_k) >= 0``.

    The paper gives no sharpness of the angle; ``alpha = 20`` follows a public re-implementation.
    """
    direction, norm = _direction(query)
    query_angle = math.pi / 4 * torch.tanh(SHARPNESS * direction)
    key_angle = math.pi / 4 * torch.tanh(SHARPNESS * _direction(key)[0])
    query_size = direction.abs() ** _exponent(norm)
    key_size = key.abs() ** POWER
    phi_query = torch.cat((query_size * query_angle.cos(), query_size * query_angle.sin()), dim=-1)
    phi_key = torch.cat((key_size * key_angle.cos(), key_size * key_angle.sin()), dim=-1)
    return phi_query, phi_key


FEATURE_MAPS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    'signed': signed_map,
    'cosine': cosine_map,
}


def nala_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None = None,
    feature_map: str = 'signed',
) -> Tensor:
    r"""Norm-aware linear attention, linear in the number of tokens ``N``.

    .. math::
        o_t = \frac{R(\phi_q)_t \, \frac1N \sum_i R(\phi_k)_i^\top v_i}
                   {\phi_{q,t} \cdot \frac1N \sum_i \phi_{k,i} + 10^{-6}}

    with the feature maps :math:`\phi: R^d \to R^{2d}` of ``feature_map`` and the rotary embedding
    :math:`R` on each half of their channels; the normaliser is not rotated.

    Args:
        query: Floating tensor of shape ``(B, heads, N, d)``, as in
            :func:`torch.nn.functional.scaled_dot_product_attention`.
        key: Like ``query``.
        value: Like ``query``.
        rotary: ``(cos, sin)``, each of shape ``(N, d)`` with ``d`` even; ``None`` for no position.
        feature_map: ``'signed'`` (the release) or ``'cosine'`` (the paper).

    Returns:
        Tensor of shape ``(B, heads, N, d)`` in the dtype of ``value``. The computation runs in
        float32 at least, also under autocast: the cube of a key overflows float16 above 40.3.
        A zero query returns zero, where the release returns NaN.

    Raises:
        ValueError: If the shapes differ, ``N`` or ``d`` is 0, or ``feature_map`` is unknown.
        TypeError: If a tensor is not real floating point.
    """
    _check_inputs(query, key, value, rotary, feature_map)
    # Autocast knows no meta device (shape and FLOP counting), so there the CPU's is switched off.
    device_type = 'cpu' if value.is_meta else value.device.type
    with torch.autocast(device_type, enabled=False):
        compute_dtype = torch.promote_types(value.dtype, torch.float32)
        query, key, values = (x.to(compute_dtype) for x in (query, key, value))
        phi_query, phi_key = FEATURE_MAPS[feature_map](query, key)
        normaliser = phi_query @ phi_key.mean(dim=-2).unsqueeze(-1) + EPS
        if rotary is not None:
            cos, sin = (torch.cat((table, table), dim=-1).to(compute_dtype) for table in rotary)
            phi_query = apply_rotary(phi_query, (cos, sin))
            phi_key = apply_rotary(phi_key, (cos, sin))
        state = phi_key.transpose(-2, -1) @ (values / values.shape[-2])
        return (phi_query @ state / normaliser).to(value.dtype)


def _check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    feature_map: str,
) -> None:
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f'feature_map must be one of {sorted(FEATURE_MAPS)}, got {feature_map!r}')
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
