"""Faults in training: a run ends with one line, and the next one with the undisturbed weights."""

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from faults import (
    checkpoint,
    differences,
    training_state,
    write_tiny_config,
)
from kill_training import kill_at_random
from mmengine.config import Config
from toy import (
    Finished,
    run_pair,
    run_ranks,
    run_tool,
    start,
    write_detection_config,
    write_scenes,
    write_segmentation_config,
)

from mmnala.engine.agreement import highest
from mmnala.engine.errors import InputError
from mmnala.engine.faults import harden, named_faults
from mmnala.engine.non_finite_loss import NonFiniteLossHook, first_non_finite
from mmnala.engine.preemption import PreemptionHook
from mmnala.engine.resuming import check_same, find_resumable
from mmnala.engine.runner import init_gloo
from mmnala.engine.unreadable_image import UnreadableImageHook, unreadable_file
from mmnala.engine.whole_files import remove_partial, write_whole

LAST, BEST = 'iter_12.pth', 'best_score_iter_*.pth'


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('toy') / 'data'
    write_scenes(folder)
    return folder


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> Path:
    """The work folder of the tiny training, undisturbed."""
    return train(tmp_path_factory.mktemp('whole'), 'whole')


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def run_tiny(folder: Path, work_dir: str, extra: str = '', *arguments: str) -> Finished:
    config = write_tiny_config(folder / 'tiny.py', extra)
    return run_tool('train.py', config, '--work-dir', work_dir, *arguments, cwd=folder)


def train(folder: Path, work_dir: str, extra: str = '', *arguments: str) -> Path:
    finished = run_tiny(folder, work_dir, extra, *arguments)
    assert finished.code == 0, finished.output
    return folder / work_dir


def error_line(finished: Finished) -> str:
    """The one line that a run ends with."""
    lines = finished.output.strip().splitlines()
    assert finished.code == 1, finished.output
    assert 'Traceback' not in finished.output
    assert [line for line in lines if line.startswith('error: ')] == lines[-1:]
    return lines[-1]


def hook(kind: str, **arguments: object) -> str:
    return f'custom_hooks.append(dict(type={kind!r}, **{arguments!r}))\n'


def pointer(work_dir: Path) -> str:
    return Path((work_dir / 'last_checkpoint').read_text()).name


def assert_same_end(folder: Path, expected: Path) -> None:
    assert differences(training_state(folder / LAST), training_state(expected / LAST)) == []
    (best,), (expected_best,) = folder.glob(BEST), expected.glob(BEST)
    assert best.name == expected_best.name
    left, right = checkpoint(best)['state_dict'], checkpoint(expected_best)['state_dict']
    assert differences(dict(left), dict(right)) == []


# Saving


def test_a_run_leaves_what_mmengines_hook_leaves(tmp_path, whole):
    """Files, names and content; beside it the tool's other hooks, which change nothing."""
    stock = "default_hooks['checkpoint'].update(type='StockCheckpointHook')"
    extra = 'custom_hooks.append(dict(type="NonFiniteLossHook", action="skip"))\n'
    left = train(tmp_path, 'stock', f'{stock}\n')
    right = train(tmp_path, 'safe', extra)
    names = {path.name for path in left.glob('*.pth')} | {'last_checkpoint'}
    assert names >= {'iter_10.pth', LAST, 'last_checkpoint'} and len(names) == 4
    for folder in (right, whole):
        assert {p.name for p in folder.glob('*.pth')} | {'last_checkpoint'} == names
        assert (folder / 'last_checkpoint').read_text() == str(folder / LAST)
        assert_same_end(folder, left)


def test_killed_before_each_event_of_saving(tmp_path, whole):
    """Write, name, flush the name, the same for the pointer, remove; one checkpoint is kept.

    Each run goes on from what the one before left.
    """
    keep = "default_hooks['checkpoint'].update(max_keep_ckpts=1)\n"
    work_dir = tmp_path / 'parts'
    for event in (*range(8), 9):
        extra = keep + hook('KillAtEventHook', event=event)
        assert run_tiny(tmp_path, 'parts', extra, '--resume').code == -9
        saved = {path.name: checkpoint(path)['meta']['iter'] for path in work_dir.glob('iter_*')}
        assert saved == {f'iter_{step}.pth': step for step in saved.values()}
        assert len(saved) >= (event > 1)
        assert (work_dir / 'last_checkpoint').exists() == (event > 5)
        assert event <= 5 or pointer(work_dir) in saved
    assert_same_end(train(tmp_path, 'parts', keep, '--resume'), whole)
    assert not [path for path in work_dir.iterdir() if path.name.endswith('.partial')]


