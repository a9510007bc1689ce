"""tools/train.py and tools/test.py on tiny mmseg and mmdet configs."""

import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from toy import (
    ENVIRONMENT,
    TOOLS,
    Finished,
    run_tool,
    same,
    weights,
    write_detection_config,
    write_scenes,
    write_segmentation_config,
)


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('toy') / 'data'
    write_scenes(folder)
    return folder


@pytest.fixture(scope='module')
def segmentation(data) -> tuple[Path, Path]:
    """A trained mmseg config and its checkpoint."""
    config = write_segmentation_config(data.parent / 'seg.py', data)
    finished = run_tool('train.py', config, cwd=data.parent)
    assert finished.code == 0, finished.output
    return config, data.parent / 'work_dirs' / 'seg' / 'iter_10.pth'


@pytest.fixture(scope='module')
def detection(data) -> tuple[Path, Path]:
    """A trained mmdet config and its checkpoint."""
    config = write_detection_config(data.parent / 'det.py', data)
    finished = run_tool('train.py', config, cwd=data.parent)
    assert finished.code == 0, finished.output
    return config, data.parent / 'work_dirs' / 'det' / 'epoch_3.pth'


def metrics(finished: Finished, name: str) -> list[float]:
    assert finished.code == 0, finished.output
    return [float(value) for value in re.findall(rf'{name}: (-?[\d.e-]+)', finished.output)]


def test_segmentation_predictions_are_saved_and_drawn(segmentation, tmp_path):
    config, checkpoint = segmentation
    arguments = ['--out', 'maps', '--show-dir', 'drawn', '--work-dir', 'work']
    finished = run_tool('test.py', config, checkpoint, *arguments, cwd=tmp_path)

    (mean_iou,) = metrics(finished, 'mIoU')
    maps = {file.stem: np.asarray(Image.open(file)) for file in (tmp_path / 'maps').iterdir()}
    assert maps.keys() == {'0', '1', '2', '3', '4'}
    masks = config.parent / 'data' / 'masks' / 'val'
    truth = np.stack([np.asarray(Image.open(masks / f'{name}.png')) for name in maps])
    predicted = np.stack(list(maps.values()))
    ious = [
        ((truth == label) & (predicted == label)).sum()
        / ((truth == label) | (predicted == label)).sum()
        for label in range(2)
    ]
    assert mean_iou == pytest.approx(100 * np.mean(ious), abs=0.01)
    assert len(list((tmp_path / 'drawn').rglob('*.png'))) == 5
    assert not (tmp_path / 'work_dirs').exists()


def test_segmentation_predictions_in_a_file_with_tta(segmentation, tmp_path):
    config, checkpoint = segmentation
    arguments = ['--out', 'all.pkl', '--tta', '--work-dir', 'work']
    finished = run_tool('test.py', config, checkpoint, *arguments, cwd=tmp_path)
    assert len(metrics(finished, 'mIoU')) == 1
    samples = pickle.loads((tmp_path / 'all.pkl').read_bytes())
    assert [sample['pred_sem_seg']['data'].shape for sample in samples] == [(1, 64, 64)] * 5


def test_detection_predictions_are_saved_and_drawn(detection, tmp_path):
    config, checkpoint = detection
    arguments = ['--out', 'boxes.pkl', '--show-dir', 'drawn', '--work-dir', 'work']
    finished = run_tool('test.py', config, checkpoint, *arguments, cwd=tmp_path)
    assert len(metrics(finished, 'coco/bbox_mAP')) == 1
    samples = pickle.loads((tmp_path / 'boxes.pkl').read_bytes())
    assert [sample['img_id'] for sample in samples] == [0, 1, 2, 3, 4]
    assert all(sample['pred_instances']['bboxes'].shape == (10, 4) for sample in samples)
    assert len(list((tmp_path / 'drawn').glob('*.png'))) == 5


