"""Receptive fields, principal components and complexity, with their tools."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import Golden
from mmengine.registry import MODELS
from PIL import Image
from torch import nn
from toy import run_tool, write_detection_config, write_scenes, write_segmentation_config

from mmnala import NaLaFormer
from mmnala.analysis import complexity, feature_pca, receptive_field
from mmnala.analysis.subject import stage_outputs
from mmnala.ops import FEATURE_MAPS

ARCH = Golden('nalaformer_micro').arch


class Stages(nn.Module):
    """Two convolutions that put out one channel each, the second behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 1, 3, padding=1)
        self.second = nn.Conv2d(1, 1, 3, padding=2, dilation=2)

    def forward(self, x):
        x = self.first(x)
        return x, self.second(x)


def test_the_field_of_a_convolution_is_its_kernel():
    torch.manual_seed(0)
    model = Stages().double()
    images = [torch.randn(1, 2, 9, 11, dtype=torch.float64) for _ in range(3)]
    first, second = receptive_field.receptive_fields(model, images)
    expected = np.zeros((9, 11))
    expected[3:6, 4:7] = model.first.weight[0].abs().sum(0).detach().numpy()
    np.testing.assert_allclose(first, expected, rtol=0, atol=1e-12)
    # The second's gradient is the two kernels' convolution, here by one impulse of each channel.
    expected = np.zeros((9, 11))
    for row in range(-2, 3, 2):
        for column in range(-2, 3, 2):
            weight = model.second.weight[0, 0, row // 2 + 1, column // 2 + 1].abs().item()
            part = weight * model.first.weight[0].abs().sum(0).detach().numpy()
            expected[3 + row : 6 + row, 4 + column : 7 + column] += part
    rows, columns = np.nonzero(second)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (1, 7, 2, 8)
    assert (second <= expected + 1e-12).all()  # where they overlap, signs can cancel
    np.testing.assert_allclose(second[1, 2], expected[1, 2])


def test_fields_are_averaged_over_the_images():
    class Square(nn.Module):
        def forward(self, x):
            return x**2

    images = [torch.full((1, 1, 5, 5), value) for value in (1.0, -3.0)]
    (field,) = receptive_field.receptive_fields(Square(), images)
    assert field[2, 2] == pytest.approx((2 + 6) / 2) and field.sum() == field[2, 2]


def test_channels_behind_a_norm_have_a_gradient():
    """Their sum is constant, so that only random signs show where it comes from."""
    torch.manual_seed(0)
    model = NaLaFormer(arch=ARCH).double().eval()
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    fields = receptive_field.receptive_fields(model, [image])
    other = receptive_field.receptive_fields(model, [image], seed=1)
    for i, (field, changed) in enumerate(zip(fields, other, strict=True)):
        x = image.clone().requires_grad_()
        output = model(x)[i]
        centre = output[0, :, output.shape[2] // 2, output.shape[3] // 2]
        (plain,) = torch.autograd.grad(centre.sum(), x)
        assert plain.abs().max() < 1e-10 < 1e-3 < field.max()
        assert not np.allclose(field, changed)
    with pytest.raises(ValueError, match='--images: there are none'):
        receptive_field.receptive_fields(model, [])


def test_squares_that_hold_a_share():
    field = np.zeros((9, 9))
    field[4, 4], field[3, 4], field[4, 1], field[8, 8] = 5, 3, 1, 1
    sides = [receptive_field.side_of_share(field, share) for share in (0.2, 0.5, 0.8, 0.85, 0.99)]
    assert sides == [1, 1, 3, 7, 9]
    assert receptive_field.side_of_share(0 * field, 0.5) == 0
    rows = receptive_field.rows([field])
    assert [(row['share'], row['side']) for row in rows] == [
        (0.2, 1),
        (0.3, 1),
        (0.5, 1),
        (0.99, 9),
    ]
    assert rows[-1]['area_ratio'] == 1 and rows[0]['side_ratio'] == pytest.approx(1 / 9)


def test_images_are_scaled_to_cover_the_size():
    image = torch.arange(12.0).expand(1, 3, 6, 12)
    same = receptive_field.fit(image, (6, 12))
    assert torch.equal(same, image)
    centre = receptive_field.fit(image, (6, 4))
    assert torch.equal(centre[0, 0, 0], torch.tensor([4.0, 5, 6, 7]))
    assert receptive_field.fit(image, (13, 17)).shape == (1, 3, 13, 17)


def test_outputs_that_are_no_feature_maps_are_an_error():
    vit = dict(type='VisionTransformer', img_size=32, patch_size=8, _scope_='mmpretrain')
    arch = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16)
    model = MODELS.build(dict(vit, arch=arch))
    with pytest.raises(ValueError, match='VisionTransformer: its outputs are no feature maps'):
        stage_outputs(model, torch.zeros(1, 3, 32, 32))
    model = MODELS.build(dict(vit, arch=arch, out_type='featmap'))
    assert [x.shape for x in stage_outputs(model, torch.zeros(1, 3, 32, 32))] == [(1, 16, 4, 4)]


def test_outputs_of_timm_have_their_channels_first():
    options = dict(img_size=32, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2))
    name = 'swin_tiny_patch4_window7_224'
    model = timm.create_model(name, **options, features_only=True, out_indices=(0, 1)).eval()
    outputs = stage_outputs(model, torch.randn(1, 3, 32, 32))
    assert [tuple(x.shape) for x in outputs] == [(1, 8, 8, 8), (1, 16, 4, 4)]
    with pytest.raises(ValueError, match='the backbone does not take images of 40x32'):
        stage_outputs(model, torch.randn(1, 3, 40, 32))


