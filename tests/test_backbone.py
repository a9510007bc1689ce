"""The backbone's interface: shapes, options, registration, errors."""

import importlib
import subprocess
import sys

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmnala import NaLaFormer

TINY = dict(channels=[8, 16, 16, 24], depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 3], mlp_ratio=2)


def tiny(**kwargs) -> NaLaFormer:
    torch.manual_seed(0)
    return NaLaFormer(TINY, **kwargs)


@pytest.mark.parametrize('size', [(1, 1), (2, 3), (33, 64), (65, 31), (7, 130)])
@pytest.mark.parametrize('batch', [1, 3])
def test_output_sides_are_rounded_up(size, batch):
    outputs = tiny().eval()(torch.rand(batch, 3, *size))
    for i, (out, channels) in enumerate(zip(outputs, TINY['channels'], strict=True)):
        stride = 4 * 2**i
        assert out.shape == (batch, channels, *(-(-side // stride) for side in size))
        assert out.isfinite().all()


def test_shapes_on_the_meta_device():
    with torch.device('meta'):
        outputs = tiny()(torch.zeros(2, 3, 64, 96))
    assert [tuple(out.shape[2:]) for out in outputs] == [(16, 24), (8, 12), (4, 6), (2, 3)]


@pytest.mark.parametrize('out_norm', [True, False])
def test_mmcvs_operators_read_the_outputs_right(out_norm):
    """RoIAlign takes memory for contiguous: with another layout it returns other pixels."""
    from mmcv.ops import RoIAlign
    from torchvision.ops import roi_align

    outputs = tiny(out_norm=out_norm).eval()(torch.rand(2, 3, 64, 96))
    assert all(out.is_contiguous() for out in outputs)
    boxes = torch.tensor([[0, 2.0, 3.0, 20.0, 30.0], [1, 10.0, 8.0, 50.0, 60.0]])
    for level, out in enumerate(outputs):
        lateral = nn.Conv2d(out.shape[1], 8, 1)
        features = lateral(out)
        scale = 0.25 / 2**level
        expected = roi_align(features, boxes, 7, scale, aligned=True)
        torch.testing.assert_close(RoIAlign(7, scale, 0)(features, boxes), expected)


def test_images_of_a_batch_do_not_mix():
    model = tiny().double().eval()
    images = torch.rand(2, 3, 40, 56, dtype=torch.float64)
    together = model(images)
    for i in range(2):
        for whole, single in zip(together, model(images[i : i + 1]), strict=True):
            torch.testing.assert_close(whole[i : i + 1], single, atol=1e-10, rtol=1e-10)


def test_class_and_instance_know_the_channels():
    assert NaLaFormer.out_channels['t'] == NaLaFormer.out_channels['tiny'] == (64, 128, 256, 512)
    assert NaLaFormer.out_channels['xt'] == (32, 64, 128, 384)
    assert set(NaLaFormer.out_channels) == {
        *('xt', 't', 's', 'b', 'l'),
        *('xtiny', 'tiny', 'small', 'base', 'large'),
    }
    assert tiny(out_indices=(1, 3)).out_channels == (16, 24)


@pytest.mark.parametrize('word', ['xtiny', 'XT'])
def test_words_name_the_same_variant(word):
    torch.manual_seed(0)
    short = NaLaFormer('xt').state_dict()
    torch.manual_seed(0)
    long = NaLaFormer(word).state_dict()
    assert all(torch.equal(short[k], long[k]) for k in short) and len(short) == len(long)


def test_out_indices_select_stages_and_build_no_more():
    full, part = tiny(), tiny(out_indices=(0, 2))
    part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
    image = torch.rand(1, 3, 64, 64)
    expected = full.eval()(image)
    outputs = part.eval()(image)
    assert len(outputs) == 2
    assert torch.equal(outputs[0], expected[0]) and torch.equal(outputs[1], expected[2])
    part.train()
    sum(out.square().mean() for out in part(torch.rand(2, 3, 64, 64))).backward()
    assert all(p.grad is not None for p in part.parameters())


def test_out_norm_normalises_each_position():
    image = torch.rand(1, 3, 64, 96)
    normed, plain = tiny(), tiny(out_norm=False)
    plain.load_state_dict(
        {
            k: v
            for k, v in normed.state_dict().items()
            if not k.startswith(('norm0', 'norm1', 'norm2', 'norm3'))
        }
    )
    for out, raw in zip(normed.eval()(image), plain.eval()(image), strict=True):
        expected = (raw - raw.mean(1, keepdim=True)) / (
            raw.var(1, keepdim=True, unbiased=False) + 1e-6
        ).sqrt()
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_stage_attention_and_feature_map_change_the_result():
    image = torch.rand(1, 3, 64, 64)
    results = {}
    for name, kwargs in {
        'default': {},
        'cosine': dict(feature_map='cosine'),
        'linear': dict(stage_attention=('nala',) * 4),
        'softmax': dict(stage_attention=('softmax',) * 4),
    }.items():
        results[name] = tiny(**kwargs).eval()(image)
    assert not torch.equal(results['default'][0], results['cosine'][0])
    assert not torch.equal(results['default'][0], results['softmax'][0])
    assert torch.equal(results['default'][1], results['linear'][1])
    assert not torch.equal(results['default'][2], results['linear'][2])


def test_softmax_stage_is_ordinary_attention():
    from mmnala.backbones.nalaformer import GatedAttention
    from mmnala.ops import apply_rotary, rotary_table

    torch.manual_seed(0)
    module = GatedAttention(16, 2, 'softmax', 'signed', 'auto').double()
    query, key, value = torch.randn(3, 1, 3, 4, 16, dtype=torch.float64)
    rotary = rotary_table(3, 4, 8, dtype=torch.float64)
    output = module._attend(query, key, value, rotary).flatten(1, 2)
    for head in (slice(0, 8), slice(8, 16)):
        q, k, v = (x.flatten(1, 2)[..., head] for x in (query, key, value))
        logits = apply_rotary(q, rotary) @ apply_rotary(k, rotary).mT / 8**0.5
        torch.testing.assert_close(output[..., head], logits.softmax(-1) @ v)


def test_drop_path_grows_linearly_and_is_off_in_eval():
    model = tiny(drop_path_rate=0.4)
    rates = [block.drop_path.drop_prob for stage in model.layers for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    image = torch.rand(2, 3, 32, 32)
    model.eval()
    assert torch.equal(model(image)[3], model(image)[3])
    with torch.device('meta'):
        variant = NaLaFormer('b')
    assert variant.layers[-1].blocks[-1].drop_path.drop_prob == pytest.approx(0.4)


def test_layer_scale_init_per_stage():
    model = NaLaFormer({**TINY, 'layer_scale_init': [1, 1, 0.5, 1e-6]})
    scales = [stage.blocks[0].gamma_2 for stage in model.layers]
    for scale, expected in zip(scales, [1, 1, 0.5, 1e-6], strict=True):
        assert torch.equal(scale, torch.full_like(scale, expected))


def test_initialisation_is_deterministic_and_as_published():
    first, second = tiny().state_dict(), tiny().state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    model = NaLaFormer('xt')
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert (module.bias == 0).all()
            assert module.weight.abs().max() <= 2
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all()
    weights = torch.cat([m.weight.flatten() for m in model.modules() if isinstance(m, nn.Conv2d)])
    assert weights.std().item() == pytest.approx(0.02, rel=0.01)
    linear = model.layers[3].blocks[0].ffn.fc1.weight
    assert linear.abs().max() <= linear.shape[1] ** -0.5
    assert linear.std().item() == pytest.approx((linear.shape[1] * 3) ** -0.5, rel=0.01)


@pytest.mark.parametrize(
    ('norm_cfg', 'kind'),
    [
        (dict(type='BN', momentum=0.03), nn.BatchNorm2d),
        (dict(type='SyncBN', requires_grad=True), nn.SyncBatchNorm),
        (dict(type='GN', num_groups=2), nn.GroupNorm),
    ],
)
def test_norm_cfg(norm_cfg, kind):
    model = tiny(norm_cfg=norm_cfg)
    norms = [model.patch_embed.proj[1], model.layers[0].downsample.norm]
    assert all(type(norm) is kind for norm in norms)
    if 'momentum' in norm_cfg:
        assert norms[0].momentum == 0.03
    frozen = tiny(norm_cfg={**norm_cfg, 'requires_grad': False})
    assert not frozen.patch_embed.proj[1].weight.requires_grad


def test_norm_eval_keeps_running_statistics():
    model = tiny(norm_eval=True).train()
    before = model.patch_embed.proj[1].running_mean.clone()
    model(torch.rand(2, 3, 32, 32))
    assert torch.equal(model.patch_embed.proj[1].running_mean, before)
    assert model.layers[0].blocks[0].training


@pytest.mark.parametrize('frozen_stages', [-1, 0, 2, 4])
def test_frozen_stages(frozen_stages):
    model = tiny(frozen_stages=frozen_stages).train()
    parts = [model.patch_embed, *model.layers]
    for i, part in enumerate(parts):
        frozen = i <= frozen_stages
        assert all(p.requires_grad != frozen for p in part.parameters()), i
        assert all(m.training != frozen for m in part.modules()), i
    if frozen_stages < 4:
        sum(out.square().mean() for out in model(torch.rand(2, 3, 64, 64))).backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_checkpointing_gives_the_same_gradients():
    gradients = []
    for with_cp in (False, True):
        model = tiny(with_cp=with_cp, drop_path_rate=0.3).train()
        torch.manual_seed(1)
        sum(out.square().mean() for out in model(torch.ones(2, 3, 32, 32))).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ('with_cp', 'limit'),
    [
        (False, 18),  # 9 of C channels, 4 C of query, key, value and gate, 4 C hidden: 17
        (True, 1.5),  # the block's input
    ],
)
def test_memory_that_a_block_keeps_for_the_backward_pass(with_cp, limit):
    """In tensors of the block's input's size; without recomputing the cheap layers it kept 28."""
    image = torch.rand(1, 3, 128, 128)
    kept = []
    for depth in (1, 3):
        arch = {**TINY, 'channels': [16] * 4, 'num_heads': [1] * 4, 'depths': [depth, 1, 1, 1]}
        model = NaLaFormer(arch | {'mlp_ratio': 4}, out_indices=(0,), with_cp=with_cp).train()
        with torch.profiler.profile(profile_memory=True) as profile:
            outputs = model(image)  # holds the graph while the memory is counted
        kept.append(sum(event.self_cpu_memory_usage for event in profile.key_averages()))
        assert outputs[0].shape == (1, 16, 32, 32)
    assert (kept[1] - kept[0]) / 2 / outputs[0].nbytes < limit


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_with_large_keys_is_finite(dtype):
    model = tiny().train()
    for stage in model.layers:
        for block in stage.blocks:
            channels = block.gamma_1.numel()
            block.attn.qkvg.bias.data[channels : 2 * channels] = 1e3  # the keys
    with torch.autocast('cpu', dtype=dtype):
        outputs = model(torch.rand(2, 3, 64, 64))
        loss = sum(out.float().square().mean() for out in outputs)
    loss.backward()
    assert all(out.isfinite().all() for out in outputs)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_constant_image_is_finite():
    model = tiny().train()
    outputs = model(torch.zeros(2, 3, 64, 64))
    sum(out.square().mean() for out in outputs).backward()
    assert all(out.isfinite().all() for out in outputs)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ('kwargs', 'words'),
    [
        (dict(arch='huge'), "arch must be one of .*'xtiny'.* got 'huge'"),
        (dict(arch=3), 'arch must be a name or a dict, got 3'),
        (dict(arch={**TINY, 'depth': [1]}), "arch must have the keys .*'depths'.* got .*'depth'"),
        (dict(arch={k: v for k, v in TINY.items() if k != 'depths'}), 'arch must have the keys'),
        (
            dict(arch={**TINY, 'depths': [1, 1]}),
            r"arch\['depths'\] must have one value .* \[1, 1\]",
        ),
        (dict(arch={**TINY, 'mlp_ratio': [2] * 3}), r"arch\['mlp_ratio'\] must .* \[2, 2, 2\]"),
        (dict(arch={**TINY, 'num_heads': [1, 2, 2, 4]}), 'multiple of 4 .* got 24 / 4'),
        (dict(arch={**TINY, 'channels': [9, 16, 16, 24]}), 'must start even'),
        (dict(arch={**TINY, 'depths': [1, 0, 1, 1]}), r"arch\['depths'\] must be .* 0"),
        (
            dict(stage_attention=('nala', 'flash', 'softmax', 'softmax')),
            "stage_attention .* 'flash'",
        ),
        (dict(arch={**TINY, 'channels': 8}), r"arch\['channels'\] must be a list, got 8"),
        (dict(arch={**TINY, 'num_heads': None}), r"arch\['num_heads'\] must have one .* got None"),
        (dict(arch={**TINY, 'mlp_ratio': -1}), r"arch\['mlp_ratio'\] must be positive .* .-1"),
        (dict(arch={**TINY, 'mlp_ratio': ['a'] * 4}), r"arch\['mlp_ratio'\] must be positive"),
        (dict(stage_attention=None), 'stage_attention must name 4 .* got None'),
        (dict(feature_map=['signed']), 'feature_map must be one of .* got .*signed'),
        (dict(out_indices=(0, 'a')), "out_indices must be .* got .*'a'"),
        (dict(out_indices=(True,)), 'out_indices must be .* got .*True'),
        (dict(drop_path_rate='0.1'), "drop_path_rate must lie in .* got '0.1'"),
        (dict(frozen_stages=1.0), 'frozen_stages must be -1 to 4, got 1.0'),
        (dict(norm_cfg=None), 'norm_cfg must be a dict, got None'),
        (dict(norm_cfg='BN'), "norm_cfg must be a dict, got 'BN'"),
        (dict(stage_attention=('nala',)), 'stage_attention must name 4'),
        (dict(stage_attention='nala'), "stage_attention must name 4 .* got 'nala'"),
        (dict(feature_map='sine'), "feature_map must be one of .* got 'sine'"),
        (dict(attn_impl='fused'), "attn_impl must be 'auto' or one of .* got 'fused'"),
        (dict(out_indices=(0, 4)), r'out_indices must be .* got \(0, 4\)'),
        (dict(out_indices=(-1,)), r'out_indices must be .* got \(-1,\)'),
        (dict(out_indices=()), r'out_indices must be .* got \(\)'),
        (dict(out_indices=3), 'out_indices must be .* got 3'),
        (dict(drop_path_rate=1.0), 'drop_path_rate must lie in .* got 1.0'),
        (dict(frozen_stages=5), 'frozen_stages must be -1 to 4, got 5'),
        (dict(in_channels=0), 'in_channels must be .* got 0'),
        (dict(norm_cfg=dict(type='Norm')), 'norm_cfg must have a type of .*Norm'),
        (dict(norm_cfg=dict()), 'norm_cfg must have a type of'),
    ],
)
def test_bad_arguments(kwargs, words):
    with pytest.raises(ValueError, match=words):
        NaLaFormer(**{'arch': TINY} | kwargs)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match='drop_rate'):
        MODELS.build(dict(type='NaLaFormer', arch='xt', drop_rate=0.1))


def test_wrong_image_shape_is_an_error():
    with pytest.raises(ValueError, match=r'image must be .*3.* got \(1, 4, 32, 32\)'):
        tiny()(torch.rand(1, 4, 32, 32))


@pytest.mark.parametrize('name', ['NaLaFormer', 'mmdet.NaLaFormer', 'mmseg.NaLaFormer'])
@pytest.mark.parametrize('scope', [None, 'mmdet', 'mmseg'])
def test_builds_in_every_scope(scope, name):
    registries = {None: MODELS}
    for toolbox in ('mmdet', 'mmseg'):
        registries[toolbox] = importlib.import_module(f'{toolbox}.registry').MODELS
    with DefaultScope.overwrite_default_scope(scope):
        for registry in (registries[scope], MODELS):
            assert type(registry.build(dict(type=name, arch=TINY))) is NaLaFormer


def test_scoped_names_resolve_whichever_is_imported_first():
    code = (
        'import mmnala, sys; assert "mmdet" not in sys.modules and "mmcv" not in sys.modules\n'
        'from mmdet.registry import MODELS\n'
        'assert MODELS.get("mmdet.NaLaFormer") is mmnala.NaLaFormer'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


def test_importing_again_raises_nothing():
    code = (
        'import importlib, sys, mmnala\n'
        'from mmengine.registry import MODELS\n'
        'importlib.reload(mmnala)\n'
        'for name in [name for name in sys.modules if name.startswith("mmnala")]:\n'
        '    del sys.modules[name]\n'
        'again = importlib.import_module("mmnala")\n'
        'assert MODELS.get("NaLaFormer") is again.NaLaFormer is not mmnala.NaLaFormer'
    )
    subprocess.run([sys.executable, '-c', code], check=True)