def test_detection_has_a_default_tta(detection, tmp_path):
    config, checkpoint = detection
    finished = run_tool('test.py', config, checkpoint, '--tta', '--work-dir', 'work', cwd=tmp_path)
    assert len(metrics(finished, 'coco/bbox_mAP')) == 1


def test_options_reach_the_config(segmentation, tmp_path):
    config, _ = segmentation
    options = ['train_cfg.max_iters=2', 'optim_wrapper.optimizer.lr=0.5', 'param_scheduler=None']
    finished = run_tool(
        'train.py', config, '--auto-scale-lr', '--cfg-options', *options, cwd=tmp_path
    )
    # The batch of 2 is a quarter of auto_scale_lr.base_batch_size.
    assert metrics(finished, 'lr')[-2:] == [0.125, 0.125]
    assert (tmp_path / 'work_dirs' / 'seg' / 'iter_2.pth').exists()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['missing.py'], 'config missing.py: .*missing.py'),
        (['{config}', '--cfg-options', 'model'], "--cfg-options 'model': expected KEY=VALUE"),
        (['{config}', '--cfg-options', 'a=[1,2'], r"--cfg-options 'a=\[1,2': expected KEY=VALUE"),
        (['{config}', '--cfg-options', 'a=)1,('], r"--cfg-options 'a=\)1,\(': expected KEY=VALUE"),
        (['{config}', '--cfg-options', 'work_dir=a b'], "'work_dir=a b': a value with blanks must"),
        (['{config}', '--cfg-options', 'randomness.seed.x=1'], '--cfg-options .*randomness.seed'),
        (['{config}', '--resume', 'no.pth'], 'checkpoint no.pth: FileNotFoundError'),
        (['{config}', '--resume', 'foreign.pth'], 'foreign.pth: not a checkpoint of an mmengine'),
        (
            ['{config}', '--auto-scale-lr', '--cfg-options', 'auto_scale_lr={}'],
            'no auto_scale_lr.base_batch_size',
        ),
        (
            ['{config}', '--cfg-options', 'train_dataloader.dataset.data_root=nowhere'],
            'No such file or directory.*nowhere',
        ),
        (
            ['{config}', '--amp', '--cfg-options', 'optim_wrapper.type=ApexOptimWrapper'],
            'optim_wrapper.type is ApexOptimWrapper, expected OptimWrapper or AmpOptimWrapper',
        ),
    ],
)
def test_train_names_bad_input(segmentation, tmp_path, arguments, message):
    config, _ = segmentation
    torch.save(dict(state_dict={}), tmp_path / 'foreign.pth')
    arguments = [argument.replace('{config}', str(config)) for argument in arguments]
    finished = run_tool('train.py', *arguments, cwd=tmp_path)
    assert finished.code == 1
    assert re.search(f'^error: .*{message}', finished.output, re.M), finished.output
    assert 'Traceback' not in finished.output


def test_amp_needs_a_gpu(segmentation, tmp_path):
    finished = run_tool('train.py', segmentation[0], '--amp', cwd=tmp_path)
    assert finished.code == 1
    assert "error: --amp: mmengine's AmpOptimWrapper needs a GPU" in finished.output


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_amp_on_a_gpu(segmentation, tmp_path):
    command = [sys.executable, TOOLS / 'train.py', segmentation[0], '--amp']
    environment = {**ENVIRONMENT, 'CUDA_VISIBLE_DEVICES': '0'}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    checkpoint = torch.load(tmp_path / 'work_dirs/seg/iter_10.pth', weights_only=False)
    assert 'loss_scaler' in checkpoint['optimizer']


