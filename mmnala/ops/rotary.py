"""Two-dimensional rotary position embedding (architecture of arXiv 2506.21137)."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .tracing import is_traced


def rotary_table(
    height: int,
    width: int,
    head_dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles of an image grid, tokens in row-major order.

    The first half of the channels turns by ``row * w_j``, the second by ``column * w_j``, with
    ``w_j = 10000 ** (-j / (head_dim / 4 - 1))`` for ``j = 0 .. head_dim / 4 - 1``; every frequency
    serves two neighbouring channels.

    Args:
        height: Rows of the grid.
        width: Columns of the grid.
        head_dim: Channels of one head, divisible by 4.
        device: Where the tables live.
        dtype: Their floating dtype; the angles are float32 at least.

    Returns:
        ``(cos, sin)``, each of shape ``(height * width, head_dim)``.

    Raises:
        ValueError: If ``head_dim`` is no positive multiple of 4.
    """
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f'head_dim must be a positive multiple of 4 (rotary), got {head_dim}')
    quarter = head_dim // 4
    compute_dtype = torch.promote_types(dtype, torch.float32)
    # A single frequency is 1: max() only avoids 0 / 0.
    steps = torch.arange(quarter, device=device, dtype=compute_dtype) / max(quarter - 1, 1)
    frequency = (10000.0**-steps).repeat_interleave(2)
    angle = (
        torch.arange(max(height, width), device=device, dtype=compute_dtype)[:, None] * frequency
    )
    shape = (height, width, head_dim // 2)

    def grid(table: Tensor) -> Tensor:
        rows, columns = table[:height, None].expand(shape), table[None, :width].expand(shape)
        return torch.cat((rows, columns), dim=-1).flatten(0, 1)

    # Few angles make the whole grid: only they are turned into cosines and sines.
    return grid(angle.cos().to(dtype)), grid(angle.sin().to(dtype))


def cached_rotary_table(
    height: int, width: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """:func:`rotary_table`, kept for the next image of the same size; not to be written to."""
    # What a tracer or a mode (fake tensors, counters) makes belongs to it alone.
    if is_traced() or _get_current_dispatch_mode() is not None:
        return rotary_table(height, width, head_dim, device, dtype)
    return _kept_table(height, width, head_dim, device, dtype)


@lru_cache(maxsize=4)  # the stages of one image: more would pile up where sizes vary
def _kept_table(
    height: int, width: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # training could not use an inference tensor
        return rotary_table(height, width, head_dim, device, dtype)


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each channel pair ``(2i, 2i + 1)`` of every token by its own angle.

    Args:
        x: Floating tensor of shape ``(..., N, d)``.
        rotary: ``(cos, sin)`` of shape ``(N, d)``, see :func:`rotary_table`.

    Returns:
        Tensor of the shape of ``x``; pair ``(a, b)`` became ``(a cos - b sin, b cos + a sin)``.
    """
    cos, sin = rotary
    quarter_turn = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + quarter_turn * sin
