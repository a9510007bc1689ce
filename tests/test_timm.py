"""timm's models: the interface that timm's users, its scripts and OpenMMLab's wrapper rely on."""

import importlib
import runpy
import subprocess
import sys
from copy import deepcopy

import pytest
import timm
import torch
from mmengine.registry import DefaultScope
from safetensors.torch import save_file
from timm.models import group_parameters, load_checkpoint
from timm.optim import create_optimizer_v2
from torch import nn
from toy import ENVIRONMENT

from mmnala import NaLaFormer
from mmnala.conversion import convert
from mmnala.export import EXPORTS_SIZES

try:
    from timm.optim import param_groups_layer_decay
except ImportError:  # timm 1.0.9
    from timm.optim.optim_factory import param_groups_layer_decay

ARCH = dict(channels=[8, 16, 16, 24], depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 3], mlp_ratio=2)
IMAGE = torch.rand(2, 3, 33, 64, generator=torch.Generator().manual_seed(0))
SIDES = [(9, 16), (5, 8), (3, 4), (2, 2)]  # of the stages' outputs

# Name: parameters of the classifier in millions, drop path, channels of the last stage.
MODELS = {
    'nalaformer_xtiny': (6.14, 0.1, 384),
    'nalaformer_tiny': (15.91, 0.1, 512),
    'nalaformer_small': (25.65, 0.15, 512),
    'nalaformer_base': (52.00, 0.4, 512),
    'nalaformer_large': (95.43, 0.55, 640),
}


def create(**kwargs) -> nn.Module:
    """A tiny model in eval mode, of the same weights whatever its head."""
    torch.manual_seed(0)
    options = dict(arch=ARCH, num_classes=5, head_hidden_size=32) | kwargs
    return timm.create_model('nalaformer_tiny', **options).eval()


def outputs_of(model: nn.Module, image: torch.Tensor = IMAGE) -> tuple[torch.Tensor, ...]:
    """All stages' outputs by a plain backbone with the model's weights."""
    backbone = NaLaFormer(ARCH, out_norm=False).eval()
    backbone.load_state_dict(model.backbone.state_dict())
    return backbone(image)


