"""Layer-wise learning-rate decay, against tables written by hand."""

import importlib
from fnmatch import fnmatch

import pytest
import torch
from mmengine.config import Config
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import build_optim_wrapper
from mmengine.optim.scheduler import MultiStepLR
from mmengine.registry import DefaultScope
from torch import nn
from toy import write_detection_config, write_segmentation_config

from mmnala import NaLaFormer
from mmnala.engine.errors import InputError

ARCH = dict(channels=[8, 16, 16, 24], depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 3], mlp_ratio=2)
LR, DECAY, RATE = 0.01, 0.05, 0.5

# The factor of the learning rate, layer-wise and stage-wise. Whatever is missing has 1.
FACTORS = {
    'patch_embed.*': (1 / 64, 1 / 32),
    'layers.0.blocks.0.*': (1 / 32, 1 / 16),
    'layers.0.downsample.*': (1 / 16, 1 / 8),
    'layers.1.blocks.0.*': (1 / 16, 1 / 8),
    'layers.1.blocks.1.*': (1 / 8, 1 / 8),
    'layers.1.downsample.*': (1 / 4, 1 / 4),
    'layers.2.blocks.0.*': (1 / 4, 1 / 4),
    'layers.2.downsample.*': (1 / 2, 1 / 2),
    'layers.3.blocks.0.*': (1 / 2, 1 / 2),
}


def build(kind: str, tmp_path) -> tuple[nn.Module, str]:
    """A model, and the backbone's prefix in it."""
    if kind == 'backbone':
        return NaLaFormer(ARCH), ''
    scope = 'mmseg' if kind == 'EncoderDecoder' else 'mmdet'
    write = write_segmentation_config if scope == 'mmseg' else write_detection_config
    cfg = Config.fromfile(write(tmp_path / 'config.py', tmp_path)).model
    cfg.backbone.arch = ARCH
    assert cfg.type == kind
    with DefaultScope.overwrite_default_scope(scope):
        return importlib.import_module(f'{scope}.registry').MODELS.build(cfg), 'backbone.'


def build_wrapper(model: nn.Module, optimizer: dict | None = None, **paramwise_cfg):
    cfg = dict(
        constructor='LayerDecayOptimWrapperConstructor',
        optimizer=optimizer or dict(type='AdamW', lr=LR, weight_decay=DECAY),
        paramwise_cfg=paramwise_cfg,
    )
    return build_optim_wrapper(model, cfg)


def settings(wrapper, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter that is optimised."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = [
        (names[id(param)], (group['lr'], group['weight_decay']))
        for group in wrapper.optimizer.param_groups
        for param in group['params']
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def factor(name: str, prefix: str, decay_type: str) -> float:
    column = ('layer_wise', 'stage_wise').index(decay_type)
    matches = [row[column] for key, row in FACTORS.items() if fnmatch(name, prefix + key)]
    assert len(matches) <= 1
    return matches[0] if matches else 1.0


@pytest.mark.parametrize('decay_type', ['layer_wise', 'stage_wise'])
@pytest.mark.parametrize('kind', ['backbone', 'EncoderDecoder', 'RetinaNet'])
def test_every_parameter_has_the_tables_settings(kind, decay_type, tmp_path):
    model, prefix = build(kind, tmp_path)
    norms = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d))
        for param in module.parameters(recurse=False)
    }
    wrapper = build_wrapper(
        model,
        layer_decay_rate=RATE,
        decay_type=decay_type,
        norm_decay_mult=0.0,
        custom_keys={'gamma_': dict(decay_mult=0.0), 'qkvg': dict(lr_mult=3.0, decay_mult=0.1)},
    )

    expected = {}
    for name, param in model.named_parameters():
        lr, decay = LR * factor(name, prefix, decay_type), DECAY
        if id(param) in norms or 'gamma_' in name:
            decay = 0.0
        if 'qkvg' in name:
            lr, decay = 3 * lr, DECAY / 10
        expected[name] = (lr, decay)
    found = settings(wrapper, model)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name

    # Groups are merged, and a scheduler scales them all.
    assert len(wrapper.optimizer.param_groups) == len(set(found.values()))
    scheduler = MultiStepLR(wrapper, milestones=[1], gamma=0.1)
    wrapper.step()
    scheduler.step()
    after = settings(wrapper, model)
    for name, (lr, decay) in expected.items():
        assert after[name] == pytest.approx((lr / 10, decay), rel=1e-12), name
    assert wrapper.get_lr()['base_lr'] == [pytest.approx(LR / 10)]


