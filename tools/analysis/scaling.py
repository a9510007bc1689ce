"""What a training needs on each GPU: memory, communication and steps.

What a forward pass keeps for its backward pass is counted to the byte, for one and two images on
the CPU; everything else is computed, and nothing measured on a GPU. Prints three tables and writes
them as activations.csv, states.csv and steps.csv.
"""

import argparse

from mmnala.analysis import scaling as analysis
from mmnala.analysis.plotting import as_text, save, table
from mmnala.analysis.subject import (
    TIMM,
    add_model_arguments,
    add_output_argument,
    load_subject,
    positive,
    size,
)
from mmnala.engine.tools import claim, fail, load_config, run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, weights=False)
    add_output_argument(parser)
    parser.add_argument(
        '--size', type=size, required=True, metavar='HxW', help='of the images, after augmentation'
    )
    parser.add_argument(
        '--batch-size',
        type=positive,
        help="images on a GPU (default: the config's train_dataloader.batch_size)",
    )
    parser.add_argument(
        '--images',
        type=positive,
        metavar='NUMBER',
        help='of the training set; needed if the schedule counts epochs',
    )
    parser.add_argument(
        '--gpus', type=positive, nargs='+', default=[8, 16, 32, 64], help='(default: 8 16 32 64)'
    )
    parser.add_argument(
        '--bandwidth',
        type=positive,
        default=25,
        metavar='GB/S',
        help='that each GPU sends and receives, 10^9 bytes a second (default: 25)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.config.startswith(TIMM):
        fail(f'{args.config}: expected a config, which has a loss and a schedule')
    cfg = load_config(args)
    batch_size = args.batch_size or (cfg.get('train_dataloader') or {}).get('batch_size')
    if batch_size is None:
        fail('--batch-size: the config has no train_dataloader.batch_size, so it is needed')
    steps = analysis.step_rows(cfg, args.gpus, batch_size, args.images)
    claim(args.out)
    model = load_subject(args, whole=True).model
    states = analysis.state_rows(analysis.weights(model), args.gpus, args.bandwidth * 1e9)
    rows = analysis.activations(
        model, cfg.model.backbone, cfg.get('default_scope'), args.size, batch_size
    )
    tables = {
        'activations.csv': (analysis.ACTIVATION_COLUMNS, rows),
        'states.csv': (analysis.STATE_COLUMNS, states),
        'steps.csv': (analysis.STEP_COLUMNS, steps),
    }
    for columns, found in tables.values():
        print(as_text(columns, found), end='\n\n')
    save(args.out, {name: table(*content) for name, content in tables.items()})


if __name__ == '__main__':
    run(main)