def test_validations_that_a_kill_prevented_are_made_up_for(tmp_path, whole):
    extra = hook('KillBeforeValidationHook', iteration=4)
    assert run_tiny(tmp_path, 'parts', extra).code == -9
    assert pointer(tmp_path / 'parts') == 'iter_4.pth'
    extra = hook('KillBeforeValidationHook', iteration=12)
    killed = run_tiny(tmp_path, 'parts', extra, '--resume')
    assert killed.code == -9 and 'saved before its validation' in killed.output
    assert pointer(tmp_path / 'parts') == LAST
    finished = run_tiny(tmp_path, 'parts', '', '--resume')
    assert finished.code == 0 and 'saved before its validation' in finished.output
    assert_same_end(tmp_path / 'parts', whole)


def test_a_copied_run_leaves_the_first_one_alone(tmp_path, whole):
    extra = hook('KillBeforeValidationHook', iteration=8)
    assert run_tiny(tmp_path, 'first', extra).code == -9
    first, copy = tmp_path / 'first', tmp_path / 'copy'
    before = {path: path.read_bytes() for path in first.iterdir() if path.is_file()}
    shutil.copytree(first, copy)
    for work_dir, resume in (('copy', 'auto'), ('fork', 'first/iter_8.pth')):
        finished = run_tiny(tmp_path, work_dir, '', '--resume', resume)
        assert finished.code == 0, finished.output
        assert ('first/' in finished.output) == (work_dir == 'fork')
        names = {path.name for path in (tmp_path / work_dir).glob('*.pth')}
        assert names <= {path.name for path in whole.glob('*.pth')} | {'iter_8.pth'}
        assert {p: p.read_bytes() for p in first.iterdir() if p.is_file()} == before
    assert_same_end(copy, whole)


def test_a_file_in_the_place_of_the_work_folder(tmp_path):
    (tmp_path / 'file').touch()
    assert str(tmp_path / 'file') in error_line(run_tiny(tmp_path, 'file'))


def test_a_name_without_number_is_never_without_its_file(tmp_path, whole):
    extra = "default_hooks['checkpoint'].update(filename_tmpl='latest.pth', max_keep_ckpts=1)\n"
    work_dir = train(tmp_path, 'work', extra)
    names = {path.name for path in work_dir.glob('*.pth')}
    assert names == {'latest.pth', 'best_score_latest.pth'}
    assert differences(training_state(work_dir / 'latest.pth'), training_state(whole / LAST)) == []
    assert run_tiny(tmp_path, 'work', extra, '--resume').code == 0


def test_a_full_disk(tmp_path, whole):
    extra = hook('SmallDiskHook', iteration=6, size=150_000)
    finished = run_tiny(tmp_path, 'parts', extra)
    line = error_line(finished)
    path = tmp_path / 'parts' / 'iter_8.pth'
    assert line.startswith(f"error: writing failed: [Errno 27] File too large: '{path}'")
    names = sorted(path.name for path in (tmp_path / 'parts').iterdir() if path.is_file())
    assert names == sorted(
        ['tiny.py', 'last_checkpoint', 'iter_4.pth', 'iter_6.pth', 'best_score_iter_4.pth']
    )
    assert_same_end(train(tmp_path, 'parts', '', '--resume'), whole)