@pytest.mark.parametrize(
    ('checkpoint', 'message'),
    [
        ('no.pth', 'checkpoint no.pth: FileNotFoundError'),
        ('truncated.pth', "checkpoint 'truncated.pth' is truncated or no checkpoint: "),
        ('text.pth', "checkpoint 'text.pth' is truncated or no checkpoint: "),
        (
            'foreign.pth',
            r'checkpoint foreign.pth lacks \d+ weights of the model: backbone.patch_embed',
        ),
        (
            'no_buffers.pth',
            r'checkpoint no_buffers.pth lacks \d+ weights of the model: .*running_mean',
        ),
        ('list.pth', 'checkpoint list.pth: its state_dict is no dict of named weights'),
        ('empty.pth', 'checkpoint empty.pth: empty state dict'),
        ('damaged.pth', r"checkpoint 'damaged.pth' .*its part \w+/data/\d+ is damaged"),
        ('text.safetensors', "checkpoint 'text.safetensors' is truncated or no checkpoint"),
        ('wider.pth', r'checkpoint wider.pth does not fit the model: .*\n.*conv_seg.bias'),
    ],
)
def test_test_names_a_bad_checkpoint(segmentation, tmp_path, checkpoint, message):
    config, good = segmentation
    (tmp_path / 'truncated.pth').write_bytes(good.read_bytes()[:5000])
    (tmp_path / 'text.pth').write_text('no checkpoint')
    torch.save(dict(model={'stem.weight': torch.zeros(3)}), tmp_path / 'foreign.pth')
    wider = dict(weights(good), **{'decode_head.conv_seg.bias': torch.zeros(19)})
    torch.save(dict(state_dict=wider), tmp_path / 'wider.pth')
    bare = {k: v for k, v in weights(good).items() if '.running_' not in k}
    torch.save(dict(state_dict=bare), tmp_path / 'no_buffers.pth')
    torch.save(dict(state_dict=[1]), tmp_path / 'list.pth')
    torch.save(dict(state_dict={}), tmp_path / 'empty.pth')
    (tmp_path / 'text.safetensors').write_text('no checkpoint')
    content = bytearray(good.read_bytes())
    bias = weights(good)['decode_head.convs.0.conv.weight'].numpy().tobytes()
    content[content.index(bias)] ^= 1
    (tmp_path / 'damaged.pth').write_bytes(content)
    finished = run_tool('test.py', config, checkpoint, cwd=tmp_path)
    assert finished.code == 1
    assert re.search(f'^error: {message}', finished.output, re.M), finished.output
    assert 'Traceback' not in finished.output


@pytest.mark.parametrize(
    ('task', 'arguments', 'message'),
    [
        ('segmentation', ['--tta', '--cfg-options', 'tta_model=None'], 'no tta_model'),
        ('segmentation', ['--show-dir', 'x'], 'the config has no default_hooks.visualization'),
        ('detection', ['--out', 'boxes.json'], r'--out boxes.json: expected a name ending in .pkl'),
    ],
)
def test_test_names_a_bad_option(request, tmp_path, task, arguments, message):
    config, checkpoint = request.getfixturevalue(task)
    if '--show-dir' in arguments:
        text = config.read_text()
        config = tmp_path / 'plain.py'
        config.write_text(text + 'del default_hooks["visualization"]\n')
    finished = run_tool('test.py', config, checkpoint, *arguments, cwd=tmp_path)
    assert finished.code == 1
    assert re.search(f'^error: .*{message}', finished.output, re.M), finished.output
    assert 'Traceback' not in finished.output


def test_a_folder_of_predictions_is_refused_before_a_classifier_is_built(tmp_path):
    config = tmp_path / 'config.py'
    config.write_text("default_scope = 'mmpretrain'\nmodel = dict(type='CannotBeBuilt')\n")
    torch.save({}, tmp_path / 'w.pth')
    finished = run_tool('test.py', config, 'w.pth', '--out', 'a/new', cwd=tmp_path)
    assert finished.code == 1 and finished.output.splitlines()[-1] == (
        'error: --out a/new: expected a name ending in .pkl or .pickle; a folder, not .json, is '
        "for mmseg and mmdet, the config's default_scope is mmpretrain"
    )
    assert not (tmp_path / 'a').exists()


