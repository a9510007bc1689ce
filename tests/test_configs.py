"""The shipped configs: what they say, and that toolboxes run them unchanged."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mmseg
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmseg.apis import MMSegInferencer, inference_model, init_model
from mmseg.registry import MODELS
from PIL import Image
from toy import ENVIRONMENT, run_tool

from mmnala import NaLaFormer
from mmnala.datasets import shapes

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / 'configs'
ADE20K = CONFIGS / 'upernet_nala_ade20k.py'
SHAPES = CONFIGS / 'shapes/upernet_nala-xt_shapes.py'
MIM = Path(mmseg.__file__).parent / '.mim'


def build_model(cfg: Config) -> torch.nn.Module:
    init_default_scope(cfg.default_scope)
    return MODELS.build(cfg.model)


@pytest.fixture(scope='module')
def scenes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('scenes') / 'data'
    shapes.make_dataset(folder, num_train=4, num_val=2, size=96)
    return folder


def data_options(folder: Path) -> list[str]:
    return [
        f'{loader}_dataloader.{option}'
        for loader in ('train', 'val', 'test')
        for option in (f'dataset.data_root={folder}', 'num_workers=0', 'persistent_workers=False')
    ]


def test_variant_channels_are_those_of_the_backbone():
    listed = Config.fromfile(ADE20K).channels
    assert {name: NaLaFormer.out_channels[name] for name in listed} == {
        name: tuple(channels) for name, channels in listed.items()
    }
    assert set(listed) == {'xt', 't', 's', 'b', 'l'}


def test_ade20k_recipe():
    cfg = Config.fromfile(ADE20K)
    stock = Config.fromfile(MIM / 'configs/_base_/datasets/ade20k.py')
    for name in ('train_pipeline', 'test_pipeline', 'val_evaluator', 'test_evaluator'):
        assert cfg[name] == stock[name]
    assert cfg.train_dataloader.dataset == stock.train_dataloader.dataset
    assert cfg.train_dataloader.batch_size * 8 == cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.train_cfg.max_iters == 160000
    assert cfg.optim_wrapper.optimizer.lr == 6e-5
    assert cfg.optim_wrapper.optimizer.weight_decay == 0.01
    warmup, decay = cfg.param_scheduler
    assert (warmup.begin, warmup.end, decay.begin, decay.end) == (0, 1500, 1500, 160000)
    assert cfg.model.backbone.arch == 't'


def test_no_decay_on_norms_and_layer_scales():
    cfg = Config.fromfile(SHAPES)
    model = build_model(cfg)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    decays = {id(p): g['weight_decay'] for g in wrapper.param_groups for p in g['params']}
    norms = (torch.nn.LayerNorm, torch.nn.modules.batchnorm._BatchNorm)
    free = {
        id(p) for m in model.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)
    }
    free |= {id(p) for name, p in model.named_parameters() if 'gamma_' in name}
    assert all(decays[id(p)] == (0 if id(p) in free else 0.01) for p in model.parameters())


def test_the_demos_config_has_the_generators_classes():
    metainfo = Config.fromfile(SHAPES).metainfo
    assert tuple(metainfo.classes) == shapes.CLASSES
    assert [tuple(colour) for colour in metainfo.palette] == list(shapes.PALETTE)


def test_mmsegs_own_tools_run_the_ade20k_config(scenes, tmp_path):
    """Unchanged but for the size of the job; the drawn data set has ADE20K's layout and names."""
    options = [
        *data_options(scenes),
        *(
            'train_cfg.max_iters=1',
            'train_cfg.val_interval=1',
            'default_hooks.checkpoint.interval=1',
        ),
        'train_dataloader.dataset.pipeline.2.scale=(96,96)',
        'train_dataloader.dataset.pipeline.3.crop_size=(64,64)',
        *('model.data_preprocessor.size=(64,64)', 'model.decode_head.channels=16'),
        'val_dataloader.dataset.pipeline.1.scale=(96,96)',
        'test_dataloader.dataset.pipeline.1.scale=(96,96)',
    ]
    for script, arguments in (
        ('train.py', ['--work-dir', 'work']),
        ('test.py', ['work/iter_1.pth', '--work-dir', 'tested']),
    ):
        # A copy, because the original would find the checkout's packages beside it.
        shutil.copy(MIM / 'tools' / script, tmp_path / script)
        command = [sys.executable, script, str(ADE20K), *arguments, '--cfg-options', *options]
        finished = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, text=True, capture_output=True
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert 'mIoU:' in finished.stdout


