"""One training, shared out between two processes in several ways, and what its plan counts."""

import csv
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mmengine.config import Config
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from toy import (
    run_pair,
    run_ranks,
    run_tool,
    same,
    weights,
    write_scenes,
    write_segmentation_config,
)

from mmnala import NaLaFormer
from mmnala.analysis import scaling as analysis
from mmnala.backbones.nalaformer import Block
from mmnala.engine.errors import InputError
from mmnala.engine.strategies import ShardedStrategy, build_flexible_runner
from mmnala.engine.tools import build_runner

ROOT = Path(__file__).parents[1]
PAGE = ROOT / 'docs/scaling.md'
STEPS = 10
TOLERANCE = dict(rtol=1e-5, atol=1e-5)
# AdamW turns the noise of gradients that are 0 in theory, as those of a bias before a norm, into
# steps of the full learning rate; a larger eps leaves them as small as they are.
COMMON = f"""
model['backbone']['drop_path_rate'] = 0.0
model['decode_head']['dropout_ratio'] = 0
model['backbone']['norm_cfg'] = model['decode_head']['norm_cfg'] = dict(type='SyncBN')
train_dataloader['dataset']['pipeline'] = test_pipeline
train_cfg = dict(type='IterBasedTrainLoop', max_iters={STEPS})
val_cfg = val_dataloader = val_evaluator = param_scheduler = None
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-3, eps=1e-4, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(norm_decay_mult=0.0))
default_hooks['checkpoint']['interval'] = 5
custom_hooks = []
"""
WITH_CP = "model['backbone']['with_cp'] = True\n"
FLEXIBLE = "runner_type = 'FlexibleRunner'\n"
ZERO = "optim_wrapper['optimizer'].update(type='ZeroRedundancyOptimizer', optimizer_type='AdamW')\n"
SHARDED = FLEXIBLE + "strategy = dict(type='ShardedStrategy')\n"
GRAD_OP = SHARDED + "strategy['model_wrapper'] = dict(sharding_strategy='SHARD_GRAD_OP')\n"
WRAPPED = SHARDED + "strategy['activation_checkpointing'] = dict(check_fn='is_nalaformer_block')\n"
SAME = {
    'with_cp': WITH_CP,
    'zero': FLEXIBLE + ZERO,
    'shard_grad_op': GRAD_OP + WITH_CP,
    'full_shard': SHARDED,
    'full_shard_checkpointed': WRAPPED,
}
# Batch statistics are those of a small batch: only norms that look at one image can be compared.
NO_BATCH_NORM = """
model['backbone']['norm_cfg'] = model['decode_head']['norm_cfg'] = dict(type='GN', num_groups=2)
"""
ACCUMULATED = f"""
optim_wrapper['accumulative_counts'] = 2
train_cfg['max_iters'] = {2 * STEPS}
"""
ACCUMULATIONS = {
    'accumulated': NO_BATCH_NORM + ACCUMULATED,
    'accumulated_full_shard': NO_BATCH_NORM + ACCUMULATED + SHARDED,
}
RUNS = {
    'plain': '',
    'large_batch': NO_BATCH_NORM + "train_dataloader['batch_size'] = 4\n",
    **SAME,
    **ACCUMULATIONS,
}


class Traffic(Hook):
    """Counts the bytes that a process sends in the third iteration to gather and to scatter."""

    def __init__(self) -> None:
        self.sent = 0
        self._functions: dict[str, Callable] = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter != 2:
            return
        for name in ('all_gather', 'reduce_scatter_tensor'):
            self._functions[name] = getattr(torch.distributed, name)
            setattr(torch.distributed, name, self._counted(name))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        while self._functions:
            setattr(torch.distributed, *self._functions.popitem())

    def _counted(self, name: str) -> Callable:
        function = self._functions[name]

        def call(output, given, *args, **kwargs):
            part = given if name == 'all_gather' else output  # all but one of them travel
            self.sent += part.nbytes * (torch.distributed.get_world_size() - 1)
            return function(output, given, *args, **kwargs)

        return call


