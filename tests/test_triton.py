"""The Triton path against the plain formula in float64, interpreted on the CPU."""

import pytest
import torch

from mmnala.ops import nala_attention, triton_path
from mmnala.ops.plain import plain_attention
from mmnala.ops.rotary import rotary_table
from mmnala.ops.triton_path import triton_attention

GRIDS = {1: (1, 1), 17: (1, 17), 130: (10, 13)}
TOLERANCES = {  # of output and gradients, relative to the largest element
    torch.float32: (1e-5, 1e-4),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1e-2),
}


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    """Split even short inputs over programs, so that partial sums are added."""
    monkeypatch.setattr(triton_path, 'MIN_TOKENS', 48)


def make_inputs(tokens, head_dim, dtype=torch.float32, batch=1, heads=2, scale=1.0, seed=0):
    """Query, key, value and output gradient."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, head_dim)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for _ in range(4)]


def run(attention, inputs, grad, *args):
    """Output and gradients by query, key and value."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attention(*leaves, *args)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def assert_matches_plain(inputs, grad, rotary, feature_map, dtype):
    actual = run(triton_attention, inputs, grad, rotary, feature_map)
    exact_rotary = rotary and tuple(table.double() for table in rotary)
    exact_inputs = [x.double() for x in inputs]
    expected = run(plain_attention, exact_inputs, grad.double(), exact_rotary, feature_map)
    tolerances = TOLERANCES[dtype]
    # With one token or one channel the gradients by query and key are 0 but for eps: terms of
    # the order of the inputs cancel.
    floor = 1.0 if 1 in inputs[0].shape[2:] else 0.0
    for name, a, e in zip(('output', 'query', 'key', 'value'), actual, expected, strict=True):
        error = ((a.double() - e).abs().max() / e.abs().max().clamp_min(floor)).item()
        assert error <= tolerances[name != 'output'], f'{name}: relative error {error:.1e}'


@pytest.mark.parametrize('feature_map', ['signed', 'cosine'])
@pytest.mark.parametrize('with_rotary', [False, True])
@pytest.mark.parametrize('tokens', [1, 17, 130])
@pytest.mark.parametrize('head_dim', [32, 64, 96])
def test_float32(head_dim, tokens, with_rotary, feature_map):
    *inputs, grad = make_inputs(tokens, head_dim)
    rotary = rotary_table(*GRIDS[tokens], head_dim) if with_rotary else None
    assert_matches_plain(inputs, grad, rotary, feature_map, torch.float32)


@pytest.mark.parametrize('feature_map', ['signed', 'cosine'])
@pytest.mark.parametrize('head_dim', [32, 64, 96])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half(dtype, head_dim, feature_map):
    *inputs, grad = make_inputs(130, head_dim, dtype)
    assert_matches_plain(inputs, grad, rotary_table(10, 13, head_dim), feature_map, dtype)


@pytest.mark.parametrize('head_dim', [1, 7, 8, 20])
def test_other_head_dims(head_dim):
    *inputs, grad = make_inputs(17, head_dim)
    rotary = rotary_table(1, 17, head_dim) if head_dim % 4 == 0 else None
    assert_matches_plain(inputs, grad, rotary, 'cosine', torch.float32)


def test_mixed_dtypes():
    *inputs, _ = make_inputs(17, 32)
    inputs[2] = inputs[2].half()
    output = triton_attention(*inputs, None, 'signed')
    assert output.dtype == torch.float16
    expected = plain_attention(*(x.double() for x in inputs), None, 'signed')
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('feature_map', ['signed', 'cosine'])
def test_slices_and_expanded_gradient(feature_map):
    """As the module calls it: slices of one tensor (B, N, 4 C), read in place."""
    batch, heads, tokens, head_dim = 2, 2, 17, 32
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(batch, tokens, 4 * heads * head_dim, generator=generator)
    parts = joint.unflatten(-1, (4, heads, head_dim)).movedim(2, 0).transpose(2, 3)
    inputs = list(parts[:3])
    assert not any(x.is_contiguous() for x in inputs)
    grad = torch.randn(batch, 1, tokens, 1, generator=generator).expand(inputs[0].shape)
    rotary = rotary_table(1, tokens, head_dim)
    assert_matches_plain(inputs, grad, rotary, feature_map, torch.float32)
    transposed = [x.mT.contiguous().mT for x in inputs]  # channels that are not adjacent
    assert_matches_plain(transposed, grad, rotary, feature_map, torch.float32)


@pytest.mark.parametrize('feature_map', ['signed', 'cosine'])
def test_zero_query(feature_map):
    *inputs, grad = make_inputs(17, 32)
    inputs[0][:, :, 3] = 0
    inputs[1][:, :, 5] = 0
    output, *grads = run(triton_attention, inputs, grad, None, feature_map)
    assert output[:, :, 3].eq(0).all()
    assert all(x.isfinite().all() for x in grads)
    assert grads[0][:, :, 3].eq(0).all()
    assert_matches_plain(inputs, grad, None, feature_map, torch.float32)


@pytest.mark.parametrize('feature_map', ['signed', 'cosine'])
def test_large_inputs(feature_map):
    *inputs, grad = make_inputs(130, 32, torch.float16)
    inputs[0] *= 1e3
    inputs[1] *= 1e3
    assert_matches_plain(inputs, grad, rotary_table(10, 13, 32), feature_map, torch.float16)


@pytest.mark.parametrize('scale', [1e-3, 1e-1, 30.0])
def test_scales(scale):
    *inputs, grad = make_inputs(17, 32, scale=scale)
    assert_matches_plain(inputs, grad, None, 'cosine', torch.float32)


def test_deterministic():
    *inputs, grad = make_inputs(130, 32)
    rotary = rotary_table(10, 13, 32)
    first, second = (run(triton_attention, inputs, grad, rotary, 'signed') for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_double_is_refused():
    *inputs, _ = make_inputs(17, 32, torch.float64)
    with pytest.raises(TypeError, match='query must be float32, float16 or bfloat16 .*float64'):
        triton_attention(*inputs, None, 'signed')


def test_wide_head_is_refused():
    *inputs, _ = make_inputs(17, 129)
    with pytest.raises(ValueError, match='at most 128 channels for Triton, got 129'):
        triton_attention(*inputs, None, 'signed')


@pytest.mark.parametrize('feature_map', ['elu', 'relu', 'focused'])
def test_maps_without_a_kernel_are_refused(feature_map):
    *inputs, _ = make_inputs(17, 32)
    message = rf"one of \['signed', 'cosine'\] for Triton, got '{feature_map}'"
    with pytest.raises(ValueError, match=message):
        nala_attention(*inputs, None, feature_map, 'triton')


def test_the_operator_selects_it():
    query, key, value, _ = make_inputs(17, 32)
    expected = triton_attention(query, key, value, None, 'cosine')
    actual = nala_attention(query, key, value, None, 'cosine', 'triton')
    assert torch.equal(actual, expected)
