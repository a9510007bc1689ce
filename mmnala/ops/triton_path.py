"""Norm-aware linear attention as fused Triton kernels for CUDA devices.

What it saves: the plain formula writes and reads back feature maps of twice the channels, their
rotated copies and float32 copies of its inputs. Here all of these live in registers.

- Forward: one pass over keys and values sums the ``2d x d`` state and the ``2d`` key sum in
  float32; one pass over the queries writes the output.
- Backward: one pass over queries and output gradients writes the query gradient and sums those of
  state and key sum; one pass over keys and values writes theirs. Features are computed again from
  the inputs; beyond these only state and key sum are kept.

Where a pass has two loops over its tokens, the second one finds them in the cache.

The tokens of a head are split over programs; each writes its partial sums, which are then added in
a fixed order. Without atomics a result is the same in every run.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lean import differentiable_once
from .plain import EPS, MIN_NORM, OFFSET, POWER, SHARPNESS

KERNEL_MAPS = ('signed', 'cosine')
MAX_HEAD_DIM = 128
# Enough programs to fill a large GPU, each with enough tokens that its partial sums (2d x d)
# are small beside what it reads.
PROGRAMS = 512
MIN_TOKENS = 512

_OFFSET = tl.constexpr(OFFSET)
_SHARPNESS = tl.constexpr(SHARPNESS)
_EPS = tl.constexpr(EPS)
_MIN_NORM = tl.constexpr(MIN_NORM)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_POWER = tl.constexpr(POWER)
_LOG_2 = tl.constexpr(math.log(2))
_HALF_PI = tl.constexpr(math.pi / 2)


# Feature maps. A block is (tokens, channels of one head), float32, zero where it is padded.
# Both maps are size(x) * (first(x), second(x)): size is |unit|^p or |key|^3, the pair is
# (x > 0, x < 0) for the signed map and (sin, cos) of the shifted angle for the cosine map.


@triton.jit
def _tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))  # in (0, 1]: no overflow
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def _direction(x):
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), _TINY)[:, None]
    scaled = x / largest
    length = tl.sqrt(tl.sum(scaled * scaled, axis=1))[:, None]
    return scaled / tl.maximum(length, _MIN_NORM), length * largest


@triton.jit
def _direction_grad(x, grad):
    """Gradient by ``x`` from that by its direction."""
    unit, norm = _direction(x)
    along = tl.sum(grad * unit, axis=1)[:, None]
    return (grad - unit * along) / tl.where(norm < _MIN_NORM, float('inf'), norm)


@triton.jit
def _sign_pair(x, COSINE: tl.constexpr):
    """The pair, and the derivative of its angle by the direction of ``x``."""
    if COSINE:
        unit, _ = _direction(x)
        positive = tl.sigmoid(2.0 * _SHARPNESS * unit)
        negative = tl.sigmoid(-2.0 * _SHARPNESS * unit)
        first = tl.sin(_HALF_PI * positive)
        second = tl.sin(_HALF_PI * negative)
        slope = _HALF_PI * 2.0 * _SHARPNESS * positive * negative
    else:
        first = (x > 0).to(tl.float32)
        second = (x < 0).to(tl.float32)
        slope = tl.zeros_like(x)
    return first, second, slope


@triton.jit
def _query_size(query):
    """``|unit|^p``, its derivatives by ``unit`` and ``p``, and that of ``p`` by the norm."""
    unit, norm = _direction(query)
    tanh = _tanh(norm)
    exponent = _POWER * (_OFFSET + tanh)
    base = tl.where(unit == 0, 1.0, unit)  # size and derivatives are 0 at 0; the logarithm is not
    log2 = tl.log2(tl.abs(base))
    size = tl.where(unit == 0, 0.0, tl.exp2(exponent * log2))
    by_exponent = size * log2 * _LOG_2
    return size, exponent * size / base, by_exponent, _POWER * (1.0 - tanh * tanh)


@triton.jit
def _query_features(query, COSINE: tl.constexpr):
    size, _, _, _ = _query_size(query)
    first, second, _ = _sign_pair(query, COSINE)
    return size * first, size * second


@triton.jit
def _query_features_grad(query, grad_first, grad_second, COSINE: tl.constexpr):
    # The compiler merges what the features computed already.
    unit, _ = _direction(query)
    size, by_unit, by_exponent, exponent_by_norm = _query_size(query)
    first, second, slope = _sign_pair(query, COSINE)
    grad_size = grad_first * first + grad_second * second
    grad_unit = grad_size * by_unit
    if COSINE:
        grad_unit += size * slope * (grad_first * second - grad_second * first)
    grad_norm = exponent_by_norm * tl.sum(grad_size * by_exponent, axis=1)[:, None]
    return _direction_grad(query, grad_unit) + unit * grad_norm


@triton.jit
def _key_features(key, COSINE: tl.constexpr):
    size = tl.abs(key) * key * key
    first, second, _ = _sign_pair(key, COSINE)
    return size * first, size * second


@triton.jit
def _key_features_grad(key, grad_first, grad_second, COSINE: tl.constexpr):
    first, second, slope = _sign_pair(key, COSINE)
    grad = (grad_first * first + grad_second * second) * 3.0 * tl.abs(key) * key
    if COSINE:
        size = tl.abs(key) * key * key
        grad += _direction_grad(key, size * slope * (grad_first * second - grad_second * first))
    return grad


# Memory. Rows have ``d`` adjacent channels; the blocks are padded to powers of two.


@triton.jit
def _block(row, rows, row_stride, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets and mask of ``ROWS`` rows from ``row`` on, of ``rows`` that there are."""
    row_index = row + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    offsets = row_index.to(tl.int64) * row_stride + channel
    return offsets, (row_index < rows) & (channel < D)


