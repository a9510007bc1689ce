"""Where do the queries at chosen pixels of an image attend? For every stage of a NaLaFormer.

Writes NAME.png, the maps over the image, and NAME.csv, the weights times the number of tokens (1 is
uniform attention), for each image. Red is positive, blue is negative: with rotary embedding, a
linear attention can subtract.
"""

import argparse

from mmnala.analysis import attention_map as analysis
from mmnala.analysis.attention import attention_layers, select_block
from mmnala.analysis.plotting import save, table
from mmnala.analysis.subject import (
    add_image_arguments,
    add_model_arguments,
    add_output_argument,
    load_pictures,
    load_subject,
    point,
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
        '--points',
        nargs='+',
        type=point,
        required=True,
        metavar='X,Y',
        help='pixels of the queries, in every image, counted from 0 at its left upper corner',
    )
    parser.add_argument(
        '--block',
        type=int,
        default=-1,
        help="the block of each stage, negative from the stage's last (default: -1)",
    )
    parser.add_argument(
        '--stages', nargs='+', type=int, metavar='I', help='stages to show (default: all)'
    )
    parser.add_argument(
        '--per-head', action='store_true', help='show every head (default: their mean)'
    )
    parser.add_argument(
        '--without-rotary',
        action='store_true',
        help='show the similarities alone, as the normaliser of a linear attention has them',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    claim(args.out)
    subject = load_subject(args, whole=True)
    chosen = select_block(attention_layers(subject.backbone), args.block, args.stages)
    pictures = load_pictures(subject, args)
    points = list(dict.fromkeys(args.points))
    for picture in pictures:  # what cannot be found is said before anything is written
        for x, y in points:
            picture.locate(x, y)
    for name, picture in zip(unique_names(pictures), pictures, strict=True):
        maps = analysis.attention_maps(
            subject.backbone, picture, points, rotated=not args.without_rotary
        )
        maps = [item for item in maps if item.layer in chosen]
        if not args.per_head:
            maps = [analysis.average_heads(item) for item in maps]
        rows = analysis.rows(name, maps, averaged=not args.per_head)
        save(
            args.out,
            {
                f'{name}.png': png(analysis.draw(picture, maps, averaged=not args.per_head)),
                f'{name}.csv': table(analysis.COLUMNS, rows),
            },
        )


if __name__ == '__main__':
    run(main)