def test_depths_as_mmpretrain_asks_for_them():
    model = NaLaFormer(ARCH)
    for name, depth in {
        'patch_embed.proj.0.weight': 0,
        'layers.0.blocks.0.gamma_1': 1,
        'layers.0.downsample.reduction.weight': 2,
        'layers.1.blocks.1.attn.ln.bias': 3,
        'layers.3.blocks.0.ffn.fc1.weight': 5,
        'norm0.weight': 6,
    }.items():
        assert model.get_layer_depth(name) == (depth, 7)
        assert model.get_layer_depth('backbone.' + name, 'backbone.') == (depth, 7)
        assert model.get_layer_depth(name, 'backbone.') == (6, 7)
    assert NaLaFormer(ARCH, out_indices=(0, 1)).get_layer_depth('norm1.weight') == (4, 5)


def test_frozen_parameters_are_in_no_group():
    model = NaLaFormer(ARCH, frozen_stages=1)
    found = settings(build_wrapper(model, layer_decay_rate=RATE), model)
    assert found.keys() == {n for n, param in model.named_parameters() if param.requires_grad}
    assert not any(name.startswith(('patch_embed', 'layers.0')) for name in found)


def test_rate_one_and_an_optimizer_without_weight_decay():
    model = NaLaFormer(ARCH)
    wrapper = build_wrapper(model, dict(type='SGD', lr=LR), layer_decay_rate=1)
    assert set(settings(wrapper, model).values()) == {(LR, 0)}
    assert len(wrapper.optimizer.param_groups) == 1


def test_a_distributed_wrapper(tmp_path):
    model, _ = build('EncoderDecoder', tmp_path)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    try:
        wrapper = build_wrapper(MMDistributedDataParallel(model), layer_decay_rate=RATE)
    finally:
        torch.distributed.destroy_process_group()
    for name, (lr, _) in settings(wrapper, model).items():
        assert lr == pytest.approx(LR * factor(name, 'backbone.', 'layer_wise'))


@pytest.mark.parametrize(
    ('paramwise_cfg', 'words'),
    [
        (dict(), r'paramwise_cfg.layer_decay_rate must lie in \(0, 1\], got None'),
        (dict(layer_decay_rate=0), 'layer_decay_rate must lie .* got 0'),
        (dict(layer_decay_rate=1.1), 'layer_decay_rate must lie .* got 1.1'),
        (dict(layer_decay_rate='0.9'), "layer_decay_rate must lie .* got '0.9'"),
        (dict(layer_decay_rate=True), 'layer_decay_rate must lie .* got True'),
        (
            dict(layer_decay_rate=0.9, decay_type='block'),
            r"decay_type must be one of \['layer_wise', 'stage_wise'\], got 'block'",
        ),
        (
            dict(layer_decay_rate=0.9, decay_rate=0.9, num_layers=6),
            r"paramwise_cfg must have keys of .* got \['decay_rate', 'num_layers'\]",
        ),
    ],
)
def test_bad_options(paramwise_cfg, words):
    with pytest.raises(InputError, match=words):
        build_wrapper(NaLaFormer(ARCH), **paramwise_cfg)


@pytest.mark.parametrize('decay_type', ['layer_wise', 'stage_wise'])
def test_a_model_without_depths(decay_type):
    method = dict(layer_wise='get_layer_depth', stage_wise='get_stage_depth')[decay_type]
    with pytest.raises(InputError, match=f"'{decay_type}' needs a .* {method}, got Conv2d"):
        build_wrapper(nn.Conv2d(1, 1, 1), layer_decay_rate=0.9, decay_type=decay_type)


def test_an_optimizer_without_a_learning_rate():
    with pytest.raises(InputError, match=r'optim_wrapper.optimizer must have an lr'):
        build_wrapper(NaLaFormer(ARCH), dict(type='AdamW'), layer_decay_rate=0.9)