def test_write_whole(tmp_path):
    path = tmp_path / 'file'
    for content in (b'first', b'second'):
        write_whole(path, content)
        assert path.read_bytes() == content
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / 'none' / 'file', b'')
    (tmp_path / f'.{"0" * 32}.partial').write_bytes(b'left')
    (tmp_path / '.other.partial').write_bytes(b"another program's")
    remove_partial(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['.other.partial', 'file']


# Resuming


def resumable(work_dir: Path, intact: set[str], **hook: object):
    def read(path: str) -> dict:
        if Path(path).name not in intact or not Path(path).exists():
            raise SystemExit(f'error: checkpoint {path}:\ndamaged')
        return dict(meta={}, message_hub={}, state_dict={})

    default_hooks = dict(checkpoint=dict(by_epoch=False, **hook))
    return find_resumable(Config(dict(work_dir=str(work_dir), default_hooks=default_hooks)), read)


def touch(work_dir: Path, *names: str) -> None:
    for age, name in enumerate(names):
        (work_dir / name).write_text('')
        os.utime(work_dir / name, (age, age))


@pytest.mark.parametrize(
    ('pointer', 'intact', 'found', 'damaged'),
    [
        ('iter_6.pth', {'iter_6.pth', 'iter_4.pth'}, 'iter_6.pth', 0),
        ('iter_6.pth', {'iter_4.pth', 'iter_2.pth'}, 'iter_4.pth', 1),
        ('iter_6.pth', {'iter_2.pth'}, 'iter_2.pth', 2),
        ('iter_8.pth', {'iter_6.pth'}, 'iter_6.pth', 1),  # missing
        ('elsewhere/iter_4.pth', {'iter_4.pth'}, 'iter_4.pth', 0),  # the folder was moved
        ('', {'iter_6.pth', 'iter_4.pth'}, 'iter_6.pth', 0),
        (None, {'iter_6.pth'}, 'iter_6.pth', 0),
    ],
)
def test_the_newest_intact_checkpoint(tmp_path, pointer, intact, found, damaged):
    touch(tmp_path, 'iter_2.pth', 'iter_4.pth', 'iter_6.pth', 'best_iter_6.pth', 'iter_9.pth.bak')
    if pointer is not None:
        text = str(tmp_path / pointer) if pointer else ''
        (tmp_path / 'last_checkpoint').write_text(text)
    result = resumable(tmp_path, intact)
    assert Path(result.path) == tmp_path / found
    assert len(result.damaged) == damaged
    assert all(re.fullmatch(r'checkpoint \S+: damaged', reason) for reason in result.damaged)


def test_the_newest_is_the_youngest_file(tmp_path):
    """Not the highest number, which may be another run's in the same folder."""
    touch(tmp_path, 'iter_90.pth', 'iter_2.pth')
    assert Path(resumable(tmp_path, {'iter_90.pth', 'iter_2.pth'}).path).name == 'iter_2.pth'


def test_names_and_folders_of_the_checkpoint_hook(tmp_path):
    work_dir, out_dir = tmp_path / 'work', tmp_path / 'out' / 'work'
    work_dir.mkdir()
    out_dir.mkdir(parents=True)
    touch(out_dir, 'step-02.ckpt', 'step-04.ckpt', 'iter_6.pth')
    hook = dict(filename_tmpl='step-{:02d}.ckpt', out_dir=str(tmp_path / 'out'))
    assert Path(resumable(work_dir, {'step-02.ckpt'}, **hook).path) == out_dir / 'step-02.ckpt'
    touch(work_dir, 'latest.pth')
    found = resumable(work_dir, {'latest.pth'}, filename_tmpl='latest.pth')
    assert Path(found.path) == work_dir / 'latest.pth'


def test_never_anew_beside_damaged_checkpoints(tmp_path):
    assert resumable(tmp_path, set()) is None
    (tmp_path / 'last_checkpoint').write_text('')
    with pytest.raises(InputError, match='--resume auto: no intact .*last_checkpoint is empty'):
        resumable(tmp_path, set())
    touch(tmp_path, 'iter_2.pth', 'iter_4.pth')
    with pytest.raises(InputError, match=r'no intact .*iter_4.pth: damaged; .*iter_2.pth: damaged'):
        resumable(tmp_path, set())
    with pytest.raises(InputError, match='not one to resume a training from'):
        cfg = dict(work_dir=str(tmp_path), default_hooks=dict(checkpoint=dict(by_epoch=False)))
        find_resumable(Config(cfg), lambda path: dict(state_dict={}))


def test_a_truncated_checkpoint_is_passed_over(tmp_path, whole):
    shutil.copytree(whole, tmp_path / 'parts')
    for name in (LAST, 'last_checkpoint'):
        path = tmp_path / 'parts' / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / 'parts' / 'last_checkpoint').write_text(str(tmp_path / 'parts' / LAST))
    finished = run_tiny(tmp_path, 'parts', '', '--resume', 'auto')
    assert finished.code == 0, finished.output
    pattern = r'WARNING - --resume auto: passed over a damaged checkpoint: .*parts/iter_12.pth'
    assert re.search(pattern, finished.output)
    assert 'resumed epoch: 0, iter: 10' in finished.output
    assert_same_end(tmp_path / 'parts', whole)

    for path in (tmp_path / 'parts').glob('iter_*.pth'):
        path.write_bytes(path.read_bytes()[:1000])
    for arguments in (['--resume'], ['--cfg-options', 'resume=True']):
        line = error_line(run_tiny(tmp_path, 'parts', '', *arguments))
        assert re.match(
            r'error: --resume auto: no intact checkpoint in parts: .*iter_12.*iter_10', line
        )


