"""Time and memory of the linear attention and of whole backbones beside their alternatives.

All sides of a comparison take turns in one process, so that whatever slows the machine slows them
alike, and times are medians of the turns. Each peak of memory is measured in a process of its own.
Tables are printed and written with plots to --out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from measuring import (
    KERNELS,
    Limits,
    Step,
    count_flops,
    describe_commit,
    describe_machine,
    fit_exponent,
    free_bytes,
    kernel_shares,
    measure_limits,
    peak_memory,
    take_turns,
)
from torch import Tensor, nn

from mmnala import NaLaFormer
from mmnala.ops import ATTN_IMPLS, apply_rotary, nala_attention, rotary_table

Args = argparse.Namespace
Row = dict[str, Any]

MODES = ('inference', 'training')
DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
PATHS = (*ATTN_IMPLS, 'softmax', 'sdpa')
# timm's names, and what makes the models return four stages at strides 4 to 32.
TIMM_MODELS: dict[str, dict[str, Any]] = {
    'swin_tiny': dict(model_name='swin_tiny_patch4_window7_224'),
    'convnext_tiny': dict(model_name='convnext_tiny'),
    'pvt_v2_b2': dict(model_name='pvt_v2_b2'),
    'efficientvit_b2': dict(model_name='efficientvit_b2'),
    'resnet50': dict(model_name='resnet50', out_indices=(1, 2, 3, 4)),
}
OURS = [f'{kind}-{arch}' for arch in ('xt', 't', 's', 'b', 'l') for kind in ('nala', 'released')]

_MEASURED = ('seconds', 'ratio', 'first_seconds', 'peak_mib')
_MEMORY = ('percent_below_softmax', 'softmax_mib', 'softmax_source', 'percent_below_sdpa')
_SHARES = ('gflop_per_s', 'compute_share', 'traffic_share', 'roofline', 'roofline_seconds')
COLUMNS = {
    'operator': ('mode', 'tokens', 'path', *_MEASURED, *_MEMORY, *_SHARES, 'note'),
    'exponents': ('mode', 'path', 'quantity', 'exponent', 'tokens'),
    'backbone': ('size', 'mode', 'model', *_MEASURED, *_SHARES, 'note'),
    'profile': ('size', 'mode', 'model', *KERNELS, 'rest', 'ratio_without_rest'),
}
LEGEND = """\
ratio: time / time of ours. first_seconds: the first call, with compilation. peak_mib: memory above
the idle state. Work: matrix products and convolutions. Traffic: inputs and outputs of the operator;
image and weights of a backbone, in training with gradients. Shares: of the machine's limits above.
roofline_seconds: the least time at these limits, which roofline names. Profile: the parts of a
call's time. ratio_without_rest: what the ratio of the model as released would be if ours spent time
in the libraries' kernels alone, that is the most that can be reached without faster kernels.
"""
FIT_FROM = 4096  # tokens; below, the overhead of calls hides how time grows
SOFTMAX_MATRICES = {'inference': 2, 'training': 4}  # N x N at once in explicit attention


def explicit_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query * query.shape[-1] ** -0.5 @ key.mT).softmax(dim=-1) @ value


def attend(path: str, query: Tensor, key: Tensor, value: Tensor, rotary: Any) -> Tensor:
    if path in ATTN_IMPLS:
        return nala_attention(query, key, value, rotary, attn_impl=path)
    attention = explicit_softmax if path == 'softmax' else F.scaled_dot_product_attention
    return attention(*(apply_rotary(x, rotary).to(x.dtype) for x in (query, key)), value)


def operator_step(path: str, mode: str, tokens: int, args: Args, device: str | None = None) -> Step:
    """One call of an attention, in training with the gradients of query, key and value."""
    device, training = device or args.device, mode == 'training'
    torch.manual_seed(0)
    height = max(i for i in range(1, math.isqrt(tokens) + 1) if tokens % i == 0)
    rotary = rotary_table(height, tokens // height, args.head_dim, device=device)
    shape = (args.batch, args.heads, tokens, args.head_dim)
    *inputs, grad = (torch.randn(shape, device=device, dtype=DTYPES[args.dtype]) for _ in range(4))
    for x in inputs:
        x.requires_grad_(training)

    def step() -> None:
        output = attend(path, *inputs, rotary)
        if training:
            torch.autograd.grad(output, inputs, grad)

    return step


class AsReleased(nn.Module):
    """A NaLaFormer computed as the public release does, with the same weights.

    The formula and the softmax matrices in full, on feature maps ``(B, C, H, W)`` that are copied
    to the layout which a norm or a convolution needs. Of the modules it uses the weights alone, so
    that it stays the same whatever their own forward passes do.
    """

    def __init__(self, model: NaLaFormer) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> list[Tensor]:
        x = self.model.patch_embed.proj(image)
        outputs = []
        for stage in self.model.layers:
            head_dim = x.shape[1] // stage.blocks[0].attn.num_heads
            rotary = rotary_table(*x.shape[2:], head_dim, device=x.device)
            for block in stage.blocks:
                x = x + self._conv(block.cpe1, x)
                attention = self._attention(block.attn, self._norm(block.norm1, x), rotary)
                x = x + block.gamma_1[:, None, None] * attention
                x = x + self._conv(block.cpe2, x)
                ffn = self._feed_forward(block.ffn, self._norm(block.norm2, x))
                x = x + block.gamma_2[:, None, None] * ffn
            outputs.append(x)
            if stage.downsample is not None:
                x = stage.downsample.norm(stage.downsample.reduction(x))
        return outputs

    def _conv(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        x = x.contiguous()
        return F.conv2d(x, conv.weight, conv.bias, padding=conv.padding, groups=conv.groups)

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2).contiguous()

    def _attention(self, attn: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        *qkv, gate = attn.qkvg(x.permute(0, 2, 3, 1)).chunk(4, dim=-1)
        path = 'plain' if attn.attention == 'nala' else 'softmax'
        heads = [x.flatten(1, 2).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for x in qkv]
        out = attend(path, *heads, rotary).transpose(1, 2).reshape(gate.shape)
        out = out + self._conv(attn.lepe, qkv[2].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return attn.out_proj(attn.ln(out) * F.silu(gate)).permute(0, 3, 1, 2)

    def _feed_forward(self, ffn: nn.Module, x: Tensor) -> Tensor:
        x = F.gelu(ffn.fc1(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = x + self._conv(ffn.dwconv, x)
        return ffn.fc2(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def build_model(name: str, size: tuple[int, int]) -> nn.Module:
    """A backbone with random weights that returns its four stages, without norms on them."""
    torch.manual_seed(0)
    if name in TIMM_MODELS:
        options = dict(img_size=size, strict_img_size=False) if name.startswith('swin') else {}
        return timm.create_model(**TIMM_MODELS[name], **options, features_only=True)
    kind, arch, *suffix = name.split('-')
    model = NaLaFormer(arch, drop_path_rate=0.0, out_norm=False, with_cp=suffix == ['cp'])
    if kind == 'released':
        return AsReleased(model)
    return torch.compile(model) if suffix == ['compiled'] else model


def backbone_step(
    name: str, mode: str, size: tuple[int, int], args: Args, device: str | None = None
) -> Step:
    """A forward pass, in training with a loss and a backward pass; no optimizer."""
    device, training, dtype = device or args.device, mode == 'training', DTYPES[args.dtype]
    model = build_model(name, size).to(device).train(training)
    image = torch.rand(args.batch, 3, *size, device=device)

    def step() -> None:
        with (
            torch.set_grad_enabled(training),
            torch.autocast(args.device, dtype, enabled=dtype != torch.float32),
        ):
            outputs = model(image)
        if training:
            sum(x.float().square().mean() for x in outputs).backward()
            model.zero_grad(set_to_none=True)

    return step


def measure(
    builds: Mapping[str, Callable[[], Step]], ours: Callable[[str], str], args: Args
) -> dict[str, Row]:
    """Time and memory of every step; ``ours`` names the step that each is compared with."""
    rows = take_turns({k: build() for k, build in builds.items()}, args.repeats, args.device)
    if args.device == 'cuda':
        torch.cuda.empty_cache()
    for name, row in rows.items():
        if ours(name) in rows:
            row['ratio'] = row['seconds'] / rows[ours(name)]['seconds']
        row['peak_mib'] = peak_memory(builds[name], args.threads, args.device)
        row['note'] = 'memory: the process died' if row['peak_mib'] is None else ''
        print(*builds[name].args[:3], *map(_text, row.values()), file=sys.stderr, flush=True)
    return rows


def _flops(build: Callable[..., Step], name: str, mode: str, size: Any, args: Args) -> int:
    args = Args(**vars(args) | dict(device='cpu', dtype='float32'))  # no autocast for meta tensors
    forward = count_flops(build(name, 'inference', size, args, device='meta'))
    return forward * (3 if mode == 'training' else 1)


def operator_section(args: Args, limits: Limits) -> dict[str, list[Row]]:
    ours = 'triton' if 'triton' in args.paths else 'lean'
    rows: list[Row] = []
    for mode in args.modes:
        last: dict[str, tuple[int, float]] = {}  # tokens and seconds of the size before
        for tokens in sorted(set(args.tokens)):
            skipped = {path: _too_much(path, mode, tokens, last, args) for path in args.paths}
            chosen = [path for path, reason in skipped.items() if not reason]
            builds = {path: partial(operator_step, path, mode, tokens, args) for path in chosen}
            measured = measure(builds, lambda _: ours, args)
            matrix = 4 * args.batch * args.heads * tokens**2 / 2**20
            softmax, sdpa = (measured.get(x, {}).get('peak_mib') for x in ('softmax', 'sdpa'))
            for path, reason in skipped.items():
                row = dict(mode=mode, tokens=tokens, path=path, note=reason)
                row['softmax_mib'] = softmax or matrix
                row['softmax_source'] = 'measured' if softmax else 'computed: one N x N of float32'
                if path in measured:
                    row |= measured[path]
                    last[path] = tokens, row['seconds']
                    row['percent_below_softmax'] = _percent_below(row, softmax or matrix)
                    row['percent_below_sdpa'] = _percent_below(row, sdpa)
                    same = 'plain' if path in ATTN_IMPLS else 'softmax'  # computes the same
                    flops = _flops(operator_step, same, mode, tokens, args)
                    row |= limits.shares(row['seconds'], flops, _traffic(mode, tokens, args))
                rows.append(row)
    return {'operator': rows, 'exponents': exponents(rows)}


def _too_much(path: str, mode: str, tokens: int, last: Mapping[str, Any], args: Args) -> str:
    """Why a size is left out, or nothing."""
    if path == 'softmax':
        matrix = args.batch * args.heads * tokens**2 * DTYPES[args.dtype].itemsize
        needed, free = SOFTMAX_MATRICES[mode] * matrix, free_bytes(args.device)
        if needed > free:
            return f'{needed / 2**30:.3g} GiB needed, {free / 2**30:.3g} GiB free'
    before, seconds = last.get(path, (tokens, 0))
    seconds *= (tokens / before) ** (2 if path in ('softmax', 'sdpa') else 1)
    return f'about {seconds:.0f} s expected' if seconds > args.max_seconds else ''


def _percent_below(row: Row, other: float | None) -> float | None:
    return None if row['peak_mib'] is None or not other else 100 * (1 - row['peak_mib'] / other)


def _traffic(mode: str, tokens: int, args: Args) -> int:
    """Bytes of query, key, value and output, in training twice for the gradients; and rotary."""
    tensors = (8 if mode == 'training' else 4) * args.batch * args.heads
    return (tensors * DTYPES[args.dtype].itemsize + 2 * 4) * tokens * args.head_dim


def exponents(rows: Sequence[Row]) -> list[Row]:
    """How time and memory grow with the tokens, for every path and mode."""
    points = defaultdict(list)
    for row in rows:
        for quantity in ('seconds', 'peak_mib'):
            if row['tokens'] >= FIT_FROM and (row.get(quantity) or 0) > 0:
                key = row['mode'], row['path'], quantity
                points[key].append((row['tokens'], row[quantity]))
    fits = []
    for key, pairs in points.items():
        sizes, values = zip(*pairs, strict=True)
        if len(sizes) > 1:
            fit = (*key, fit_exponent(sizes, values), f'{sizes[0]}-{sizes[-1]}')
            fits.append(dict(zip(COLUMNS['exponents'], fit, strict=True)))
    return fits


def backbone_section(args: Args, limits: Limits) -> dict[str, list[Row]]:
    rows, profiles = [], []
    for size in args.sizes:
        for mode in args.modes:
            names = list(args.models)
            for name in args.models:
                if name.startswith('nala'):
                    # Without a backward pass nothing is recomputed.
                    names += [f'{name}-cp'] if mode == 'training' else []
                    names += [f'{name}-compiled'] if args.compile else []
            builds = {name: partial(backbone_step, name, mode, size, args) for name in names}
            measured = measure(builds, _our_model, args)
            for name in args.models:
                if name.startswith('nala'):
                    shares = kernel_shares(builds[name](), args.device)
                    ratio = measured.get(name.replace('nala', 'released'), {}).get('ratio')
                    most = ratio and ratio / (1 - shares['rest'])
                    row = dict(size=f'{size[0]}x{size[1]}', mode=mode, model=name)
                    profiles.append(row | shares | dict(ratio_without_rest=most))
            for name, row in measured.items():
                # Blocks that are computed twice are no more work done.
                same = _our_model(name) if name.startswith('nala') else name
                flops = _flops(backbone_step, same, mode, size, args)
                weights = sum(x.numel() for x in build_model(same, size).parameters())
                weights *= 2 if mode == 'training' else 1
                traffic = 4 * (args.batch * 3 * math.prod(size) + weights)
                row |= limits.shares(row['seconds'], flops, traffic)
                rows.append(dict(size=f'{size[0]}x{size[1]}', mode=mode, model=name) | row)
    return {'backbone': rows, 'profile': profiles}


def _our_model(name: str) -> str:
    return 'nala-t' if name in TIMM_MODELS else f'nala-{name.split("-")[1]}'


def describe(args: Args, limits: Limits) -> dict[str, str]:
    """What stands at the head of every result."""
    settings = {k: v for k, v in vars(args).items() if k not in ('section', 'out')}
    flops, traffic = limits.flops / 1e9, limits.traffic / 1e9
    return dict(
        date=datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
        machine=describe_machine(args.threads, args.device),
        versions=f'torch {torch.__version__}, timm {timm.__version__}',
        commit=describe_commit(),
        command=shlex.join(['python', *sys.argv]),
        settings=', '.join(f'{key}={value}' for key, value in settings.items()),
        limits=f'matrix product {flops:.4g} GFLOP/s ({args.dtype}), copy {traffic:.4g} GB/s',
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f'{value:.4g}' if abs(value) < 1e4 else f'{value:.0f}'
    return '' if value is None else str(value)


def markdown(title: str, rows: Sequence[Row]) -> str:
    lines = [COLUMNS[title], ['---'] * len(COLUMNS[title])]
    lines += [[_text(row.get(column)) for column in COLUMNS[title]] for row in rows]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def comma_separated(title: str, rows: Sequence[Row], about: Mapping[str, str]) -> str:
    text = io.StringIO()
    text.writelines(f'# {key}: {value}\n' for key, value in about.items())
    writer = csv.DictWriter(text, COLUMNS[title], lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plot(rows: Sequence[Row], about: Mapping[str, str]) -> bytes:
    """A PNG, time above memory: curves over the tokens, or a bar for each model."""
    groups = defaultdict(list)
    for row in rows:
        groups[f'{row.get("size", "")} {row["mode"]}'].append(row)
    figure = Figure(figsize=(1 + 5 * len(groups), 8), layout='constrained')
    grid = figure.subplots(2, len(groups), squeeze=False)
    labels = dict(seconds='time [s]', peak_mib='peak memory above idle [MiB]')
    for (column, label), line in zip(labels.items(), grid, strict=True):
        for (title, group), axes in zip(groups.items(), line, strict=True):
            axes.set_title(title)
            if 'model' in group[0]:
                axes.barh([row['model'] for row in group], [row[column] or 0 for row in group])
                axes.invert_yaxis()
                axes.set_xlabel(label)
                continue
            for path in dict.fromkeys(row['path'] for row in group):
                curve = [row for row in group if row['path'] == path and row.get(column)]
                tokens, values = ([row[key] for row in curve] for key in ('tokens', column))
                axes.loglog(tokens, values, 'o-', label=path)
            axes.set(xlabel='tokens', ylabel=label)
            axes.legend()
    figure.supxlabel(f'{about["machine"]}; {about["versions"]}', fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format='png', metadata=dict(about))
    return png.getvalue()


def write(path: Path, content: bytes) -> None:
    """Replace a file as a whole or not at all."""
    part = path.with_name(f'{path.name}.part')
    part.write_bytes(content)
    part.replace(path)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f'{self.prog}: error: {message}\n')  # without the usage above it


def _integer(text: str, multiple: int = 1) -> int:
    if not text.isdecimal() or int(text) < 1 or int(text) % multiple:
        kind = f'multiple of {multiple}' if multiple > 1 else 'integer'
        raise argparse.ArgumentTypeError(f'must be a positive {kind}, got {text!r}')
    return int(text)


def _size(text: str) -> tuple[int, ...]:
    sides = tuple(int(side) for side in text.split('x') if side.isdecimal())
    if 'x'.join(map(str, sides)) != text or len(sides) != 2 or min(sides) < 32:
        raise argparse.ArgumentTypeError(
            f'must be HEIGHTxWIDTH, 32x32 at least, such as 512x512, got {text!r}'
        )
    return sides


def parse_args(argv: Sequence[str] | None) -> Args:
    show = argparse.ArgumentDefaultsHelpFormatter
    parser = _Parser(description=__doc__)
    sections = parser.add_subparsers(dest='section', required=True)
    for section, text in (
        ('operator', 'attention paths over the number of tokens'),
        ('backbone', 'whole backbones'),
        ('all', 'the operator and the backbones'),
    ):
        sub = sections.add_parser(section, help=text, description=text, formatter_class=show)
        add = sub.add_argument
        add('--repeats', type=_integer, default=7, help='turns of each side')
        add('--threads', type=_integer, default=torch.get_num_threads(), help='threads of the CPU')
        add('--device', choices=('cpu', 'cuda'), default='cpu', help='where to compute')
        add('--dtype', choices=DTYPES, default='float32', help='of tensors; backbones: autocast')
        add('--batch', type=_integer, default=1, help='images at once')
        add(
            '--modes',
            nargs='+',
            choices=MODES,
            default=MODES,
            help='without and with backward pass',
        )
        add(
            '--out',
            type=Path,
            default='work_dirs/benchmark',
            help='folder; results in it are replaced',
        )
        if section != 'backbone':
            tokens = [2**10, 2**12, 2**14, 70000, 2**18]
            add('--paths', nargs='+', choices=PATHS, help='default: all that the device has')
            add('--tokens', nargs='+', type=_integer, default=tokens, help='numbers of tokens')
            add('--head-dim', type=partial(_integer, multiple=4), default=64, help='its channels')
            add('--heads', type=_integer, default=1, help='number of heads')
            add('--max-seconds', type=_integer, default=60, help='leave out longer calls')
        if section != 'operator':
            models, sizes = [*OURS, *TIMM_MODELS], [(512, 512), (800, 1344)]
            default, names = [*OURS[:4], *TIMM_MODELS], dict(metavar='MODEL', choices=models)
            add('--models', nargs='+', default=default, help=f'of {models}', **names)
            add('--sizes', nargs='+', type=_size, default=sizes, metavar='HxW', help='of images')
            add('--compile', action='store_true', help='compare each NaLaFormer compiled, too')
    args = parser.parse_args(argv)

    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('argument --device: cuda is not available, choose cpu')
    if 'paths' in args:
        args.paths = args.paths or [p for p in PATHS if p != 'triton' or args.device == 'cuda']
        if 'triton' in args.paths and args.device != 'cuda':
            parser.error('argument --paths: triton needs --device cuda')
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'argument --out: {error}')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    limits = measure_limits(args.repeats, args.device, DTYPES[args.dtype])
    about = describe(args, limits)
    intro = ''.join(f'- {key}: {value}\n' for key, value in about.items()) + f'\n{LEGEND}\n'
    print(intro)
    for name, section in (('operator', operator_section), ('backbone', backbone_section)):
        if args.section not in (name, 'all'):
            continue
        tables = section(args, limits)
        text = '\n'.join(markdown(title, rows) for title, rows in tables.items())
        print(text)
        for title, rows in tables.items():
            write(args.out / f'{title}.csv', comma_separated(title, rows, about).encode())
        write(args.out / f'{name}.png', plot(tables[name], about))
        write(args.out / f'{name}.md', f'{intro}{text}'.encode())


if __name__ == '__main__':
    main()
