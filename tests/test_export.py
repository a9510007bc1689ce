"""Exported files against the models that they were made of, and the tools with them."""

import json
import re
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from conftest import Golden
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn
from toy import run_tool, write_detection_config, write_scenes, write_segmentation_config

import mmnala.export
from mmnala import NaLaFormer, __version__
from mmnala.engine.errors import InputError
from mmnala.export import (
    EXPORTS_SIZES,
    AdaptiveAveragePool,
    check_request,
    compute_by_onnx,
    export,
    exportable_form,
    load,
    metadata,
    quantised,
    relative_difference,
)

# One stage of each attention: exporters are slow.
UPERNET = """
model['backbone'] = dict(
    type='NaLaFormer', drop_path_rate=0.2, norm_cfg=dict(type='SyncBN'),
    arch=dict(channels=[8, 16], depths=[1, 1], num_heads=[1, 2], mlp_ratio=2),
    out_indices=(0, 1), stage_attention=('nala', 'softmax'))
model['decode_head'] = dict(
    type='UPerHead', in_channels=[8, 16], in_index=[0, 1], channels=8, num_classes=2,
    dropout_ratio=0.2, norm_cfg=norm_cfg)
model['auxiliary_head'] = dict(
    type='FCNHead', in_channels=16, in_index=1, channels=8, num_convs=1, num_classes=2,
    norm_cfg=norm_cfg)
"""
CLASSIFIER = dict(
    type='mmpretrain.ImageClassifier',
    backbone=dict(
        type='NaLaFormer',
        arch=dict(channels=[16], depths=[1], num_heads=[1], mlp_ratio=2),
        out_indices=(0,),
        stage_attention=('nala',),
    ),
    neck=dict(type='NaLaFormerNeck', in_channels=16, out_channels=32),
    head=dict(type='mmpretrain.LinearClsHead', num_classes=5, in_channels=32),
)
SIZES = [(1, 64, 96), (3, 65, 33), (2, 34, 141)]
needs_open_sizes = pytest.mark.skipif(not EXPORTS_SIZES, reason='needs torch 2.6')