def train_all(folder: Path) -> None:
    """Train every config of a folder, and note what this process holds at the end."""
    os.environ['LOCAL_RANK'] = str(get_rank())
    Config.pretty_text = ''  # formatting it takes half of the time
    for config in sorted(folder.glob('*.py')):
        cfg = Config.fromfile(config)
        cfg.launcher, cfg.work_dir = 'pytorch', str(folder / config.stem)
        runner, traffic = build_runner(cfg, training=True), Traffic()
        runner.register_hook(traffic)
        runner.train()
        optimizer = runner.optim_wrapper.optimizer
        states = getattr(optimizer, 'optim', optimizer).state.values()
        modules = list(runner.model.modules())
        facts = dict(
            moments=sum(state['exp_avg'].numel() for state in states if state),
            units=sum(isinstance(m, FullyShardedDataParallel) for m in modules),
            checkpointed=sum(isinstance(m, CheckpointWrapper) for m in modules),
            sent=traffic.sent,
        )
        torch.save(facts, folder / config.stem / f'facts{get_rank()}.pth')


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('toy') / 'data'
    write_scenes(folder)
    return folder


@pytest.fixture(scope='module')
def runs(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('runs')
    for name, lines in RUNS.items():
        write_segmentation_config(folder / f'{name}.py', data, COMMON + lines)
    run_ranks(train_all, folder)
    return folder


@pytest.fixture(scope='module')
def toy_config(data, tmp_path_factory) -> Path:
    return write_segmentation_config(tmp_path_factory.mktemp('model') / 'toy.py', data)


@pytest.fixture(scope='module')
def toy_model(toy_config) -> nn.Module:
    init_default_scope('mmseg')
    return MODELS.build(Config.fromfile(toy_config).model).train()


class Result(NamedTuple):
    """The loss of every step, the norm of every update's gradient, and the weights at the end."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    weights: dict[str, torch.Tensor]


def result(run: Path, iteration: int = STEPS) -> Result:
    content = torch.load(run / f'iter_{iteration}.pth', weights_only=False)
    scalars = content['message_hub']['log_scalars']
    curves = (torch.tensor(scalars[f'train/{name}'].data[0]) for name in ('loss', 'grad_norm'))
    return Result(*curves, dict(content['state_dict']))


def assert_same_training(found: Result, expected: Result) -> None:
    torch.testing.assert_close(found.loss, expected.loss, **TOLERANCE)
    torch.testing.assert_close(found.grad_norm, expected.grad_norm, **TOLERANCE)
    torch.testing.assert_close(found.weights, expected.weights, **TOLERANCE)


@pytest.mark.parametrize('name', SAME)
def test_same_curve_as_plain_data_parallel(runs, name):
    expected = result(runs / 'plain')
    assert len(expected.loss) == len(expected.grad_norm) == STEPS
    assert expected.loss[-1] < 0.9 * expected.loss[0]  # it learns
    assert_same_training(result(runs / name), expected)


@pytest.mark.parametrize('name', ACCUMULATIONS)
def test_accumulation_has_the_curve_of_the_larger_batch(runs, name):
    found, expected = result(runs / name, 2 * STEPS), result(runs / 'large_batch')
    halves = found.loss.view(STEPS, 2)
    assert not torch.allclose(halves[:, 0], halves[:, 1], **TOLERANCE)
    assert_same_training(found._replace(loss=halves.mean(1)), expected)


def test_states_are_in_parts(runs):
    """Each parameter's moments are on one process alone, but for some elements of padding."""

    def facts(name: str, fact: str) -> list[int]:
        return [torch.load(runs / name / f'facts{rank}.pth')[fact] for rank in range(2)]

    whole, twice = facts('plain', 'moments')
    assert whole == twice
    assert sum(facts('zero', 'moments')) == whole
    for name in ('zero', 'full_shard', 'shard_grad_op'):
        parts = facts(name, 'moments')
        assert sum(parts) == whole
        assert max(parts) < 0.6 * whole
    assert facts('full_shard', 'units') == [5, 5]  # four blocks and what is outside
    assert facts('full_shard_checkpointed', 'checkpointed') == [4, 4]
    assert facts('full_shard', 'checkpointed') == [0, 0]


@pytest.mark.parametrize('name', ['shard_grad_op', 'full_shard'])
def test_communication_is_as_computed(runs, toy_model, name):
    expected = analysis.sent(analysis.weights(toy_model), name.upper(), gpus=2)
    for rank in range(2):
        sent = torch.load(runs / name / f'facts{rank}.pth')['sent']
        # FSDP aligns each parameter to 16 bytes.
        assert expected <= sent < 1.001 * expected


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


@pytest.mark.parametrize('name', ['zero', 'full_shard'])
def test_resumed_to_the_same_end(runs, tmp_path, port, name):
    config, half = runs / f'{name}.py', runs / name / 'iter_5.pth'
    options = ['--work-dir', 'work', '--resume', half]
    for rank in run_pair('train.py', config, *options, cwd=tmp_path, port=port):
        assert rank.code == 0, rank.output
    assert same(weights(tmp_path / 'work/iter_10.pth'), weights(runs / name / 'iter_10.pth'))
    assert not list((tmp_path / 'work').glob('.*.partial'))


@pytest.mark.parametrize('name', ['zero', 'full_shard'])
def test_evaluated_as_a_plain_model(runs, tmp_path, name):
    end, outputs = runs / name / 'iter_10.pth', []
    for tested in (runs / f'{name}.py', runs / 'plain.py'):
        finished = run_tool('test.py', tested, end, cwd=tmp_path)
        assert finished.code == 0, finished.output
        outputs.append(re.findall(r'aAcc: [\d.]+  mIoU: [\d.]+  mAcc: [\d.]+', finished.output))
    assert len(outputs[0]) == 1
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(launcher='none'), "strategy.type='DataParallelStrategy' needs processes"),
        (dict(strategy=dict(type='FSDPStrategy')), "'ShardedStrategy'] without a GPU, got 'FSDPS"),
        (dict(sync_bn='torch'), 'sync_bn: .*does not read it, give strategy.sync_bn'),
        (dict(compile=True), 'compile: .*does not read it, leave it out'),
        (
            dict(strategy=dict(type='ShardedStrategy'), custom_hooks=[dict(type='EMAHook')]),
            "EMAHook averages whole weights.*'DataParallelStrategy'",
        ),
    ],
)
def test_what_a_strategy_cannot_serve(monkeypatch, options, message):
    monkeypatch.setattr('mmnala.engine.strategies.get_device', lambda: 'cpu')
    with pytest.raises(InputError, match=message):
        build_flexible_runner(Config(dict(launcher='pytorch', model=dict()) | options))