def gather_different(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    check_same('a/iter_2.pth')
    check_same(None)
    with pytest.raises(InputError, match=r'\(rank 0: iter_0.pth, rank 1: iter_1.pth\)'):
        check_same(f'a/iter_{rank}.pth')
    assert highest(rank) == 1 and highest(-rank) == 0


def test_ranks_resume_from_the_same_checkpoint(tmp_path):
    run_ranks(gather_different, tmp_path)


# Random kills: `python tests/kill_training.py` makes more of them.


def test_random_kills(tmp_path):
    report = kill_at_random(tmp_path, kills=2, seed=0)
    assert report.kills == 2 and report.completed >= 1 and report.failures == []


# A scheduler's signal


def test_a_signal_saves_and_ends(tmp_path, whole):
    extra = hook('SignalHook', name='SIGUSR1', iteration=4) + hook(
        'PreemptionHook', signals=['SIGTERM', 'SIGUSR1']
    )
    finished = run_tiny(tmp_path, 'parts', extra)
    assert finished.code == 128 + signal.SIGUSR1, finished.output
    line = (
        f'PreemptionHook: SIGUSR1, after iteration 5: saved {tmp_path}/parts/iter_5.pth; --resume'
    )
    assert line in finished.output and 'Traceback' not in finished.output
    assert training_state(tmp_path / 'parts/iter_5.pth')['meta']['iter'] == 5
    finished = run_tiny(tmp_path, 'parts', '', '--resume')
    assert finished.code == 0 and 'resumed epoch: 0, iter: 5' in finished.output
    assert_same_end(tmp_path / 'parts', whole)


def test_a_signal_to_the_whole_job_spares_the_workers(tmp_path, whole):
    """SIGTERM reaches them a second before their training."""
    workers = 'train_dataloader.update(num_workers=2, persistent_workers=True)\n'
    extra = workers + hook('SignalHook', iteration=4, to='all')
    began = time.monotonic()
    finished = run_tiny(tmp_path, 'parts', extra)
    assert finished.code == 143, finished.output
    assert f'SIGTERM, after iteration 5: saved {tmp_path}/parts/iter_5.pth' in finished.output
    assert 'Traceback' not in finished.output and time.monotonic() - began < 30
    assert_same_end(train(tmp_path, 'parts', workers, '--resume'), whole)


def test_a_signal_in_a_validation_of_averaged_weights(tmp_path):
    ema = hook('EMAHook', momentum=0.1)
    expected = train(tmp_path, 'whole', ema)
    every = "default_hooks['checkpoint'].update(interval=3)\n"
    finished = run_tiny(tmp_path, 'parts', ema + every + hook('SignalHook', val_iteration=1))
    assert finished.code == 143, finished.output
    assert f'after iteration 4: saved {tmp_path}/parts/iter_4.pth' in finished.output
    work_dir = train(tmp_path, 'parts', ema, '--resume')
    assert_same_end(work_dir, expected)
    left, right = (checkpoint(f / LAST)['ema_state_dict'] for f in (work_dir, expected))
    assert differences(dict(left), dict(right)) == []


def test_a_signal_waits_for_the_update_of_accumulated_gradients(tmp_path):
    accumulate = "optim_wrapper['accumulative_counts'] = 3\n"
    expected = train(tmp_path, 'whole', accumulate)
    every = "default_hooks['checkpoint'].update(interval=12)\n"
    extra = accumulate + every + hook('SignalHook', iteration=3)
    finished = run_tiny(tmp_path, 'parts', extra)
    assert finished.code == 143 and 'after iteration 6: saved' in finished.output
    resumed = train(tmp_path, 'parts', accumulate, '--resume')
    assert differences(training_state(resumed / LAST), training_state(expected / LAST)) == []


EPOCHS = """
train_dataloader.update(sampler=dict(type='DefaultSampler', shuffle=True))
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=2)
default_hooks['checkpoint'].update(by_epoch=True, interval=1)
"""


def test_signals_between_and_within_epochs(tmp_path):
    expected = train(tmp_path, 'whole', EPOCHS)
    finished = run_tiny(tmp_path, 'parts', EPOCHS + hook('SignalHook', iteration=4))
    assert finished.code == 143, finished.output
    assert f'after iteration 5: saved {tmp_path}/parts/epoch_1.pth' in finished.output
    finished = run_tiny(tmp_path, 'parts', EPOCHS + hook('SignalHook', iteration=6), '--resume')
    assert finished.code == 143, finished.output
    assert 'after iteration 7: nothing is saved within an epoch' in finished.output
    resumed = train(tmp_path, 'parts', EPOCHS, '--resume')
    states = [training_state(folder / 'epoch_2.pth') for folder in (resumed, expected)]
    assert differences(*states) == []


def test_a_signal_to_one_rank_stops_both(tmp_path, port):
    config = write_tiny_config(
        tmp_path / 'tiny.py',
        hook('SignalHook', iteration=3, rank=1) + hook('PreemptionHook', interval=4),
    )
    for rank in run_pair('train.py', config, '--work-dir', 'work', cwd=tmp_path, port=port):
        assert rank.code == 143, rank.output
    assert pointer(tmp_path / 'work') == 'iter_4.pth'


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(signals='SIGTERM'), "signals must be a list .* got 'SIGTERM'"),
        (dict(signals=['TERM']), r"signals must be a list .* got \['TERM'\]"),
        (dict(signals=['SIGKILL']), r"signals must be .* can be caught, got \['SIGKILL'\]"),
        (dict(interval=0), 'interval must be a positive integer, got 0'),
    ],
)
def test_preemption_names_a_bad_argument(arguments, message):
    with pytest.raises(InputError, match=f'^PreemptionHook: {message}'):
        PreemptionHook(**arguments)


