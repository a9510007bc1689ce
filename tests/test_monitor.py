"""AttentionMonitorHook: what it measures, when it warns, and that training does not notice it."""

import json
import math
import re
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import Golden
from mmengine.logging import MessageHub
from torch import nn
from toy import run_pair, run_tool, same, weights, write_scenes, write_segmentation_config

from mmnala import NaLaFormer
from mmnala.engine import AttentionMonitorHook
from mmnala.engine.attention_monitor import sample_attention
from mmnala.ops import apply_rotary, rotary_table

ARCH = Golden('nalaformer_micro').arch
MAPS = ('signed', 'cosine', 'elu', 'relu', 'focused')


class Run:
    """What the hook needs of a runner, around a model."""

    def __init__(self, model: nn.Module, **cfg: object) -> None:
        self.model = model
        self.rank = 0
        self.iter = 0
        self.cfg = cfg
        self.logger = Mock()
        self.message_hub = MessageHub('monitor')

    def train(self, hook: AttentionMonitorHook, image: torch.Tensor, iterations: int = 1) -> None:
        hook.before_train(self)
        for _ in range(iterations):
            hook.before_train_iter(self, self.iter)
            sum(x.square().mean() for x in self.model(image)).backward()
            hook.after_train_iter(self, self.iter)
            self.iter += 1

    @property
    def scalars(self) -> dict[str, float]:
        prefix = 'train/attention/'
        return {
            k.removeprefix(prefix): v.current() for k, v in self.message_hub.log_scalars.items()
        }

    @property
    def warnings(self) -> list[str]:
        return [call.args[0] for call in self.logger.warning.call_args_list]


def make_model(**options: object) -> NaLaFormer:
    torch.manual_seed(0)
    return NaLaFormer(arch=ARCH, **options)


def layer(attention: str, feature_map: str = 'signed') -> nn.Module:
    """Attention of 2 heads with 16 channels each, in float64."""
    options = dict(stage_attention=(attention,) * 4, feature_map=feature_map)
    return make_model(**options).layers[1].blocks[0].attn.double()


