"""The lean path: the same attention in chunks of tokens that stay in the cache.

Saves, against the plain formula, every temporary of the features' size (``N x 2 d`` for the maps of
the paper): features, rotated features and the copies that a rotary turn makes exist for one chunk
at a time, and the backward pass computes them again. Keys are read once to accumulate the state,
queries once to read it out. Only the inputs and the ``2 d x d`` state of each head are kept for the
backward pass. The gradients of the ``signed`` map are written out; those of another map come from
autograd, chunk by chunk.
"""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .plain import EPS, FEATURE_MAPS, MIN_NORM, OFFSET, POWER, nan_if_infinite, unit_and_norm

# Elements of one chunk's features over all heads and for each thread: 512 KiB in float32, half of a
# core's L2 cache.
CHUNK_ELEMENTS = 2**17
MIN_CHUNK = 32  # tokens


def lean_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    feature_map: str,
) -> Tensor:
    """See :func:`~mmnala.ops.nala_attention`; differentiable once."""
    return _LeanAttention.apply(query, key, value, *(rotary or (None, None)), feature_map)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's decorator ``once_differentiable``, which lets a constant gradient pass in silence:
    its second derivative would be missing from a sum."""

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attn_impl must be 'plain' for gradients of gradients (create_graph=True), got "
                f"'{ctx.attn_impl}'"
            )
        return backward(ctx, *grads)

    return checked


# Features, and the function that takes their gradient to that of the input.
Pullback = Callable[[Tensor], Tensor]
DifferentiableMap = Callable[[Tensor], tuple[Tensor, Pullback]]


def _halves(signed: Tensor) -> Tensor:
    """Positive and negative part side by side, the latter with its sign.

    ``plain.py`` has it without; the sign cancels, as queries and keys both carry it.
    """
    d = signed.shape[-1]
    halves = signed.new_empty(*signed.shape[:-1], 2 * d)
    positive = torch.clamp(signed, min=0, out=halves[..., :d])
    torch.sub(signed, positive, out=halves[..., d:])
    return halves


def _sum_of_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return first + second


def _signed_query(query: Tensor) -> tuple[Tensor, Pullback]:
    direction, norm = unit_and_norm(query)
    tanh = norm.tanh()
    power = POWER * (OFFSET + tanh)
    # The smallest normal number stands for 0, which has no logarithm.
    size = direction.abs().clamp_(min=torch.finfo(query.dtype).tiny)
    log = size.log2()
    phi = _halves(((power - 1) * log).exp2_().mul_(direction))

    def pullback(grad: Tensor) -> Tensor:
        # The derivatives of |u|^p by log |u| and by p are p |u|^p and log |u| |u|^p.
        grad_log = _sum_of_halves(grad * phi)
        grad_norm = POWER * math.log(2) * (1 - tanh**2) * (log * grad_log).sum(-1, keepdim=True)
        slope = power / norm.masked_fill(norm < MIN_NORM, math.inf)
        along = grad_norm - grad_log.sum(-1, keepdim=True) * slope
        grad_direction = grad_log.mul_(slope).div_(size).mul_(direction.sign())
        return grad_direction.addcmul_(direction, along)

    return phi, pullback


def _signed_key(key: Tensor) -> tuple[Tensor, Pullback]:
    halves = _halves(key)
    square = key * key
    phi = (halves.unflatten(-1, (2, -1)) * square.unsqueeze(-2)).flatten(-2)
    return phi, lambda grad: _sum_of_halves(halves.mul_(grad)).mul_(key).mul_(POWER)


def _by_autograd(feature_map: Callable[[Tensor], Tensor]) -> DifferentiableMap:
    def differentiable(x: Tensor) -> tuple[Tensor, Pullback]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            phi = feature_map(x)
        # A copy, as the rotary embedding turns it in place and the gradient may need it.
        return phi.detach().clone(), lambda grad: torch.autograd.grad(phi, x, grad)[0]

    return differentiable


def _maps(name: str) -> tuple[DifferentiableMap, DifferentiableMap]:
    """Those of queries and of keys."""
    if name == 'signed':
        return _signed_query, _signed_key
    maps = FEATURE_MAPS[name]
    return _by_autograd(maps.query), _by_autograd(maps.key)


def _chunks(x: Tensor) -> Iterator[tuple[int, slice]]:
    """One image and so many tokens of it, all heads, at a time."""
    batch, heads, tokens, channels = x.shape
    size = max(MIN_CHUNK, torch.get_num_threads() * CHUNK_ELEMENTS // (2 * heads * channels))
    for image in range(batch):
        for start in range(0, tokens, size):
            yield image, slice(start, start + size)


def _rotate_(x: Tensor, cos: Tensor | None, sin: Tensor | None, chunk: slice) -> Tensor:
    """Turn the pairs in each part of ``(heads, n, parts d)`` in place; by ``-sin``, turn them back.

    Both channels of a pair turn by one angle, so a turn is a complex product.
    """
    if cos is None or sin is None:
        return x
    turn = torch.complex(*(table[chunk, ::2].to(x.dtype) for table in (cos, sin)))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, turn.shape[-1], 2)))
    pairs.mul_(turn[:, None])
    return x


class _LeanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        feature_map: str,
    ) -> Tensor:
        query_map, key_map = _maps(feature_map)
        dtype = torch.promote_types(value.dtype, torch.float32)
        batch, heads, tokens, channels = query.shape
        features = FEATURE_MAPS[feature_map].parts * channels
        state = value.new_zeros(batch, heads, features, channels, dtype=dtype)
        key_sum = value.new_zeros(batch, heads, 1, features, dtype=dtype)
        for image, chunk in _chunks(key):
            phi, _ = key_map(key[image, :, chunk].to(dtype))
            key_sum[image] += phi.sum(dim=-2, keepdim=True)
            phi = _rotate_(phi, cos, sin, chunk)
            state[image].baddbmm_(phi.mT, value[image, :, chunk].to(dtype))
        state /= tokens
        key_sum /= tokens

        # Laid out as the module reads it, (B, N, heads, d), to save it a copy.
        output = value.new_empty(batch, tokens, heads, channels).transpose(1, 2)
        for image, chunk in _chunks(query):
            phi, _ = query_map(query[image, :, chunk].to(dtype))
            normaliser = nan_if_infinite(phi @ key_sum[image].mT + EPS)
            numerator = _rotate_(phi, cos, sin, chunk) @ state[image]
            torch.div(numerator, normaliser, out=output[image, :, chunk])
        ctx.save_for_backward(query, key, value, cos, sin, state, key_sum)
        ctx.feature_map, ctx.attn_impl = feature_map, 'lean'
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cos, sin, state, key_sum = ctx.saved_tensors
        query_map, key_map = _maps(ctx.feature_map)
        dtype, tokens = state.dtype, query.shape[-2]
        back = None if sin is None else -sin
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        grad_state, grad_key_sum = torch.zeros_like(state), torch.zeros_like(key_sum)

        for image, chunk in _chunks(query):
            phi, pullback = query_map(query[image, :, chunk].to(dtype))
            normaliser = nan_if_infinite(phi @ key_sum[image].mT + EPS)
            grad_numerator = grad_output[image, :, chunk].to(dtype) / normaliser
            grad_state[image].baddbmm_(_rotate_(phi.clone(), cos, sin, chunk).mT, grad_numerator)
            grad_phi = _rotate_(grad_numerator @ state[image].mT, cos, back, chunk)
            # The product of grad_numerator and numerator, without computing the latter again.
            product = (grad_phi * phi).sum(dim=-1, keepdim=True)
            grad_normaliser = product / -normaliser
            grad_key_sum[image] += grad_normaliser.mT @ phi
            grad_phi.addcmul_(grad_normaliser, key_sum[image])
            grad_query[image, :, chunk] = pullback(grad_phi)

        grad_state /= tokens
        grad_key_sum /= tokens
        for image, chunk in _chunks(key):
            phi, pullback = key_map(key[image, :, chunk].to(dtype))
            grad_value[image, :, chunk] = _rotate_(phi, cos, sin, chunk) @ grad_state[image]
            grad_phi = value[image, :, chunk].to(dtype) @ grad_state[image].mT
            grad_phi = _rotate_(grad_phi, cos, back, chunk).add_(grad_key_sum[image])
            grad_key[image, :, chunk] = pullback(grad_phi)
        return grad_query, grad_key, grad_value, None, None, None
