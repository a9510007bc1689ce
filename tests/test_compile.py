"""The backbone under compilers: one graph, the same values and gradients."""

import pytest
import torch
from torch import nn

from mmnala import NaLaFormer
from mmnala.export import EXPORTS_SIZES

TINY = dict(channels=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], mlp_ratio=2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tiny(**kwargs) -> NaLaFormer:
    torch.manual_seed(0)
    return NaLaFormer(TINY, drop_path_rate=0.0, **kwargs)


def results(model: nn.Module, call, image: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, and in training the gradients too."""
    if not model.training:
        with torch.no_grad():
            return list(call(image))
    model.zero_grad()
    image = image.clone().requires_grad_()
    outputs = call(image)
    sum(out.square().mean() for out in outputs).backward()
    return [*outputs, image.grad, *(p.grad for p in model.parameters())]


def assert_same(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= 1e-5 * max(1, e.abs().max())


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('with_cp', [False, True])
def test_one_graph_with_the_same_results(training, with_cp):
    """``aot_eager`` takes forward and backward graphs as a backend does, but builds no kernels."""
    model = tiny(with_cp=with_cp).train(training)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    image = torch.rand(2, 3, 33, 64)
    assert_same(results(model, compiled, image), results(model, model, image))


def test_sizes_may_change():
    model = tiny().eval()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    for size in ((32, 32), (40, 64), (65, 33)):
        image = torch.rand(1, 3, *size)
        assert_same(results(model, compiled, image), results(model, model, image))


def test_no_graph_break_in_a_segmentor():
    from mmengine.registry import DefaultScope
    from mmseg.models import EncoderDecoder  # noqa: F401
    from mmseg.registry import MODELS

    head = dict(
        type='FCNHead', in_channels=16, in_index=3, channels=8, num_convs=1, num_classes=3,
        norm_cfg=dict(type='BN'), loss_decode=dict(type='CrossEntropyLoss'),
    )  # fmt: skip
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(
            dict(
                type='EncoderDecoder',
                backbone=dict(type='NaLaFormer', arch=TINY),
                decode_head=head,
                test_cfg=dict(mode='whole'),
            )
        ).eval()
    image = torch.rand(1, 3, 32, 32)
    explanation = torch._dynamo.explain(model)(image)
    assert explanation.graph_break_count == 0, explanation.break_reasons
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    with torch.no_grad():
        assert_same([compiled(image)], [model(image)])


needs_autocast_regions = pytest.mark.skipif(
    not EXPORTS_SIZES, reason='torch.export has no autocast regions before torch 2.6'
)


@needs_autocast_regions
def test_export():
    model = tiny().eval()
    image = torch.rand(1, 3, 32, 64)
    program = torch.export.export(model, (image,))
    assert_same(program.module()(image), model(image))


@needs_autocast_regions
def test_export_with_dynamic_sizes():
    model = tiny().eval()
    # Below 33 a side of the last stage is 1, which torch takes for a constant.
    height, width = (torch.export.Dim(name, min=33, max=512) for name in ('height', 'width'))
    program = torch.export.export(
        model, (torch.rand(1, 3, 40, 64),), dynamic_shapes=({2: height, 3: width},)
    )
    for size in ((40, 64), (65, 33)):
        image = torch.rand(1, 3, *size)
        assert_same(program.module()(image), model(image))


def test_trace():
    model = tiny().eval()
    image = torch.rand(1, 3, 32, 64)
    traced = torch.jit.trace(model, image)
    assert_same(traced(image), model(image))
