"""Which channels of a query and a key survive each non-negative feature map?

Without a config the pair is drawn at random by --seed; with one it is a query and a key of a
NaLaFormer. Writes contributions.png and contributions.csv, and prints the similarities and how many
channels of each combination of signs contribute more than a hundredth of the largest contribution.
"""

import argparse

import torch

from mmnala.analysis import contributions as analysis
from mmnala.analysis.attention import (
    Heads,
    Layer,
    attention_layers,
    select_block,
    visit_attention,
)
from mmnala.analysis.attention_map import token_at
from mmnala.analysis.plotting import as_text, save, table
from mmnala.analysis.subject import (
    add_image_arguments,
    add_model_arguments,
    add_output_argument,
    load_pictures,
    load_subject,
    point,
    positive,
)
from mmnala.engine.tools import claim, fail, run
from mmnala.report.drawing import png


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, optional=True)
    add_image_arguments(parser)
    add_output_argument(parser)
    parser.add_argument('--channels', type=positive, help='of a random pair (default: 32)')
    parser.add_argument(
        '--points',
        nargs=2,
        type=point,
        metavar='X,Y',
        help="pixels of the model's query and key in the first image (default: its centre, twice)",
    )
    for name in ('stage', 'block', 'head'):
        counted = ", negative from the stage's last" if name == 'block' else ''
        parser.add_argument(
            f'--{name}', type=int, help=f"of the model's pair{counted} (default: 0)"
        )
    args = parser.parse_args()
    names = ('channels',) if args.config else ('images', 'points', 'stage', 'block', 'head')
    for name in names:
        if getattr(args, name) is not None:
            fail(f'--{name}: only {"without" if args.config else "with"} a config')
    args.channels = args.channels or 32
    for name in ('stage', 'block', 'head'):
        setattr(args, name, getattr(args, name) or 0)
    return args


def model_pair(args: argparse.Namespace) -> tuple[Layer, torch.Tensor, torch.Tensor]:
    """A layer of a NaLaFormer, and its query and key at the chosen pixels, without rotary."""
    subject = load_subject(args, whole=True)
    layers = attention_layers(subject.backbone)
    (layer,) = select_block(layers, args.block, [args.stage], 'stage')
    args.num_images = 1
    picture = load_pictures(subject, args)[0]
    height, width = picture.image.shape[:2]
    if args.points is None:
        places = [(width / 2, height / 2)] * 2
    else:
        places = [picture.locate(*xy) for xy in args.points]
    pairs = {}

    def visit(layer: Layer, heads: Heads) -> None:
        if heads.grid is None:
            fail(f'config {args.config}: the pairs are of NaLaFormer alone')
        tokens = (token_at(place, heads.grid, picture.tensor.shape[2:]) for place in places)
        if heads.feature_map is not None:
            query, key = (x[0, :, token].cpu() for x, token in zip(heads[:2], tokens, strict=True))
            pairs[layer] = query, key

    visit_attention(subject.backbone, picture.tensor, visit)
    chosen = pairs.get(layer)
    if chosen is None:
        blocks = ', '.join(f'{linear.stage}/{linear.block}' for linear in pairs) or 'none'
        fail(
            f'--stage {args.stage} --block {args.block}: expected a linear attention, '
            f'stage/block {blocks}'
        )
    heads = len(chosen[0])
    if not 0 <= args.head < heads:
        fail(f'--head {args.head}: expected 0 to {heads - 1}')
    return layer, chosen[0][args.head], chosen[1][args.head]


def main() -> None:
    args = parse_args()
    claim(args.out)
    if args.config is None:
        pair = analysis.example_pair(args.channels, args.seed)
        title = f'a random pair, seed {args.seed}'
    else:
        layer, *pair = model_pair(args)
        title = f'stage {layer.stage}, block {layer.block}, head {args.head}'
    rows = analysis.rows(*pair)
    print(as_text(analysis.SUMMARY_COLUMNS, analysis.summary(rows)))
    save(
        args.out,
        {
            'contributions.png': png(analysis.draw(rows, title)),
            'contributions.csv': table(analysis.COLUMNS, rows),
        },
    )


if __name__ == '__main__':
    run(main)
