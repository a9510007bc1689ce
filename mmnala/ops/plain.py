"""Norm-aware linear attention (NaLa), the plain formula of arXiv 2506.21137.

Softmax attention gets sharper as the query norm grows; an ordinary linear attention divides that
norm away. NaLa puts it back: the norm of a query sets the exponent of its feature map, its
direction sets the similarity.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .rotary import apply_rotary

POWER = 3.0  # lambda: power of the keys, and slope of the query's exponent
OFFSET = 0.5  # tau: exponents lie in [lambda tau, lambda (tau + 1)) = [1.5, 4.5)
SHARPNESS = 20.0  # alpha of the cosine map's angle
FOCUS = 3.0  # power of the focused map
EPS = 1e-6  # added to the normaliser
# The gradient of a direction grows as 1 / norm, out of float32's range: shorter vectors get none.
MIN_NORM = 1e-20


def unit_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Direction and norm of the vectors ``(..., d)``; a zero vector has the direction 0.

    The largest channel is divided out first: float32 does not hold the squares of numbers below
    1e-19 or above 1e19.
    """
    largest = x.detach().abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    scaled = x / largest
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / length.clamp_min(MIN_NORM), length * largest


def _direction(x: Tensor) -> tuple[Tensor, Tensor]:
    unit, norm = unit_and_norm(x)
    return torch.where(norm < MIN_NORM, unit.detach(), unit), norm


def nan_if_infinite(normaliser: Tensor) -> Tensor:
    """An overflow stays visible: divided by infinity, the output would be a plausible 0."""
    return normaliser + 0 * normaliser


def _exponent(query_norm: Tensor) -> Tensor:
    return POWER * (OFFSET + torch.tanh(query_norm))


class FeatureMap(NamedTuple):
    """Features of the queries and of the keys, ``(..., N, d)`` to ``(..., N, parts d)``.

    The rotary embedding turns each of the parts by the same angles.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    parts: int


def signed_query(query: Tensor) -> Tensor:
    direction, norm = _direction(query)
    exponent = _exponent(norm)
    return torch.cat((direction.relu() ** exponent, (-direction).relu() ** exponent), dim=-1)


def signed_key(key: Tensor) -> Tensor:
    return torch.cat((key.relu() ** POWER, (-key).relu() ** POWER), dim=-1)


def cosine_query(query: Tensor) -> Tensor:
    direction, norm = _direction(query)
    return _by_angle(direction.abs() ** _exponent(norm), direction)


def cosine_key(key: Tensor) -> Tensor:
    return _by_angle(key.abs() ** POWER, _direction(key)[0])


def _by_angle(magnitude: Tensor, direction: Tensor) -> Tensor:
    """Sine and cosine of theta + pi / 4, where theta = pi / 4 tanh(alpha u) is the paper's angle.

    Only differences of angles count. Shifted by pi / 4 they lie in [0, pi / 2], so no feature is
    negative and nothing cancels in the normaliser.
    """
    angles = (math.pi / 2 * torch.sigmoid(s * 2 * SHARPNESS * direction) for s in (1, -1))
    return torch.cat([magnitude * angle.sin() for angle in angles], dim=-1)


def elu(x: Tensor) -> Tensor:
    # 1 + ELU as F.elu has it, exp(x) - 1 + 1, has lost all digits at -20.
    return x.clamp_max(0).exp() + x.relu()


def focused(x: Tensor) -> Tensor:
    direction, norm = _direction(x.relu())
    sharpened = direction**FOCUS
    return norm * _direction(sharpened)[0]


FEATURE_MAPS = {
    # Positive and negative parts side by side (the release): only channels in which query and key
    # have the same sign contribute to their similarity.
    'signed': FeatureMap(signed_query, signed_key, parts=2),
    # Signs as angles (the paper): a channel contributes |q|^p |k|^3 cos(a_q - a_k) >= 0. The paper
    # gives no sharpness of the angle; alpha = 20 follows a public re-implementation.
    'cosine': FeatureMap(cosine_query, cosine_key, parts=2),
    # What the paper argues against: maps that do not see the query norm, or hardly. A query scaled
    # by c > 0 has c times the features under relu and focused, and the normaliser takes that away.
    # "Transformers are RNNs", arXiv 2006.16236, equation 7.
    'elu': FeatureMap(elu, elu, parts=1),
    'relu': FeatureMap(torch.relu, torch.relu, parts=1),
    # "FLatten Transformer", arXiv 2308.00442, equation 4: sharper directions of the same norms.
    'focused': FeatureMap(focused, focused, parts=1),
}


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    feature_map: str,
) -> Tensor:
    """The formula as it is written, with full-size temporaries; see :func:`nala_attention`."""
    compute_dtype = torch.promote_types(value.dtype, torch.float32)
    query, key, values = (x.to(compute_dtype) for x in (query, key, value))
    features = FEATURE_MAPS[feature_map]
    phi_query, phi_key = features.query(query), features.key(key)
    normaliser = nan_if_infinite(phi_query @ phi_key.mean(dim=-2).unsqueeze(-1) + EPS)
    if rotary is not None:
        cos, sin = (table.repeat(1, features.parts).to(compute_dtype) for table in rotary)
        phi_query = apply_rotary(phi_query, (cos, sin))
        phi_key = apply_rotary(phi_key, (cos, sin))
    state = phi_key.transpose(-2, -1) @ (values / values.shape[-2])
    return (phi_query @ state / normaliser).to(value.dtype)
