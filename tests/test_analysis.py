"""Attention of single queries, its entropy, and contributions of channels, with their tools."""

import csv
import math
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import timm
import torch
from conftest import Golden
from mmengine.config import Config
from mmengine.registry import MODELS
from PIL import Image
from scipy.stats import spearmanr
from torch import nn
from toy import run_tool, write_detection_config, write_scenes, write_segmentation_config

from mmnala import NaLaFormer
from mmnala.analysis import attention_map, contributions, norm_entropy, subject
from mmnala.analysis.attention import (
    Heads,
    Layer,
    attention_layers,
    attention_weights,
    entropy,
    select_block,
    visit_attention,
)
from mmnala.analysis.subject import Picture, unique_names
from mmnala.engine.attention_monitor import sample_attention
from mmnala.engine.errors import InputError
from mmnala.ops import FEATURE_MAPS
from mmnala.ops.plain import plain_attention

ARCH = Golden('nalaformer_micro').arch
KINDS = ('softmax', *FEATURE_MAPS)


def make_model(kind: str) -> NaLaFormer:
    torch.manual_seed(0)
    softmax = kind == 'softmax'
    return (
        NaLaFormer(
            arch=ARCH,
            stage_attention=('softmax' if softmax else 'nala',) * 4,
            feature_map='signed' if softmax else kind,
        )
        .double()
        .eval()
    )


def make_image() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, 64, 128, dtype=torch.float64, generator=generator)