def randomise(model: nn.Module) -> nn.Module:
    """Weights and statistics under which every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if name.endswith('running_var'):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise / max(1, tensor[0].numel()) ** 0.5 if tensor.dim() > 1 else noise)
    return model.eval()


def build(config: dict | Config, scope: str = 'mmseg') -> nn.Module:
    with DefaultScope.overwrite_default_scope(scope):
        return randomise(MODELS.build(config))


def classifier() -> nn.Module:
    import mmpretrain.models  # noqa: F401

    return build(CLASSIFIER, 'mmpretrain')


def image(batch: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height))


def assert_close(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5 * float(e.abs().max()))


@pytest.fixture(scope='module')
def segmentor(tmp_path_factory) -> Path:
    """A folder with a data set, a config, its checkpoint and what tools/export.py makes of it."""
    if not EXPORTS_SIZES:
        pytest.skip('needs torch 2.6')
    folder = tmp_path_factory.mktemp('segmentor')
    write_scenes(folder)
    config = write_segmentation_config(folder / 'config.py', folder, UPERNET)
    model = build_segmentor(config)
    torch.save(dict(state_dict=model.state_dict()), folder / 'model.pth')
    done = run_tool('export.py', config, 'model.pth', 'model.onnx', cwd=folder)
    assert done.code == 0, done.output
    assert re.search(
        r'^model.onnx: 0\.\d MB, largest relative difference \d\.\de-0[678]$', done.output, re.M
    )
    return folder


@torch.no_grad()
def build_segmentor(config: Path) -> nn.Module:
    """A segmentor that finds each of its two classes in half of the places."""
    model = build(Config.fromfile(config).model)
    logits = model.encode_decode(image(2, 64, 64), [dict(img_shape=(64, 64))])
    model.decode_head.conv_seg.bias[0] += (logits[:, 1] - logits[:, 0]).median()
    return model


@pytest.fixture
def torch_segmentor(segmentor) -> nn.Module:
    return build_segmentor(segmentor / 'config.py')


@pytest.mark.parametrize('shape', SIZES)
@torch.no_grad()
def test_onnx_segmentor_gives_the_logits_at_any_size(segmentor, torch_segmentor, shape):
    session = onnxruntime.InferenceSession(segmentor / 'model.onnx')
    x = image(*shape)
    (logits,) = session.run(['logits'], {'image': x.numpy()})
    metas = [dict(ori_shape=shape[1:], img_shape=shape[1:])] * shape[0]
    expected = torch_segmentor.inference(x, metas)
    assert logits.shape == (shape[0], 2, *shape[1:])
    assert_close([torch.from_numpy(logits)], [expected])


def test_onnx_file_can_be_used_without_the_config(segmentor):
    model = onnx.load(segmentor / 'model.onnx')
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [('', 18)]
    (entry,) = model.graph.input
    dims = entry.type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ['batch', 3, 'height', 'width']
    assert {prop.key: json.loads(prop.value) for prop in model.metadata_props} == dict(
        kind='segmentor',
        mmnala_version=__version__,
        mean=[90] * 3,
        std=[60] * 3,
        bgr_to_rgb=True,
        classes=['ground', 'box'],
        palette=[[0, 0, 0], [255, 0, 0]],
    )


SLIDE = ['model.test_cfg.mode=slide', 'model.test_cfg.crop_size=48,40']
SLIDE += ['model.test_cfg.stride=24,20']


@pytest.mark.parametrize('options', [[], ['--tta', '--cfg-options', *SLIDE]])
def test_evaluation_by_onnxruntime(segmentor, tmp_path, options):
    """The same label maps and metrics as with the checkpoint, in windows and with flips too."""
    metrics, maps = [], []
    for file in ('model.pth', 'model.onnx'):
        out = tmp_path / file
        config, weights = segmentor / 'config.py', segmentor / file
        done = run_tool('test.py', config, weights, '--out', out, *options, cwd=tmp_path)
        assert done.code == 0, done.output
        metrics.append(re.search(r'aAcc: .*mAcc: [\d.]+', done.output)[0])
        maps.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert metrics[0] == metrics[1]
    assert maps[0] == maps[1] and len(maps[0]) == 5
    assert len(set(maps[0].values())) == 5  # the maps differ from image to image


@torch.no_grad()
def test_int8_linear_layers(segmentor, torch_segmentor, tmp_path):
    path = tmp_path / 'model.onnx'
    path.write_bytes((segmentor / 'model.onnx').read_bytes())
    path = Path(quantised(str(path)))
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    # Two blocks of four linear layers; products of two activations stay in float.
    assert nodes.count('MatMulInteger') == 8 and 'ConvInteger' not in nodes
    kept = [
        {prop.key: prop.value for prop in onnx.load(file).metadata_props}
        for file in (segmentor / 'model.onnx', path)
    ]
    assert kept[0].items() <= kept[1].items()
    x = image(1, 64, 96)
    expected = torch_segmentor.encode_decode(x, [dict(img_shape=(64, 96))])
    difference = (load(str(path))(x)[0] - expected).abs().max() / expected.abs().max()
    assert 1e-5 < difference < 0.05


@torch.no_grad()
def test_backbone_equals_the_golden_stages(tmp_path):
    """The stages that the public release computed, from a file alone."""
    golden = Golden('nalaformer_micro')
    release = tmp_path / 'release.pth'
    torch.save(golden.under('state.'), release)
    init_cfg = dict(type='Pretrained', checkpoint=str(release))
    model = nn.Module()
    model.backbone = NaLaFormer(golden.arch, out_norm=False, attn_impl='triton', init_cfg=init_cfg)
    model.backbone.init_weights()
    out = str(tmp_path / 'backbone.ts')
    assert export(model, out, 'backbone', static=(64, 96), meta=dict(kind='"backbone"')) < 1e-5
    assert model.backbone.training and model.backbone.layers[0].blocks[0].attn.attn_impl == 'triton'
    for i, stage in enumerate(load(out)(golden['input'])):
        expected = golden[f'eval.stage{i}']
        assert (stage - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
    extra = {'metadata.json': ''}
    torch.jit.load(out, _extra_files=extra)
    assert json.loads(extra['metadata.json']) == dict(kind='"backbone"')


@needs_open_sizes
@torch.no_grad()
def test_torch_export_at_any_size(tmp_path):
    model = classifier()
    out = str(tmp_path / 'model.pt2')
    assert export(model, out, meta=dict(std='null')) < 1e-5
    extra = {'metadata.json': ''}
    program = torch.export.load(out, extra_files=extra)
    assert json.loads(extra['metadata.json']) == dict(std='null')
    for shape in SIZES:
        x = image(*shape)
        assert_close(program.module()(x), [model(x)])


@torch.no_grad()
def test_torchscript_refuses_other_sizes(tmp_path):
    model = classifier()
    out = str(tmp_path / 'model.pt')
    export(model, out, static=(40, 48))
    assert_close(load(out)(image(2, 40, 48)), [model(image(2, 40, 48))])
    for size in ((48, 40), (40, 49), (80, 96)):
        with pytest.raises(torch.jit.Error, match=r'must be \(B, C, 40, 48\), got \[1, 3, '):
            load(out)(image(1, *size))


@needs_open_sizes
@torch.no_grad()
def test_classifier_by_onnxruntime(tmp_path):
    """Static size, int8 beside float32, and mmpretrain's own predictions from the logits."""
    from mmpretrain.structures import DataSample

    model = classifier()
    out = str(tmp_path / 'model.onnx')
    assert export(model, out, static=(40, 48)) < 1e-5
    assert 1e-5 < export(model, str(tmp_path / 'int8.onnx'), static=(40, 48), int8=True) < 0.2
    by_onnx = classifier()
    for parameter in by_onnx.parameters():
        parameter.fill_(float('nan'))
    compute_by_onnx(by_onnx, out)
    x = image(3, 40, 48)
    expected, actual = (m.predict(x, [DataSample() for _ in x]) for m in (model, by_onnx))
    assert_close([s.pred_score for s in actual], [s.pred_score for s in expected])
    assert [s.pred_label for s in actual] == [s.pred_label for s in expected]
    with pytest.raises(InputError, match=r'takes images of \[40, 48\] alone, got \[48, 40\]'):
        by_onnx.predict(image(1, 48, 40))


