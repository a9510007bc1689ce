"""Numbers at their limits: the operator beside the formula in float64, blocks, images, training."""

import copy
import math
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from conftest import Golden
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmnala import NaLaFormer
from mmnala.backbones.nalaformer import Block
from mmnala.ops import apply_rotary, lean, nala_attention, plain, rotary_table, triton_path

NORM_AWARE = ['signed', 'cosine']
PATHS = [(impl, name) for impl in ('plain', 'lean') for name in plain.FEATURE_MAPS]
PATHS += [('triton', name) for name in NORM_AWARE]
HALVES = [torch.float16, torch.bfloat16]
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
# An element is an ordinary number, a power of ten, always the same, often zero, and so on.
KINDS = ['normal', 'mixed', 'constant', 'sparse', 'zero', 'denormal']


@pytest.fixture(autouse=True, scope='module')
def several_chunks():
    """Even of a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean, 'CHUNK_ELEMENTS', 1)
        patch.setattr(lean, 'MIN_CHUNK', 4)
        patch.setattr(triton_path, 'MIN_TOKENS', 8)
        yield


class Case(NamedTuple):
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    kinds: tuple[str, str, str]
    scales: tuple[float, float, float]
    rotary: tuple[Tensor, Tensor] | None
    seed: int

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = zip((*self.kinds, 'normal'), (*self.scales, 1.0), strict=True)
        return [elements(generator, self.shape, self.dtype, *part) for part in parts]


def elements(
    generator: torch.Generator, shape: tuple, dtype: torch.dtype, kind: str, scale: float
) -> Tensor:
    x, uniform = (
        draw(shape, generator=generator, dtype=torch.float64) for draw in (torch.randn, torch.rand)
    )
    info = torch.finfo(dtype)
    x = {
        'normal': scale * x,
        'mixed': 10 ** (18 * uniform - 12) * x.sign(),
        'constant': scale * x.flatten()[:1].sign().expand(shape),
        'sparse': scale * x * (uniform > 0.5),
        'zero': 0 * x,
        'denormal': info.smallest_normal * uniform * x.sign(),
    }[kind]
    if kind == 'sparse':
        x[..., ::2, :] = 0
    return x.clamp(info.min, info.max).to(dtype)


@st.composite
def cases(draw, dtypes=tuple(TOLERANCES), kinds=tuple(KINDS), least_tokens=1, dims=None) -> Case:
    height, width = draw(
        st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(
            lambda s: s[0] * s[1] >= least_tokens
        )
    )
    with_rotary = draw(st.booleans())
    if dims is None:
        dims = st.sampled_from([4, 8, 20]) if with_rotary else st.integers(1, 9)
    dim = draw(dims)
    dtype = draw(st.sampled_from(dtypes))
    table_dtype = torch.promote_types(dtype, torch.float32)
    return Case(
        shape=(draw(st.integers(1, 3)), draw(st.integers(1, 3)), height * width, dim),
        dtype=dtype,
        kinds=draw(st.tuples(*[st.sampled_from(kinds)] * 3)),
        scales=tuple(10.0**i for i in draw(st.tuples(*[st.integers(-12, 6)] * 3))),
        rotary=rotary_table(height, width, dim, dtype=table_dtype) if with_rotary else None,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def examples(attn_impl: str) -> settings:
    share = 8 if attn_impl == 'triton' else 2  # its interpreter is slow
    return settings(max_examples=settings.default.max_examples // share)


def direction(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    length = (x / largest).norm(dim=-1, keepdim=True)
    return torch.where(length == 0, 0, x / largest / length.clamp_min(1e-20)), length * largest


def features(feature_map: str, query: Tensor, key: Tensor) -> list[list[Tensor]]:
    """Those of queries and of keys in float64, in parts that rotate alike."""
    if feature_map == 'relu':
        return [[x.relu()] for x in (query, key)]
    if feature_map == 'elu':
        return [[torch.where(x > 0, x + 1, x.clamp_max(0).exp())] for x in (query, key)]
    if feature_map == 'focused':
        both = [direction(x.relu()) for x in (query, key)]
        return [[norm * direction(unit**3)[0]] for unit, norm in both]
    (unit_q, norm), (unit_k, _) = direction(query), direction(key)
    sizes = unit_q.abs() ** (3 * (0.5 + norm.tanh())), key.abs() ** 3
    if feature_map == 'signed':
        return [
            [size * (x > 0), size * (x < 0)] for size, x in zip(sizes, (query, key), strict=True)
        ]
    # cos(a) cos(b) + sin(a) sin(b) of angles between -pi/4 and pi/4 may cancel. The sines of
    # pi/4 + a and pi/4 - a, written without a difference, have the same sum of products.
    return [
        [size * (math.pi / 2 / (1 + (sign * 40 * unit).exp())).sin() for sign in (-1, 1)]
        for size, unit in zip(sizes, (unit_q, unit_k), strict=True)
    ]


class Exact(NamedTuple):
    output: Tensor
    size: Tensor  # what the output's terms add up to without their signs
    slope: Tensor  # what gradients by features may reach


def exact_attention(query: Tensor, key: Tensor, value: Tensor, rotary, feature_map: str) -> Exact:
    """The formula by its N x N weights, in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    rotary = rotary and tuple(table.double() for table in rotary)
    phi_q, phi_k = features(feature_map, query, key)
    tokens = query.shape[-2]

    def similarity(of_part) -> Tensor:
        return sum(of_part(q) @ of_part(k).mT for q, k in zip(phi_q, phi_k, strict=True)) / tokens

    # Features and sums below float32's range have no digits to be exact to.
    tiny = torch.finfo(torch.float32).tiny

    def pair_lengths(x: Tensor) -> Tensor:
        if rotary is None:
            return x.detach().abs() + tiny
        return x.detach().unflatten(-1, (-1, 2)).norm(dim=-1) * 2**0.5 + tiny

    normaliser = similarity(lambda x: x).sum(-1, keepdim=True) + 1e-6
    turned = similarity(lambda x: x if rotary is None else apply_rotary(x, rotary))
    below = tiny * (1 + sum(pair_lengths(part).sum(-1, keepdim=True) for part in phi_q))
    size = (similarity(pair_lengths) @ (value.abs() + tiny) + below) / normaliser
    largest = max(part.mean(dim=-2).max() for part in phi_k)
    slope = (size.sum(-1, keepdim=True) / normaliser).max() * largest
    return Exact(turned @ value / normaliser, size.detach(), slope.detach())