def operator_inputs(model: nn.Module, image: torch.Tensor) -> dict:
    """Of each layer its module, inputs and what the operator makes of its queries and keys."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__ == 'GatedAttention':
            module.register_forward_hook(
                lambda module, args, output, name=name: found.update({name: (module, *args)})
            )
    model(image)
    return found


@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_maps_are_rows_of_the_explicit_matrix(kind):
    model, image = make_model(kind), make_image()
    picture = Picture('x', image, np.zeros((64, 128, 3), np.uint8), (128, 256))
    points = [(0.0, 0.0), (255.0, 127.0), (50.0, 90.0)]
    maps = attention_map.attention_maps(model, picture, points)
    assert [m.point for m in maps] == points * 5
    for name, (module, x, rotary) in operator_inputs(model, image).items():
        own = [m for m in maps if m.layer.name == name]
        query, key = (module._split_heads(part) for part in module.qkvg(x).chunk(4, -1)[:2])
        rows, columns = x.shape[1:3]
        tokens, stride = rows * columns, 64 // rows
        identity = torch.eye(tokens, dtype=torch.float64)
        if kind == 'softmax':
            matrix = nn.functional.scaled_dot_product_attention(
                *(plain_rotary(part, rotary) for part in (query, key)),
                identity.expand(1, module.num_heads, -1, -1),
            )
        else:
            identity = identity.expand(1, module.num_heads, -1, -1)
            matrix = plain_attention(query, key, identity, rotary, kind)
        for (px, py), found in zip(points, own, strict=True):
            token = int(py / 2 // stride) * columns + int(px / 2 // stride)
            expected = matrix[0, :, token].unflatten(-1, (rows, columns)) * tokens
            torch.testing.assert_close(torch.tensor(found.weights), expected, rtol=0, atol=1e-10)
            assert found.kind == kind
            mean = attention_map.average_heads(found).weights
            assert np.allclose(mean[0], expected.mean(0))


def plain_rotary(x: torch.Tensor, rotary: tuple) -> torch.Tensor:
    cos, sin = (table[:, ::2] for table in rotary)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


@pytest.mark.parametrize('kind', KINDS)
def test_entropies_are_those_of_the_monitor(kind):
    model, image = make_model(kind), make_image()
    layers = norm_entropy.norms_and_entropies(model, [image, image], 10)
    assert [(v.layer.stage, v.layer.block) for v in layers] == [
        *((0, 0), (1, 0), (1, 1), (2, 0), (3, 0))
    ]
    modules = operator_inputs(model, image)
    for values in layers:
        module, x, rotary = modules[values.layer.name]
        sample = sample_attention(module, x, rotary, 10)
        expected = torch.cat((sample.entropy, sample.entropy), -1).detach().numpy()
        assert values.kind == kind and np.allclose(values.entropy, expected, rtol=0, atol=1e-12)
        picks = np.linspace(0, x.shape[1] * x.shape[2] - 1, min(10, x.shape[1] * x.shape[2]))
        query, key = (
            module._split_heads(part)[0, :, picks.astype(int)].norm(dim=-1).detach().numpy()
            for part in module.qkvg(x).chunk(4, -1)[:2]
        )
        number = query.shape[-1]
        assert values.image.tolist() == [0] * number + [1] * number
        assert np.allclose(values.query_norm[:, number:], query)
        assert np.allclose(values.key_norm[:, :number], key)


@pytest.mark.parametrize('kind', KINDS)
def test_longer_queries_are_sharper_in_norm_aware_attention_alone(kind):
    torch.manual_seed(2)
    query, key = torch.randn(2, 1, 2, 64, 16, dtype=torch.float64)
    query = 0.05 * query
    heads = Heads(query, key, None if kind == 'softmax' else kind)
    _, _, entropies = norm_entropy.sample_queries(heads, 64)
    assert entropies.shape == (len(norm_entropy.SCALES), 2, 64)
    change = entropies.diff(dim=0)
    if kind in ('signed', 'cosine'):
        assert (change < 0).all()
    elif kind == 'softmax':
        assert (change.mean((1, 2)) < 0).all()
    elif kind in ('relu', 'focused'):
        assert change.abs().max() < 1e-12
    _, _, once = norm_entropy.sample_queries(heads._replace(query=8 * query), 64)
    torch.testing.assert_close(once[norm_entropy.SCALES.index(1.0)], entropies[-1])


def test_correlations_are_of_each_head_over_all_images():
    model = make_model('signed')
    layers = norm_entropy.norms_and_entropies(model, [make_image(), -make_image()], 7)
    rows = norm_entropy.correlation_rows(layers)
    assert [(row['stage'], row['block'], row['head']) for row in rows] == [
        *((0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)),
        *((2, 0, h) for h in range(3)),
        *((3, 0, h) for h in range(4)),
    ]
    values, row = layers[1], rows[2]
    for name, norms in (('query', values.query_norm), ('key', values.key_norm)):
        expected = spearmanr(norms[1], values.entropy[1])
        assert (row[f'rho_{name}'], row[f'p_{name}']) == (expected.statistic, expected.pvalue)
    assert row['queries'] == 14 and row['entropy'] == pytest.approx(values.entropy[1].mean())
    assert all(map(math.isnan, norm_entropy.rank_correlation(np.ones(4), np.arange(4))))


@pytest.mark.parametrize(
    ('weights', 'expected'),
    [([1, 0, 0, 0], 0), ([0.25] * 4, 1), ([0.5, 0.5, 0, 0], 0.5), ([0, 0, 0], 0), ([1], 0)],
)
def test_entropy(weights, expected):
    assert entropy(torch.tensor(weights, dtype=torch.float64)).item() == pytest.approx(expected)


SWIN = dict(
    type='SwinTransformer',
    pretrain_img_size=32,
    embed_dims=8,
    depths=(2, 2),
    num_heads=(1, 2),
    strides=(4, 2),
    out_indices=(0, 1),
    window_size=4,
)
VIT = dict(
    type='VisionTransformer', img_size=32, patch_size=8, embed_dims=16, num_layers=2, num_heads=2
)
OTHERS = {
    'mmseg.swin': dict(SWIN, _scope_='mmseg'),
    'mmdet.swin': dict(SWIN, _scope_='mmdet'),
    'mmpretrain.swin': dict(
        type='SwinTransformer',
        arch=dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2)),
        img_size=32,
        window_size=4,
        out_indices=(0, 1),
        _scope_='mmpretrain',
    ),
    'mmseg.vit': dict(VIT, _scope_='mmseg', out_indices=1),
    'mmpretrain.vit': dict(
        type='VisionTransformer',
        arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=16),
        img_size=32,
        patch_size=8,
        _scope_='mmpretrain',
    ),
    'mmseg.mit': dict(
        type='MixVisionTransformer',
        embed_dims=8,
        num_stages=2,
        num_layers=(1, 1),
        num_heads=(1, 2),
        patch_sizes=(7, 3),
        strides=(4, 2),
        sr_ratios=(2, 1),
        out_indices=(0, 1),
        _scope_='mmseg',
    ),
    'timm.swin': dict(
        model_name='swin_tiny_patch4_window7_224',
        img_size=32,
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(1, 2),
    ),
    'timm.vit': dict(
        model_name='vit_tiny_patch16_224',
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        qk_norm=True,
    ),
}


def build_other(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name.startswith('timm'):
        model = timm.create_model(**OTHERS[name], num_classes=0)
    else:
        model = MODELS.build(OTHERS[name])
    with torch.no_grad():
        for parameter in model.parameters():  # biases and position tables start at 0
            parameter.add_(0.3 * torch.randn_like(parameter))
    model = model.double()
    model.eval()  # mmseg's does not return the model
    return model


def own_weights(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    """The attention weights that the layers themselves compute, ``(groups, heads, n, m)``."""
    found, handles = [], []

    def ask(module, args, kwargs, output):
        kwargs = {**kwargs, 'need_weights': True, 'average_attn_weights': False}
        found.append(nn.MultiheadAttention.forward(module, *args, **kwargs)[1])

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_hook(ask, with_kwargs=True))
        elif isinstance(getattr(module, 'attn_drop', None), nn.Dropout):
            module.fused_attn = False
            handles.append(
                module.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0]))
            )
    model(image)
    for handle in handles:
        handle.remove()
    return found


def explicit_weights(model: nn.Module, image: torch.Tensor, monkeypatch) -> list[torch.Tensor]:
    """mmpretrain's ViT hands queries and keys straight to torch's function."""
    found = []

    def attend(query, key, value, **kwargs):
        found.append((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1))
        return found[-1] @ value

    for module in model.modules():
        if hasattr(module, 'scaled_dot_product_attention'):
            monkeypatch.setattr(module, 'scaled_dot_product_attention', attend)
    model(image)
    return list(found)


@pytest.mark.parametrize('name', OTHERS)
@torch.no_grad()
def test_weights_of_other_backbones_are_their_own(name, monkeypatch):
    model = build_other(name)
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    if name == 'mmpretrain.vit':
        expected = explicit_weights(model, image, monkeypatch)
    else:
        expected = own_weights(model, image)
    found, places, key_norms = [], [], []

    def visit(layer, heads):
        groups, _, tokens, _ = heads.query.shape
        rows = [attention_weights(heads, torch.arange(tokens), group) for group in range(groups)]
        found.append(torch.stack(rows))
        places.append((layer.stage, layer.block))
        key_norms.append(norm_entropy.sample_queries(heads, 9)[1])
        assert heads.kind == 'softmax' and heads.grid is None

    visit_attention(model, image, visit)
    assert len(found) == len(expected) > 0
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-10)
    stages = dict(swin=[(0, 0), (0, 1), (1, 0), (1, 1)], vit=[(0, 0), (0, 1)], mit=[(0, 0), (1, 0)])
    assert places == stages[name.split('.')[1]]
    assert [norms is None for norms in key_norms] == [
        name == 'mmseg.mit' and place == (0, 0) for place in places
    ]


@pytest.mark.parametrize('name', [name for name in OTHERS if name.endswith('swin')])
@torch.no_grad()
def test_uniform_attention_in_shifted_windows_has_entropy_1(name):
    model = build_other(name)
    for key, parameter in model.named_parameters():
        if 'qkv' in key or 'relative_position' in key:
            parameter.zero_()
    masked = []
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    visit_attention(model, image, lambda _, heads: masked.append(heads.visible is not None))
    layers = norm_entropy.norms_and_entropies(model, [image], 64)
    assert any(masked)
    for values in layers:
        np.testing.assert_allclose(values.entropy, 1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(values.scaled, 1, rtol=0, atol=1e-12)


def test_a_backbone_without_attention_is_an_error():
    with pytest.raises(ValueError, match='Sequential: it has no attention that is known here'):
        visit_attention(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8), print)


@pytest.mark.parametrize('strategy', contributions.STRATEGIES)
def test_contributions_add_up_to_the_similarity(strategy):
    torch.manual_seed(4)
    query, key = torch.randn(2, 5, 3, 12, dtype=torch.float64)
    parts = contributions.contributions(query, key, strategy)
    if strategy == 'product':
        similarity = (query * key).sum(-1)
    else:
        maps = FEATURE_MAPS[strategy]
        similarity = torch.einsum('...d,...d->...', maps.query(query), maps.key(key))
        assert (parts >= 0).all()
    torch.testing.assert_close(parts.sum(-1), similarity, rtol=1e-12, atol=1e-12)
    survives = parts.abs() > 0
    positive, same = (query > 0) & (key > 0), query * key > 0
    expected = dict(signed=same, relu=positive, focused=positive)
    torch.testing.assert_close(survives, expected.get(strategy, torch.ones_like(survives)))


def test_rows_and_summary_of_a_pair():
    query, key = torch.tensor([2.0, -2.0, 1.0, 0.01]), torch.tensor([1.0, -1.0, -2.0, 1.0])
    rows = contributions.rows(query, key)
    relu = [row for row in rows if row['strategy'] == 'relu']
    assert [row['signs'] for row in relu] == [
        *('both positive', 'both negative', 'opposite', 'both positive')
    ]
    assert [row['contribution'] for row in relu] == pytest.approx([2, 0, 0, 0.01])
    assert sum(row['share'] for row in relu) == pytest.approx(1)
    table = {line['strategy']: line for line in contributions.summary(rows)}
    assert table['product']['similarity'] == pytest.approx(2.01)
    survivors = {name: [line[s] for s in contributions.SIGNS] for name, line in table.items()}
    assert survivors['product'] == ['1 of 2', '1 of 1', '1 of 1']
    assert survivors['signed'] == ['1 of 2', '1 of 1', '0 of 1']
    assert survivors['relu'] == ['1 of 2', '0 of 1', '0 of 1']
    assert survivors['elu'] == ['2 of 2', '0 of 1', '1 of 1']
    with pytest.raises(ValueError, match="strategy must be one of .*, got 'gelu'"):
        contributions.contributions(query, key, 'gelu')


def test_pixels_of_the_file_are_found_in_a_resized_and_padded_image():
    picture = Picture('x', torch.zeros(1, 3, 64, 96), np.zeros((50, 80, 3), np.uint8), (100, 40))
    assert picture.locate(0, 0) == (1.0, 0.25) and picture.locate(39, 99) == (79.0, 49.75)
    assert attention_map.token_at((79.0, 49.75), (4, 6), (64, 96)) == 3 * 6 + 4
    with pytest.raises(ValueError, match='point 40,5: x is 40 wide and 100 high'):
        picture.locate(40, 5)
    with pytest.raises(ValueError, match='alone, and the test pipeline has CenterCrop; take it'):
        picture._replace(moved_by='CenterCrop').locate(1, 1)


def run_pipeline(path, *transforms: dict) -> Picture:
    """What a test pipeline with these transforms makes of an image file."""
    pipeline = [dict(type='mmcv.LoadImageFromFile'), *transforms, dict(type='mmseg.PackSegInputs')]
    cfg = Config(dict(test_dataloader=dict(dataset=dict(pipeline=pipeline))))

    class Model:
        def data_preprocessor(self, batch, training):
            return dict(inputs=batch['inputs'][0][None].float())

    return subject._run_pipeline(cfg, Model(), path)


RESIZE = dict(type='mmseg.Resize', scale=(80, 80), keep_ratio=True)


def test_pixels_are_found_left_and_above_the_padding_of_the_pipeline(tmp_path):
    Image.new('RGB', (40, 30), (9, 8, 7)).save(tmp_path / 'x.png')
    no_flip, pad = dict(type='mmseg.RandomFlip', prob=0.0), dict(type='mmcv.Pad', size=(96, 96))
    picture = run_pipeline(tmp_path / 'x.png', RESIZE, no_flip, pad)
    assert picture.tensor.shape == (1, 3, 96, 96) and picture.size == (30, 40)
    assert picture.image.shape == (60, 80, 3) and (picture.image == (9, 8, 7)).all()
    assert picture.locate(0, 0) == (1, 1) and picture.locate(39, 29) == (79, 59)
    picture = run_pipeline(tmp_path / 'x.png', dict(type='mmcv.Pad', size=(50, 40)), RESIZE)
    assert picture.image.shape == (48, 64, 3) and picture.locate(39, 29) == (63.2, 47.2)


@pytest.mark.parametrize(
    'transform',
    [
        dict(type='mmcv.CenterCrop', crop_size=20),
        dict(type='mmcv.RandomFlip', prob=1.0),
        dict(type='mmseg.RandomRotate', prob=1.0, degree=90.0),
    ],
    ids=lambda transform: transform['type'],
)
def test_pixels_are_not_followed_where_the_pipeline_moves_them(tmp_path, transform):
    Image.new('RGB', (40, 30)).save(tmp_path / 'x.png')
    picture = run_pipeline(
        tmp_path / 'x.png', RESIZE, transform, dict(type='mmcv.Pad', size=(96, 96))
    )
    assert picture.image.shape == (96, 96, 3)
    name = transform['type'].rpartition('.')[2]
    with pytest.raises(ValueError, match=f'point 1,1: .* the test pipeline has {name};'):
        picture.locate(1, 1)


def test_photos_are_turned_as_their_exif_data_say(tmp_path):
    stored = np.zeros((32, 48, 3), np.uint8)
    stored[:16, :, 0], stored[:, :16, 1] = 250, 200
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.fromarray(stored).save(tmp_path / 'x.jpg', exif=exif, quality=95)
    loaded = cv2.imread(str(tmp_path / 'x.jpg'))[..., ::-1].astype(int)
    assert loaded.shape == (48, 32, 3) and loaded[2, 30, 0] > 200 > 50 > loaded[2, 2, 0]
    data = dict(input_size=(3, 48, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    of_timm = subject._prepare_timm(tmp_path / 'x.jpg', data)
    of_pipeline = run_pipeline(tmp_path / 'x.jpg')
    for picture in (of_timm, of_pipeline):
        assert picture.size == (48, 32)
        assert abs(picture.image - loaded).max() <= 3


@pytest.mark.parametrize('suffix', ['png', 'tif'])
def test_grey_of_16_bits_is_scaled(tmp_path, suffix):
    path = str(tmp_path / f'x.{suffix}')
    cv2.imwrite(path, np.linspace(0, 65535, 35 * 20).astype(np.uint16).reshape(20, 35))
    image = np.asarray(subject._read_rgb(path))
    assert np.array_equal(image, cv2.imread(path)[..., ::-1]) and np.ptp(image) == 255


@pytest.mark.parametrize('error', [SyntaxError, ValueError, OSError, None])
def test_images_that_cannot_be_read_are_one_line(tmp_path, monkeypatch, error):
    Image.new('RGB', (40, 30)).save(tmp_path / 'x.png')
    if error is None:
        monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 10)
        message = r'Image size \(1200 pixels\) exceeds limit of 20 pixels'
    else:
        message = 'broken file'
        monkeypatch.setattr(Image.Image, 'convert', Mock(side_effect=error(message)))
    with pytest.raises(InputError, match=f'^--images .*x.png: {message}') as caught:
        subject._read_rgb(tmp_path / 'x.png')
    assert '\n' not in str(caught.value)


def test_names_of_files_differ():
    pictures = [Picture(name, torch.zeros(0), None, None) for name in ('a', 'b', 'a', 'a~1', 'a')]
    assert unique_names(pictures) == ['a', 'b', 'a~1', 'a~1~1', 'a~2']


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp('config')
    write_scenes(folder / 'data')
    return write_segmentation_config(folder / 'config.py', folder / 'data')


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_norm_entropy_tool(config, tmp_path):
    options = ('--out', 'out', '--queries', 5, '--num-images', 2, '--block', 0)
    relu = ('--cfg-options', 'model.backbone.feature_map=relu')
    done = run_tool('analysis/norm_entropy.py', config, *options, *relu, cwd=tmp_path)
    assert done.code == 0, done.output
    heads = 1 + 2 + 2 + 3
    rows = read_csv(tmp_path / 'out' / 'spearman.csv')
    assert [row['kind'] for row in rows] == ['relu'] * 3 + ['softmax'] * 5
    assert {row['queries'] for row in rows} == {'10', '8'}  # the last stage has 4 tokens
    points = read_csv(tmp_path / 'out' / 'points.csv')
    assert {row['image'] for row in points} == {'0', '4'} and len(points) == 10 * 5 + 8 * 3
    scaling = read_csv(tmp_path / 'out' / 'scaling.csv')
    assert len(scaling) == heads * len(norm_entropy.SCALES)
    first = [float(row['entropy']) for row in scaling if row['kind'] == 'relu'][:7]
    assert np.ptp(first) < 1e-6
    assert Image.open(tmp_path / 'out' / 'norm_entropy.png').width > 1000
    again = run_tool('analysis/norm_entropy.py', config, *options, cwd=tmp_path)
    assert again.code == 1
    assert again.output.endswith(
        'error: --out out: expected a new or empty folder; move what is in it, or choose another\n'
    )


def test_an_analysis_that_fails_leaves_no_folder(config, tmp_path):
    (tmp_path / 'broken.pth').write_bytes(b'nothing')
    (tmp_path / 'kept').mkdir()
    for out in ('out', 'kept/new/out'):
        options = ('broken.pth', '--out', out)
        done = run_tool('analysis/norm_entropy.py', config, *options, cwd=tmp_path)
        assert done.code == 1
        assert done.output.endswith('\n') and done.output.count('broken.pth') == 1, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ['broken.pth', 'kept', 'output.log']
    assert not any((tmp_path / 'kept').iterdir())


def test_attention_map_tool_with_a_detector_and_a_checkpoint(tmp_path):
    write_scenes(tmp_path / 'data')
    config = write_detection_config(tmp_path / 'det.py', tmp_path / 'data')
    image = tmp_path / 'data' / 'images' / 'val' / '2.png'
    arguments = (config, '--images', image, image, '--points', '10,20', '63,63')
    done = run_tool('analysis/attention_map.py', *arguments, '--out', 'out', cwd=tmp_path)
    assert done.code == 0, done.output
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == [
        *('2.csv', '2.png', '2~1.csv', '2~1.png')
    ]
    rows = read_csv(tmp_path / 'out' / '2.csv')
    assert len(rows) == 2 * (16**2 + 8**2 + 4**2 + 2**2)
    assert {row['head'] for row in rows} == {'mean'}
    softmax = [float(row['weight']) for row in rows if row['stage'] == '2' and row['x'] == '10.0']
    assert np.mean(softmax) == pytest.approx(1, abs=1e-5)

    options = ('--per-head', '--stages', 1, '--block', 0, '--without-rotary')
    done = run_tool(
        'analysis/attention_map.py', *arguments, *options, '--out', 'out2', cwd=tmp_path
    )
    assert done.code == 0, done.output
    rows = read_csv(tmp_path / 'out2' / '2.csv')
    assert {(row['stage'], row['head']) for row in rows} == {('1', '0'), ('1', '1')}
    similarity = [float(r['weight']) for r in rows if (r['head'], r['x']) == ('1', '63.0')]
    assert min(similarity) >= 0 and np.mean(similarity) == pytest.approx(1, abs=1e-5)


def test_contributions_tool(config, tmp_path):
    options = ('--out', 'pair', '--channels', 7, '--seed', 5)
    done = run_tool('analysis/contributions.py', *options, cwd=tmp_path)
    assert done.code == 0, done.output
    rows = read_csv(tmp_path / 'pair' / 'contributions.csv')
    query, key = contributions.example_pair(7, 5)
    assert [float(row['contribution']) for row in rows[:7]] == pytest.approx((query * key).tolist())

    where = ('--points', '0,0', '63,63', '--stage', 1, '--head', 1)
    done = run_tool('analysis/contributions.py', config, *where, '--out', 'model', cwd=tmp_path)
    assert done.code == 0, done.output
    rows = read_csv(tmp_path / 'model' / 'contributions.csv')
    assert len(rows) == 8 * len(contributions.STRATEGIES)
    last = (*where, '--block', -1)
    done = run_tool('analysis/contributions.py', config, *last, '--out', 'last', cwd=tmp_path)
    assert done.code == 0, done.output
    assert read_csv(tmp_path / 'last' / 'contributions.csv') == rows  # it has one block
    done = run_tool('analysis/contributions.py', config, '--out', 'same', cwd=tmp_path)
    assert done.code == 0, done.output


@pytest.mark.parametrize(
    ('tool', 'options', 'message'),
    [
        ('attention_map', '--points 64,0', 'point 64,0: 0 is 64 wide and 64 high'),
        ('attention_map', '--points 1,1 --stages 4', '--stages 4: expected 0, 1, 2, 3'),
        ('attention_map', '--points 1,1 --block 1', '--block 1: expected -1 to 0'),
        ('attention_map', '--points 1,1 --stages 1 --block -2', '--block -2: expected -1 to 0'),
        ('norm_entropy', '--block -2', '--block -2: expected -1 to 0'),
        ('contributions', '--stage 1 --block -2', '--block -2: expected -1 to 0'),
        ('contributions', '--stage 4', '--stage 4: expected 0, 1, 2, 3'),
        ('attention_map', '--points 1', "--points: expected X,Y such as 120,64, got '1'"),
        ('contributions', '--head 3', '--head 3: expected 0 to 0'),
        ('contributions', '--stage 2', '--stage 2 --block 0: expected a linear attention, stage'),
        ('contributions', '--channels 4', '--channels: only without a config'),
        ('norm_entropy', '--queries 0', "--queries: expected a positive integer, got '0'"),
        ('norm_entropy', '--images none.png', '--images none.png: [Errno 2] No such file'),
        ('norm_entropy', '--images .', '--images .: no .bmp, .jpeg'),
    ],
)
def test_input_that_cannot_work_is_one_line(config, tmp_path, tool, options, message):
    done = run_tool(f'analysis/{tool}.py', config, *options.split(), '--out', 'out/x', cwd=tmp_path)
    assert done.code != 0
    assert message in done.output.splitlines()[-1], done.output
    assert not list((tmp_path / 'out').rglob('*.*'))


def test_a_point_outside_a_later_image_leaves_no_half_result(config, tmp_path):
    for name, width in (('a', 64), ('b', 48)):
        Image.new('RGB', (width, 64)).save(tmp_path / f'{name}.png')
    options = ('--images', 'a.png', 'b.png', '--points', '5,5', '50,50', '--out', 'out')
    done = run_tool('analysis/attention_map.py', config, *options, cwd=tmp_path)
    assert done.output.endswith('error: point 50,50: b is 48 wide and 64 high\n')
    assert not (tmp_path / 'out').exists()


def test_a_block_is_counted_in_its_stage():
    layers = [Layer(f'{s}.{b}', s, b) for s, depth in ((0, 2), (1, 3)) for b in range(depth)]

    def names(*args):
        return [layer.name for layer in select_block(layers, *args)]

    assert names(-1) == ['0.1', '1.2'] and names(0) == ['0.0', '1.0']
    assert names(2, [1]) == ['1.2'] and names(-3, [1]) == ['1.0']
    for block in (2, -3):
        with pytest.raises(InputError, match=f'--block {block}: expected -2 to 1'):
            names(block)
    assert attention_layers(make_model('signed'))[2].name == 'layers.1.blocks.1.attn'


def test_a_checkpoint_that_lacks_weights_is_one_line(config, tmp_path):
    torch.save({'state_dict': {'backbone.patch_embed.proj.0.bias': torch.zeros(4)}}, tmp_path / 'a')
    done = run_tool('analysis/norm_entropy.py', config, 'a', '--out', 'out', cwd=tmp_path)
    assert done.code == 1 and 'error: checkpoint a lacks' in done.output.splitlines()[-1]
    done = run_tool('analysis/norm_entropy.py', config, 'b', '--out', 'out', cwd=tmp_path)
    assert "error: checkpoint must be an existing file, got 'b'" in done.output.splitlines()[-1]


def test_timm_models_by_name(tmp_path):
    Image.new('RGB', (40, 30), (200, 30, 60)).save(tmp_path / 'x.png')
    tiny = ['img_size=32', 'patch_size=8', 'embed_dim=16', 'depth=2', 'num_heads=2']
    arguments = ('--images', 'x.png', '--queries', 6, '--cfg-options', *tiny)
    name = 'timm:vit_tiny_patch16_224'
    done = run_tool('analysis/norm_entropy.py', name, '--out', 'out', *arguments, cwd=tmp_path)
    assert done.code == 0, done.output
    rows = read_csv(tmp_path / 'out' / 'spearman.csv')
    assert [(r['stage'], r['block'], r['kind']) for r in rows[::2]] == [
        *(('0', '0', 'softmax'), ('0', '1', 'softmax'))
    ]
    done = run_tool('analysis/norm_entropy.py', 'timm:x', '--out', 'y', *arguments, cwd=tmp_path)
    assert 'error: timm:x: RuntimeError: Unknown model (x)' in done.output.splitlines()[-1]
    done = run_tool('analysis/norm_entropy.py', name, '--out', 'z', cwd=tmp_path)
    assert '--images: a timm model has no test set' in done.output.splitlines()[-1]
    points = ('--images', 'x.png', '--points', '1,1', '--cfg-options', *tiny)
    done = run_tool('analysis/attention_map.py', name, '--out', 'w', *points, cwd=tmp_path)
    assert 'attention maps are of NaLaFormer alone' in done.output.splitlines()[-1]
