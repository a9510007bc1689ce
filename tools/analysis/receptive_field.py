"""The effective receptive field: which pixels change the central output of each stage?

Writes receptive_field.png, receptive_field.csv with the sides of the squares that hold 20, 30, 50
and 99 % of the gradients, which are printed, and fields.npz with the gradients.
"""

import argparse
import io

import numpy as np

from mmnala.analysis import receptive_field as analysis
from mmnala.analysis.plotting import as_text, save, table
from mmnala.analysis.subject import (
    add_image_arguments,
    add_model_arguments,
    add_output_argument,
    load_pictures,
    load_subject,
    size,
)
from mmnala.engine.tools import claim, run
from mmnala.report.drawing import png


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    add_image_arguments(parser)
    add_output_argument(parser)
    parser.add_argument(
        '--size',
        type=size,
        metavar='HxW',
        help='scale the images to cover this size and take their centre (default: that of the '
        'first image)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    claim(args.out)
    subject = load_subject(args)
    pictures = load_pictures(subject, args)
    shape = args.size or tuple(pictures[0].tensor.shape[2:])
    fields = analysis.receptive_fields(
        subject.backbone, (analysis.fit(picture.tensor, shape) for picture in pictures), args.seed
    )
    rows = analysis.rows(fields)
    print(as_text(analysis.COLUMNS, rows))
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **{f'output{i}': field for i, field in enumerate(fields)})
    save(
        args.out,
        {
            'receptive_field.png': png(analysis.draw(fields, rows)),
            'receptive_field.csv': table(analysis.COLUMNS, rows),
            'fields.npz': arrays.getvalue(),
        },
    )


if __name__ == '__main__':
    run(main)