def test_without_signals_nothing_is_listened_to(tmp_path):
    extra = hook('PreemptionHook', signals=[]) + hook('SignalHook', iteration=2)
    assert run_tiny(tmp_path, 'work', extra).code == -signal.SIGTERM


# Data


def test_a_dead_worker(tmp_path, whole):
    extra = 'train_dataloader.update(num_workers=2)\n'
    kill = hook('SignalHook', name='SIGKILL', iteration=6, to='worker')
    began = time.monotonic()
    line = error_line(run_tiny(tmp_path, 'parts', extra + kill))
    assert re.match(
        r'error: a process that loads data died: DataLoader worker \(pid \d+\) is killed by '
        'signal: Killed; .*--resume auto continues',
        line,
    )
    assert time.monotonic() - began < 30
    assert_same_end(train(tmp_path, 'parts', extra, '--resume'), whole)


def spoil(data: Path, folder: Path, kind: str, split: str = 'train') -> Path:
    """A copy of the data of which a file is damaged; the file's path."""
    shutil.copytree(data, folder)
    path = folder / ('masks' if kind in ('mask', 'missing') else 'images') / split / '3.png'
    if kind == 'missing':
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if kind == 'empty' else 40])
    return path


@pytest.mark.parametrize(
    ('kind', 'workers', 'reason'),
    [
        ('image', 2, 'cannot identify image|OSError|SyntaxError|truncated'),
        ('mask', 0, 'cannot identify image|OSError|SyntaxError|truncated'),
        ('missing', 2, 'No such file or directory'),
    ],
)
def test_an_unreadable_image_is_named(data, tmp_path, kind, workers, reason):
    path = spoil(data, tmp_path / 'data', kind)
    extra = f'train_dataloader.update(num_workers={workers})\n'
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', extra)
    line = error_line(run_tool('train.py', config, cwd=tmp_path))
    assert line.startswith('error: ') and str(path) in line and re.search(reason, line)