def test_state_dict_cfg_is_full():
    with pytest.raises(InputError, match="state_dict_cfg must be 'full', got 'local'"):
        ShardedStrategy(state_dict_cfg='local')


def test_zero_needs_the_flexible_runner():
    optimizer = dict(type='ZeroRedundancyOptimizer', optimizer_type='AdamW', lr=1e-3)
    cfg = Config(dict(launcher='pytorch', optim_wrapper=dict(optimizer=optimizer)))
    with pytest.raises(SystemExit, match="needs runner_type='FlexibleRunner'"):
        build_runner(cfg, training=True)


def test_layer_decay_sees_through_the_wrappers():
    backbone = NaLaFormer('xt')
    for name, _ in backbone.named_parameters():
        wrapped = re.sub(
            r'(blocks\.\d+\.)', r'\1_fsdp_wrapped_module._checkpoint_wrapped_module.', name
        )
        assert backbone.get_layer_depth(wrapped) == backbone.get_layer_depth(name)
        assert backbone.get_stage_depth(wrapped) == backbone.get_stage_depth(name)


def test_nothing_but_batch_norms_has_buffers():
    """So there are no rotary tables that a strategy would have to spread or to save."""
    names = {name.rsplit('.')[-1] for name, _ in NaLaFormer('xt').named_buffers()}
    assert names == {'running_mean', 'running_var', 'num_batches_tracked'}


