"""Two processes on a machine without a GPU."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import (
    ENVIRONMENT,
    TOOLS,
    Finished,
    run_pair,
    run_tool,
    same,
    weights,
    write_detection_config,
    write_scenes,
    write_segmentation_config,
)

SYNC_BUFFERS = 'custom_hooks.insert(0, dict(type="SyncBuffersHook"))\n'


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('toy') / 'data'
    write_scenes(folder)
    return folder


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def run_script(script: str, *args: object, cwd: Path, port: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        ['bash', os.path.relpath(TOOLS / script, cwd), *map(str, args)],
        cwd=cwd,
        env=dict(ENVIRONMENT, PYTHON=sys.executable, PORT=str(port)),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_scripts_train_and_evaluate(data, tmp_path, port):
    """dist_train.sh leaves the same weights on both ranks, dist_test.sh the figures of test.py."""
    folder = tmp_path / 'a folder'
    folder.mkdir()
    lines = "sync_bn = 'mmcv'\n"  # without it, the statistics would differ
    config = write_segmentation_config(folder / 'seg.py', data, lines)
    options = ['--work-dir', 'the work', '--cfg-options', 'train_cfg.max_iters=6']
    trained = run_script('dist_train.sh', config, 2, *options, cwd=folder, port=port)
    assert trained.returncode == 0, trained.stdout
    work = folder / 'the work'
    assert same(weights(work / 'rank0.pth'), weights(work / 'rank1.pth'))

    arguments = [config, work / 'iter_6.pth']
    alone = run_tool('test.py', *arguments, cwd=folder)
    both = run_script('dist_test.sh', *arguments, 2, cwd=folder, port=port)
    assert both.returncode == 0, both.stdout
    line = r'aAcc: ([\d.]+)  mIoU: ([\d.]+)  mAcc: ([\d.]+)'
    assert re.findall(line, alone.output) == re.findall(line, both.stdout)
    assert len(re.findall(line, alone.output)) == 1


@pytest.mark.parametrize('ranks', [1, 2])
def test_same_seed_same_weights(data, tmp_path, port, ranks):
    """With torch's deterministic algorithms, and by the seed alone."""

    def train(name: str, seed: int) -> dict[str, torch.Tensor]:
        lines = f"randomness = dict(seed={seed}, deterministic=True)\ntrain_cfg['max_iters'] = 4"
        config = write_segmentation_config(tmp_path / f'{name}.py', data, lines)
        if ranks == 1:
            finished = [run_tool('train.py', config, cwd=tmp_path)]
        else:
            finished = run_pair('train.py', config, cwd=tmp_path, port=port)
        assert [rank.code for rank in finished] == [0] * ranks, finished[0].output
        return weights(tmp_path / f'work_dirs/{name}/rank{ranks - 1}.pth')

    first = train('first', seed=7)
    assert same(train('second', seed=7), first)
    assert not same(train('third', seed=8), first)


def test_a_dying_rank_ends_the_run(data, tmp_path, port):
    kill = 'custom_hooks.append(dict(type="KillHook", iteration=2, rank=1))'
    config = write_segmentation_config(tmp_path / 'dying.py', data, kill)
    finished = run_script('dist_train.sh', config, 2, cwd=tmp_path, port=port)
    assert finished.returncode == 1
    assert 'Signal 9 (SIGKILL)' in finished.stdout
    assert not (tmp_path / 'work_dirs' / 'dying' / 'rank0.pth').exists()


def test_scripts_name_their_arguments(tmp_path, port):
    for arguments in (['dist_train.sh', 'config.py', 'two'], ['dist_test.sh', 'config.py', '2']):
        finished = run_script(*arguments, cwd=tmp_path, port=port)
        assert finished.returncode == 2
        assert 'usage: ' in finished.stdout


def test_two_processes_equal_one_with_twice_the_batch(data, tmp_path, port):
    """Without randomness, and with norms that look at one image at a time."""
    lines = """
model['backbone'].update(norm_cfg=dict(type='GN', num_groups=4), drop_path_rate=0.0)
model['decode_head'].update(norm_cfg=dict(type='GN', num_groups=4), dropout_ratio=0)
train_dataloader['dataset']['pipeline'] = test_pipeline
train_cfg['max_iters'] = 4
"""
    config = write_segmentation_config(tmp_path / 'pair.py', data, lines)
    batch = 'train_dataloader["batch_size"] = 4'
    single = write_segmentation_config(tmp_path / 'single.py', data, lines + batch)
    alone = run_tool('train.py', single, cwd=tmp_path)
    assert alone.code == 0, alone.output
    for rank in run_pair('train.py', config, cwd=tmp_path, port=port):
        assert rank.code == 0, rank.output

    expected = weights(tmp_path / 'work_dirs/single/rank0.pth')
    first, second = (weights(tmp_path / f'work_dirs/pair/rank{rank}.pth') for rank in range(2))
    assert same(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-6)


