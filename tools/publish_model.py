"""Publish a checkpoint: its weights and what is needed to use them, hashed, with a model card."""

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.hub import HASH_REGEX

from mmnala import __version__
from mmnala.backbones.nalaformer import ARCH_WORDS
from mmnala.checkpoint import read_checkpoint
from mmnala.checkpoint.files import check_target, pack_checkpoint, write_new
from mmnala.checkpoint.layouts import STEM, find_state_dict, sort_weights, takes_averages
from mmnala.conversion import infer_arch, variants
from mmnala.engine.tools import fail

BUFFERS = ('.running_mean', '.running_var', '.num_batches_tracked', '.RoPE.angle')
NO_METRICS = ('data_time', 'time', 'step')
GIT_HASH = re.compile(r'([0-9a-f]{40}|unknown)$')  # behind mmengine's own version


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('input', help='checkpoint of a training')
    parser.add_argument(
        'output',
        help='name of the new file, .pth or .safetensors; gets the first eight digits of its '
        'sha256 before the ending',
    )
    parser.add_argument(
        '--ema',
        action=argparse.BooleanOptionalAction,
        help='take the averaged or the trained weights (default: as the loaders of each project, '
        'trained of the release, averaged of timm and mmengine)',
    )
    return parser.parse_args()


def is_builtin(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str | int) and is_builtin(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_builtin, value))
    return value is None or isinstance(value, str | int | float)


def keep_builtin(meta: Mapping[Any, Any], name: str = 'meta') -> dict[Any, Any]:
    """Entries of Python's own types, which any loader reads; others are named and left out."""
    kept = {}
    for key, value in meta.items():
        if isinstance(value, Mapping):
            kept[key] = keep_builtin(value, f'{name}.{key}')
        elif is_builtin(key) and is_builtin(value):
            kept[key] = value
        else:
            print(f'left out {name}.{key}: no builtin value')
    return kept


def config_entry(config: str, path: str) -> str | None:
    """The source of a config's entry, such as ``model.backbone``; the config is not run."""
    name, *keys = path.split('.')
    node: ast.AST | None = None
    try:
        for statement in ast.parse(config).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
                node = statement.value
    except (SyntaxError, ValueError):
        return None
    for key in keys:
        node = next((k.value for k in getattr(node, 'keywords', ()) if k.arg == key), None)
    return node and ast.unparse(node)


def find_metrics(checkpoint: Path, meta: Mapping[str, Any]) -> dict[str, float]:
    """What the training's log says of the validation of this very checkpoint."""
    # The run's folder has the time in the run's name; mmengine counts epochs from 1 where it
    # trains by epochs, and leaves them at 0 where it trains by iterations.
    run = str(meta.get('experiment_name', ''))[-len('YYYYMMDD_hhmmss') :]
    step = meta.get('epoch') or meta.get('iter')
    log = checkpoint.parent / run / 'vis_data' / 'scalars.json'
    if not run or not step or not log.is_file():
        return {}
    metrics: dict[str, float] = {}
    for line in log.read_text(errors='replace').splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a killed run leaves half a line
        if isinstance(entry, dict) and entry.get('step') == step and 'lr' not in entry:
            metrics = {
                name: value
                for name, value in entry.items()
                if name not in NO_METRICS and isinstance(value, int | float)
            }
    return metrics


def millions(state: Mapping[str, Any]) -> str:
    count = sum(v.numel() for k, v in state.items() if not k.endswith(BUFFERS))
    return f'{count / 1e6:.2f} M'


