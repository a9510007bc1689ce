"""Does attention get sharper as the query norm grows? Entropies against norms of queries and keys.

Writes norm_entropy.png, points.csv with every sampled query, scaling.csv with the mean entropies if
all queries were longer or shorter, and spearman.csv with the rank correlations, which are printed.
The norm of a key is that of the query's own token.
"""

import argparse

from mmnala.analysis import norm_entropy as analysis
from mmnala.analysis.attention import attention_layers, select_block
from mmnala.analysis.plotting import as_text, save, table
from mmnala.analysis.subject import (
    add_image_arguments,
    add_model_arguments,
    add_output_argument,
    load_pictures,
    load_subject,
    positive,
    unique_names,
)
from mmnala.engine.tools import claim, run
from mmnala.report.drawing import png


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    add_image_arguments(parser)
    add_output_argument(parser)
    parser.add_argument(
        '--queries',
        type=positive,
        default=256,
        help='evenly spaced queries of each layer and image (default: 256)',
    )
    parser.add_argument(
        '--block',
        type=int,
        default=-1,
        help="the block of each stage to draw, negative from the stage's last (default: -1)",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    claim(args.out)
    subject = load_subject(args, whole=True)
    drawn = select_block(attention_layers(subject.backbone), args.block)
    pictures = load_pictures(subject, args)
    layers = analysis.norms_and_entropies(
        subject.backbone, (picture.tensor for picture in pictures), args.queries
    )
    correlations = analysis.correlation_rows(layers)
    print(as_text(analysis.CORRELATION_COLUMNS, correlations))
    points = analysis.point_rows(layers, unique_names(pictures))
    save(
        args.out,
        {
            'norm_entropy.png': png(analysis.draw([v for v in layers if v.layer in drawn])),
            'points.csv': table(analysis.POINT_COLUMNS, points),
            'scaling.csv': table(analysis.SCALING_COLUMNS, analysis.scaling_rows(layers)),
            'spearman.csv': table(analysis.CORRELATION_COLUMNS, correlations),
        },
    )


if __name__ == '__main__':
    run(main)