@pytest.mark.parametrize('cells', [1, 2, 3, 6, (2, 5), (None, 3)])
def test_pooling_by_matrices(cells):
    generator = torch.Generator().manual_seed(0)
    pool, expected = AdaptiveAveragePool(cells), nn.AdaptiveAvgPool2d(cells)
    for height in range(1, 30):
        width = 31 - height
        x = torch.randn(2, 3, height, width, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(pool(x), expected(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize('mode, align_corners', [('nearest', None), ('bilinear', False)])
def test_mmseg_upsampling(mode, align_corners):
    from mmseg.models.utils import Upsample

    upsample = Upsample(scale_factor=2, mode=mode, align_corners=align_corners)
    form = exportable_form(upsample)
    assert type(form) is not Upsample
    for size in ((1, 1), (5, 9), (8, 3)):
        assert torch.equal(form(image(2, *size)), upsample(image(2, *size)))
    halves = Upsample(scale_factor=1.5)
    assert exportable_form(halves) is halves


def test_metadata_of_a_data_set_that_brings_its_classes():
    import mmseg.datasets  # noqa: F401

    cfg = Config(
        dict(
            model=dict(data_preprocessor=dict(type='SegDataPreProcessor', mean=[1.5])),
            test_dataloader=dict(dataset=dict(dataset=dict(type='mmseg.CityscapesDataset'))),
        )
    )
    values = {name: json.loads(value) for name, value in metadata(cfg, 'segmentor').items()}
    assert values['classes'][:2] == ['road', 'sidewalk'] and len(values['palette']) == 19
    assert (values['mean'], values['std'], values['bgr_to_rgb']) == ([1.5], None, False)


@pytest.mark.parametrize(
    'out, options, message',
    [
        ('model.h5', {}, 'expected a name ending in .onnx, .pt2, .pt, .ts'),
        ('model.ts', {}, 'give --static HxW'),
        ('model.pt2', dict(int8=True), '--int8 is for .onnx files'),
        ('taken.pt2', {}, 'taken.pt2 exists already'),
        ('folder/model.pt2', {}, 'there is no such folder'),
    ],
)
def test_requests_that_cannot_work(out, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('taken.pt2').write_text('precious')
    with pytest.raises((InputError, OSError), match=re.escape(message)):
        check_request(out, **dict(dict(static=None, int8=False), **options))
    assert Path('taken.pt2').read_text() == 'precious'


def test_missing_packages(tmp_path, monkeypatch):
    find = mmnala.export.find_spec
    monkeypatch.setattr(mmnala.export, 'find_spec', lambda n: None if 'onnx' in n else find(n))
    monkeypatch.setattr(mmnala.export, 'EXPORTS_SIZES', True)
    message = r"needs onnx, onnxscript, onnxruntime, not installed: pip install 'mmnala\[export\]'"
    with pytest.raises(InputError, match=message):
        check_request(str(tmp_path / 'model.onnx'), None, False)


@pytest.mark.parametrize('name', ['model.onnx', 'model.pt2'])
def test_a_torch_that_is_too_old(name, tmp_path, monkeypatch):
    monkeypatch.setattr(mmnala.export, 'EXPORTS_SIZES', False)
    out = str(tmp_path / name)
    message = f'{out}: {Path(name).suffix} needs torch 2.6 or newer, not {torch.__version__}; '
    with pytest.raises(InputError, match=f'^{re.escape(message)}TorchScript'):
        check_request(out, None, False)
    check_request(str(tmp_path / 'model.ts'), (64, 64), False)


@pytest.mark.parametrize('wrong, expected', [(3.0, 0.5), (float('nan'), float('nan'))])
def test_relative_difference(wrong, expected):
    """Every output by its own scale; NaN wherever it stands."""
    right = [torch.tensor([1.0, -2.0]), torch.tensor([100.0, 1.0])]
    difference = relative_difference([torch.tensor([1.0, -wrong]), right[1] + 1], right)
    assert difference == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize('difference', [1.1e-4, float('nan')])
def test_a_file_that_differs_is_not_kept(difference, tmp_path, monkeypatch):
    monkeypatch.setattr(mmnala.export, 'relative_difference', lambda actual, expected: difference)
    with pytest.raises(InputError, match='differs from the model by .* allowed is 0.0001'):
        export(classifier(), str(tmp_path / 'model.ts'), static=(40, 40))
    assert not list(tmp_path.iterdir())


@needs_open_sizes
def test_what_an_exporter_cannot_express(tmp_path):
    model = classifier()
    model.head.fc.forward = lambda x: x[: int(x.sum())]
    with pytest.raises(InputError) as caught:
        export(model, str(tmp_path / 'model.pt2'), static=(40, 40))
    assert str(caught.value).startswith(f'{tmp_path}/model.pt2: ') and '\n' not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_detectors(tmp_path):
    """The backbone of a detector is exported, a whole detector neither that nor evaluated."""
    write_scenes(tmp_path)
    config = write_detection_config(tmp_path / 'config.py', tmp_path)
    done = run_tool('export.py', config, 'none', 'model.ts', '--static=64x64', cwd=tmp_path)
    assert done.code == 1
    assert re.search('^error: RetinaNet is a detector, .*mmdeploy', done.output, re.M)
    (tmp_path / 'model.onnx').write_bytes(b'')
    done = run_tool('test.py', config, 'model.onnx', cwd=tmp_path)
    assert done.code == 1 and re.search('^error: RetinaNet is a detector', done.output, re.M)
    backbone = ('none', 'backbone.ts', '--part=backbone', '--static=40x64')
    done = run_tool('export.py', config, *backbone, cwd=tmp_path)
    assert done.code == 0, done.output
    shapes = [tuple(x.shape) for x in load(str(tmp_path / 'backbone.ts'))(image(2, 40, 64))]
    assert shapes == [(2, 8, 10, 16), (2, 16, 5, 8), (2, 16, 3, 4), (2, 24, 2, 2)]


@pytest.mark.parametrize(
    'file, message',
    [
        ('absent.onnx', 'absent.onnx: '),
        ('damaged.onnx', 'damaged.onnx: '),
        ('backbone.onnx', 'expected a segmentor, its outputs are stage0'),
        ('classes.onnx', 'classes.onnx: has 3 classes, the config 2'),
    ],
)
def test_files_that_are_no_such_segmentor(torch_segmentor, file, message, tmp_path):
    (tmp_path / 'damaged.onnx').write_bytes(b'no model')
    for name, output in (('backbone', 'stage0'), ('classes', 'logits')):
        values = [
            onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, [1, 3, 8, 8])
            for tensor in ('image', output)
        ]
        node = onnx.helper.make_node('Identity', ['image'], [output])
        graph = onnx.helper.make_graph([node], 'graph', values[:1], values[1:])
        model = onnx.helper.make_model(
            graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid('', 18)]
        )
        onnx.save(model, tmp_path / f'{name}.onnx')
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        compute_by_onnx(torch_segmentor, str(tmp_path / file))
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({}, None),
        (dict(palette='[1]', kind='"other"', mmnala_version='"0"'), None),
        (dict(mean='[90.0, 90.0, 90.0]', classes='null'), None),
        (dict(mean='[90, 91, 90]'), 'mean is [90, 91, 90] in the file, [90, 90, 90] in the config'),
        (dict(std='null'), 'std is None in the file, [60, 60, 60] in the config'),
        (dict(std='0.2,0.3'), "std is '0.2,0.3' in the file"),
        (dict(bgr_to_rgb='false'), 'bgr_to_rgb is False in the file, True in the config'),
        (dict(classes='["ground", "car"]'), "classes[1] is 'car' in the file, 'box' in the config"),
        (dict(classes='["ground"]'), "classes is ['ground'] in the file, ['ground', 'box'] in the"),
    ],
)
def test_onnx_metadata_must_be_the_configs(segmentor, torch_segmentor, tmp_path, change, message):
    cfg = Config.fromfile(segmentor / 'config.py')
    model = onnx.load(segmentor / 'model.onnx')
    onnx.helper.set_model_props(
        model, {prop.key: prop.value for prop in model.metadata_props} | change
    )
    path = str(tmp_path / 'model.onnx')
    onnx.save(model, path)
    if message is None:
        compute_by_onnx(torch_segmentor, path, cfg)
    else:
        with pytest.raises(InputError) as caught:
            compute_by_onnx(torch_segmentor, path, cfg)
        assert str(caught.value).startswith(f'{path}: {message}')
    del model.metadata_props[:]
    onnx.save(model, path)
    compute_by_onnx(torch_segmentor, path, cfg)


def test_evaluation_refuses_another_normalisation(segmentor, tmp_path):
    options = ['--tta', '--cfg-options', 'model.data_preprocessor.mean=90,80,90']
    done = run_tool(
        'test.py', segmentor / 'config.py', segmentor / 'model.onnx', *options, cwd=tmp_path
    )
    assert done.code == 1 and 'Traceback' not in done.output
    message = 'mean is [90, 90, 90] in the file, [90, 80, 90] in the config'
    assert f'error: {segmentor}/model.onnx: {message}' in done.output


@pytest.mark.parametrize('text', ['64', '0x64', '64x', 'axb'])
def test_sizes_of_the_command_line(text, tmp_path):
    done = run_tool('export.py', 'a.py', 'none', 'out.ts', '--static', text, cwd=tmp_path)
    assert done.code == 1
    assert f'error: --static {text}: expected HEIGHTxWIDTH' in done.output
