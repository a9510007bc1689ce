"""Draw trainings from their logs, several in one picture: curves, and bars of the classes."""

import argparse
from pathlib import Path

from mmnala.checkpoint.files import write_new
from mmnala.engine.tools import fail, run
from mmnala.report.drawing import run_files, usual_curves
from mmnala.report.log import read_run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help='work folder of a training, resumed or not, or one of its TIMESTAMP folders',
    )
    parser.add_argument(
        '--out',
        required=True,
        type=Path,
        metavar='DIR',
        help='folder for curves.png, curves.csv and, where classes are logged, per_class.png and '
        'per_class.csv; none of them may exist yet',
    )
    parser.add_argument(
        '--names', nargs='+', metavar='NAME', help="the runs' names (default: their folders')"
    )
    parser.add_argument(
        '--curves',
        nargs='+',
        metavar='NAME',
        help='what to draw, by its name in the log (default: loss, learning rate, and mIoU, AP or '
        'top-1); the table has everything',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    names = args.names or [Path(folder).resolve().name for folder in args.runs]
    if len(names) != len(args.runs):
        fail(f'--names: expected {len(args.runs)}, one for each run, got {len(names)}')
    if len(set(names)) < len(names):
        fail(f'--names: the runs need different names, got {", ".join(names)}')
    runs = [read_run(folder, name) for folder, name in zip(args.runs, names, strict=True)]
    logged = sorted({name for training in runs for name in training.curves})
    for name in args.curves or ():
        if name not in logged:
            fail(f'--curves {name}: not in the logs, which have {", ".join(logged)}')
    curves = args.curves or usual_curves(runs)
    if not curves:
        fail(f'--curves: none of the usual ones is in the logs, which have {", ".join(logged)}')

    files = run_files(runs, curves)
    for name in files:
        if (args.out / name).exists():
            fail(f'--out {args.out}: {name} exists already; move it or choose another folder')
    args.out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_new(args.out / name, data)
        print(args.out / name)
    if lacking := [training.name for training in runs if training.table is None]:
        print(
            f'no classes in the log of {", ".join(lacking)} (mmdet: val_evaluator.classwise=True)'
        )


if __name__ == '__main__':
    run(main)
