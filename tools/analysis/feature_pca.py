"""What do the feature maps of each stage tell apart? Their principal components as colours.

Writes feature_pca.png with a row for each image, and feature_pca.csv with the shares of the
variance, which are printed.
"""

import argparse

import torch

from mmnala.analysis import feature_pca as analysis
from mmnala.analysis.plotting import as_text, save, table
from mmnala.analysis.subject import (
    add_image_arguments,
    add_model_arguments,
    add_output_argument,
    load_pictures,
    load_subject,
    stage_outputs,
    unique_names,
)
from mmnala.engine.tools import claim, run
from mmnala.report.drawing import png


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    add_image_arguments(parser)
    add_output_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    claim(args.out)
    subject = load_subject(args)
    pictures = load_pictures(subject, args)
    found = []
    for picture in pictures:
        with torch.no_grad():
            outputs = stage_outputs(subject.backbone, picture.tensor)
        found.append([analysis.principal_components(x[0]) for x in outputs])
    rows = [
        row
        for name, components in zip(unique_names(pictures), found, strict=True)
        for row in analysis.rows(name, components)
    ]
    print(as_text(analysis.COLUMNS, rows))
    save(
        args.out,
        {
            'feature_pca.png': png(analysis.draw(pictures, found)),
            'feature_pca.csv': table(analysis.COLUMNS, rows),
        },
    )


if __name__ == '__main__':
    run(main)
