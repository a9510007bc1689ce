"""Write the shapes data set, with its own classes or in the layout of a real data set."""

from __future__ import annotations

import argparse

from mmnala.datasets.shapes import LAYOUTS, make_dataset


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('--out', required=True, help='folder to write; it must not exist yet')
    parser.add_argument('--num-train', type=int, default=400, help='training images')
    parser.add_argument('--num-val', type=int, default=100, help='validation images')
    parser.add_argument(
        '--size', type=int, default=128, help='side of the square images, in pixels'
    )
    parser.add_argument('--seed', type=int, default=0, help='another seed, other images')
    parser.add_argument(
        '--layout',
        choices=LAYOUTS,
        default='shapes',
        help='file names and classes; of a real data set, its configs read the folder',
    )
    parser.add_argument(
        '--overwrite', action='store_true', help='replace the folder, if this command wrote it'
    )
    args = parser.parse_args()
    try:
        make_dataset(**vars(args))
    except (ValueError, OSError) as error:
        parser.exit(1, f'{parser.prog}: error: {error}\n')


if __name__ == '__main__':
    main()