def test_mmsegs_apis(scenes, tmp_path):
    dataset_meta = dict(classes=shapes.CLASSES, palette=shapes.PALETTE)
    checkpoint = tmp_path / 'model.pth'
    weights = build_model(Config.fromfile(SHAPES)).state_dict()
    torch.save(dict(state_dict=weights, meta=dict(dataset_meta=dataset_meta)), checkpoint)
    model = init_model(str(SHAPES), str(checkpoint), device='cpu')
    images = sorted(map(str, (scenes / 'images/validation').iterdir()))
    result = inference_model(model, images[0]).pred_sem_seg.data
    assert result.shape == (1, 96, 96) and result.max() < 7

    inferencer = MMSegInferencer(str(SHAPES), str(checkpoint), device='cpu')
    maps = inferencer(images, out_dir=str(tmp_path / 'out'))['predictions']
    assert len(maps) == len(images)
    np.testing.assert_array_equal(maps[0], result[0].numpy())
    assert len(list((tmp_path / 'out/vis').iterdir())) == len(images)


def readme_snippet(toolbox: str) -> str:
    text = (ROOT / 'README.md').read_text().split('## In your own config')[1]
    snippet = text.split('```python\n')[1].split('```')[0]
    if toolbox == 'mmdet':  # as the snippet's comments say
        snippet = snippet.replace('decode_head=', 'neck=')
        snippet = re.sub(r'.*(pretrained|auxiliary_head).*\n', '', snippet)
    return snippet


@pytest.mark.parametrize(
    ('toolbox', 'name'),
    [
        ('mmseg', 'swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'),
        ('mmseg', 'upernet/upernet_r50_4xb4-80k_ade20k-512x512'),
        ('mmdet', 'retinanet/retinanet_r50_fpn_1x_coco'),
        ('mmdet', 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco'),
    ],
)
def test_readme_snippet_on_stock_configs(tmp_path, toolbox, name):
    stock = Path(importlib.import_module(toolbox).__file__).parent / f'.mim/configs/{name}.py'
    path = tmp_path / 'config.py'
    path.write_text(f'_base_ = {str(stock)!r}\n' + readme_snippet(toolbox))
    cfg = Config.fromfile(path)
    init_default_scope(toolbox)
    model = importlib.import_module(f'{toolbox}.registry').MODELS.build(cfg.model).eval()
    assert type(model.backbone) is NaLaFormer
    features = model.extract_feat(torch.rand(2, 3, 64, 64))
    if toolbox == 'mmseg':
        assert model.decode_head(features).shape == (2, 150, 16, 16)
        assert model.auxiliary_head(features).shape[1] == 150
    else:
        assert [x.shape[1] for x in features] == [256] * 5


def train_shapes(folder: Path, tmp_path: Path, *options: str):
    options = [
        *data_options(folder),
        'train_cfg.max_iters=1',
        'train_dataloader.batch_size=4',
        *options,
    ]
    return run_tool('train.py', SHAPES, '--cfg-options', *options, cwd=tmp_path)


def test_labels_outside_the_classes_are_named(scenes, tmp_path):
    shutil.copytree(scenes, tmp_path / 'data')
    for path in (tmp_path / 'data/annotations/training').iterdir():
        Image.fromarray(np.full((96, 96), 9, dtype=np.uint8)).save(path)
    finished = train_shapes(tmp_path / 'data', tmp_path)
    assert finished.code != 0
    last = finished.output.splitlines()[-1]
    assert last.startswith('error: ') and 'ADE_train_0000000' in last
    assert 'Traceback' not in finished.output
    assert 'labels [8] after reduce_zero_label, allowed are 0 to 6 and 255' in finished.output


def test_a_head_with_other_classes_is_named(scenes, tmp_path):
    finished = train_shapes(scenes, tmp_path, 'model.decode_head.num_classes=6')
    assert finished.code != 0
    assert 'decode_head.num_classes must be 7' in finished.output.splitlines()[-1]


@pytest.mark.parametrize('emptied', [False, True])
def test_a_missing_or_empty_dataset_is_named(scenes, tmp_path, emptied):
    folder = tmp_path / 'data'
    if emptied:
        shutil.copytree(scenes, folder)
        for path in (folder / 'images/training').iterdir():
            path.unlink()
    finished = train_shapes(folder, tmp_path)
    assert finished.code != 0
    last = finished.output.splitlines()[-1]
    assert last.startswith('error: ')
    assert 'is empty' in last if emptied else str(folder / 'images/training') in last


def test_demo(tmp_path):
    work_dir = tmp_path / 'a demo'
    stale = work_dir / 'predictions/ADE_val_00000099.png'
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, ROOT / 'tools/demo.py', '--max-iters', '2']
    finished = subprocess.run(
        [*command, '--num-train', '8', '--num-val', '8', '--work-dir', work_dir],
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for name in shapes.CLASSES:
        assert f'| {name} |' in ' '.join(finished.stdout.split())
    assert 'mIoU' in finished.stdout
    assert len(list((work_dir / 'overlays').glob('*.png'))) == 8
    strip = Image.open(work_dir / 'overlays/ADE_val_00000001.png')
    assert strip.width == 3 * strip.height
    for name in ('loss.png', 'overlays.png'):
        assert Image.open(work_dir / name).width > 500
