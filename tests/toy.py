"""Tiny data sets, configs and runs for the tests of the tools.

A tool is run in a fork of a server process that has the toolboxes imported and sees no GPU: that
takes two seconds instead of ten. What only a real command line can show is tested with one.
"""

import json
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from PIL import Image

TOOLS = Path(__file__).parents[1] / 'tools'

# The environment of a process that can import this module and has no GPU.
ENVIRONMENT = dict(
    PATH=os.environ['PATH'],
    PYTHONPATH=str(Path(__file__).parent),
    OMP_NUM_THREADS='1',
    CUDA_VISIBLE_DEVICES='',
)

PARTS = ('datasets', 'engine', 'evaluation', 'models', 'visualization')
_processes = multiprocessing.get_context('forkserver')
_processes.set_forkserver_preload(
    [f'{toolbox}.{part}' for toolbox in ('mmseg', 'mmdet', 'mmpretrain') for part in PARTS]
    + ['mmnala.engine.tools', 'matplotlib.backends.backend_agg', 'setuptools']
)


@HOOKS.register_module()
class KillHook(Hook):
    """Kills its process, as an operating system would, after a training iteration."""

    def __init__(self, iteration: int, rank: int = 0) -> None:
        self.iteration = iteration
        self.rank = rank

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if (runner.iter, runner.rank) == (self.iteration, self.rank):
            os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class SaveWeightsHook(Hook):
    """Saves the weights that each rank ends with."""

    def after_train(self, runner) -> None:
        model = getattr(runner.model, 'module', runner.model)
        torch.save(model.state_dict(), Path(runner.work_dir) / f'rank{runner.rank}.pth')


@HOOKS.register_module()
class SaveLossesHook(Hook):
    """Saves what each rank's first iteration logs: its losses and, with clipping, gradient norm."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 0:
            losses = {name: torch.as_tensor(value) for name, value in outputs.items()}
            torch.save(losses, Path(runner.work_dir) / f'losses{runner.rank}.pth')


@dataclass
class Finished:
    code: int
    output: str


def start(script: str, *args: object, log: Path, cwd: Path, env: dict | None = None):
    """Start a script of ``tools`` in a process of its own."""
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    process = _processes.Process(target=_run, args=(script, args, log, cwd, env or {}))
    process.start()
    return process


def _run(script: str, args: tuple, log: Path, cwd: Path, env: dict) -> None:
    with log.open('w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv = [str(TOOLS / script), *map(str, args)]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does
    runpy.run_path(sys.argv[0], run_name='__main__')


def run_tool(script: str, *args: object, cwd: Path, env: dict | None = None) -> Finished:
    """Run a script of ``tools`` from the folder ``cwd``."""
    log = cwd / 'output.log'
    process = start(script, *args, log=log, cwd=cwd, env=env)
    process.join()
    return Finished(process.exitcode, log.read_text())


def run_pair(script: str, *args: object, cwd: Path, port: int) -> list[Finished]:
    """Run a script of ``tools`` as two ranks."""
    logs = [cwd / f'output{rank}.log' for rank in range(2)]
    shared = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), WORLD_SIZE='2')
    processes = [
        start(
            script,
            *args,
            '--launcher=pytorch',
            log=logs[rank],
            cwd=cwd,
            env=dict(shared, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.join()
    return [Finished(p.exitcode, log.read_text()) for p, log in zip(processes, logs, strict=True)]


def run_ranks(function: Callable[[Path], None], folder: Path) -> None:
    """Call a function of a test module in two processes that talk over gloo."""
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    processes = [_processes.Process(target=_rank, args=(function, folder, i)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def _rank(function: Callable[[Path], None], folder: Path, rank: int) -> None:
    store = f'file://{folder}/store'
    torch.distributed.init_process_group('gloo', init_method=store, rank=rank, world_size=2)
    function(folder)
    torch.distributed.destroy_process_group()


def weights(path: Path) -> dict[str, torch.Tensor]:
    content = torch.load(path, map_location='cpu', weights_only=False)
    return content.get('state_dict', content)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def write_scenes(folder: Path, same_boxes: bool = False) -> None:
    """Write images with one bright box each, as segmentation masks and as COCO boxes.

    ``same_boxes`` puts it where it is in the first image.
    """
    for split, number, seed in (('train', 10, 0), ('val', 5, 1)):
        draw = np.random.default_rng(seed)
        images, annotations = [], []
        for kind in ('images', 'masks'):
            (folder / kind / split).mkdir(parents=True)
        for index in range(number):
            image = draw.integers(0, 90, (64, 64, 3), dtype=np.uint8)
            mask = np.zeros((64, 64), np.uint8)
            if index == 0 or not same_boxes:
                left, top = map(int, draw.integers(4, 28, 2))
            image[top : top + 24, left : left + 24, index % 3] += 150
            mask[top : top + 24, left : left + 24] = 1
            Image.fromarray(image).save(folder / 'images' / split / f'{index}.png')
            Image.fromarray(mask).save(folder / 'masks' / split / f'{index}.png')
            images.append(dict(id=index, file_name=f'{index}.png', width=64, height=64))
            box = dict(bbox=[left, top, 24, 24], area=576, iscrowd=0)
            annotations.append(dict(box, id=index + 1, image_id=index, category_id=1))
        coco = dict(images=images, annotations=annotations, categories=[dict(id=1, name='box')])
        (folder / f'{split}.json').write_text(json.dumps(coco))


_RUNTIME = """
default_scope = '{scope}'
custom_imports = dict(imports=['toy', 'mmnala'])
randomness = dict(seed=3)
visualizer = dict(type='{visualizer}', vis_backends=[dict(type='LocalVisBackend')])
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.02, momentum=0.9))
param_scheduler = [dict(type='PolyLR', eta_min=1e-4, by_epoch=False)]
custom_hooks = [dict(type='IterationSeedHook'), dict(type='SaveWeightsHook')]
auto_scale_lr = dict(base_batch_size=8)
val_cfg = test_cfg = dict()
"""

_BACKBONE = """
backbone = dict(
    type='NaLaFormer', drop_path_rate=0.2, arch=dict(
        channels=[8, 16, 16, 24], depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 3], mlp_ratio=2))
