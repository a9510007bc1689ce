"""The lean path: the same attention in chunks of tokens that stay in the cache.

Saves, against the plain formula, every temporary of size ``N x 2 d``: features, rotated features
and the copies that a rotary turn makes exist for one chunk at a time, and the backward pass
computes them again. Keys are read once to accumulate the state, queries once to read it out. What
is kept for the backward pass are the inputs, the output and the ``2 d x d`` state.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .plain import EPS, FEATURE_MAPS, MIN_NORM, OFFSET, POWER, FeatureMap

# Elements of one chunk's features over all images and heads: 1 MiB in float32, about one L2 cache.
CHUNK_ELEMENTS = 2**18
MIN_CHUNK = 32  # tokens


def _signed_query(query: Tensor) -> Tensor:
    """As in ``plain.py``; the power is computed once and split by sign."""
    norm = torch.linalg.vector_norm(query, dim=-1, keepdim=True)
    direction = query / norm.clamp_min(MIN_NORM)
    exponent = POWER * (OFFSET + torch.tanh(norm))
    # The smallest normal number stands for 0, whose logarithm has no gradient; its power is 0.
    size = direction.abs().clamp_min(torch.finfo(query.dtype).tiny)
    signed = torch.copysign(torch.exp2(exponent * torch.log2(size)), direction)
    return torch.cat((signed.relu(), (-signed).relu()), dim=-1)


def _signed_key(key: Tensor) -> Tensor:
    cube = key * key * key
    return torch.cat((cube.relu(), (-cube).relu()), dim=-1)


_FASTER_MAPS = {'signed': FeatureMap(_signed_query, _signed_key)}


def lean_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    feature_map: str,
) -> Tensor:
    """See :func:`~mmnala.ops.nala_attention`; differentiable once."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    turn = None
    if rotary is not None:
        # Both channels of a pair turn by one angle, so a turn is a complex product.
        turn = torch.complex(*(table[:, ::2].to(dtype).contiguous() for table in rotary))
    features = _FASTER_MAPS.get(feature_map, FEATURE_MAPS[feature_map])
    return _LeanAttention.apply(query, key, value, turn, features, dtype)


def _chunks(x: Tensor) -> list[slice]:
    batch, heads, tokens, channels = x.shape
    size = max(MIN_CHUNK, CHUNK_ELEMENTS // (2 * batch * heads * channels))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _rotate(x: Tensor, turn: Tensor | None, back: bool = False) -> Tensor:
    """Turn both halves of ``(..., n, 2 d)`` by ``(n, d / 2)`` unit complex numbers, or back."""
    if turn is None:
        return x
    turn = turn.conj() if back else turn
    pairs = torch.view_as_complex(x.unflatten(-1, (2, turn.shape[-1], 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-3)


class _LeanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        turn: Tensor | None,
        features: FeatureMap,
        dtype: torch.dtype,
    ) -> Tensor:
        batch, heads, tokens, channels = query.shape
        state = query.new_zeros(batch, heads, 2 * channels, channels, dtype=dtype)
        key_sum = query.new_zeros(batch, heads, 2 * channels, 1, dtype=dtype)
        for chunk in _chunks(key):
            phi = features.key(key[:, :, chunk].to(dtype))
            key_sum += phi.sum(dim=-2).unsqueeze(-1)
            phi = _rotate(phi, None if turn is None else turn[chunk])
            state += phi.mT @ value[:, :, chunk].to(dtype)
        state /= tokens
        key_sum /= tokens

        # Laid out as the module reads it, (B, N, heads, d), to save it a copy.
        output = value.new_empty(batch, tokens, heads, channels).transpose(1, 2)
        for chunk in _chunks(query):
            phi = features.query(query[:, :, chunk].to(dtype))
            normaliser = phi @ key_sum + EPS
            phi = _rotate(phi, None if turn is None else turn[chunk])
            output[:, :, chunk] = phi @ state / normaliser
        ctx.save_for_backward(query, key, value, turn, state, key_sum)
        ctx.features = features
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, turn, state, key_sum = ctx.saved_tensors
        dtype, tokens = state.dtype, query.shape[-2]
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        grad_state, grad_key_sum = torch.zeros_like(state), torch.zeros_like(key_sum)

        for chunk in _chunks(query):
            angle = None if turn is None else turn[chunk]
            part = query[:, :, chunk].to(dtype, copy=True).requires_grad_()
            with torch.enable_grad():
                features = ctx.features.query(part)
            phi = features.detach()
            rotated = _rotate(phi, angle)
            normaliser = phi @ key_sum + EPS
            grad_numerator = grad_output[:, :, chunk].to(dtype) / normaliser
            numerator = rotated @ state
            grad_normaliser = (grad_numerator * numerator).sum(-1, keepdim=True) / -normaliser
            grad_state += rotated.mT @ grad_numerator
            grad_key_sum += phi.mT @ grad_normaliser
            grad_phi = _rotate(grad_numerator @ state.mT, angle, back=True)
            grad_phi += grad_normaliser * key_sum.mT
            grad_query[:, :, chunk] = torch.autograd.grad(features, part, grad_phi)[0]

        grad_state /= tokens
        grad_key_sum /= tokens
        for chunk in _chunks(key):
            angle = None if turn is None else turn[chunk]
            part = key[:, :, chunk].to(dtype, copy=True).requires_grad_()
            with torch.enable_grad():
                features = ctx.features.key(part)
            grad_value[:, :, chunk] = _rotate(features.detach(), angle) @ grad_state
            grad_phi = _rotate(value[:, :, chunk].to(dtype) @ grad_state.mT, angle, back=True)
            grad_phi += grad_key_sum.mT
            grad_key[:, :, chunk] = torch.autograd.grad(features, part, grad_phi)[0]
        return grad_query, grad_key, grad_value, None, None, None