TOY_STEP = """
model['backbone'].update(drop_path_rate=0.0)
train_dataloader['batch_size'] = {batch_size}
train_dataloader['dataset'].update(indices=4, pipeline=test_pipeline)
train_dataloader['sampler']['shuffle'] = False
train_cfg['max_epochs'] = 1
find_unused_parameters = True  # the neck leaves the first stage's output
custom_hooks.append(dict(type='SaveLossesHook'))
"""
# SGD, because the first step of AdamW would only show the gradients' signs.
ZOO_STEP = """
_base_ = '{config}'
custom_imports = dict(imports=['toy', 'mmnala'])
custom_hooks = [dict(type='SaveWeightsHook'), dict(type='SaveLossesHook')]
model = dict(backbone=dict(drop_path_rate=0.0), bbox_head=dict(num_classes=1))
train_dataloader = dict(
    batch_size={batch_size}, num_workers=0, persistent_workers=False, sampler=dict(shuffle=False),
    dataset=dict(
        data_root='{data}', ann_file='train.json', data_prefix=dict(img='images/train'),
        metainfo=dict(classes=('box',)), indices=4,
        pipeline=[
            dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True),
            dict(type='PackDetInputs')]))
val_cfg = val_dataloader = val_evaluator = test_cfg = test_dataloader = test_evaluator = None
default_hooks = dict(checkpoint=dict(save_best=None))
optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.02, weight_decay=0.05))
param_scheduler = None
train_cfg = dict(max_epochs=1)
"""


def write_detection_step(path: Path, data: Path, kind: str, batch_size: int) -> Path:
    """Write a config of one iteration on the first four images, SyncBN included."""
    if kind == 'zoo':
        config = TOOLS.parent / 'configs/coco/retinanet_nala-xt_fpn_1x_coco.py'
        path.write_text(ZOO_STEP.format(config=config, data=data, batch_size=batch_size))
        return path
    norm = {
        'layers': "model['backbone']['norm_cfg'] = dict(type='SyncBN')",
        'whole model': "sync_bn = 'torch'",
    }[kind]
    return write_detection_config(path, data, TOY_STEP.format(batch_size=batch_size) + norm)


@pytest.mark.parametrize('kind', ['layers', 'whole model', 'zoo'])
def test_detection_with_sync_bn_equals_one_process_with_twice_the_batch(tmp_path, port, kind):
    """The losses of the first step, each by its name, and the weights behind it.

    RetinaNet divides by its own process's number of positive anchors: all images have the same box.
    """
    data = tmp_path / 'data'
    write_scenes(data, same_boxes=True)
    single = write_detection_step(tmp_path / 'single.py', data, kind, batch_size=4)
    pair = write_detection_step(tmp_path / 'pair.py', data, kind, batch_size=2)
    alone = run_tool('train.py', single, cwd=tmp_path)
    assert alone.code == 0, alone.output
    for rank in run_pair('train.py', pair, cwd=tmp_path, port=port):
        assert rank.code == 0, rank.output

    work_dirs = tmp_path / 'work_dirs'
    expected = weights(work_dirs / 'single/losses0.pth')
    ranks = [weights(work_dirs / f'pair/losses{rank}.pth') for rank in range(2)]
    assert {'loss', 'loss_cls', 'loss_bbox'} <= expected.keys()
    assert ranks[0]['loss'] != ranks[1]['loss']
    mean = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in ranks[0]}
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-4)

    expected = weights(work_dirs / 'single/rank0.pth')
    first, second = (weights(work_dirs / f'pair/rank{rank}.pth') for rank in range(2))
    assert same(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


def test_detection_with_unused_parameters_and_a_killed_run(data, tmp_path, port):
    """Both ranks resume to the weights of the uninterrupted run."""
    lines = """
model['backbone']['norm_cfg'] = dict(type='SyncBN')
model['backbone']['frozen_stages'] = 1
model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameters=True)
"""
    kill = ''.join(
        f'custom_hooks.append(dict(type="KillHook", iteration=4, rank={rank}))\n'
        for rank in range(2)
    )
    config = write_detection_config(tmp_path / 'det.py', data, SYNC_BUFFERS + lines)
    killed = write_detection_config(tmp_path / 'killed.py', data, SYNC_BUFFERS + lines + kill)

    def train(config: Path, *args: str) -> list[Finished]:
        return run_pair('train.py', config, *args, cwd=tmp_path, port=port)

    whole = train(config, '--work-dir', 'whole')
    assert [rank.code for rank in whole] == [0, 0], whole[0].output
    assert [rank.code for rank in train(killed, '--work-dir', 'parts')] == [-9, -9]
    rest = train(config, '--work-dir', 'parts', '--resume')
    assert [rank.code for rank in rest] == [0, 0], rest[0].output

    expected = weights(tmp_path / 'whole/rank0.pth')
    for file in ('whole/rank1.pth', 'parts/rank0.pth', 'parts/rank1.pth'):
        assert same(weights(tmp_path / file), expected), file


def test_another_runner_needs_a_gpu(data, tmp_path):
    config = write_segmentation_config(tmp_path / 'seg.py', data, "runner_type = 'Runner'")
    finished = run_tool('train.py', config, '--launcher', 'pytorch', cwd=tmp_path)
    assert finished.code == 1
    assert "error: runner_type='Runner': without a GPU, only CPUDist" in finished.output