def differentiate(attention, tensors: list[Tensor], grad: Tensor) -> tuple:
    """The result, and the gradients by query, key and value."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    result = attention(*leaves)
    output = result.output if isinstance(result, Exact) else result
    return result, torch.autograd.grad(output, leaves, grad.to(output.dtype))


def both(case: Case, attn_impl: str, feature_map: str) -> tuple:
    """Result and gradients of a path, and of the formula in float64."""
    *tensors, grad = case.tensors()
    actual = differentiate(
        lambda *x: nala_attention(*x, case.rotary, feature_map, attn_impl), tensors, grad
    )
    exact = differentiate(
        lambda *x: exact_attention(*x, case.rotary, feature_map),
        [x.double() for x in tensors],
        grad.double(),
    )
    return actual, exact


def dtypes_of(attn_impl: str) -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtype in TOLERANCES if attn_impl != 'triton' or dtype != torch.float64)


def tolerated(exact: Exact, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    denormal = torch.finfo(torch.float32).tiny + info.tiny * info.eps
    return TOLERANCES[dtype] * exact.size + denormal


@pytest.mark.parametrize(('attn_impl', 'feature_map'), PATHS)
def test_equal_to_float64_and_finite(attn_impl, feature_map):
    """Outputs element by element, relative to their terms; gradients where they are representable.

    A gradient with many digits lost (of one token alone, say) is checked to be finite only.
    """

    @examples(attn_impl)
    @given(cases(dtypes_of(attn_impl)))
    def check(case: Case) -> None:
        (output, grads), (exact, exact_grads) = both(case, attn_impl, feature_map)
        info = torch.finfo(case.dtype)
        assert output.dtype == case.dtype
        error = (output.double() - exact.output).abs()
        bound = tolerated(exact, case.dtype)
        holds = exact.output.abs() + bound < info.max
        assert (error <= bound)[holds].all(), f'{(error / bound)[holds].max():.3g} of the tolerance'
        for name, grad, wanted in zip(('query', 'key', 'value'), grads, exact_grads, strict=True):
            if wanted.abs().max() < 0.99 * info.max and exact.slope < 1e36:
                assert grad.isfinite().all(), f'gradient by the {name}'
            else:
                event(f'out of range: gradient by the {name}')

    check()


@pytest.mark.parametrize(('attn_impl', 'feature_map'), PATHS)
def test_gradients_equal_those_of_float64(attn_impl, feature_map):
    """Of ordinary numbers of any scale, relative to the largest."""

    @examples(attn_impl)
    @given(cases(dtypes_of(attn_impl), ['normal'], 3, st.sampled_from([4, 8, 20])))
    def check(case: Case) -> None:
        (_, grads), (exact, exact_grads) = both(case, attn_impl, feature_map)
        info = torch.finfo(case.dtype)
        floor = torch.finfo(torch.float32).tiny / 1e-6 * max(1.0, *(1 / s for s in case.scales))
        terms = TOLERANCES[case.dtype] * (exact.size * case.tensors()[3].abs()).sum()
        for name, grad, wanted, scale in zip(
            ('query', 'key', 'value'), grads, exact_grads, case.scales, strict=True
        ):
            largest = wanted.abs().max()
            if largest < 0.99 * info.max:
                error = (grad.double() - wanted).abs().max()
                bound = 10 * TOLERANCES[case.dtype] * largest + floor + info.tiny * info.eps
                # What terms that cancel may leave; elu's features do not scale with its input.
                bound += terms if feature_map == 'elu' and name != 'value' else terms / scale
                assert error <= bound, f'{name}: {error / bound:.3g} of the tolerance'

    check()


@pytest.mark.parametrize(('attn_impl', 'feature_map'), PATHS)
def test_images_and_heads_may_change_places(attn_impl, feature_map):
    @examples(attn_impl)
    @given(cases(dtypes_of(attn_impl)), st.randoms(use_true_random=False))
    def check(case: Case, random) -> None:
        images, heads = ([*range(size)] for size in case.shape[:2])
        random.shuffle(images)
        random.shuffle(heads)
        tensors = case.tensors()[:3]
        output = nala_attention(*tensors, case.rotary, feature_map, attn_impl)
        moved = [x[images][:, heads] for x in tensors]
        actual = nala_attention(*moved, case.rotary, feature_map, attn_impl)
        # Not bit by bit: a vector's rest that fills no register is computed by other code.
        exact = exact_attention(*moved, case.rotary, feature_map)
        bound = tolerated(exact, case.dtype)
        holds = exact.output.abs() + bound < torch.finfo(case.dtype).max
        error = (actual.double() - output[images][:, heads]).abs()
        assert (error <= bound)[holds].all()

    check()


def ordinary(shape: tuple, scales=(1.0, 1.0, 1.0), rotary=None) -> list[Tensor]:
    case = Case(shape, torch.float32, ('normal',) * 3, scales, rotary, seed=0)
    return case.tensors()[:3]


@pytest.mark.filterwarnings('ignore::RuntimeWarning')  # of Triton's interpreter
@pytest.mark.parametrize(('attn_impl', 'feature_map'), PATHS)
@pytest.mark.parametrize('number', [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize('place', ['query', 'key', 'value'])
def test_what_is_not_finite_shows_where_the_formula_has_it(attn_impl, feature_map, number, place):
    """A query in its own output, a key in its head's, a value in its channel's."""
    tensors = ordinary((2, 2, 6, 8))
    tensors[['query', 'key', 'value'].index(place)][1, 0, 2, 3] = number
    rotary = rotary_table(2, 3, 8)
    exact = exact_attention(*tensors, rotary, feature_map)
    output = nala_attention(*tensors, rotary, feature_map, attn_impl)

    reached = torch.zeros(2, 2, 6, 8, dtype=torch.bool)
    if number != -math.inf or place == 'value' or feature_map in NORM_AWARE:  # others map it to 0
        reached[dict(query=(1, 0, 2), key=(1, 0), value=(1, 0, ..., 3))[place]] = True
    assert torch.equal(exact.output.isfinite(), ~reached)
    assert torch.equal(output.isfinite(), ~reached)
    error = (output - exact.output).abs()
    assert (error <= 1e-5 * exact.size)[~reached].all()


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
@pytest.mark.parametrize('attn_impl', ['plain', 'lean', 'triton'])
@pytest.mark.parametrize('feature_map', NORM_AWARE)
@pytest.mark.parametrize('scale', [1e-44, 1e-30, 1e-20, 1e20, 1e37])
def test_queries_whose_squares_are_out_of_range(attn_impl, feature_map, scale):
    *tensors, grad = Case(
        (1, 2, 6, 8), torch.float32, ('normal',) * 3, (scale, 1.0, 1.0), None, seed=0
    ).tensors()
    output, grads = differentiate(
        lambda *x: nala_attention(*x, None, feature_map, attn_impl), tensors, grad
    )
    exact = exact_attention(*tensors, None, feature_map)
    assert ((output - exact.output).abs() <= 1e-5 * exact.size).all()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
@pytest.mark.parametrize(('attn_impl', 'feature_map'), PATHS)
@pytest.mark.parametrize('scale', [1e9, 1e11, 3e12, 1e37])
def test_an_overflow_is_never_taken_for_a_number(attn_impl, feature_map, scale):
    """Small values, so that only the normaliser overflows."""
    tensors = ordinary((1, 2, 200, 8), (1.0, scale, 1e-6))
    output = nala_attention(*tensors, None, feature_map, attn_impl)
    exact = exact_attention(*tensors, None, feature_map)
    right = (output - exact.output).abs() <= 1e-5 * exact.size
    assert (right | ~output.isfinite()).all()
    if scale == 1e9 or (feature_map not in NORM_AWARE and scale < 1e37):
        assert right.all()


@triton.jit
def _round_kernel(x, rounded, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(rounded + offsets, triton_path._round_to_tf32(tl.load(x + offsets)))


def test_tf32_rounding_keeps_what_is_not_finite():
    """CUDA's arithmetic makes NaN of the bits 0x7fffffff; half an ulp more is -0."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000, -0x800000, 0x3F800FFF, 0x3F801000, 0])
    x = torch.cat([bits, bits.new_zeros(1)]).to(torch.int32).view(torch.float32)
    x = x.to('cuda' if torch.cuda.is_available() else 'cpu')
    rounded = torch.empty_like(x)
    _round_kernel[(1,)](x, rounded, SIZE=8)
    expected = [math.nan, math.nan, math.inf, -math.inf, 1.0, 1 + 2**-10, 0, 0]
    torch.testing.assert_close(
        rounded.cpu(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize('feature_map', ['softmax', *plain.FEATURE_MAPS])
def test_blocks(feature_map):
    """Of any input: the float64 result, and finite gradients."""
    torch.manual_seed(0)
    attention = 'softmax' if feature_map == 'softmax' else 'nala'
    own_map = 'signed' if feature_map == 'softmax' else feature_map
    block = Block(8, 2, 2.0, attention, own_map, 'auto', drop_path=0.0, layer_scale_init=1.0)
    double = copy.deepcopy(block).double()

    @examples('auto')
    @given(cases([torch.float32], dims=st.just(8)))
    def check(case: Case) -> None:
        x = case.tensors()[0].requires_grad_()  # (B, H, W, C)
        tables = rotary_table(*x.shape[1:3], 4, dtype=torch.float64)
        output = block(x, tuple(table.float() for table in tables))
        exact = double(x.double(), tables)
        assert (output - exact).abs().max() <= 1e-5 * exact.abs().max()
        block.zero_grad()
        output.square().mean().backward()
        assert all(p.grad.isfinite().all() for p in [x, *block.parameters()])

    check()


def micro(**kwargs) -> NaLaFormer:
    torch.manual_seed(0)
    return NaLaFormer(Golden('nalaformer_micro').arch, **kwargs)


IMAGES = {
    'zero': lambda size: torch.zeros(2, 3, *size),
    'constant': lambda size: torch.full((2, 3, *size), 255.0),
    'huge and constant': lambda size: torch.full((2, 3, *size), 6e4),
    'huge': lambda size: 6e4 * (2 * torch.rand(2, 3, *size) - 1),
    'one pixel': lambda size: torch.zeros(2, 3, *size).index_fill_(3, torch.tensor(0), 6e4),
}


@pytest.mark.parametrize('size', [(1, 1), (33, 40)])
@pytest.mark.parametrize('image', IMAGES)
@pytest.mark.parametrize('dtype', [torch.float32, *HALVES])
def test_images(image, size, dtype):
    """Outputs in eval mode beside those of float64, outputs and gradients in training."""
    model = micro().eval()
    x = IMAGES[image](size)
    autocast = torch.autocast('cpu', dtype=dtype, enabled=dtype != torch.float32)
    with torch.no_grad():
        with autocast:
            outputs = model(x)
        exact = copy.deepcopy(model).double()(x.double())
    for output, wanted in zip(outputs, exact, strict=True):
        error = (output - wanted).abs().max() / wanted.abs().max()
        assert error <= 10 * TOLERANCES[dtype]

    model.train()
    with autocast:
        outputs = model(x.requires_grad_())
    # oneDNN's bfloat16 convolution reads memory that nothing wrote where a map is one pixel wide,
    # for the gradient of its weight.
    with torch.backends.mkldnn.flags(enabled=size[1] > 1):
        sum(output.float().square().mean() for output in outputs).backward()
    assert all(output.isfinite().all() for output in outputs)
    assert all(p.grad.isfinite().all() for p in [x, *model.parameters()])


@pytest.mark.parametrize('scale', [1e-12, 1e6])
@pytest.mark.parametrize('feature_map', NORM_AWARE)
def test_image_scales(feature_map, scale):
    model = micro(feature_map=feature_map, stage_attention=('nala',) * 4).eval()
    x = scale * torch.rand(1, 3, 33, 40)
    with torch.no_grad():
        outputs, exact = model(x), copy.deepcopy(model).double()(x.double())
    for output, wanted in zip(outputs, exact, strict=True):
        assert (output - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize('dtype', [torch.float32, *HALVES])
def test_500_steps_at_a_high_learning_rate(dtype):
    """A hundred times the usual one, with autocast as without; float16 has its scaler."""
    torch.manual_seed(0)
    arch = dict(channels=[16], depths=[1], num_heads=[2], mlp_ratio=2)
    backbone = NaLaFormer(arch, out_indices=(0,), stage_attention=('nala',))
    head = nn.Linear(backbone.out_channels[-1], 4)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    scaler = torch.amp.GradScaler('cpu', enabled=dtype == torch.float16)
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
    losses = []
    for _ in range(500):
        with torch.autocast('cpu', dtype=dtype, enabled=dtype != torch.float32):
            logits = head(backbone(images)[-1].mean((2, 3)))
            loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    assert torch.stack(losses).isfinite().all()
    assert all(p.isfinite().all() for p in parameters)
    assert scaler.get_scale() >= 1  # gradients that overflow are the exception


@pytest.fixture
def deterministic():
    def switch(on: bool) -> None:
        torch.use_deterministic_algorithms(on)  # fills what is not initialised with NaN, too

    yield switch
    switch(False)


@pytest.mark.parametrize('attn_impl', ['plain', 'lean'])
@pytest.mark.parametrize('with_cp', [False, True])
def test_deterministic_algorithms(deterministic, attn_impl, with_cp):
    """They change nothing: all of it is deterministic, and no memory is read unwritten."""
    results = []
    for on in (False, True, True):
        deterministic(on)
        model = micro(attn_impl=attn_impl, with_cp=with_cp, drop_path_rate=0.2).train()
        outputs = model(torch.rand(2, 3, 33, 40))
        sum(output.square().mean() for output in outputs).backward()
        results.append([*outputs, *(p.grad for p in model.parameters())])
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)