def explicit_entropy(attn: nn.Module, x: torch.Tensor, rotary: tuple) -> torch.Tensor:
    """Entropies of all queries by the formulas, one head after the other."""
    q, k, _, _ = attn.qkvg(x[0].flatten(0, 1)).chunk(4, -1)
    rows = []
    for query, key in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True):
        norm = query.norm(dim=-1, keepdim=True)
        p = 3 * (0.5 + norm.tanh())
        if attn.attention == 'softmax':
            a = (apply_rotary(query, rotary) @ apply_rotary(key, rotary).T / math.sqrt(16)).exp()
        elif attn.feature_map == 'signed':
            a = sum((s * query / norm).relu() ** p @ ((s * key).relu() ** 3).T for s in (1, -1))
        elif attn.feature_map == 'cosine':
            angle = [
                math.pi / 4 * (20 * y / y.norm(dim=-1, keepdim=True)).tanh() for y in (query, key)
            ]
            magnitude = (query / norm).abs() ** p, key.abs() ** 3
            a = sum(
                (magnitude[0] * f(angle[0])) @ (magnitude[1] * f(angle[1])).T
                for f in (torch.cos, torch.sin)
            )
        elif attn.feature_map == 'elu':
            a = (1 + nn.functional.elu(query)) @ (1 + nn.functional.elu(key)).T
        else:
            query, key = query.relu(), key.relu()
            if attn.feature_map == 'focused':
                query, key = (
                    y.norm(dim=-1, keepdim=True) * y**3 / (y**3).norm(dim=-1, keepdim=True)
                    for y in (query, key)
                )
            a = query @ key.T
        a = a / a.sum(-1, keepdim=True)
        rows.append(-(a * a.clamp_min(1e-300).log()).sum(-1) / math.log(len(a)))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ('attention', 'feature_map'), [('softmax', 'signed'), *(('nala', name) for name in MAPS)]
)
def test_entropy_is_the_formula(attention, feature_map):
    attn = layer(attention, feature_map)
    rotary = rotary_table(5, 6, 16, dtype=torch.float64)
    x = 2 * torch.randn(
        2, 5, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    expected = explicit_entropy(attn, x, rotary)
    norms = attn.qkvg(x[:1])[..., :32].reshape(30, 2, 16).norm(dim=-1).T
    for number, picks in ((30, range(30)), (100, range(30)), (3, (0, 14, 29)), (1, (0,))):
        sample = sample_attention(attn, x, rotary, number)
        torch.testing.assert_close(sample.entropy, expected[:, list(picks)], rtol=0, atol=1e-12)
        if attention == 'nala' and feature_map in ('signed', 'cosine'):
            tanh = norms[:, list(picks)].tanh()
            torch.testing.assert_close(sample.tanh_norm, tanh, rtol=0, atol=1e-12)
        else:
            assert sample.tanh_norm is None


@pytest.mark.parametrize('attention', ['nala', 'softmax'])
def test_entropy_of_a_single_position_and_of_zero_keys(attention):
    attn = layer(attention)
    x = torch.ones(1, 1, 1, 32, dtype=torch.float64)
    assert sample_attention(attn, x, rotary_table(1, 1, 16), 4).entropy.tolist() == [[0], [0]]
    nn.init.zeros_(attn.qkvg.weight)
    nn.init.zeros_(attn.qkvg.bias)
    entropy = sample_attention(attn, x.expand(1, 2, 2, 32), rotary_table(2, 2, 16), 4).entropy
    torch.testing.assert_close(entropy, torch.full_like(entropy, float(attention == 'softmax')))


@pytest.mark.parametrize(
    'options', [{}, dict(with_cp=True), dict(frozen_stages=2), dict(feature_map='cosine')]
)
def test_scalars_summarise_the_blocks_of_a_stage(options):
    model = make_model(**options)
    run = Run(model)
    image = torch.randn(2, 3, 64, 96)
    samples: dict[int, list] = {}
    for i, stage in enumerate(model.layers):
        for block in stage.blocks:
            block.attn.register_forward_hook(
                lambda attn, args, output, i=i: samples.setdefault(i, []).append(
                    sample_attention(attn, *args, 16)
                )
            )
    run.train(AttentionMonitorHook(interval=1, num_queries=16), image)

    expected = {}
    for i, stage in samples.items():
        stage = stage[: ARCH['depths'][i]]  # recomputation appends them again
        expected[f'stage{i}/entropy'] = torch.stack([s.entropy for s in stage]).mean().item()
        if i < 2:
            tanh = torch.stack([s.tanh_norm for s in stage])
            p = 1.5 + 3 * tanh
            expected |= {
                f'stage{i}/exponent_mean': p.mean().item(),
                f'stage{i}/exponent_min': p.min().item(),
                f'stage{i}/exponent_max': p.max().item(),
                f'stage{i}/saturated': (tanh > 0.99).float().mean().item(),
            }
    assert run.scalars == pytest.approx(expected, abs=1e-6)


def test_maps_without_exponent_have_only_an_entropy():
    run = Run(make_model(feature_map='relu'))
    run.train(AttentionMonitorHook(interval=1), torch.randn(1, 3, 64, 64))
    assert set(run.scalars) == {f'stage{i}/entropy' for i in range(4)}


def test_forward_hooks_exist_in_measured_iterations_only():
    model = make_model()
    run, hook = Run(model), AttentionMonitorHook(interval=3)
    hook.before_train(run)
    listening = []
    for run.iter in range(7):
        hook.before_train_iter(run, run.iter)
        listening.append(sum(len(m._forward_hooks) for m in model.modules()))
        if run.iter != 5:  # an iteration without a forward pass leaves none behind
            model(torch.randn(2, 3, 32, 32))
        hook.after_train_iter(run, run.iter)
        assert not any(m._forward_hooks for m in model.modules())
    assert listening == [0, 0, 5, 0, 0, 5, 0]
    assert len(run.message_hub.get_scalar('train/attention/stage0/entropy').data[0]) == 1


def set_qk(model: NaLaFormer, scale: float) -> None:
    """Scale all queries and keys."""
    for stage in model.layers:
        for block in stage.blocks:
            half = block.attn.qkvg.out_features // 2
            with torch.no_grad():
                block.attn.qkvg.weight[:half] *= scale
                block.attn.qkvg.bias[:half] *= scale


@pytest.mark.parametrize(
    ('attention', 'scale', 'options', 'messages'),
    [
        ('softmax', 100, {}, ['attention has collapsed.*below 0.02: 0.0']),
        ('softmax', 100, dict(collapsed=0), []),
        ('softmax', 1e-4, {}, [r'attention has become uniform.*above 0.999: 1.0000 in stage 0']),
        ('softmax', 1e-4, dict(uniform=1.0), []),
        ('nala', 1, {}, []),
        ('nala', 100, {}, ['exponent saturates everywhere.*at least 1.0: 1.0000 in stage 0, 1.00']),
        ('nala', 1, dict(saturated=0), ['exponent saturates everywhere.*at least 0: 0.']),
    ],
)
def test_degenerate_attention_is_warned_of_once(attention, scale, options, messages):
    model = make_model(stage_attention=(attention,) * 4)
    set_qk(model, scale)
    run = Run(model)
    hook = AttentionMonitorHook(interval=1, **options)
    torch.manual_seed(0)
    run.train(hook, torch.randn(1, 3, 64, 64), iterations=2)
    assert len(run.warnings) == len(messages), run.warnings
    for warning, message in zip(run.warnings, messages, strict=True):
        assert re.search(f'iteration 1: .*{message}', warning)


@pytest.mark.parametrize(
    ('model', 'cfg', 'reason'),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3)), {}, 'the model has no NaLaFormer'),
        (NaLaFormer(arch=ARCH), dict(compile=True), 'the model is compiled'),
    ],
)
def test_other_models_are_left_alone(model, cfg, reason):
    run = Run(model, **cfg)
    run.train(AttentionMonitorHook(interval=1), torch.randn(2, 3, 32, 32), iterations=2)
    assert run.logger.info.call_count == 1
    assert reason in run.logger.info.call_args.args[0]
    assert not run.message_hub.log_scalars


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(interval=0), 'interval must be a positive integer, got 0'),
        (dict(interval=True), 'interval must be a positive integer, got True'),
        (dict(num_queries=2.5), 'num_queries must be a positive integer, got 2.5'),
        (dict(collapsed=-0.1), r'collapsed must lie in \[0, 1\], got -0.1'),
        (dict(uniform='1'), r"uniform must lie in \[0, 1\], got '1'"),
        (dict(saturated=1.5), r'saturated must lie in \[0, 1\], got 1.5'),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMonitorHook(**options)


