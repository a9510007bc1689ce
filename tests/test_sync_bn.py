"""Synchronised batch norm over two gloo processes, against torch's over the whole batch."""

from pathlib import Path

import pytest
import torch
from mmcv.ops import SyncBatchNorm as MMCVSyncBatchNorm
from mmengine.dist import get_rank
from torch import nn
from toy import run_ranks

from mmnala.engine.sync_bn import CPUSyncBatchNorm

CHANNELS = 5
OPTIONS = {
    'default': dict(),
    'average': dict(momentum=None),
    'momentum': dict(momentum=0.3, eps=0.1),
    'no affine': dict(affine=False),
    'no statistics': dict(track_running_stats=False),
}
SHAPES = {'NC': (), 'NCL': (7,), 'NCHW': (3, 4), 'channels last': (4, 3), 'NCDHW': (2, 3, 2)}
LAYERS = (nn.SyncBatchNorm, MMCVSyncBatchNorm)
CASES = [
    *[(layer, options, 'NCHW') for layer in LAYERS for options in OPTIONS],
    *[(nn.SyncBatchNorm, 'default', shape) for shape in SHAPES],
]
PARTS = (slice(0, 1), slice(1, 4))  # of the batch, for the two ranks


def batches(shape: str) -> list[torch.Tensor]:
    """Two training batches and one for evaluation, far from zero mean."""
    draw = torch.Generator().manual_seed(0)
    size = (3, 4, CHANNELS, *SHAPES[shape])
    images = torch.randn(size, dtype=torch.float64, generator=draw) * 3 + 10
    memory = torch.channels_last if shape == 'channels last' else torch.contiguous_format
    return [batch.contiguous(memory_format=memory) for batch in images]


def step(layer: nn.Module, batch: torch.Tensor, part: slice) -> dict[str, torch.Tensor]:
    """Output and gradients of a loss that is a sum over the batch."""
    x = batch[part].requires_grad_()
    out = layer(x)
    assert out.stride() == x.stride()
    (out * (batch + batch.square()).sin()[part].detach()).sum().backward()
    found = dict(out=out.detach(), x=x.grad)
    found |= {name: param.grad.clone() for name, param in layer.named_parameters()}
    layer.zero_grad()
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def run_cases(folder: Path) -> None:
    results = []
    for kind, options, shape in CASES:
        layer = CPUSyncBatchNorm.convert(with_weights(kind(CHANNELS, **OPTIONS[options])).double())
        assert type(layer) is CPUSyncBatchNorm
        *train, evaluate = batches(shape)
        found = [step(layer, batch.clone(), PARTS[get_rank()]) for batch in train]
        results.append([*found, dict(out=layer.eval()(evaluate).detach())])
    torch.save(results, folder / f'{get_rank()}.pth')


def with_weights(layer: nn.Module) -> nn.Module:
    for name, param in layer.named_parameters():
        nn.init.constant_(param, 0.5 if name == 'bias' else 1.5)
    return layer


@pytest.fixture(scope='module')
def ranks(tmp_path_factory) -> list:
    folder = tmp_path_factory.mktemp('ranks')
    run_ranks(run_cases, folder)
    return [torch.load(folder / f'{rank}.pth') for rank in range(2)]


@pytest.mark.parametrize('case', range(len(CASES)))
def test_two_unequal_batches_equal_the_whole(ranks, case):
    _, options, shape = CASES[case]
    norm = nn.BatchNorm1d if len(SHAPES[shape]) < 2 else nn.BatchNorm2d
    norm = nn.BatchNorm3d if shape == 'NCDHW' else norm
    layer = with_weights(norm(CHANNELS, **OPTIONS[options])).double()
    *train, evaluate = batches(shape)
    for number, batch in enumerate(train):
        expected = step(layer, batch.clone(), slice(None))
        first, second = (rank[case][number] for rank in ranks)
        assert first.keys() == expected.keys()
        for name in expected:
            if name in ('out', 'x'):
                found = torch.cat([first[name], second[name]])
            elif name in ('weight', 'bias'):
                found = first[name] + second[name]
            else:
                assert torch.equal(first[name], second[name])
                found = first[name]
            torch.testing.assert_close(found, expected[name], atol=1e-12, rtol=1e-10)
    expected = layer.eval()(evaluate).detach()
    for rank in ranks:
        torch.testing.assert_close(rank[case][-1]['out'], expected, atol=1e-12, rtol=1e-10)


def run_bfloat16(folder: Path) -> None:
    torch.manual_seed(get_rank())
    image = torch.rand(2, 3, 4, 4)
    layer = CPUSyncBatchNorm(3)
    expected = layer(image)
    found = layer(image.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)


def test_half_precision_keeps_its_dtype(tmp_path):
    run_ranks(run_bfloat16, tmp_path)


def test_one_process_needs_no_group():
    image = torch.rand(2, 3, 4, 4)
    assert torch.equal(CPUSyncBatchNorm(3)(image), nn.BatchNorm2d(3)(image))


def test_conversion_keeps_what_is_not_synchronised():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.SyncBatchNorm(3)).eval())
    before = dict(model.named_parameters()), dict(model.named_buffers())
    assert CPUSyncBatchNorm.convert(model) is model
    assert type(model[0]) is nn.BatchNorm2d and type(model[1][0]) is CPUSyncBatchNorm
    assert model[0].training and not model[1][0].training
    for named, found in zip(before, (model.named_parameters(), model.named_buffers()), strict=True):
        found = dict(found)
        assert found.keys() == named.keys() and all(found[n] is named[n] for n in named)


def test_an_image_without_channels_is_an_error():
    with pytest.raises(ValueError, match=r'input must be \(N, C, ...\), got \(3,\)'):
        CPUSyncBatchNorm(3)(torch.rand(3))
