"""Make a report on a training: one HTML page that needs no other file and no network."""

import argparse
import re
import tempfile
from pathlib import Path

from mmengine.runner import find_latest_checkpoint

from mmnala.checkpoint.files import write_new
from mmnala.engine.tools import (
    CfgOptions,
    build_runner,
    check_weights,
    fail,
    load_config,
    read_checkpoint,
    run,
)
from mmnala.report.evaluation import CollectHook
from mmnala.report.log import last_table, read_run
from mmnala.report.page import render


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('run', metavar='WORK_DIR', help='work folder of a training')
    parser.add_argument(
        '--out', type=Path, metavar='FILE', help='the page (default: WORK_DIR/report.html)'
    )
    parser.add_argument(
        '--checkpoint',
        metavar='FILE',
        help="what to evaluate (default: the work folder's best_*.pth, else the latest)",
    )
    parser.add_argument(
        '--no-images',
        action='store_true',
        help='evaluate nothing: neither checkpoint nor data set is needed, and the page has no '
        'confusion and no images',
    )
    parser.add_argument(
        '--num-images', type=int, default=4, help='of the best, and of the worst (default: 4)'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        default={},
        metavar='KEY=VALUE',
        help='override entries of the config, such as data_root=FOLDER',
    )
    return parser.parse_args()


def choose_checkpoint(args: argparse.Namespace) -> str:
    if args.checkpoint:
        return args.checkpoint
    folder = Path(args.run)
    best = sorted(folder.glob('best_*.pth'), key=lambda file: file.stat().st_mtime)
    numbers = {
        file: int(match[1])
        for file in folder.glob('*.pth')
        if (match := re.fullmatch(r'(?:iter|epoch)_(\d+)', file.stem))
    }
    # In a copied folder, the path that mmengine noted is the old folder's.
    noted = folder / Path(find_latest_checkpoint(args.run) or '').name
    if best:
        return str(best[-1])
    if noted.is_file():
        return str(noted)
    if numbers:
        return str(max(numbers, key=numbers.__getitem__))
    fail(f'{args.run}: no checkpoint; --checkpoint names one, --no-images does without')


def main() -> None:
    args = parse_args()
    if args.num_images < 1:
        fail(f'--num-images {args.num_images}: expected a positive number')
    log = read_run(args.run)
    out = args.out or Path(args.run) / 'report.html'
    if out.exists():
        fail(f'--out {out}: exists already; move it or choose another name')
    if not out.parent.is_dir():
        fail(f'--out {out}: there is no such folder')

    with tempfile.TemporaryDirectory() as folder:  # an evaluation writes logs of its own
        cfg = load_config(
            argparse.Namespace(
                config=str(log.config),
                cfg_options=args.cfg_options,
                work_dir=folder,
                launcher='none',
                local_rank=0,
            )
        )
        cfg.resume = False
        cfg.load_from = None if args.no_images else choose_checkpoint(args)
        cfg.setdefault('visualizer', dict(type='Visualizer')).vis_backends = []
        # The test loop, since validation belongs to a training, whose hooks await one.
        cfg.test_dataloader, cfg.test_evaluator = cfg.val_dataloader, cfg.val_evaluator
        cfg.test_cfg = cfg.get('test_cfg') or dict()
        checkpoint = None if args.no_images else read_checkpoint(cfg.load_from)
        runner = build_runner(cfg)
        if checkpoint is None:
            page = render(log, runner.model)
        else:
            check_weights(runner.model, checkpoint, cfg.load_from)
            del checkpoint
            collected = CollectHook(args.num_images)
            runner.register_hook(collected)
            try:
                for metric in runner.test_evaluator.metrics:
                    if hasattr(metric, 'classwise'):  # mmdet's CocoMetric
                        metric.classwise = True
                metrics = runner.test()
            except FileNotFoundError as error:
                fail(
                    f'the validation set: {str(error).strip().splitlines()[-1]}; --cfg-options '
                    'data_root=FOLDER names its place, --no-images does without'
                )
            log.table = last_table(Path(runner.log_dir))
            page = render(log, runner.model, collected, metrics, Path(cfg.load_from).name)
    write_new(out, page.encode())
    print(out)


if __name__ == '__main__':
    run(main)