@pytest.mark.parametrize('write_config', [write_segmentation_config, write_detection_config])
def test_an_unreadable_image_is_skipped(data, tmp_path, write_config):
    path = spoil(data, tmp_path / 'data', 'image')
    extra = hook('UnreadableImageHook', action='skip')
    if write_config is write_segmentation_config:
        extra += """
dataset = train_dataloader['dataset']
train_dataloader['dataset'] = dict(type='RepeatDataset', times=2, dataset=dataset)
"""
    config = write_config(tmp_path / 'toy.py', tmp_path / 'data', extra)
    finished = run_tool('train.py', config, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert f'UnreadableImageHook: {path}: ' in finished.output
    assert (tmp_path / 'work_dirs/toy/rank0.pth').exists()


def test_an_unreadable_image_ends_a_validation(data, tmp_path):
    path = spoil(data, tmp_path / 'data', 'image', 'val')
    config = write_segmentation_config(
        tmp_path / 'seg.py', tmp_path / 'data', hook('UnreadableImageHook', action='skip')
    )
    line = error_line(run_tool('train.py', config, cwd=tmp_path))
    assert line.startswith(f'error: {path}: ')


def test_only_unreadable_files_are_named(data, tmp_path):
    sample = dict(img_path=str(data / 'images/train/0.png'), seg_map_path='s3://bucket/mask.png')
    assert unreadable_file(sample) is None
    for kind, reason in (('empty', 'the file is empty'), ('image', 'UnidentifiedImageError: .*')):
        path = spoil(data, tmp_path / kind, kind)
        found = unreadable_file(dict(seg_map_path=sample['img_path'], img_path=str(path)))
        assert re.fullmatch(f'{path}: {reason}', found)
    with pytest.raises(InputError, match="action must be 'stop' or 'skip', got 'pass'"):
        UnreadableImageHook(action='pass')


# Ranks


def test_a_killed_rank_ends_the_other(tmp_path, port):
    """Without torchrun, which would end it too."""
    kill = hook('KillHook', iteration=3, rank=1)
    config = write_tiny_config(tmp_path / 'tiny.py', kill)
    began = time.monotonic()
    first, second = run_pair('train.py', config, cwd=tmp_path, port=port)
    assert second.code == -9 and time.monotonic() - began < 30
    assert re.match(r'error: rank 0: another rank ended or does not answer', error_line(first))


def test_a_hanging_rank_ends_the_other(tmp_path, port):
    config = write_tiny_config(
        tmp_path / 'tiny.py',
        'env_cfg = dict(dist_cfg=dict(backend="nccl", timeout=5))\n'
        + hook('SignalHook', name='SIGSTOP', iteration=3, rank=1),
    )
    logs = [tmp_path / f'output{rank}.log' for rank in range(2)]
    shared = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), WORLD_SIZE='2')
    ranks = [
        start(
            'train.py',
            config,
            '--launcher=pytorch',
            log=log,
            cwd=tmp_path,
            env=dict(shared, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        ranks[0].join(40)
        line = error_line(Finished(ranks[0].exitcode, logs[0].read_text()))
        assert re.match(
            r'error: rank 0: another rank ended or does not answer, .*[Tt]imed out', line
        )
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_an_error_of_one_rank_ends_both(tmp_path, port, data):
    """Each with a line of its own: the first rank reads no damaged image."""
    path = spoil(data, tmp_path / 'data', 'image')
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', '')
    ranks = [error_line(r) for r in run_pair('train.py', config, cwd=tmp_path, port=port)]
    assert sorted(line.startswith(f'error: {path}') for line in ranks) == [False, True]
    assert sum('another rank ended or does not answer' in line for line in ranks) == 1


@pytest.mark.parametrize('timeout', [0, -1, 'long'])
def test_a_bad_timeout(timeout):
    with pytest.raises(InputError, match=f'dist_cfg.timeout must be a positive .* got {timeout!r}'):
        init_gloo('pytorch', timeout)


# A loss that is not finite


def poisoned(module: str, iterations: list[int], **options: object) -> str:
    rank = options.pop('rank', 0)
    return hook('PoisonHook', module=module, iterations=iterations, rank=rank) + hook(
        'NonFiniteLossHook', **options
    )


def test_a_loss_that_is_not_finite_stops(tmp_path):
    finished = run_tiny(tmp_path, 'work', poisoned('norm', [4]))
    assert error_line(finished) == (
        'error: iteration 5: the loss is nan (loss): the first module whose output is not finite '
        'is norm (BatchNorm1d)'
    )
    assert pointer(tmp_path / 'work') == 'iter_4.pth'


def test_a_compiled_model(tmp_path):
    """Stays one graph, so that its modules are not named."""
    extra = "compile = dict(backend='eager')\n" + poisoned('head', [4, 6], action='skip')
    finished = run_tiny(tmp_path, 'work', extra)
    assert finished.code == 0, finished.output
    pattern = (
        r'iteration (\d+): the loss is nan: the module is not known, as the model is compiled; '
    )
    assert re.findall(pattern, finished.output) == ['5', '7']


def test_a_skipped_iteration_changes_nothing(tmp_path):
    """No weight, statistic or optimizer state; the iterations around it are trained on."""
    states = hook('SaveStatesHook', iterations=[3, 4, 5])
    finished = run_tiny(tmp_path, 'work', poisoned('head', [4], action='skip') + states)
    assert finished.code == 0, finished.output
    before, skipped, after = (checkpoint(tmp_path / f'work/state{i}_rank0.pth') for i in (3, 4, 5))
    assert differences(before, skipped) == []
    assert '.state_dict.norm.running_mean' in differences(skipped, after)
    assert '.state_dict.head.weight' in differences(skipped, after)
    assert re.search(
        r'WARNING - iteration 5: the loss is nan .* head \(Linear\); skipped, 1 in a row, 1 in all',
        finished.output,
    )
    assert re.search(r'Iter\(train\) \[ *12/12\].* skipped: 1\b', finished.output)
    hub = checkpoint(tmp_path / 'work' / LAST)['message_hub']['runtime_info']
    assert (hub['skipped'], hub['skipped_in_a_row']) == (1, 0)


def test_too_many_in_a_row(tmp_path):
    """Counted over an interruption, too."""
    options = dict(action='skip', max_in_a_row=3)
    extra = poisoned('head', [2, 4, 5, 6, 7], **options)
    assert run_tiny(tmp_path, 'work', extra + hook('KillHook', iteration=6)).code == -9
    line = error_line(run_tiny(tmp_path, 'work', extra, '--resume'))
    assert re.match(r'error: iteration 8: .* head \(Linear\); 3 were skipped before it', line)


def test_skipping_with_accumulated_gradients(tmp_path):
    """The update of the skipped iteration is dropped, that of the next three is made."""
    extra = "optim_wrapper['accumulative_counts'] = 3\n" + hook(
        'SaveStatesHook', iterations=[2, 5, 8]
    )
    finished = run_tiny(tmp_path, 'work', extra + poisoned('head', [5], action='skip'))
    assert finished.code == 0, finished.output
    first, second, third = (checkpoint(tmp_path / f'work/state{i}_rank0.pth') for i in (2, 5, 8))
    assert differences(first['optimizer'], second['optimizer']) == []
    weights = [dict(s['state_dict']) for s in (first, second, third)]
    assert [d for d in differences(*weights[:2]) if 'norm.running' not in d] == [
        '.norm.num_batches_tracked'
    ]
    assert '.head.weight' in differences(*weights[1:])


@pytest.mark.parametrize('action', ['stop', 'skip'])
def test_ranks_do_the_same(tmp_path, port, action):
    extra = "model_wrapper_cfg = dict(type='MMDistributedDataParallel', broadcast_buffers=False)\n"
    states = hook('SaveStatesHook', iterations=[3, 4, 5])
    config = write_tiny_config(
        tmp_path / 'tiny.py', extra + poisoned('body.0', [4], rank=1, action=action) + states
    )
    ranks = run_pair('train.py', config, '--work-dir', 'work', cwd=tmp_path, port=port)
    message = (
        r'iteration 5: rank 0: the loss is [\d.]+; rank 1: the loss is nan \(loss\): the first '
        r'module whose output is not finite is body.0 \(Linear\)'
    )
    if action == 'stop':
        for rank in ranks:
            assert re.fullmatch(f'error: {message}', error_line(rank))
        return
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    assert re.search(f'{message}; skipped, 1 in a row', ranks[0].output)
    states = {
        (rank, i): checkpoint(tmp_path / f'work/state{i}_rank{rank}.pth')
        for rank in range(2)
        for i in (3, 4, 5)
    }
    for rank in range(2):
        assert differences(states[rank, 3], states[rank, 4]) == []
        assert differences(states[rank, 4], states[rank, 5])
    for i in (4, 5):
        assert differences(states[0, i]['optimizer'], states[1, i]['optimizer']) == []


def test_what_is_not_finite_is_named(micro):
    from mmnala import NaLaFormer

    model = NaLaFormer(micro.arch, drop_path_rate=0.0).train()
    image = micro['input']
    text, outputs = first_non_finite(model, (image,), {})
    assert text == 'not so when the forward pass was repeated' and len(outputs) == 4
    text, _ = first_non_finite(model, (image / 0,), {})
    assert text == 'the input of the model is not finite'
    with torch.no_grad():
        model.layers[1].blocks[0].ffn.fc1.bias[0] = float('inf')
    text, _ = first_non_finite(model, (), dict(x=image))
    assert text == (
        'the first module whose output is not finite is layers.1.blocks.0.ffn.fc1 (Linear), whose '
        'weights are not finite'
    )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(action='pass'), "action must be 'stop' or 'skip', got 'pass'"),
        (dict(max_in_a_row=0), 'max_in_a_row must be a positive integer, got 0'),
    ],
)
def test_non_finite_loss_names_a_bad_argument(arguments, message):
    with pytest.raises(InputError, match=f'^NonFiniteLossHook: {message}'):
        NonFiniteLossHook(**arguments)