def test_principal_components_are_those_of_the_svd():
    torch.manual_seed(1)
    features = torch.randn(6, 5, 7) * torch.tensor([5.0, 4, 3, 2, 1, 0.5])[:, None, None]
    scores, explained = feature_pca.principal_components(features)
    x = features.double().flatten(1).numpy().T
    x = x - x.mean(0)
    left, sizes, right = np.linalg.svd(x, full_matrices=False)
    signs = np.sign([row[np.abs(row).argmax()] for row in right])
    np.testing.assert_allclose(scores.reshape(35, 3), (left * sizes * signs)[:, :3], atol=1e-10)
    np.testing.assert_allclose(explained, sizes**2 / (sizes**2).sum(), atol=1e-12)
    # A turn by 180 degrees of the space leaves the axes, and so their signs.
    np.testing.assert_allclose(feature_pca.principal_components(-features).scores, -scores)


def test_components_of_few_channels_and_of_nothing():
    scores, explained = feature_pca.principal_components(torch.randn(2, 3, 4))
    assert scores.shape == (3, 4, 3) and not scores[..., 2].any() and len(explained) == 2
    scores, explained = feature_pca.principal_components(torch.ones(4, 2, 2))
    assert not scores.any() and not explained.any()
    assert (feature_pca.as_colours(scores) == 0).all()


def test_colours_span_the_percentiles():
    scores = np.stack([np.linspace(a, b, 101) for a, b in ((0, 1), (-5, 5), (3, 3))], -1)[None]
    colours = feature_pca.as_colours(scores)
    np.testing.assert_allclose(colours[0, [0, 1, 50, 99, 100], 1], [0, 0, 0.5, 1, 1], atol=1e-12)
    assert (colours[..., 2] == 0).all()


