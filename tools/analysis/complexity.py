"""Multiply-adds, activations and parameters of a backbone, by stage and operation.

A NaLaFormer is counted as configured, and with linear (nala) or softmax attention in all stages.
Prints the totals and the parameters, and writes complexity.png, complexity.csv with stages and
operations, and totals.csv.
"""

import argparse

from mmnala.analysis import complexity as analysis
from mmnala.analysis.plotting import as_text, save, table
from mmnala.analysis.subject import (
    add_model_arguments,
    add_output_argument,
    load_subject,
    size,
)
from mmnala.engine.tools import claim, run
from mmnala.report.drawing import png


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, weights=False)
    add_output_argument(parser)
    parser.add_argument(
        '--sizes',
        nargs='+',
        type=size,
        default=[(224, 224), (512, 512), (800, 1344)],
        metavar='HxW',
        help='of the images (default: 224x224 512x512 800x1344)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    claim(args.out)
    subject = load_subject(args, whole=True)
    for name, module in subject.model.named_children():
        if number := analysis.parameters(module):
            print(f'{number / 1e6:8.2f} M parameters in {name}')
    print(f'{analysis.parameters(subject.model) / 1e6:8.2f} M parameters')
    rows = analysis.compare(subject.backbone, dict.fromkeys(args.sizes))
    totals = analysis.totals(rows)
    print(as_text(analysis.TOTAL_COLUMNS, totals))
    save(
        args.out,
        {
            'complexity.png': png(analysis.draw(rows)),
            'complexity.csv': table(analysis.COLUMNS, rows),
            'totals.csv': table(analysis.TOTAL_COLUMNS, totals),
        },
    )


if __name__ == '__main__':
    run(main)