def assert_equal(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_all_variants_are_listed():
    assert timm.list_models('nalaformer*') == sorted(MODELS)
    assert timm.list_models(module='nalaformer') == sorted(MODELS)
    assert all(timm.is_model(name) for name in MODELS)
    assert timm.list_pretrained('nalaformer*') == []


@pytest.mark.parametrize('name', MODELS)
def test_variants(name):
    parameters, drop_path, channels = MODELS[name]
    with torch.device('meta'):
        model = timm.create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == parameters
    assert model.backbone.layers[-1].blocks[-1].drop_path.drop_prob == pytest.approx(drop_path)
    assert (model.num_classes, model.in_chans) == (1000, 3)
    assert (model.num_features, model.head_hidden_size) == (channels, 1024)

    cfg = model.default_cfg
    assert cfg is model.pretrained_cfg
    assert cfg['architecture'] == name
    assert (cfg['input_size'], cfg['interpolation']) == ((3, 224, 224), 'bicubic')
    assert cfg['mean'] == (0.485, 0.456, 0.406)
    assert cfg['std'] == (0.229, 0.224, 0.225)
    assert 'url' not in cfg
    state = model.state_dict()
    assert state[cfg['first_conv'] + '.weight'].shape[1:] == (3, 3, 3)
    assert state[cfg['classifier'] + '.weight'].shape == (1000, 1024)
    assert model.get_classifier() is model.get_submodule(cfg['classifier'])


def test_size_of_the_last_stage_at_the_default_input_size():
    model = timm.create_model('nalaformer_xtiny', num_classes=0, global_pool='').eval()
    with torch.no_grad():
        out = model(torch.zeros(1, *model.default_cfg['input_size']))
    assert out.shape == (1, 1024, *model.default_cfg['pool_size'])


def golden_classifier(golden) -> nn.Module:
    state = golden.under('state.')
    classes, width = state['head.weight'].shape[:2]
    options = dict(num_classes=classes, head_hidden_size=width)
    if 'linear' in golden.path.name:
        options['stage_attention'] = ('nala',) * 4
    model = timm.create_model('nalaformer_tiny', arch=golden.arch, **options)
    model.load_state_dict(convert(state, 'classifier').state)
    return model.eval()


def test_logits_of_the_release(golden):
    with torch.no_grad():
        logits = golden_classifier(golden)(golden['input'])
    expected = golden['eval.logits']
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_is_mmpretrains_classifier(micro):
    mmpretrain = pytest.importorskip('mmpretrain.registry')
    importlib.import_module('mmpretrain.models')
    model = golden_classifier(micro)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        classifier = mmpretrain.MODELS.build(
            dict(
                type='ImageClassifier',
                backbone=dict(type='NaLaFormer', arch=micro.arch, out_indices=(3,), out_norm=False),
                neck=dict(type='NaLaFormerNeck', in_channels=64, out_channels=32),
                head=dict(type='LinearClsHead', num_classes=5, in_channels=32),
            )
        ).eval()
    assert classifier.state_dict().keys() == model.state_dict().keys()
    classifier.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_equal(model(micro['input']), classifier(micro['input']))


def test_classifier_starts_as_the_release_draws_it():
    model = create(num_classes=200, head_hidden_size=200)
    for classes in (200, 100):
        if classes != model.num_classes:
            model.reset_classifier(classes)
        fc = model.get_classifier()
        assert fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not fc.bias.any()


def test_gradient_in_every_parameter():
    model = create(drop_path_rate=0.0).train()
    model(IMAGE).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_parts_make_the_whole():
    model = create()
    features = model.forward_features(IMAGE)
    assert_equal(features, outputs_of(model)[-1])
    pre_logits = model.forward_head(features, pre_logits=True)
    neck = model.neck.project(features)
    assert_equal(pre_logits, neck.mean((2, 3)))
    assert_equal(model.forward_head(features), model.head.fc(pre_logits))
    assert_equal(model(IMAGE), model.forward_head(features))

    model.reset_classifier(0)
    assert_equal(model(IMAGE), pre_logits)
    assert isinstance(model.get_classifier(), nn.Identity)
    model.reset_classifier(0, '')
    assert_equal(model(IMAGE), neck)
    assert (model.num_classes, model.num_features, model.head_hidden_size) == (0, 24, 32)

    model.reset_classifier(7, 'avg')
    assert_equal(model(IMAGE), model.head.fc(pre_logits))
    assert model(IMAGE).shape == (2, 7)
    assert not model.head.training

    model.reset_classifier(0, reset_other=True)
    assert_equal(model(IMAGE), features.mean((2, 3)))
    assert model.head_hidden_size == 24


@pytest.mark.parametrize(
    ('pool', 'expected'),
    [
        ('avg', lambda x: x.mean((2, 3))),
        ('fast', lambda x: x.mean((2, 3))),
        ('max', lambda x: x.amax((2, 3))),
        ('avgmax', lambda x: (x.mean((2, 3)) + x.amax((2, 3))) / 2),
        ('catavgmax', lambda x: torch.cat((x.mean((2, 3)), x.amax((2, 3))), 1)),
    ],
)
def test_pooling(pool, expected):
    model = create(global_pool=pool)
    neck = model.neck.project(model.forward_features(IMAGE))
    pre_logits = model.forward_head(model.forward_features(IMAGE), pre_logits=True)
    assert pre_logits.shape[1] == model.head_hidden_size == model.get_classifier().in_features
    torch.testing.assert_close(pre_logits, expected(neck))
    torch.testing.assert_close(create(global_pool=pool, num_classes=0)(IMAGE), expected(neck))


@pytest.mark.parametrize(
    'options',
    [
        dict(feature_map='cosine', attn_impl='plain'),
        dict(stage_attention=('softmax', 'nala', 'nala', 'nala')),
        dict(norm_cfg=dict(type='GN', num_groups=2)),
        dict(in_chans=1),
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_backbone(options):
    model = create(**options)
    in_channels = options.pop('in_chans', 3)
    backbone = NaLaFormer(ARCH, in_channels, out_norm=False, **options).eval()
    backbone.load_state_dict(model.backbone.state_dict())
    image = IMAGE[:, :in_channels]
    assert_equal(model.forward_features(image), backbone(image)[-1])
    assert model.in_chans == in_channels
    norm = nn.GroupNorm if 'norm_cfg' in options else nn.BatchNorm2d
    assert isinstance(model.neck.norm, norm)


@pytest.mark.parametrize(('given', 'expected'), [(None, 0.1), (0, 0.0), (0.25, 0.25)])
def test_drop_path_rate(given, expected):
    with torch.device('meta'):
        model = timm.create_model('nalaformer_tiny', drop_path_rate=given)
    rates = [b.drop_path.drop_prob for layer in model.backbone.layers for b in layer.blocks]
    assert rates == pytest.approx(torch.linspace(0, expected, 12).tolist())


def test_modes_and_frozen_stages_reach_the_backbone():
    model = create(frozen_stages=1, norm_eval=True).train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, _ in model.named_parameters()} - trained
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if name.startswith(('backbone.patch_embed.', 'backbone.layers.0.'))
    }
    assert not model.backbone.layers[1].downsample.norm.training
    assert model.neck.norm.training


def test_what_timms_training_script_passes():
    """Whatever its user leaves alone is None or timm's default."""
    model = timm.create_model(
        'nalaformer_xtiny',
        pretrained=False,
        in_chans=3,
        num_classes=10,
        drop_rate=0.25,
        drop_path_rate=None,
        drop_block_rate=None,
        global_pool=None,
        bn_momentum=None,
        bn_eps=None,
        scriptable=False,
        checkpoint_path='',
    )
    assert model.head.drop.p == 0.25
    assert model.head.global_pool.pool_type == 'avg'
    assert model.get_classifier().out_features == 10


@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        (dict(featuremap='cosine'), TypeError, r"options \[.*'feature_map'.*got \['featuremap'\]"),
        (dict(bn_momentum=0.1), TypeError, r"got \['bn_momentum'\]"),
        (dict(out_norm=True), TypeError, r"got \['out_norm'\]"),
        (dict(out_indices=(1, 2)), TypeError, 'out_indices goes with features_only=True'),
        (dict(feature_map='sine'), ValueError, "feature_map must be one of .*, got 'sine'"),
        (dict(num_classes=-1), ValueError, 'num_classes must be an integer from 0 up, got -1'),
        (dict(global_pool=''), ValueError, "global_pool='' needs num_classes=0"),
        (dict(global_pool='median'), AssertionError, 'Invalid pool type: median'),
        (dict(head_hidden_size=0), ValueError, 'out_channels must be a positive integer, got 0'),
        (dict(pretrained=True), RuntimeError, 'No pretrained weights exist for nalaformer_tiny'),
        (dict(features_only=True, out_indices=(4,)), AssertionError, 'feature index 4 is out of'),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        timm.create_model('nalaformer_tiny', **dict(dict(arch=ARCH), **options))


@pytest.mark.parametrize(
    ('out_indices', 'stages'),
    [(None, [0, 1, 2, 3]), ((1, 2), [1, 2]), ((-2, -1), [2, 3]), (2, [2, 3]), ((0,), [0])],
)
def test_features_only(out_indices, stages):
    options = {} if out_indices is None else dict(out_indices=out_indices)
    whole = create()
    model = create(features_only=True, **options)
    weights = {k: v for k, v in whole.state_dict().items() if k in model.model.state_dict()}
    model.model.load_state_dict(weights)
    assert model.feature_info.channels() == [ARCH['channels'][i] for i in stages]
    assert model.feature_info.reduction() == [(4, 8, 16, 32)[i] for i in stages]
    expected = outputs_of(whole)
    outputs = model(IMAGE)
    assert_equal(outputs, [expected[i] for i in stages])
    assert [tuple(out.shape[2:]) for out in outputs] == [SIDES[i] for i in stages]
    assert all(out.is_contiguous() for out in outputs)
    model.train()
    sum(out.square().mean() for out in model(IMAGE)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_features_by_hooks():
    expected = outputs_of(create())
    model = create(features_only=True, feature_cls='hook', out_indices=(0, 3))
    assert_equal(model(IMAGE), [expected[0], expected[3]])


LAYOUTS = {
    'NCHW': lambda x: x,
    'NHWC': lambda x: x.permute(0, 2, 3, 1),
    'NCL': lambda x: x.flatten(2),
    'NLC': lambda x: x.flatten(2).transpose(1, 2),
}


@pytest.mark.parametrize('output_fmt', LAYOUTS)
@pytest.mark.parametrize('stop_early', [False, True])
@pytest.mark.parametrize(
    ('indices', 'stages'), [(None, [0, 1, 2, 3]), (2, [2, 3]), ([2, 0], [0, 2]), ([-3], [1])]
)
def test_forward_intermediates(indices, stages, stop_early, output_fmt):
    model = create()
    expected = outputs_of(model)
    ran = []
    for i, stage in enumerate(model.backbone.layers):
        stage.register_forward_hook(lambda *_, i=i: ran.append(i))
    options = dict(indices=indices, stop_early=stop_early, output_fmt=output_fmt)
    features, outputs = model.forward_intermediates(IMAGE, **options)
    last = stages[-1] if stop_early else 3
    assert ran == list(range(last + 1))
    assert_equal(features, expected[last])
    assert_equal(outputs, [LAYOUTS[output_fmt](expected[i]) for i in stages])
    alone = model.forward_intermediates(IMAGE, intermediates_only=True, norm=True, **options)
    assert_equal(alone, outputs)


def test_unknown_layout():
    message = r"output_fmt must be one of \['NCHW', 'NHWC', 'NCL', 'NLC'\], got 'HWC'"
    with pytest.raises(ValueError, match=message):
        create().forward_intermediates(IMAGE, output_fmt='HWC')


@pytest.mark.parametrize(
    ('indices', 'kept', 'last'), [([1], [1], 1), (1, [3], 3), ([0, -2], [0, 2], 2)]
)
def test_prune(indices, kept, last):
    model = create()
    expected = outputs_of(model)
    names = list(model.state_dict())
    assert model.prune_intermediate_layers(indices) == kept
    behind = tuple(f'backbone.layers.{i}.' for i in range(last + 1, 4))
    gone = ('neck.', 'head.', f'backbone.layers.{last}.downsample.', *behind)
    assert list(model.state_dict()) == [name for name in names if not name.startswith(gone)]
    assert_equal(model.forward_features(IMAGE), expected[last])
    assert_equal(model(IMAGE), expected[last].mean((2, 3)))
    channels = ARCH['channels'][last]
    assert model.num_features == model.head_hidden_size == channels
    assert (model.num_classes, model.backbone.out_channels) == (0, (channels,))
    model.reset_classifier(3)
    assert model(IMAGE).shape == (2, 3)


def test_prune_can_leave_the_head():
    model = create()
    logits = model(IMAGE)
    assert model.prune_intermediate_layers([1, 3], prune_head=False) == [1, 3]
    assert_equal(model(IMAGE), logits)


def test_grad_checkpointing():
    model = create(drop_path_rate=0.0).train()
    other = deepcopy(model)
    other.set_grad_checkpointing()
    assert other.backbone.with_cp and not model.backbone.with_cp
    for one in (model, other):
        one(IMAGE).square().mean().backward()
    grads = [[p.grad for p in one.parameters()] for one in (model, other)]
    torch.testing.assert_close(*grads)
    assert_equal(model.forward_intermediates(IMAGE), other.forward_intermediates(IMAGE))
    other.set_grad_checkpointing(False)
    assert not other.backbone.with_cp


# Depths by blocks and by stages; the downsampling goes with the stage that it feeds.
DEPTHS = {
    'backbone.patch_embed.': (0, 0),
    'backbone.layers.0.blocks.0.': (1, 1),
    'backbone.layers.0.downsample.': (2, 2),
    'backbone.layers.1.blocks.0.': (2, 2),
    'backbone.layers.1.blocks.1.': (3, 2),
    'backbone.layers.1.downsample.': (4, 3),
    'backbone.layers.2.blocks.0.': (4, 3),
    'backbone.layers.2.downsample.': (5, 4),
    'backbone.layers.3.blocks.0.': (5, 4),
    'neck.': (6, 5),
    'head.': (6, 5),
}


def expected_depth(name: str, coarse: bool) -> int:
    (depths,) = (depths for prefix, depths in DEPTHS.items() if name.startswith(prefix))
    return depths[coarse]


@pytest.mark.parametrize('coarse', [False, True])
def test_group_matcher(coarse):
    model = create()
    groups = group_parameters(model, model.group_matcher(coarse), reverse=True)
    expected = {name: expected_depth(name, coarse) for name, _ in model.named_parameters()}
    assert groups == expected


def test_layer_and_weight_decay():
    model = create()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    settings = {
        names[id(p)]: (group['lr_scale'], group['weight_decay'])
        for group in groups
        for p in group['params']
    }
    assert settings == {
        name: (0.5 ** (6 - expected_depth(name, False)), 0.05 if p.ndim > 1 else 0.0)
        for name, p in model.named_parameters()
    }


def test_optimizer():
    model = create()
    optimizer = create_optimizer_v2(model, opt='adamw', lr=1e-3, weight_decay=0.05)
    plain = {id(p) for g in optimizer.param_groups if not g['weight_decay'] for p in g['params']}
    assert {name for name, p in model.named_parameters() if id(p) in plain} == {
        name for name, p in model.named_parameters() if p.ndim == 1
    }


@pytest.mark.parametrize('size', [(1, 1), (40, 64), (65, 33)])
def test_sizes_are_free(size):
    model = create()
    image = torch.rand(1, 3, *size)
    features = model.forward_features(image)
    assert features.shape == (1, 24, -(-size[0] // 32), -(-size[1] // 32))
    assert_equal(features, outputs_of(model, image)[-1])


@pytest.mark.parametrize(
    ('record', 'features_only'),
    [
        (lambda model: torch.jit.trace(model, IMAGE), False),
        pytest.param(
            lambda model: torch.export.export(model, (IMAGE,)).module(),
            False,
            marks=pytest.mark.skipif(not EXPORTS_SIZES, reason='needs torch 2.6'),
        ),
        (lambda model: torch.compile(model, fullgraph=True, backend='eager'), True),
    ],
    ids=['trace', 'export', 'compile features'],
)
def test_recorded(record, features_only):
    model = create(arch=ARCH | dict(depths=[1, 1, 1, 1]), features_only=features_only)
    with torch.no_grad():
        torch.testing.assert_close(record(model)(IMAGE), model(IMAGE), rtol=1e-5, atol=1e-5)


def test_device_and_dtype():
    model = create(dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model.reset_classifier(3)
    assert model(IMAGE.double()).dtype == torch.float64
    assert create(device='meta', features_only=True).model.backbone.out_indices == (3,)
    with torch.device('meta'):
        model = timm.create_model('nalaformer_tiny')
    model.reset_classifier(3)
    assert {p.device.type for p in model.parameters()} == {'meta'}


def trained_model() -> nn.Module:
    """A model with other weights and statistics than :func:`create` gives."""
    model = create()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.1, 0.5)
    return model


def save(model: nn.Module, folder, kind: str) -> str:
    """Write a checkpoint as timm and safetensors do."""
    state = model.state_dict()
    path = str(folder / f'weights.{"safetensors" if kind == "safetensors" else "pth"}')
    if kind == 'safetensors':
        save_file(state, path)
    else:
        torch.save(dict(state_dict=state, epoch=3) if kind == 'timm' else state, path)
    return path


@pytest.mark.parametrize('kind', ['plain', 'timm', 'safetensors'])
def test_checkpoints(kind, tmp_path):
    trained = trained_model()
    path = save(trained, tmp_path, kind)
    expected = trained(IMAGE)
    assert_equal(create(checkpoint_path=path)(IMAGE), expected)
    model = create()
    load_checkpoint(model, path)
    assert_equal(model(IMAGE), expected)


@pytest.mark.parametrize('num_classes', [-1, '7', 2.0, None, True])
def test_a_wrong_number_of_classes_leaves_the_classifier(num_classes):
    model = create()
    head = model.head
    message = f'^num_classes must be an integer from 0 up, got {num_classes!r}$'
    with pytest.raises(ValueError, match=message):
        model.reset_classifier(num_classes, reset_other=True)
    assert model.head is head and model.neck is not None and model.num_classes == 5


def test_loading_is_strict():
    model = create()
    state = model.state_dict()
    model.load_state_dict(state)
    gamma = state.pop('backbone.layers.0.blocks.0.gamma_1')
    with pytest.raises(RuntimeError, match=r'Missing key.*layers\.0\.blocks\.0\.gamma_1'):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*backbone\.gamma'):
        model.load_state_dict(state | {'backbone.gamma': gamma})


def pretrained(path: str, **options) -> nn.Module:
    cfg = dict(file=path, num_classes=5)
    return create(pretrained=True, pretrained_cfg_overlay=cfg, **options)


def test_pretrained_from_a_file(tmp_path):
    """The way of timm to weights for another number of classes or channels, or for features."""
    trained = trained_model()
    path = save(trained, tmp_path, 'plain')
    assert_equal(pretrained(path)(IMAGE), trained(IMAGE))

    model = pretrained(path, num_classes=9)
    assert model(IMAGE).shape == (2, 9)
    assert_equal(model.forward_features(IMAGE), trained.forward_features(IMAGE))

    gray = IMAGE[:, :1]
    features = trained.forward_features(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(pretrained(path, in_chans=1).forward_features(gray), features)

    expected = outputs_of(trained)[1:3]
    assert_equal(pretrained(path, features_only=True, out_indices=(1, 2))(IMAGE), list(expected))


def test_a_head_that_timm_would_not_take_is_an_error(tmp_path):
    path = save(trained_model(), tmp_path, 'plain')
    message = r"the model's 5 classes.* num_classes=1000 in .* give .*dict\(num_classes=5, \.\.\.\)"
    with pytest.raises(RuntimeError, match=message):
        create(pretrained=True, pretrained_cfg_overlay=dict(file=path))


def test_pretrained_of_the_release(micro, tmp_path):
    path = str(tmp_path / 'release.pth')
    torch.save(dict(model=micro.under('state.'), epoch=3), path)
    whole = golden_classifier(micro)
    options = dict(arch=micro.arch, head_hidden_size=32)
    assert_equal(pretrained(path, **options)(micro['input']), whole(micro['input']))
    model = pretrained(path, num_classes=9, **options)
    assert_equal(model.forward_features(micro['input']), whole.forward_features(micro['input']))


@pytest.mark.parametrize(
    ('old', 'new', 'message'),
    [
        ('neck.', None, r'pretrained weights: 7 missing: neck\.norm\.bias, .* and 1 more'),
        ('backbone.layers.1.blocks.1.', None, r'pretrained weights: 24 missing: backbone\.layers'),
        ('head.', 'decode_head.', r'unknown .*\(2\).*: decode_head\.fc\.weight'),
    ],
)
def test_pretrained_weights_of_another_model(old, new, message, tmp_path):
    """With other classes timm itself loads whatever fits."""
    state = {
        k.replace(old, new or ''): v
        for k, v in create().state_dict().items()
        if new is not None or not k.startswith(old)
    }
    path = str(tmp_path / 'weights.pth')
    torch.save(state, path)
    with pytest.raises(RuntimeError, match=message):
        pretrained(path, num_classes=9)


WRAPPERS = [
    ('mmseg', 'TIMMBackbone'),
    ('mmpretrain', 'TIMMBackbone'),
    ('mmdet', 'mmpretrain.TIMMBackbone'),
]


def build_wrapper(scope: str, kind: str, **options) -> nn.Module:
    for package in {scope, kind.partition('.')[0] if '.' in kind else scope}:
        pytest.importorskip(f'{package}.models')
    cfg = dict(
        type=kind, model_name='nalaformer_tiny', arch=ARCH, head_hidden_size=32, pretrained=False
    )
    with DefaultScope.overwrite_default_scope(scope):
        registry = importlib.import_module(f'{scope}.registry').MODELS
        return registry.build(dict(cfg, **options))


@pytest.mark.parametrize(('scope', 'kind'), WRAPPERS)
def test_wrapper_of_openmmlab(scope, kind):
    wrapper = build_wrapper(scope, kind, features_only=True, out_indices=(1, 2, 3))
    wrapper.init_weights()
    backbone = NaLaFormer(ARCH, out_indices=(1, 2, 3), out_norm=False, drop_path_rate=0.0)
    backbone.load_state_dict(wrapper.timm_model.model.backbone.state_dict())
    for training in (False, True):
        outputs = []
        for model in (wrapper, backbone):
            model.train(training)
            outputs.append(list(model(IMAGE)))
        assert_equal(*outputs)
    for outs in outputs:
        sum(out.square().mean() for out in outs).backward()
    names = dict(backbone.named_parameters())
    for name, parameter in wrapper.timm_model.model.backbone.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        assert_equal(parameter.grad, names[name].grad)
    assert len(list(wrapper.parameters())) == len(names)


def test_wrapper_of_mmpretrain_without_features_only():
    wrapper = build_wrapper('mmpretrain', 'TIMMBackbone')
    wrapper.train(False)  # in mmpretrain, neither this nor eval() returns the model
    model = wrapper.timm_model
    (out,) = wrapper(IMAGE)
    assert_equal(out, model.neck.project(model.backbone(IMAGE)[-1]))


def test_wrapper_of_mmseg_with_weights(tmp_path):
    trained = trained_model()
    path = save(trained, tmp_path, 'plain')
    overlay = dict(file=path, num_classes=5)
    options = dict(features_only=True, pretrained=True, pretrained_cfg_overlay=overlay)
    wrapper = build_wrapper('mmseg', 'TIMMBackbone', **options).eval()
    wrapper.init_weights()
    assert_equal(wrapper(IMAGE), list(outputs_of(trained)))


SCRIPT = """
import sys, timm
from helper import CODE
if __name__ == '__main__':
    print(__file__, sys.argv, sys.modules['__main__'].CODE, timm.is_model('nalaformer_tiny'))
    sys.exit(CODE)
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / 'a clone'
    folder.mkdir()
    (folder / 'helper.py').write_text('CODE = 3\n')
    path = folder / 'train.py'
    path.write_text(SCRIPT)
    return path


def test_scripts_of_timm_run_by_torchrun(script):
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    command = [*launcher, '-m', 'mmnala.timm_models', str(script), '--lr', '0.1']
    done = subprocess.run(
        command, cwd=script.parent.parent, env=ENVIRONMENT, capture_output=True, text=True
    )
    argv = [str(script), '--lr', '0.1']
    assert f'{script} {argv} 3 True' in done.stdout, done.stderr
    assert 'RuntimeWarning' not in done.stderr
    assert 'exitcode  : 3' in done.stderr


def run_module(monkeypatch, *args) -> object:
    """The exit status that ``python -m mmnala.timm_models`` would end with."""
    monkeypatch.setattr(sys, 'argv', ['mmnala.timm_models', *map(str, args)])
    monkeypatch.setattr(sys, 'path', list(sys.path))
    try:
        runpy.run_module('mmnala.timm_models', run_name='__main__')
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize('code', [0, 5])
def test_exit_codes(code, monkeypatch, tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(f'import sys\nif {code}: sys.exit({code})\n')
    assert run_module(monkeypatch, path) == code


def test_errors_of_a_script_pass_through(monkeypatch, tmp_path):
    path = tmp_path / 'script.py'
    path.write_text('raise KeyError("its own")\n')
    with pytest.raises(KeyError, match='its own'):
        run_module(monkeypatch, path)


def test_missing_script(monkeypatch, tmp_path, capsys):
    path = tmp_path / 'train.py'
    expected = f'error: script {path}: expected an existing Python file'
    assert run_module(monkeypatch, path) == expected
    assert run_module(monkeypatch) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith('are required: script, args')