def by_hand(kinds: tuple[str, ...], feature_map: str, height: int, width: int) -> dict:
    """Multiply-adds and activations of the stages of the micro model, from its formulas."""
    parts = FEATURE_MAPS[feature_map].parts
    found = {}
    for i, kind in enumerate(kinds):
        c, depth, heads = ARCH['channels'][i], ARCH['depths'][i], ARCH['num_heads'][i]
        n = math.ceil(height / 2 ** (i + 2)) * math.ceil(width / 2 ** (i + 2))
        d, hidden = c // heads, int(c * ARCH['mlp_ratios'][i])
        if kind == 'softmax':
            products = 2 * n * n * d * heads
        else:  # the normaliser, the state and its reading, each head
            products = heads * (n * parts * d + 2 * n * parts * d * d)
            elements = heads * (n + parts * d * d + n * d)
            found[i, 'attention', 'activations'] = depth * elements
        found[i, 'attention', 'macs'] = depth * products
        found[i, 'linear', 'macs'] = depth * n * (4 * c * c + c * c + 2 * c * hidden)
        found[i, 'linear', 'activations'] = depth * n * (4 * c + c + hidden + c)
        found[i, 'depthwise', 'macs'] = depth * n * (c * 9 + c * 25 + c * 9 + hidden * 9)
        found[i, 'depthwise', 'activations'] = depth * n * (3 * c + hidden)
        if i < 3:
            after = ARCH['channels'][i + 1]
            half = math.ceil(height / 2 ** (i + 3)) * math.ceil(width / 2 ** (i + 3))
            found[i, 'convolution', 'macs'] = half * 9 * c * after
            found[i, 'convolution', 'activations'] = half * after
    return found


@pytest.mark.parametrize(('feature_map', 'size'), [('signed', (64, 96)), ('relu', (45, 33))])
def test_costs_are_those_computed_by_hand(feature_map, size):
    model = NaLaFormer(arch=ARCH, feature_map=feature_map, attn_impl='lean').eval()
    parameters = complexity.parameters(model)
    rows = complexity.compare(model, [size])
    for kind, kinds in (
        ('configured', ('nala', 'nala', 'softmax', 'softmax')),
        *((name, (name,) * 4) for name in ('nala', 'softmax')),
    ):
        own = {(r['stage'], r['op']): r for r in rows if r['attention'] == kind}
        for (stage, op, quantity), value in by_hand(kinds, feature_map, *size).items():
            assert own[stage, op][quantity] == value, (kind, stage, op, quantity)
        assert sum(row['parameters'] for row in own.values()) == parameters
        assert all(r['macs'] == 0 for (_, op), r in own.items() if op == 'other')
        (total,) = (r for r in complexity.totals(rows) if r['attention'] == kind)
        assert total['gmacs'] * 1e9 == pytest.approx(sum(row['macs'] for row in own.values()))
        stem = math.ceil(size[0] / 2) * math.ceil(size[1] / 2) * 9 * (3 * 8 + 2 * 8 * 8)
        stem += math.ceil(size[0] / 4) * math.ceil(size[1] / 4) * 9 * 8 * 16
        assert own['other', 'convolution']['macs'] == stem
    assert model.layers[0].blocks[0].attn.attention == 'nala'
    assert model.layers[3].blocks[0].attn.attention == 'softmax'


README = (Path(__file__).parents[1] / 'README.md').read_text()
PUBLISHED = {'xt': (6.14, 8), 't': (15.91, 15), 's': (25.65, 26), 'b': (52.0, 52), 'l': (95.43, 95)}


@pytest.mark.parametrize('arch', PUBLISHED)
def test_totals_are_those_of_the_readme(arch):
    row = re.search(rf'^\| {arch.upper()} \|.*$', README, re.M)[0]
    backbone, classifier, at_224, at_512 = (float(x) for x in re.findall(r'([\d.]+) [MG]', row))
    with torch.device('meta'):
        model = NaLaFormer(arch, out_norm=False).eval()
    assert f'{complexity.parameters(model) / 1e6:.2f}' == f'{backbone:.2f}'
    assert classifier == PUBLISHED[arch][0]
    # The larger ones take seconds.
    for size, expected in ((224, at_224), (512, at_512))[: dict(xt=2, t=1).get(arch, 0)]:
        macs = sum(row['macs'] for row in complexity.count(model, (size, size)))
        assert f'{macs / 1e9:.2f}' == f'{expected:.2f}'