def small(with_cp: bool) -> nn.Module:
    """A module of which every kept element is known."""

    class Small(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = super().forward
            return checkpoint(inner, x, use_reentrant=False) if with_cp else inner(x)

    return Small(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize('images', [1, 5])
def test_kept_elements_by_hand(images):
    """Inputs of the linear layers and of the GELU; a view keeps what it is a view of."""
    x = torch.randn(images, 4)
    assert analysis.kept_for_backward(small(False), x) == (4 * images * (4 + 8 + 8), 0)
    assert analysis.kept_for_backward(small(True), x) == (4 * images * 4, 0)
    view = torch.randn(images, 40)[:, :4]
    assert analysis.kept_for_backward(small(False), view) == (4 * images * (40 + 8 + 8), 0)
    with torch.autocast('cpu', torch.bfloat16):
        kept = analysis.kept_for_backward(small(False), x)
    # And a matrix that was cast: the first is not needed, as ``x`` has no gradient.
    assert kept.total == 2 * images * (4 + 8 + 8) + 2 * 8 * 3


@pytest.mark.parametrize('with_cp', [False, True])
def test_kept_elements_are_those_that_autograd_really_keeps(toy_model, with_cp):
    """Count the storages of the tensors that a real backward pass needs."""
    toy_model.backbone.with_cp = with_cp
    batch = analysis.training_batch(toy_model, 'mmseg', (64, 32), 2)
    own = {p.untyped_storage().data_ptr() for p in toy_model.state_dict().values()}
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        losses = toy_model(**batch)
    losses['decode.loss_ce'].backward()
    toy_model.zero_grad()
    kept = analysis.kept_for_backward(toy_model, **batch)
    assert kept.total == sum(n for address, n in storages.items() if address not in own)


BATCH = 3
SIDES = (64, 96)


@pytest.fixture(scope='module')
def rows(toy_config) -> dict[tuple, dict]:
    cfg = Config.fromfile(toy_config)
    model = MODELS.build(cfg.model)
    found = analysis.activations(model, cfg.model.backbone, 'mmseg', SIDES, BATCH)
    assert len(found) == 8
    return {(row['precision'], row['attn_impl'], row['with_cp']): row for row in found}


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize('attn_impl', analysis.ATTN_IMPLS)
@pytest.mark.parametrize('precision', analysis.PRECISIONS)
def test_parts_are_those_of_the_whole_model(toy_model, rows, precision, attn_impl, with_cp):
    """Of fake tensors and features of zeros, as of the model that computes with data."""
    row = rows[precision, attn_impl, with_cp]
    toy_model.backbone.with_cp = with_cp
    for module in toy_model.modules():
        if hasattr(module, 'attn_impl'):
            module.attn_impl = attn_impl
    with torch.autocast('cpu', torch.bfloat16, enabled=precision == 'bfloat16'):
        less, whole = (
            analysis.kept_for_backward(
                toy_model, **analysis.training_batch(toy_model, 'mmseg', SIDES, images)
            )
            for images in (BATCH - 1, BATCH)
        )
    found = row['fixed_mib'] + BATCH * (row['backbone_mib'] + row['rest_mib'])
    if precision == 'float32':
        assert found * 2**20 == whole.total
    else:  # of neck and head, the float32 is counted
        assert whole.total < found * 2**20 < 1.5 * whole.total
    again = row['block_mib'] if with_cp else 0
    assert row['batch_gib'] == pytest.approx((found + BATCH * again) / 1024)
    if not with_cp:
        # Fake tensors do not go through autocast's cache of weights.
        rel = 0 if precision == 'float32' else 0.02
        assert row['block_mib'] * 2**20 == pytest.approx(whole.block - less.block, rel=rel)


def test_another_backbone_cannot_be_counted():
    model = nn.ModuleDict(dict(backbone=nn.Linear(1, 1)))
    with pytest.raises(InputError, match='model.backbone must be a NaLaFormer, got Linear'):
        analysis.activations(model, {}, 'mmseg', (8, 8), 1)


def test_states_and_communication_by_hand():
    size = analysis.Weights(all=100, trained=80, block=10, outside=30)
    expected = {
        'DDP': (420, 120),
        'ZeRO': (300, 180),
        'SHARD_GRAD_OP': (215, 135),
        'FULL_SHARD': (165, 187.5),
    }
    assert expected.keys() == set(analysis.STRATEGIES)
    for strategy, (held, sent) in expected.items():
        assert analysis.states(size, strategy, gpus=4) == held
        assert analysis.sent(size, strategy, gpus=4) == sent
    rows = analysis.state_rows(size, [4], bandwidth=1000)
    assert rows[0] == dict(
        gpus=4, strategy='DDP', states_gib=420 / 2**30, sent_mib=120 / 2**20, seconds=0.12
    )


def test_weights(toy_model):
    size = analysis.weights(toy_model)
    blocks = [m for m in toy_model.modules() if isinstance(m, Block)]
    numbers = [4 * sum(p.numel() for p in block.parameters()) for block in blocks]
    assert size.all == size.trained == 4 * sum(p.numel() for p in toy_model.parameters())
    assert (size.block, size.outside) == (max(numbers), size.all - sum(numbers))


@pytest.mark.parametrize(
    ('schedule', 'images', 'expected'),
    [
        (dict(max_epochs=36), 117266, dict(gpus=8, batch=16, epoch_steps=7330, steps=263880)),
        (dict(max_epochs=3), 17, dict(gpus=8, batch=16, epoch_steps=2, steps=6)),
        (dict(max_iters=160000), None, dict(gpus=8, batch=16, steps=160000)),
    ],
)
def test_steps(schedule, images, expected):
    assert analysis.step_rows(Config(dict(train_cfg=schedule)), [8], 2, images) == [expected]


def test_classification_batch():
    init_default_scope('mmpretrain')
    model = nn.Module()
    model.data_preprocessor = MODELS.build(dict(type='ClsDataPreprocessor', num_classes=6))
    batch = analysis.training_batch(model, 'mmpretrain', (24, 32), 2)
    assert batch['inputs'].shape == (2, 3, 24, 32)
    assert [sample.gt_label.tolist() for sample in batch['data_samples']] == [[0], [0]]
    with pytest.raises(InputError, match="default_scope must be one of .*, got 'mmocr'"):
        analysis.training_batch(model, 'mmocr', (24, 32), 2)


def test_tool(tmp_path):
    config = ROOT / 'configs/shapes/mask-rcnn_nala-xt_fpn_shapes.py'
    options = ['--size', 64, '--gpus', 2, '--batch-size', 4, '--out', 'plan']
    finished = run_tool('analysis/scaling.py', config, *options, cwd=tmp_path)
    assert finished.code == 0, finished.output
    tables = {
        name: list(csv.DictReader((tmp_path / f'plan/{name}.csv').open()))
        for name in ('activations', 'states', 'steps')
    }
    assert [len(rows) for rows in tables.values()] == [8, 4, 1]
    assert all(float(row['rest_mib']) > 0 for row in tables['activations'])
    assert tables['steps'] == [dict(gpus='2', batch='8', epoch_steps='', steps='1000')]
    again = run_tool('analysis/scaling.py', config, *options, cwd=tmp_path)
    assert again.code == 1
    assert 'error: --out plan: ' in again.output


def test_tool_needs_to_know_the_number_of_images(tmp_path):
    config = ROOT / 'configs/mask_rcnn_nala_coco.py'
    finished = run_tool(
        'analysis/scaling.py', config, '--size', '64', '--out', 'plan', cwd=tmp_path
    )
    assert finished.code == 1
    assert "error: --images: the config's schedule counts epochs" in finished.output
    assert not (tmp_path / 'plan').exists()


def blocks(language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder like the checkout, with the configs of the page."""
    for name in ('configs', 'tools'):
        (tmp_path / name).symlink_to(ROOT / name)
    for text in blocks('python'):
        (tmp_path / re.match(r'# (\w+\.py)', text)[1]).write_text(text)
    return tmp_path


@pytest.mark.parametrize('index', range(2))
def test_configs_of_the_page(checkout, data, port, index):
    """They load, and what they change trains the small model."""
    text = blocks('python')[index]
    cfg = Config.fromfile(checkout / re.match(r'# (\w+\.py)', text)[1])
    assert cfg.runner_type == 'FlexibleRunner'
    assert cfg.model.backbone.arch == 'l'
    lines = re.sub(r'^_base_ = .*$', '', text, flags=re.MULTILINE)
    lines = lines.replace('optim_wrapper = dict(optimizer=', "optim_wrapper['optimizer'].update(**")
    config = write_segmentation_config(checkout / 'toy.py', data, COMMON + lines)
    for rank in run_pair('train.py', config, cwd=checkout, port=port):
        assert rank.code == 0, rank.output
    assert (checkout / 'work_dirs/toy/iter_10.pth').exists()