# The tool


def test_any_config_is_hardened():
    stock = dict(
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=3)),
        custom_imports=dict(imports='mmseg'),
    )
    for _ in range(2):  # once is enough
        cfg = Config(stock)
        harden(cfg)
        assert cfg.default_hooks.checkpoint == dict(type='SafeCheckpointHook', interval=3)
        names = [hook['type'] for hook in cfg.custom_hooks]
        assert names == ['UnreadableImageHook', 'PreemptionHook']
        assert cfg.custom_imports.imports == ['mmseg', 'mmnala']
        stock = cfg.to_dict()
    cfg = Config(dict(default_hooks=dict(checkpoint=None), custom_hooks=None))
    harden(cfg)
    assert cfg.default_hooks.checkpoint is None
    bare = Config({})
    harden(bare)
    assert bare.default_hooks.checkpoint == dict(type='SafeCheckpointHook', interval=1)


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        (
            OSError(28, 'No space left on device', 'a.pth'),
            "writing failed: .*left on device: 'a.pth'",
        ),
        (ConnectionResetError(104, 'reset'), 'another rank ended or does not answer'),
        (InputError('Caught X in worker\n...\na.b.InputError: what: why'), 'what: why$'),
        (InputError('plain: line'), 'plain: line$'),
    ],
)
def test_faults_become_lines(error, expected):
    with pytest.raises(InputError, match=f'^{expected}'), named_faults():
        raise error


@pytest.mark.parametrize('error', [OSError(2, 'none', 'a'), RuntimeError('gloo'), KeyError('a')])
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as caught, named_faults():
        raise error
    assert caught.value is error
