"""The operator on every path: gradients, numerics at the edges, bad input."""

from functools import partial

import pytest
import torch

from mmnala.ops import apply_rotary, cached_rotary_table, lean, nala_attention, plain, rotary_table

NORM_AWARE = ['signed', 'cosine']
NORM_BLIND = ['elu', 'relu', 'focused']
FEATURE_MAPS = [*NORM_AWARE, *NORM_BLIND]
ATTN_IMPLS = ['plain', 'lean']  # Triton, without float64, has tests of its own


@pytest.fixture(params=ATTN_IMPLS)
def attention(request, monkeypatch):
    """The operator on each path, with several chunks even of a few tokens."""
    monkeypatch.setattr(lean, 'CHUNK_ELEMENTS', 1)
    monkeypatch.setattr(lean, 'MIN_CHUNK', 4)
    return partial(nala_attention, attn_impl=request.param)


def inputs(tokens=6, dim=8, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, tokens, dim)
    return [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(3)
    ]


@pytest.mark.parametrize('feature_map', FEATURE_MAPS)
@pytest.mark.parametrize('rotary', [False, True])
def test_gradcheck(attention, feature_map, rotary):
    tensors = [x.requires_grad_() for x in inputs()]
    tables = rotary_table(2, 3, 8, dtype=torch.float64) if rotary else None
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, tables, feature_map), tensors, atol=1e-6
    )


def published_features(feature_map, query, key):
    """Features of ``(N, d)`` queries and keys, in parts of ``d`` channels that rotate alike."""
    if feature_map in NORM_BLIND:
        return tuple([PUBLISHED[feature_map](x)] for x in (query, key))
    norm = query.norm(dim=-1, keepdim=True)
    size_q = (query / norm).abs() ** (3 * (0.5 + norm.tanh()))
    size_k = key.abs() ** 3
    if feature_map == 'signed':
        return (
            [size_q * (query > 0), size_q * (query < 0)],
            [size_k * (key > 0), size_k * (key < 0)],
        )
    angle_q = torch.pi / 4 * (20 * query / norm).tanh()
    angle_k = torch.pi / 4 * (20 * key / key.norm(dim=-1, keepdim=True)).tanh()
    return (
        [size_q * angle_q.cos(), size_q * angle_q.sin()],
        [size_k * angle_k.cos(), size_k * angle_k.sin()],
    )


def flatten_map(x):
    positive = x.clamp(min=0)
    norm, cube = positive.pow(2).sum(-1).sqrt(), positive.pow(3)
    return (norm / cube.pow(2).sum(-1).sqrt())[..., None] * cube


PUBLISHED = {
    'elu': lambda x: torch.where(x > 0, x + 1, x.exp()),
    'relu': lambda x: (x + x.abs()) / 2,
    'focused': flatten_map,
}


@pytest.mark.parametrize('feature_map', FEATURE_MAPS)
def test_one_head_by_the_explicit_matrix(attention, feature_map):
    """The published formula written token by token, with N x N weights instead of the state."""
    query, key, value = (x[0, 0] for x in inputs())
    rotary = rotary_table(2, 3, 8, dtype=torch.float64)
    phi_q, phi_k = published_features(feature_map, query, key)
    turned = sum(
        apply_rotary(q, rotary) @ apply_rotary(k, rotary).T
        for q, k in zip(phi_q, phi_k, strict=True)
    )
    plain = sum(q @ k.T for q, k in zip(phi_q, phi_k, strict=True))
    assert (plain >= 0).all()
    expected = turned / 6 @ value / (plain.mean(dim=-1, keepdim=True) + 1e-6)
    actual = attention(*(x[None, None] for x in (query, key, value)), rotary, feature_map)
    torch.testing.assert_close(actual[0, 0], expected, atol=1e-12, rtol=1e-10)


def read_weights(attention, query, key, feature_map):
    """The attention's N x N weights: values that read out so many columns as there are channels."""
    tokens, channels = query.shape[-2:]
    columns = torch.eye(tokens, dtype=query.dtype).split(channels, dim=1)
    return torch.cat(
        [attention(query, key, part[None, None], feature_map=feature_map) for part in columns], -1
    )