def model_card(
    file: Path,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    metrics: Mapping[str, float],
    weights: str,
    digest: str,
) -> str:
    """The Markdown page that goes with a published file."""
    found = sort_weights(state)
    arch = infer_arch(found)
    names = variants(arch)
    words = {short: word for word, short in ARCH_WORDS.items()}
    prefix = found.sources[f'backbone.{STEM}'].removesuffix(STEM)
    config = meta.get('cfg') if isinstance(meta.get('cfg'), str) else ''
    model = (config_entry(config, 'model.type') or '').strip('\'"')
    backbone = config_entry(config, 'model.backbone')
    dataset = (config_entry(config, 'train_dataloader.dataset.type') or '').strip('\'"')
    dataset_meta = meta.get('dataset_meta')
    classes = dataset_meta.get('classes') if isinstance(dataset_meta, Mapping) else ()
    classes = classes if isinstance(classes, list | tuple) else ()
    kind = f'NaLaFormer-{names[0].upper()}' if names else 'NaLaFormer'
    trained = ', '.join(f'{k} {meta[k]}' for k in ('epoch', 'iter') if meta.get(k))
    versions = ', '.join(
        f'{name.removesuffix("_version")} {GIT_HASH.sub("", str(version))}'
        for name, version in meta.items()
        if isinstance(name, str) and name.endswith('_version')
    )
    layout = f'{found.layout}, the backbone under `{prefix}`' if prefix else found.layout
    channels = found.tensors[f'backbone.{STEM}'].shape[1]

    lines = [
        f'# {file.stem}',
        '',
        f'{kind} (arXiv 2506.21137)'
        + (f', the backbone of `{model}`' if model else '')
        + f', published with mmnala {__version__}.',
        '',
        '| | |',
        '| --- | --- |',
        f'| architecture | {kind}: channels {arch["channels"]}, depths {arch["depths"]} |',
        f'| parameters | {millions(state)}, of them backbone {millions(found.backbone)} |',
        f'| layout | {layout} |',
        f'| weights | {weights} |',
        f'| trained for | {trained or "not in the checkpoint"} |',
        f'| versions | {versions} |',
        f'| sha256 | `{digest}` |',
        '| licence | *to be filled in* |',
        '',
        '## Data set',
        '',
        (f'`{dataset}`' if dataset else 'Not in the checkpoint')
        + (f', {len(classes)} classes: {", ".join(map(str, classes))}.' if classes else '.'),
        '',
        '## Metrics',
        '',
    ]
    if metrics:
        lines += ['Of the validation during training, from its log:', '', '| metric | value |']
        lines += ['| --- | --- |', *(f'| {name} | {value:g} |' for name, value in metrics.items())]
    else:
        lines += ['Not measured.']
    lines += ['', '## Config', '']
    if config:
        where = "`meta['cfg']`" if file.suffix == '.pth' else '`meta` in the metadata, under `cfg`'
        run = meta.get('experiment_name')
        lines += [
            f'The whole config{f" of the run `{run}`" if run else ""} is in the file, {where}.'
        ]
        if backbone:
            lines += ['', '```python', f'backbone={backbone}', '```']
    else:
        lines += ['Not in the checkpoint.']
    lines += [
        '',
        '## How to load',
        '',
        'As the pre-trained backbone of another model, in an OpenMMLab config with',
        "`custom_imports = dict(imports=['mmnala'])`:",
        '',
        '```python',
        'backbone=dict(',
        "    type='NaLaFormer',",
        *([f'    in_channels={channels},'] if channels != 3 else []),
        f'    arch={names[0]!r},' if names else '    arch=...,  # as in the config',
        '    init_cfg=dict(',
        f"        type='Pretrained', checkpoint={file.name!r}"
        + (f', prefix={prefix!r}))' if prefix else '))'),
        '```',
    ]
    if prefix == 'backbone.':
        lines += ['', 'As a whole, with its config:', '', '```python']
        lines += [f'load_from = {file.name!r}', '```']
    fc = found.tensors.get('head.fc.weight')
    if (
        found.layout == 'classifier'
        and prefix == 'backbone.'
        and names
        and fc is not None
        and channels == 3
    ):
        lines += ['', 'As a timm model, after `import mmnala`:', '', '```python']
        lines += ['timm.create_model(', f'    {"nalaformer_" + words[names[0]]!r}, ']
        lines[-1] += f'num_classes={len(fc)}, checkpoint_path={file.name!r})'
        lines += ['```']
    return '\n'.join(lines) + '\n'


def main() -> None:
    args = parse_args()
    output = Path(args.output)
    check_target(output)
    content = read_checkpoint(args.input)
    try:
        state = find_state_dict(content, args.ema)
        if names := [k for k, v in state.items() if not isinstance(v, Tensor)]:
            raise RuntimeError(f'no tensors: {", ".join(names)}')
        infer_arch(sort_weights(state))
    except RuntimeError as error:
        raise RuntimeError(f'{args.input}: {error}') from None
    meta = content.get('meta')
    meta = keep_builtin(meta) if isinstance(meta, Mapping) else {}
    meta['mmnala_version'] = __version__

    data = pack_checkpoint(state, output, 'state_dict', meta)
    digest = hashlib.sha256(data).hexdigest()
    file = output.with_name(f'{output.stem}-{digest[:8]}{output.suffix}')
    match = HASH_REGEX.search(file.name)
    if match is None or match[1] != digest[:8]:
        raise ValueError(
            f'{output}: choose a name without {match and match[0]!r}, which torch.hub would '
            'take for the hash'
        )
    card = file.with_suffix('.md')
    check_target(file)
    if card.exists():
        raise FileExistsError(f'{card} exists already; move it or choose another name')

    averaged = takes_averages(content, args.ema)
    words = {None: 'as in the checkpoint', True: 'averaged (EMA)', False: 'not averaged'}
    # mmengine validates what it saves as state_dict.
    metrics = find_metrics(Path(args.input), meta) if averaged is not False else {}
    page = model_card(file, state, meta, metrics, words[averaged], digest)
    write_new(file, data)
    try:
        write_new(card, page.encode())
    except BaseException:
        file.unlink()
        raise
    print(f'{file}\n{card}')


if __name__ == '__main__':
    try:
        main()
    except (OSError, RuntimeError, ValueError) as error:
        fail(' '.join(str(error).split()))