MONITOR = 'custom_hooks.append(dict(type="AttentionMonitorHook", interval={}))\n'


def train(folder: Path, name: str, extra: str) -> Path:
    config = write_segmentation_config(folder / f'{name}.py', folder / 'data', extra)
    finished = run_tool('train.py', config, cwd=folder)
    assert finished.code == 0, finished.output
    return folder / 'work_dirs' / name


def records(work_dir: Path) -> list[dict]:
    (file,) = work_dir.glob('*/vis_data/scalars.json')
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if 'loss' in line]


def test_training_is_the_same_bit_for_bit(tmp_path):
    write_scenes(tmp_path / 'data')
    with_cp = 'model["backbone"]["with_cp"] = True\n'
    plain = train(tmp_path, 'plain', with_cp)
    monitored = train(tmp_path, 'monitored', with_cp + MONITOR.format(2))
    assert same(weights(plain / 'iter_10.pth'), weights(monitored / 'iter_10.pth'))
    entropies = [line.get('attention/stage0/entropy') for line in records(monitored)]
    # Every second iteration has a value of its own; a log line between shows the last one.
    assert entropies[0] is None and all(0 < value <= 1 for value in entropies[1:])
    assert entropies[1:-1:2] == entropies[2::2] and len(set(entropies[1:])) == 5
    assert not any('attention' in key for line in records(plain) for key in line)


def test_the_first_of_two_processes_measures(tmp_path):
    write_scenes(tmp_path / 'data')
    lines = 'train_cfg["max_iters"] = 2\ntrain_cfg["val_interval"] = 2\n'
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    for name, extra in (('plain', ''), ('monitored', MONITOR.format(1))):
        config = write_segmentation_config(
            tmp_path / f'{name}.py', tmp_path / 'data', lines + extra
        )
        for finished in run_pair('train.py', config, cwd=tmp_path, port=port):
            assert finished.code == 0, finished.output
    work_dirs = tmp_path / 'work_dirs'
    for rank in range(2):
        pair = (weights(work_dirs / name / f'rank{rank}.pth') for name in ('plain', 'monitored'))
        assert same(*pair)
    assert all('attention/stage3/entropy' in line for line in records(work_dirs / 'monitored'))
