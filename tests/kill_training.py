"""Kill a training at random moments, resume it, and compare its end with an undisturbed one's.

    python tests/kill_training.py --kills 50 --seed 0

A small NaLaFormer with a segmentation head is trained by tools/train.py, on a disk that is made
slow, so that many kills meet a checkpoint that is being written. SIGKILL strikes at a random moment
of the whole run or, as often, of the training proper; with `--resume auto` it goes on, with or
without data workers, until a run comes to its end. Then weights, optimizer, schedules and the best
checkpoint must be those of the undisturbed run, bit by bit. After each kill every checkpoint must
be whole.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from faults import checkpoint, differences, training_state
from toy import run_tool, start, write_scenes, write_segmentation_config

CONFIG = """
train_cfg.update(max_iters=16, val_interval=4)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.002))
default_hooks['checkpoint'].update(interval=2, max_keep_ckpts=2, save_best='mIoU')
custom_hooks += [dict(type='SlowDiskHook', seconds=0.02), dict(type='NonFiniteLossHook')]
custom_imports['imports'].append('faults')
"""
LAST = 'iter_16.pth'
BEST = 'best_mIoU_iter_*.pth'


@dataclass
class Report:
    """What :func:`kill_at_random` did."""

    kills: int = 0
    before_training: int = 0
    while_writing: int = 0
    """Kills that left a half-written file."""
    completed: int = 0
    """Runs that came to their end and were compared."""
    failures: list[str] = field(default_factory=list)


def run(
    config: Path, work_dir: str, workers: int, seconds: float, after_begin: bool
) -> tuple[int | None, float]:
    """Start or resume the training, and kill it after some seconds.

    Returns:
        The status of a run that ended by itself, and when training began, where that was looked
        for.
    """
    log = config.parent / f'{work_dir}.log'
    log.unlink(missing_ok=True)
    options = ['--cfg-options', f'train_dataloader.num_workers={workers}']
    process = start(
        'train.py',
        *(config, '--work-dir', work_dir, '--resume', 'auto', *options),
        log=log,
        cwd=config.parent,
    )
    started = time.monotonic()
    while after_begin and not began(log) and process.is_alive():
        time.sleep(0.01)
    beginning = time.monotonic() - started
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None, beginning
    return process.exitcode, beginning


def began(log: Path) -> bool:
    return log.exists() and 'Checkpoints will be saved' in log.read_text()


def disk_faults(folder: Path, work_dir: str) -> list[str]:
    """What of a killed run's checkpoints is not whole."""
    faults = []
    files = sorted((folder / work_dir).glob('*.pth'))
    for path in files:
        try:
            checkpoint(path)
        except Exception as error:
            faults.append(f'{path.name}: {error}')
    pointer = folder / work_dir / 'last_checkpoint'
    if pointer.exists() and folder / pointer.read_text() not in files:
        faults.append(f'last_checkpoint names {pointer.read_text()!r}')
    return faults


def end_faults(work_dir: Path, expected: Path) -> list[str]:
    """Where a run's end differs from the undisturbed one's."""
    faults = differences(training_state(work_dir / LAST), training_state(expected / LAST))
    best, expected_best = ([*folder.glob(BEST)] for folder in (work_dir, expected))
    if [path.name for path in best] != [path.name for path in expected_best]:
        return [*faults, f'best checkpoints: {[path.name for path in best]}']
    states = [dict(checkpoint(path)['state_dict']) for path in (best[0], expected_best[0])]
    return faults + differences(*states)


def kill_at_random(folder: Path, kills: int, seed: int) -> Report:
    """Kill ``kills`` times; then let the run that is under way come to its end."""
    draw = random.Random(seed)
    write_scenes(folder / 'data')
    config = write_segmentation_config(folder / 'seg.py', folder / 'data', CONFIG)
    run_tool('train.py', '--help', cwd=folder)  # the first process waits for all imports
    started = time.monotonic()
    code, beginning = run(config, 'whole', 0, 600, after_begin=True)
    whole = time.monotonic() - started
    report = Report()
    if code != 0:
        report.failures.append(f'the undisturbed run ended with {code}')
        return report

    runs = 1
    while not report.failures and (report.kills < kills or report.completed < runs):
        work_dir = f'run{runs}'
        after_begin = draw.random() < 0.5
        limit = whole - beginning if after_begin else whole
        seconds = draw.uniform(0, limit) if report.kills < kills else 600
        code, _ = run(config, work_dir, draw.choice([0, 2]), seconds, after_begin)
        log = folder / f'{work_dir}.log'
        if code is None:
            report.kills += 1
            report.before_training += not began(log)
            report.while_writing += any((folder / work_dir).glob('.*.partial'))
            report.failures += disk_faults(folder, work_dir)
        elif code:
            report.failures.append(f'status {code}: {log.read_text()[-2000:]}')
        else:
            report.completed += 1
            report.failures += end_faults(folder / work_dir, folder / 'whole')
            if report.kills < kills:
                runs += 1
        print(report, file=sys.stderr)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=50)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = kill_at_random(Path(folder), args.kills, args.seed)
    print(report)
    sys.exit(bool(report.failures))


if __name__ == '__main__':
    main()