def test_parameters_of_the_classifier_are_those_counted_of_the_release():
    import mmnala.timm_models  # noqa: F401

    with torch.device('meta'):
        model = timm.create_model('nalaformer_tiny')
    assert f'{complexity.parameters(model) / 1e6:.2f}' == f'{PUBLISHED["t"][0]:.2f}'


@pytest.mark.parametrize(
    ('name', 'published'),  # "Swin Transformer", arXiv 2103.14030, table 1; torchvision's ResNet-50
    [('swin_tiny_patch4_window7_224', (4.5, 28.3)), ('resnet50', (4.1, 25.6))],
)
def test_other_models_cost_what_is_published(name, published):
    model = timm.create_model(name).eval()
    rows = complexity.count(model, (224, 224))
    assert round(sum(row['macs'] for row in rows) / 1e9, 1) == published[0]
    assert round(sum(row['parameters'] for row in rows) / 1e6, 1) == published[1]


def test_a_size_that_a_model_does_not_take_is_named():
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2
    )
    with pytest.raises(ValueError, match='--sizes 40x40: VisionTransformer cannot be counted'):
        complexity.compare(model.eval(), [(40, 40)])


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp('config')
    write_scenes(folder / 'data')
    return write_segmentation_config(folder / 'config.py', folder / 'data')


def test_receptive_field_tool(config, tmp_path):
    options = ('--size', '48x32', '--num-images', 2, '--out', 'out')
    done = run_tool('analysis/receptive_field.py', config, *options, cwd=tmp_path)
    assert done.code == 0, done.output
    rows = read_csv(tmp_path / 'out' / 'receptive_field.csv')
    assert [row['stage'] for row in rows[::4]] == ['0', '1', '2', '3']
    with np.load(tmp_path / 'out' / 'fields.npz') as fields:
        assert [fields[f'output{i}'].shape for i in range(4)] == [(48, 32)] * 4
        side = receptive_field.side_of_share(fields['output1'], 0.5)
    assert int(rows[6]['side']) == side and rows[6]['share'] == '0.5'
    assert Image.open(tmp_path / 'out' / 'receptive_field.png').width > 1000


def test_feature_pca_tool_with_a_detector(tmp_path):
    write_scenes(tmp_path / 'data')
    config = write_detection_config(tmp_path / 'det.py', tmp_path / 'data')
    images = ('--images', tmp_path / 'data' / 'images' / 'val', '--num-images', 2)
    runs = [
        run_tool('analysis/feature_pca.py', config, *images, '--out', out, cwd=tmp_path)
        for out in ('a', 'b')
    ]
    assert [done.code for done in runs] == [0, 0], runs[0].output
    for name in ('feature_pca.png', 'feature_pca.csv'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()
    rows = read_csv(tmp_path / 'a' / 'feature_pca.csv')
    assert [row['image'] for row in rows] == ['0'] * 12 + ['4'] * 12
    assert [row['channels'] for row in rows[:12:3]] == ['8', '16', '16', '24']


def test_complexity_tool(config, tmp_path):
    options = ('--sizes', '64', '64x96', '--cfg-options', 'model.backbone.feature_map=relu')
    done = run_tool('analysis/complexity.py', config, *options, '--out', 'out', cwd=tmp_path)
    assert done.code == 0, done.output
    assert 'M parameters in decode_head' in done.output
    totals = read_csv(tmp_path / 'out' / 'totals.csv')
    assert [(row['height'], row['width'], row['attention']) for row in totals] == [
        *(
            ('64', width, kind)
            for width in ('64', '96')
            for kind in ('configured', 'nala', 'softmax')
        )
    ]
    rows = read_csv(tmp_path / 'out' / 'complexity.csv')
    macs = sum(
        int(row['macs']) for row in rows if row['attention'] == 'nala' and row['width'] == '96'
    )
    assert float(totals[4]['gmacs']) * 1e9 == pytest.approx(macs)
    done = run_tool('analysis/complexity.py', config, '--sizes', 'x', '--out', 'y', cwd=tmp_path)
    assert "--sizes: expected 224 or HEIGHTxWIDTH, got 'x'" in done.output.splitlines()[-1]
