"""Convert a checkpoint between the layouts of the release, the backbone and the classifier."""

import argparse
import re
from collections import Counter

from mmnala.checkpoint import read_checkpoint
from mmnala.checkpoint.files import check_target, local_file, pack_checkpoint, write_new
from mmnala.checkpoint.layouts import AVERAGES, TRAINED, WEIGHTS, takes_averages
from mmnala.conversion import LAYOUTS, Conversion, convert
from mmnala.engine.tools import fail

OTHER_WORDS = {'mmpretrain': 'classifier', 'timm': 'classifier'}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'input',
        help='checkpoint of any layout, a file or URL, also of an mmseg, mmdet, mmpretrain or timm '
        'model',
    )
    parser.add_argument(
        'output', help='new file, in the format that its ending names: .pth or .safetensors'
    )
    parser.add_argument(
        '--to',
        required=True,
        choices=[*LAYOUTS, *OTHER_WORDS],
        help="names to write: the public release's, our backbone's, or the classifier's, which "
        'mmpretrain and timm share',
    )
    parser.add_argument(
        '--prefix', help='name of the backbone in the input, e.g. backbone.; takes it alone'
    )
    parser.add_argument(
        '--ema',
        action=argparse.BooleanOptionalAction,
        help='take the averaged or the trained weights (default: as the loaders of each project, '
        'trained of the release, averaged of timm and mmengine)',
    )
    parser.add_argument(
        '--num-heads',
        type=int,
        nargs='+',
        metavar='N',
        help='heads of each stage, for --to release where neither the input nor the table of '
        'variants tells',
    )
    parser.add_argument(
        '--allow-unknown',
        action='store_true',
        help='drop what no layout knows instead of refusing the input',
    )
    return parser.parse_args()


def rule(source: str, name: str) -> str:
    """How a name changed, without the end that both share."""
    pair = [re.sub(r'\b(layers|blocks)\.\d+\.', r'\1.#.', n).split('.') for n in (source, name)]
    while min(map(len, pair)) > 1 and pair[0][-1] == pair[1][-1]:
        pair = [parts[:-1] for parts in pair]
    return ' -> '.join('.'.join(parts) + '.*' for parts in pair)


def report(result: Conversion) -> None:
    renamed = Counter(rule(s, name) for name, s in result.sources.items() if s != name)
    print(f'mapped {len(result.sources)} tensors, renamed {renamed.total()}')
    for line, count in renamed.items():
        print(f'  {line} ({count})')
    added = [name for name in result.state if name not in result.sources]
    for title, names in (
        ('computed', added),
        ('dropped', result.dropped),
        ('missing', result.missing),
    ):
        print(f'{title} {len(names)}' + (': ' if names else '') + ', '.join(names))


def main() -> None:
    args = parse_args()
    layout = OTHER_WORDS.get(args.to, args.to)
    check_target(args.output)
    content = read_checkpoint(local_file(args.input))
    try:
        result = convert(content, layout, args.prefix, args.ema, args.num_heads, args.allow_unknown)
    except RuntimeError as error:
        raise RuntimeError(f'{args.input}: {error}') from None
    key = 'model' if layout == 'release' else 'state_dict'
    write_new(args.output, pack_checkpoint(result.state, args.output, key))
    print(f'{args.input} ({result.layout}) -> {args.output} ({layout})')
    if (averaged := takes_averages(content, args.ema)) is not None:
        print(f'weights: {"averaged (EMA)" if averaged else "trained, not averaged"}')
    report(result)
    parts = {*WEIGHTS, *AVERAGES, TRAINED} & content.keys()
    if parts and (others := [str(key) for key in content if key not in parts]):
        print(f'dropped beside the weights: {", ".join(others)}')


if __name__ == '__main__':
    try:
        main()
    except (OSError, RuntimeError, ValueError) as error:
        fail(' '.join(str(error).split()))