@triton.jit
def _load(ptr, row, rows, row_stride, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    offsets, mask = _block(row, rows, row_stride, ROWS, D, BLOCK_D)
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(
    ptr, x, row, rows, row_stride, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    offsets, mask = _block(row, rows, row_stride, ROWS, D, BLOCK_D)
    tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


# Rotary embedding of both halves, as in apply_rotary. A channel pair sits in one thread.


@triton.jit
def _quarter_turn(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(-odd, even), (ROWS, BLOCK_D))


@triton.jit
def _rotate(
    first, second, cos, sin, row, rows,
    ROTARY: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if ROTARY:
        c = _load(cos, row, rows, D, ROWS, D, BLOCK_D)
        s = _load(sin, row, rows, D, ROWS, D, BLOCK_D)
        first = first * c + _quarter_turn(first, ROWS, BLOCK_D) * s
        second = second * c + _quarter_turn(second, ROWS, BLOCK_D) * s
    return first, second


@triton.jit
def _rotate_grad(
    first, second, cos, sin, row, rows,
    ROTARY: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if ROTARY:
        c = _load(cos, row, rows, D, ROWS, D, BLOCK_D)
        s = _load(sin, row, rows, D, ROWS, D, BLOCK_D)
        first = first * c - _quarter_turn(first * s, ROWS, BLOCK_D)
        second = second * c - _quarter_turn(second * s, ROWS, BLOCK_D)
    return first, second


@triton.jit
def _head(ptr, batch_stride, head_stride, heads):
    """Where the head of this program begins."""
    index = tl.program_id(0).to(tl.int64)
    return ptr + index // heads * batch_stride + index % heads * head_stride


@triton.jit
def _load_sums(state, key_sum, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """State and key sum of this program's head, by halves of the features."""
    head = tl.program_id(0).to(tl.int64)
    state += head * 2 * D * D
    key_sum += head * 2 * D
    channel = tl.arange(0, BLOCK_D)
    return (
        _load(state, 0, D, D, BLOCK_D, D, BLOCK_D),
        _load(state + D * D, 0, D, D, BLOCK_D, D, BLOCK_D),
        tl.load(key_sum + channel, mask=channel < D, other=0.0)[None, :],
        tl.load(key_sum + D + channel, mask=channel < D, other=0.0)[None, :],
    )


@triton.jit
def _store_sums(
    state, key_sum, state_first, state_second, sum_first, sum_second, tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """This program's share of means over all tokens: the sums, and their gradients, are over N."""
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    state += program * 2 * D * D
    key_sum += program * 2 * D
    channel = tl.arange(0, BLOCK_D)
    _store(state, state_first / tokens, 0, D, D, BLOCK_D, D, BLOCK_D)
    _store(state + D * D, state_second / tokens, 0, D, D, BLOCK_D, D, BLOCK_D)
    tl.store(key_sum + channel, sum_first / tokens, mask=channel < D)
    tl.store(key_sum + D + channel, sum_second / tokens, mask=channel < D)


@triton.jit
def _round_to_tf32(x):
    """Tensor cores cut the last 13 bits off, a bias."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # CUDA's NaN, 0x7fffffff, would become -0


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``."""
    if PRECISION == 'tf32':
        a, b = _round_to_tf32(a), _round_to_tf32(b)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _normaliser(first, second, sum_first, sum_second):
    normaliser = tl.sum(first * sum_first + second * sum_second, axis=1)[:, None] + _EPS
    return normaliser + 0.0 * normaliser  # NaN if it is infinite, as in plain.py


# Kernels. Program (i, j) does tokens [j * chunk, (j + 1) * chunk) of head i.


@triton.jit
def _state_kernel(
    key, value, cos, sin, state, key_sum,
    key_b, key_h, key_n, value_b, value_h, value_n, heads, tokens, chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTARY: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial means of ``R(phi_k)^T v`` and ``phi_k``."""
    key = _head(key, key_b, key_h, heads)
    value = _head(value, value_b, value_h, heads)
    state_first = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    state_second = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    sum_first = tl.zeros((BLOCK_D,), tl.float32)
    sum_second = tl.zeros((BLOCK_D,), tl.float32)
    start = tl.program_id(1) * chunk
    for row in range(start, tl.minimum(start + chunk, tokens), BLOCK_N):
        k = _load(key, row, tokens, key_n, BLOCK_N, D, BLOCK_D)
        v = _load(value, row, tokens, value_n, BLOCK_N, D, BLOCK_D)
        first, second = _key_features(k, COSINE)
        sum_first += tl.sum(first, axis=0)
        sum_second += tl.sum(second, axis=0)
        first, second = _rotate(first, second, cos, sin, row, tokens, ROTARY, BLOCK_N, D, BLOCK_D)
        state_first = _dot(tl.trans(first), v, state_first, PRECISION)
        state_second = _dot(tl.trans(second), v, state_second, PRECISION)
    _store_sums(
        state, key_sum, state_first, state_second, sum_first, sum_second, tokens, D, BLOCK_D
    )


@triton.jit
def _output_kernel(
    query, cos, sin, state, key_sum, output,
    query_b, query_h, query_n, output_b, output_h, output_n, heads, tokens, chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTARY: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``R(phi_q) state / (phi_q . key_sum + eps)``."""
    query = _head(query, query_b, query_h, heads)
    output = _head(output, output_b, output_h, heads)
    state_first, state_second, sum_first, sum_second = _load_sums(state, key_sum, D, BLOCK_D)
    start = tl.program_id(1) * chunk
    for row in range(start, tl.minimum(start + chunk, tokens), BLOCK_N):
        q = _load(query, row, tokens, query_n, BLOCK_N, D, BLOCK_D)
        first, second = _query_features(q, COSINE)
        normaliser = _normaliser(first, second, sum_first, sum_second)
        first, second = _rotate(first, second, cos, sin, row, tokens, ROTARY, BLOCK_N, D, BLOCK_D)
        out = _dot(second, state_second, _dot(first, state_first, None, PRECISION), PRECISION)
        _store(output, out / normaliser, row, tokens, output_n, BLOCK_N, D, BLOCK_D)


@triton.jit
def _query_grad_kernel(
    query, grad, cos, sin, state, key_sum, grad_query, grad_normaliser, grad_state, grad_key_sum,
    query_b, query_h, query_n, grad_b, grad_h, grad_n,
    grad_query_b, grad_query_h, grad_query_n, heads, tokens, chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTARY: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient by the queries; partial sums of those by state and key sum."""
    query = _head(query, query_b, query_h, heads)
    grad = _head(grad, grad_b, grad_h, heads)
    grad_query = _head(grad_query, grad_query_b, grad_query_h, heads)
    grad_normaliser += tl.program_id(0).to(tl.int64) * tokens
    state_first, state_second, sum_first, sum_second = _load_sums(state, key_sum, D, BLOCK_D)
    start = tl.program_id(1) * chunk
    end = tl.minimum(start + chunk, tokens)
    for row in range(start, end, BLOCK_N):
        q = _load(query, row, tokens, query_n, BLOCK_N, D, BLOCK_D)
        g = _load(grad, row, tokens, grad_n, BLOCK_N, D, BLOCK_D)
        first, second = _query_features(q, COSINE)
        normaliser = _normaliser(first, second, sum_first, sum_second)
        g = g / normaliser
        grad_first = _dot(g, tl.trans(state_first), None, PRECISION)
        grad_second = _dot(g, tl.trans(state_second), None, PRECISION)
        grad_first, grad_second = _rotate_grad(
            grad_first, grad_second, cos, sin, row, tokens, ROTARY, BLOCK_N, D, BLOCK_D
        )
        # This is g . out / normaliser, without computing the output again.
        overlap = tl.sum(first * grad_first + second * grad_second, axis=1)[:, None] / normaliser
        index = row + tl.arange(0, BLOCK_N)[:, None]
        tl.store(grad_normaliser + index, -overlap, mask=index < tokens)
        grad_first -= overlap * sum_first
        grad_second -= overlap * sum_second
        dq = _query_features_grad(q, grad_first, grad_second, COSINE)
        _store(grad_query, dq, row, tokens, grad_query_n, BLOCK_N, D, BLOCK_D)

    # A second loop, whose tokens are still in the cache: one loop would hold too many registers.
    tl.debug_barrier()  # grad_normaliser was written by other threads
    grad_state_first = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    grad_state_second = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    grad_sum_first = tl.zeros((BLOCK_D,), tl.float32)
    grad_sum_second = tl.zeros((BLOCK_D,), tl.float32)
    for row in range(start, end, BLOCK_N):
        q = _load(query, row, tokens, query_n, BLOCK_N, D, BLOCK_D)
        g = _load(grad, row, tokens, grad_n, BLOCK_N, D, BLOCK_D)
        first, second = _query_features(q, COSINE)
        g = g / _normaliser(first, second, sum_first, sum_second)
        index = row + tl.arange(0, BLOCK_N)[:, None]
        weight = tl.load(grad_normaliser + index, mask=index < tokens, other=0.0)
        grad_sum_first += tl.sum(weight * first, axis=0)
        grad_sum_second += tl.sum(weight * second, axis=0)
        first, second = _rotate(first, second, cos, sin, row, tokens, ROTARY, BLOCK_N, D, BLOCK_D)
        grad_state_first = _dot(tl.trans(first), g, grad_state_first, PRECISION)
        grad_state_second = _dot(tl.trans(second), g, grad_state_second, PRECISION)
    _store_sums(
        grad_state, grad_key_sum, grad_state_first, grad_state_second,
        grad_sum_first, grad_sum_second, tokens, D, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _key_grad_kernel(
    key, value, cos, sin, grad_state, grad_key_sum, grad_key, grad_value,
    key_b, key_h, key_n, value_b, value_h, value_n,
    grad_key_b, grad_key_h, grad_key_n, grad_value_b, grad_value_h, grad_value_n,
    heads, tokens, chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTARY: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients by keys and values from those by state and key sum."""
    key = _head(key, key_b, key_h, heads)
    value = _head(value, value_b, value_h, heads)
    grad_key = _head(grad_key, grad_key_b, grad_key_h, heads)
    grad_value = _head(grad_value, grad_value_b, grad_value_h, heads)
    state_first, state_second, sum_first, sum_second = _load_sums(
        grad_state, grad_key_sum, D, BLOCK_D
    )
    start = tl.program_id(1) * chunk
    end = tl.minimum(start + chunk, tokens)
    for row in range(start, end, BLOCK_N):
        k = _load(key, row, tokens, key_n, BLOCK_N, D, BLOCK_D)
        first, second = _key_features(k, COSINE)
        first, second = _rotate(first, second, cos, sin, row, tokens, ROTARY, BLOCK_N, D, BLOCK_D)
        dv = _dot(second, state_second, _dot(first, state_first, None, PRECISION), PRECISION)
        _store(grad_value, dv, row, tokens, grad_value_n, BLOCK_N, D, BLOCK_D)

    # One loop would hold the state in shared memory twice, as it is and transposed.
    for row in range(start, end, BLOCK_N):
        k = _load(key, row, tokens, key_n, BLOCK_N, D, BLOCK_D)
        v = _load(value, row, tokens, value_n, BLOCK_N, D, BLOCK_D)
        grad_first = _dot(v, tl.trans(state_first), None, PRECISION)
        grad_second = _dot(v, tl.trans(state_second), None, PRECISION)
        grad_first, grad_second = _rotate_grad(
            grad_first, grad_second, cos, sin, row, tokens, ROTARY, BLOCK_N, D, BLOCK_D
        )
        dk = _key_features_grad(k, grad_first + sum_first, grad_second + sum_second, COSINE)
        _store(grad_key, dk, row, tokens, grad_key_n, BLOCK_N, D, BLOCK_D)


def _plan(query: Tensor, key: Tensor, value: Tensor, rotary: bool, feature_map: str) -> tuple:
    """Grid, tokens of one program, and what the kernels are specialised on."""
    batch, heads, tokens, head_dim = query.shape
    # The tensor cores' tf32 has the mantissa of float16, but not that of float32.
    half = all(x.dtype != torch.float32 for x in (query, key, value))
    block_d = max(16, triton.next_power_of_2(head_dim))
    # The largest blocks that (nearly) fit in registers, by what the compiler reports for sm_90.
    block_n = max(16, (2048 if half else 1024) // block_d)
    splits = max(1, min(PROGRAMS // (batch * heads), tokens // MIN_TOKENS))
    chunk = triton.cdiv(triton.cdiv(tokens, splits), block_n) * block_n
    options = {
        'D': head_dim,
        'BLOCK_D': block_d,
        'BLOCK_N': block_n,
        'ROTARY': rotary,
        'COSINE': feature_map == 'cosine',
        'PRECISION': 'tf32' if half else 'ieee',
        'num_warps': 8,
        'num_stages': 2 if half and block_d <= 64 else 1,
    }
    return (batch * heads, triton.cdiv(tokens, chunk)), chunk, options


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _partial_sums(grid: tuple[int, int], head_dim: int, device: torch.device) -> list[Tensor]:
    shapes = ((*grid, 2, head_dim, head_dim), (*grid, 2, head_dim))
    return [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, cos, sin, feature_map):
        grid, chunk, options = _plan(query, key, value, cos is not None, feature_map)
        heads, tokens, head_dim = query.shape[1:]
        sizes = (heads, tokens, chunk)
        output = _empty_like(value)
        with torch.cuda.device_of(query):
            sums = _partial_sums(grid, head_dim, query.device)
            _state_kernel[grid](
                key, value, cos, sin, *sums, *_strides(key, value), *sizes, **options
            )
            state, key_sum = (x.sum(dim=1) for x in sums)
            _output_kernel[grid](
                query, cos, sin, state, key_sum, output, *_strides(query, output), *sizes, **options
            )
        ctx.save_for_backward(query, key, value, cos, sin, state, key_sum)
        ctx.feature_map, ctx.attn_impl = feature_map, 'triton'
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        query, key, value, cos, sin, state, key_sum = ctx.saved_tensors
        grid, chunk, options = _plan(query, key, value, cos is not None, ctx.feature_map)
        heads, tokens, head_dim = query.shape[1:]
        sizes = (heads, tokens, chunk)
        grad = _adjacent_channels(grad)
        grad_query, grad_key, grad_value = (_empty_like(x) for x in (query, key, value))
        grad_normaliser = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        with torch.cuda.device_of(query):
            sums = _partial_sums(grid, head_dim, query.device)
            _query_grad_kernel[grid](
                query, grad, cos, sin, state, key_sum, grad_query, grad_normaliser, *sums,
                *_strides(query, grad, grad_query), *sizes, **options,
            )  # fmt: skip
            grad_state, grad_key_sum = (x.sum(dim=1) for x in sums)
            _key_grad_kernel[grid](
                key, value, cos, sin, grad_state, grad_key_sum, grad_key, grad_value,
                *_strides(key, value, grad_key, grad_value), *sizes, **options,
            )  # fmt: skip
        return grad_query, grad_key, grad_value, None, None, None


def _empty_like(x: Tensor) -> Tensor:
    """Laid out as the module splits and joins its heads, ``(B, N, heads, d)``: it need not copy."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )


def _adjacent_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    feature_map: str,
) -> Tensor:
    """See :func:`~mmnala.ops.nala_attention`; differentiable once.

    The three inputs are float32, float16 or bfloat16, with at most 128 channels, and on a CUDA
    device unless Triton interprets (``TRITON_INTERPRET=1``). The computation runs in float32; if
    all three have 16 bits, its matrix products round their factors to tf32 (11 bits). Slices of a
    larger tensor are read in place. Over 64 channels a block takes up to 160 KiB of shared memory.
    """
    for name, x in (('query', query), ('key', key), ('value', value)):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f'{name} must be float32, float16 or bfloat16 for Triton, got {x.dtype}'
            )
        if x.device.type != 'cuda' and isinstance(_state_kernel, triton.JITFunction):
            raise ValueError(f'{name} must be on a CUDA device for Triton, got {x.device}')
    if feature_map not in KERNEL_MAPS:
        raise ValueError(
            f'feature_map must be one of {list(KERNEL_MAPS)} for Triton, got {feature_map!r}'
        )
    if query.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f'query must have at most {MAX_HEAD_DIM} channels for Triton, got {query.shape[-1]}'
        )
    cos, sin = (None, None) if rotary is None else (table.contiguous() for table in rotary)
    query, key, value = (_adjacent_channels(x) for x in (query, key, value))
    return _TritonAttention.apply(query, key, value, cos, sin, feature_map)