"""

_SEGMENTATION = """
norm_cfg = dict(type='BN')
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[90] * 3, std=[60] * 3, bgr_to_rgb=True, size=(32, 32),
        seg_pad_val=255),
    backbone=backbone,
    decode_head=dict(
        type='FCNHead', in_channels=[8, 16, 16, 24], in_index=[0, 1, 2, 3],
        input_transform='resize_concat', channels=8, num_convs=1, num_classes=2, dropout_ratio=0.2,
        norm_cfg=norm_cfg),
    test_cfg=dict(mode='whole'))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomCrop', crop_size=(32, 32)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
dataset = dict(
    type='BaseSegDataset', data_root='{data}', img_suffix='.png', seg_map_suffix='.png',
    metainfo=dict(classes=('ground', 'box'), palette=[[0, 0, 0], [255, 0, 0]]))
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler'),
    dataset=dict(
        dataset, data_prefix=dict(img_path='images/train', seg_map_path='masks/train'),
        pipeline=train_pipeline))
val_dataloader = test_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        dataset, data_prefix=dict(img_path='images/val', seg_map_path='masks/val'),
        pipeline=test_pipeline))
val_evaluator = test_evaluator = dict(type='IoUMetric')
train_cfg = dict(type='IterBasedTrainLoop', max_iters=10, val_interval=5)
default_hooks = dict(
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=4),
    logger=dict(type='LoggerHook', interval=1, log_metric_by_epoch=False),
    visualization=dict(type='SegVisualizationHook'))
log_processor = dict(by_epoch=False)
tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
        [dict(type='LoadAnnotations')], [dict(type='PackSegInputs')]])]
"""

_DETECTION = """
model = dict(
    type='RetinaNet',
    data_preprocessor=dict(
        type='DetDataPreprocessor', mean=[90] * 3, std=[60] * 3, pad_size_divisor=32),
    backbone=backbone,
    neck=dict(
        type='FPN', in_channels=[8, 16, 16, 24], out_channels=16, start_level=1, num_outs=3),
    bbox_head=dict(
        type='RetinaHead', num_classes=1, in_channels=16, stacked_convs=1, feat_channels=16,
        anchor_generator=dict(
            type='AnchorGenerator', octave_base_scale=2, scales_per_octave=1, ratios=[1.0],
            strides=[8, 16, 32])),
    train_cfg=dict(
        assigner=dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0),
        sampler=dict(type='PseudoSampler'), allowed_border=-1, pos_weight=-1),
    test_cfg=dict(
        nms_pre=50, score_thr=0.0, nms=dict(type='nms', iou_threshold=0.5), max_per_img=10))
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
train_pipeline = [
    *load,
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackDetInputs')]
test_pipeline = [
    *load,
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape',
                                          'scale_factor'))]
test_pipeline.insert(1, dict(type='Resize', scale=(64, 64), keep_ratio=True))
dataset = dict(type='CocoDataset', data_root='{data}', metainfo=dict(classes=('box',)))
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='AspectRatioBatchSampler'),
    dataset=dict(
        dataset, ann_file='train.json', data_prefix=dict(img='images/train'),
        pipeline=train_pipeline))
val_dataloader = test_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        dataset, ann_file='val.json', data_prefix=dict(img='images/val'), test_mode=True,
        pipeline=test_pipeline))
val_evaluator = test_evaluator = dict(type='CocoMetric', ann_file='{data}/val.json')
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=3)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1), visualization=dict(type='DetVisualizationHook'))
"""


def write_segmentation_config(path: Path, data: Path, extra: str = '') -> Path:
    """Write an mmseg config (10 iterations, a checkpoint every 4) with ``extra`` lines."""
    runtime = _RUNTIME.format(scope='mmseg', visualizer='SegLocalVisualizer')
    path.write_text(runtime + _BACKBONE + _SEGMENTATION.replace('{data}', str(data)) + extra)
    return path


def write_detection_config(path: Path, data: Path, extra: str = '') -> Path:
    """Write an mmdet config (3 epochs of 5 iterations) with ``extra`` lines."""
    runtime = _RUNTIME.format(scope='mmdet', visualizer='DetLocalVisualizer')
    path.write_text(runtime + _BACKBONE + _DETECTION.replace('{data}', str(data)) + extra)
    return path