@pytest.mark.parametrize(
    ('weights', 'message'),
    [
        ({'stem.weight': torch.zeros(3)}, 'it holds no NaLaFormer, its names are stem.weight'),
        ({}, 'empty state dict'),
    ],
)
@pytest.mark.parametrize('script', ['train.py', 'export.py'])
def test_an_init_cfg_that_does_not_fit(segmentation, tmp_path, script, weights, message):
    torch.save(weights, tmp_path / 'w.pth')
    init_cfg = "model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint='w.pth')\n"
    config = tmp_path / 'config.py'
    config.write_text(segmentation[0].read_text() + init_cfg)
    arguments = ['none', 'out.ts', '--static=64x64'] if script == 'export.py' else []
    finished = run_tool(script, config, *arguments, cwd=tmp_path)
    assert finished.code == 1 and 'Traceback' not in finished.output
    assert finished.output.splitlines()[-1].startswith(
        f"error: checkpoint 'w.pth' does not fit the backbone: {message}"
    )


# Each case: the toolbox's config, lines added to it, the iteration in which the training is killed.
RESUMABLE = {
    'iterations': (write_segmentation_config, '', 6),
    'iterations, workers': (
        write_segmentation_config,
        'train_dataloader.update(num_workers=2, persistent_workers=True)',
        6,
    ),
    'epochs': (write_detection_config, '', 7),
    'epochs, workers': (write_detection_config, 'train_dataloader.update(num_workers=2)', 7),
    'epochs, persistent workers': (
        write_detection_config,
        'train_dataloader.update(num_workers=2, persistent_workers=True)',
        7,
    ),
    'iterations, batch sampler, workers': (
        write_detection_config,
        'train_dataloader.update(num_workers=2, sampler=dict(type="InfiniteSampler"))\n'
        'train_cfg = dict(type="IterBasedTrainLoop", max_iters=10, val_interval=5)\n'
        'default_hooks["checkpoint"] = dict(type="CheckpointHook", by_epoch=False, interval=4)\n',
        6,
    ),
}


@pytest.mark.parametrize('case', RESUMABLE)
def test_a_killed_training_resumes_to_the_same_weights(data, tmp_path, case):
    write_config, lines, kill_at = RESUMABLE[case]
    config = write_config(tmp_path / 'toy.py', data, lines)
    killed = write_config(
        tmp_path / 'killed.py',
        data,
        f'{lines}\ncustom_hooks.append(dict(type="KillHook", iteration={kill_at}))',
    )

    whole = run_tool('train.py', config, '--work-dir', 'whole', cwd=tmp_path)
    assert whole.code == 0, whole.output
    assert run_tool('train.py', killed, '--work-dir', 'parts', cwd=tmp_path).code == -9
    assert not (tmp_path / 'parts' / 'rank0.pth').exists()
    rest = run_tool('train.py', config, '--work-dir', 'parts', '--resume', cwd=tmp_path)
    assert rest.code == 0, rest.output
    assert 'resumed epoch' in rest.output

    assert same(weights(tmp_path / 'whole/rank0.pth'), weights(tmp_path / 'parts/rank0.pth'))


def test_the_number_of_workers_does_not_change_the_result(data, segmentation, tmp_path):
    _, checkpoint = segmentation
    config = write_segmentation_config(
        tmp_path / 'workers.py', data, 'train_dataloader.update(num_workers=3)'
    )
    finished = run_tool('train.py', config, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert same(weights(checkpoint), weights(tmp_path / 'work_dirs/workers/iter_10.pth'))


def test_resuming_from_a_named_checkpoint(segmentation, tmp_path):
    config, checkpoint = segmentation
    earlier = tmp_path / 'earlier.pth'
    shutil.copy(checkpoint.with_name('iter_4.pth'), earlier)
    finished = run_tool('train.py', config, '--resume', earlier, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert same(weights(checkpoint), weights(tmp_path / 'work_dirs/seg/iter_10.pth'))