@pytest.mark.parametrize('feature_map', NORM_AWARE)
def test_attention_sharpens_with_the_query_norm(attention, feature_map):
    """At fixed directions every query's entropy falls as its norm grows."""
    query, key, _ = (x[:1, :1] for x in inputs(tokens=64))
    direction = query / query.norm(dim=-1, keepdim=True)
    entropies = []
    for norm in (0.1, 0.5, 1.0, 2.0):
        weights = read_weights(attention, norm * direction, key, feature_map)
        entropies.append(torch.special.entr(weights).sum(-1))
    steps = torch.stack(entropies).diff(dim=0)
    assert (steps < 0).all() and (steps.mean((1, 2, 3)) < -0.05).all()


@pytest.mark.parametrize('feature_map', ['relu', 'focused'])
def test_the_query_norm_cancels_without_it(attention, feature_map):
    """These maps are homogeneous, so a query's length drops out (but for the 1e-6)."""
    query, key, value = inputs(tokens=64)
    once, thrice = (attention(c * query, key, value, None, feature_map) for c in (1, 3))
    torch.testing.assert_close(thrice, once, atol=1e-5, rtol=1e-5)


def test_elu_is_flat_where_a_query_is_small(attention):
    """1 + ELU is no homogeneous map: a zero query has equal features, and sees mean values."""
    query, key, value = inputs(tokens=64)
    output = attention(0 * query, key, value, None, 'elu')
    weights = 1 + torch.nn.functional.elu(key)
    expected = (weights.sum(-1)[:, :, None] @ value) / weights.sum((-2, -1))[..., None, None]
    torch.testing.assert_close(output, expected.expand_as(output), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize('scale', [1e-12, 1e-6, 1.0, 1e6])
def test_focused_keeps_norms(scale):
    x = scale * torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    phi = plain.FEATURE_MAPS['focused'].query(x)
    torch.testing.assert_close(phi.norm(dim=-1), x.relu().norm(dim=-1), atol=0, rtol=1e-5)


@pytest.mark.parametrize('feature_map', FEATURE_MAPS)
@pytest.mark.parametrize('zeroed', ['query', 'key', 'both'])
def test_zero_vectors_give_zero_output_and_finite_gradients(attention, feature_map, zeroed):
    query, key, value = inputs()
    if zeroed != 'key':
        query[:, :, 2] = 0
    if zeroed != 'query':
        key[:] = 0
    tensors = [x.requires_grad_() for x in (query, key, value)]
    output = attention(*tensors, rotary_table(2, 3, 8, dtype=torch.float64), feature_map)
    if feature_map != 'elu':  # which gives a zero vector the feature 1
        zero = output if zeroed != 'query' else output[:, :, 2]
        assert (zero == 0).all()
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize('feature_map', FEATURE_MAPS)
def test_one_token_attends_to_itself(attention, feature_map):
    """With one token the weights cancel but for the 1e-6 in the normaliser."""
    query, key, value = inputs(tokens=1)
    query, key = (x.abs() if feature_map in NORM_BLIND else x for x in (query, key))
    output = attention(query, 10 * key, value, feature_map=feature_map)
    torch.testing.assert_close(output, value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('feature_map', FEATURE_MAPS)
@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize('scale', [1e-3, 1.0, 1e3])
def test_low_precision_follows_float64(attention, feature_map, dtype, tolerance, scale):
    query, key, value = inputs(dtype=dtype)
    key = (scale * key.double()).to(dtype)
    tensors = [x.detach().requires_grad_() for x in (query, key, value)]
    output = attention(*tensors, feature_map=feature_map)
    assert output.dtype == dtype
    exact = attention(*(x.detach().double() for x in tensors), feature_map=feature_map)
    error = (output.double() - exact).abs().max() / exact.abs().max()
    assert error < tolerance
    output.float().square().mean().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_does_not_lower_the_operator(attention, dtype):
    query, key, value = inputs(dtype=torch.float32)
    with torch.autocast('cpu', dtype=dtype):
        output = attention(query, 1e3 * key, value)
    assert torch.equal(output, attention(query, 1e3 * key, value))


@pytest.mark.parametrize(
    ('change', 'error', 'words'),
    [
        (dict(attn_impl='fused'), ValueError, "attn_impl must be 'auto' or one of .* 'fused'"),
        (dict(feature_map='sine'), ValueError, "feature_map must be one of .* got 'sine'"),
        (dict(key=torch.zeros(2, 3, 5, 8)), ValueError, r'share one shape .*\(2, 3, 5, 8\)'),
        (dict(query=torch.zeros(6, 8)), ValueError, r'share one shape .*\(6, 8\)'),
        (dict(value=torch.zeros(2, 3, 6, 8).long()), TypeError, 'value must be .* torch.int64'),
        (dict(rotary=rotary_table(2, 2, 8)), ValueError, r'rotary must be .*\(6, 8\).*\(4, 8\)'),
    ],
)
def test_bad_input(attention, change, error, words):
    arguments = dict(zip(('query', 'key', 'value'), inputs(dtype=torch.float32), strict=True))
    with pytest.raises(error, match=words):
        attention(**arguments | change)


def test_empty_input(attention):
    empty = torch.zeros(1, 1, 0, 8)
    with pytest.raises(ValueError, match='must have tokens'):
        attention(empty, empty, empty)


def test_rotary_table_by_the_formula():
    cos, sin = rotary_table(2, 3, 12, dtype=torch.float64)
    frequencies = [10000.0 ** (-j / 2) for j in range(3)]
    for token, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        angles = [row * w for w in frequencies for _ in 'ab'] + [
            column * w for w in frequencies for _ in 'ab'
        ]
        expected = torch.tensor(angles, dtype=torch.float64)
        torch.testing.assert_close(cos[token], expected.cos(), atol=1e-12, rtol=0)
        torch.testing.assert_close(sin[token], expected.sin(), atol=1e-12, rtol=0)
    assert torch.equal(rotary_table(1, 2, 4)[1][1], torch.tensor([0, 0, 1.0, 1.0]).sin())


def test_rotary_tables_are_kept_for_one_image_size():
    cpu, dtype = torch.device('cpu'), torch.float32
    sizes = [(8, 6), (4, 3), (2, 2), (1, 1)]
    tables = [cached_rotary_table(*size, 8, cpu, dtype) for size in sizes]
    for size, table in zip(sizes, tables, strict=True):
        again = cached_rotary_table(*size, 8, cpu, dtype)
        assert again[0] is table[0] and again[1] is table[1]
        assert all(map(torch.equal, table, rotary_table(*size, 8)))
    assert cached_rotary_table(8, 6, 8, cpu, torch.float64)[0].dtype == torch.float64
    cached_rotary_table(5, 5, 8, cpu, dtype)  # five and six kinds push out the oldest
    assert cached_rotary_table(8, 6, 8, cpu, dtype)[0] is not tables[0][0]


def test_kept_rotary_tables_serve_training_after_inference():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    arguments = (7, 5, 8, torch.device('cpu'), torch.float32)
    with torch.inference_mode():
        tables = cached_rotary_table(*arguments)
    query = torch.randn(1, 1, 35, 8, requires_grad=True)
    apply_rotary(query, tables).square().sum().backward()
    # A turn keeps lengths.
    torch.testing.assert_close(query.grad, 2 * query.detach())

    with FakeTensorMode():
        assert isinstance(cached_rotary_table(*arguments)[0], FakeTensor)
        fresh = cached_rotary_table(3, 9, *arguments[2:])
    assert not isinstance(cached_rotary_table(3, 9, *arguments[2:])[0], FakeTensor)
    assert isinstance(fresh[0], FakeTensor)


@pytest.mark.parametrize('head_dim', [0, 2, 6, -4])
def test_rotary_table_refuses_other_head_dims(head_dim):
    with pytest.raises(ValueError, match=f'head_dim must be .* got {head_dim}'):
        rotary_table(2, 2, head_dim)


@pytest.mark.parametrize('feature_map', FEATURE_MAPS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('dim', [4, 32, 96])
def test_paths_agree(monkeypatch, feature_map, dtype, dim):
    """Output and gradients, on strided inputs as the module passes them, chunks of odd sizes."""
    monkeypatch.setattr(lean, 'CHUNK_ELEMENTS', 1)
    monkeypatch.setattr(lean, 'MIN_CHUNK', 19)
    torch.manual_seed(0)
    packed = torch.randn(2, 77, 3, 2, dim).to(dtype)
    weight = torch.randn(2, 2, 77, dim)
    tables = rotary_table(7, 11, dim)
    results = {}
    for impl in ATTN_IMPLS:
        leaf = packed.clone().requires_grad_()
        query, key, value = (x.transpose(1, 2) for x in leaf.unbind(2))
        output = nala_attention(query, key, value, tables, feature_map, impl)
        (output * weight).sum().backward()
        results[impl] = (output.detach().float(), leaf.grad.float())
    for impl, pair in results.items():
        for actual, expected in zip(pair, results['plain'], strict=True):
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2), impl


@pytest.mark.parametrize('scale', [1e-12, 1e-3, 1e3, 1e8])
@pytest.mark.parametrize('scaled', ['query', 'key'])
def test_gradients_of_tiny_and_huge_vectors(attention, scaled, scale):
    """In float32 against the formula in float64, with zeros in between."""
    query, key, value = inputs(tokens=30, dtype=torch.float32)
    (query if scaled == 'query' else key).mul_(scale)
    query[:, :, 3], query[:, :, 4, 1], key[:, :, 5, 2] = 0, 0, 0
    gradients = []
    for dtype, operator in (
        (torch.float32, attention),
        (torch.float64, partial(nala_attention, attn_impl='plain')),
    ):
        tensors = [x.detach().to(dtype).requires_grad_() for x in (query, key, value)]
        operator(*tensors, rotary_table(5, 6, 8, dtype=dtype)).square().sum().backward()
        gradients.append([x.grad for x in tensors])
    for actual, exact in zip(*gradients, strict=True):
        smallest = torch.finfo(torch.float32).tiny
        assert (actual - exact).abs().max() < 1e-4 * exact.abs().max() + smallest


@pytest.mark.parametrize('attn_impl', ['auto', *ATTN_IMPLS])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_kept_for_the_backward_pass(attn_impl, dtype):
    """On the lean path, beside inputs and tables: the state and the key sum, nothing of size N."""
    heads, dim = 2, 16
    tensors = [torch.randn(1, heads, 500, dim, dtype=dtype).requires_grad_() for _ in range(3)]
    rotary = rotary_table(20, 25, dim)
    given = {x.data_ptr() for x in (*tensors, *rotary)}
    kept = []

    def pack(tensor):
        if tensor.data_ptr() not in given:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        nala_attention(*tensors, rotary, attn_impl=attn_impl)
    if attn_impl == 'plain':
        assert max(kept) >= 2 * tensors[0].numel()  # features, both halves
    else:
        assert sorted(kept) == [heads * 2 * dim, heads * 2 * dim * dim]


@pytest.mark.parametrize('attn_impl', ['auto', *ATTN_IMPLS])
def test_gradients_of_gradients(attn_impl):
    """The formula has them; the lean path says that it has not, also if a gradient is constant."""
    query, key, value = (x.requires_grad_() for x in inputs())
    output = nala_attention(query, key, value, attn_impl=attn_impl)
    if attn_impl == 'plain':
        (grad,) = torch.autograd.grad(output.sum(), value, create_graph=True)
        assert torch.autograd.grad(grad.square().sum(), key)[0].abs().max() > 0
    else:
        with pytest.raises(RuntimeError, match="attn_impl must be 'plain' .* got 'lean'"):
            torch.autograd.grad(output.sum(), value, create_graph=True)


def test_inference_mode(attention):
    tensors = inputs()
    for feature_map in FEATURE_MAPS:
        expected = attention(*tensors, feature_map=feature_map)
        with torch.inference_mode():
            assert torch.equal(attention(*tensors, feature_map=feature_map), expected)


def test_a_map_is_added_by_a_function_and_a_line(monkeypatch, attention):
    def squared(x):
        return x.relu() ** 2

    monkeypatch.setitem(plain.FEATURE_MAPS, 'squared', plain.FeatureMap(squared, squared, parts=1))
    query, key, value = (x[0, 0] for x in inputs())
    weights = squared(query) @ squared(key).T
    expected = weights / 6 @ value / (weights.mean(-1, keepdim=True) + 1e-6)
    actual = attention(*(x[None, None] for x in (query, key, value)), None, 'squared')
    torch.testing.assert_close(actual[0, 0], expected, atol=1e-12, rtol=1e-10)
