"""Converting checkpoints between the layouts of :mod:`mmnala.checkpoint.layouts`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .backbones.nalaformer import ARCHS, NaLaFormer
from .checkpoint.layouts import (
    STEM,
    SortedWeights,
    find_state_dict,
    is_angle,
    release_angle,
    sort_weights,
    to_release,
)
from .necks import NaLaFormerNeck

LAYOUTS = ('release', 'backbone', 'classifier')
_OUTPUT_NORM = re.compile(r'backbone\.norm\d+\.')


@dataclass
class Conversion:
    """What :func:`convert` made of a checkpoint, all by name."""

    layout: str
    """That of the file, see :class:`~mmnala.checkpoint.layouts.SortedWeights`."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """The weights in the new layout."""
    sources: dict[str, str] = field(default_factory=dict)
    """For each of them that is in the file, its name there."""
    dropped: list[str] = field(default_factory=list)
    """Names in the file that the new layout has no place for, or that were unknown."""
    missing: list[str] = field(default_factory=list)
    """Names of the new layout that the file has nothing for."""


def convert(
    content: Mapping[str, Any],
    layout: str,
    prefix: str | None = None,
    ema: bool | None = None,
    num_heads: Sequence[int] | None = None,
    allow_unknown: bool = False,
) -> Conversion:
    """Name a checkpoint's weights as another layout does; values and dtypes stay.

    Backbone, neck and head are each in the file as a whole or not at all. What the new layout has
    no place for is dropped: the release's rotary buffers, which must have the values that they are
    recomputed from; output norms, unless the backbone alone is wanted; foreign parts of a larger
    model.

    Args:
        content: As :func:`~mmnala.checkpoint.read_checkpoint` returns it, of any layout.
        layout: ``'release'``, ``'backbone'`` or ``'classifier'``.
        prefix: Name of the backbone in the file, which is then all that is taken. Needed where
            there are several.
        ema: See :func:`~mmnala.checkpoint.layouts.find_state_dict`.
        num_heads: Heads of each stage, which the release's rotary buffers depend on. None takes
            them from such buffers in the file, else from the variant of the file's sizes.
        allow_unknown: Drop names that no layout knows, and rotary buffers of other values.

    Raises:
        RuntimeError: If the file holds no whole backbone, names or values that are unknown, or
            weights whose shapes do not fit together; or if the heads are not known.
        ValueError: If ``layout`` or ``num_heads`` has a value it does not allow.
    """
    if layout not in LAYOUTS:
        raise ValueError(f'layout must be one of {LAYOUTS}, got {layout!r}')
    if num_heads is not None and layout != 'release':
        raise ValueError(f'num_heads is for the release layout alone, not for {layout!r}')
    found = sort_weights(find_state_dict(content, ema), prefix)
    result = Conversion(found.layout)
    arch = infer_arch(found)
    expected = _expected(found, arch)
    wrong = [
        f'{found.sources[name]}: {tuple(value.shape)}, expected {tuple(expected[name].shape)}'
        for name, value in found.tensors.items()
        if name in expected and value.shape != expected[name].shape
    ]
    if wrong:
        raise RuntimeError(f'shapes that do not fit ({len(wrong)}): {", ".join(wrong)}')

    unknown = [found.sources[name] for name in found.tensors if name not in expected]
    if found.layout == 'classifier':
        unknown += found.others
        if layout != 'backbone':  # there, the classifier was trained with them in between
            unknown += [found.sources[k] for k in found.tensors if _OUTPUT_NORM.match(k)]
    else:
        result.dropped += found.others
    for stage, angle in found.angles.items():
        if not _fits(angle, arch, stage):
            unknown.append(found.sources[_angle_name(stage)])
    if unknown and not allow_unknown:
        raise RuntimeError(
            f'unknown names or values ({len(unknown)}), dropped only if allowed (allow_unknown): '
            + ', '.join(unknown)
        )
    result.dropped += unknown

    for part in ('backbone.', 'neck.', 'head.'):
        names = [k for k in expected if k.startswith(part) and not _OUTPUT_NORM.match(k)]
        absent = [k for k in names if k not in found.tensors]
        if absent and (part == 'backbone.' or len(absent) < len(names)):
            raise RuntimeError(f'missing ({len(absent)}): {", ".join(absent)}')
        if part == 'backbone.' or layout != 'backbone':
            result.missing += [_rename(k, expected[k], layout)[0] for k in absent]

    for name, value in found.tensors.items():
        source = found.sources[name]
        if source in unknown:
            continue
        if layout == 'backbone':
            placed = name.startswith('backbone.')
        else:
            placed = not _OUTPUT_NORM.match(name)
        if placed:
            new, value = _rename(name, value, layout)
            result.state[new], result.sources[new] = value, source
        else:
            result.dropped.append(source)
    if layout == 'release':
        _add_angles(result, found, arch, num_heads)
    else:
        sources = (found.sources[_angle_name(stage)] for stage in found.angles)
        result.dropped += [source for source in sources if source not in unknown]
    return result


def infer_arch(found: SortedWeights) -> dict[str, Any]:
    """``channels``, ``depths`` and ``mlp_ratio`` of the backbone, as in :class:`NaLaFormer`'s arch.

    Raises:
        RuntimeError: If there is no backbone, or its values are no tensors.
    """
    for name, value in found.tensors.items():
        if not isinstance(value, Tensor):
            raise RuntimeError(f'{found.sources[name]} is no tensor')
    state = found.backbone
    if STEM not in state:
        raise RuntimeError('it holds no NaLaFormer: no name ends in ' + STEM)
    blocks: dict[int, set[str]] = {}
    for name in state:
        if match := re.match(r'layers\.(\d+)\.blocks\.(\d+)\.', name):
            blocks.setdefault(int(match[1]), set()).add(match[2])
    arch: dict[str, Any] = dict(channels=[], depths=[], mlp_ratio=[])
    for stage in range(max(len(blocks), 1)):
        block = f'layers.{stage}.blocks.0'
        sizes = []
        for name in (f'{block}.attn.out_proj.weight', f'{block}.ffn.fc1.weight'):
            if name not in state or state[name].dim() != 2:
                raise RuntimeError(f'it holds no whole NaLaFormer: no matrix {name}')
            sizes.append(state[name].shape[0])
        channels, hidden = sizes
        arch['channels'].append(channels)
        arch['depths'].append(len(blocks[stage]))
        # The half keeps int(channels * ratio), which the model takes, from falling below.
        arch['mlp_ratio'].append((hidden + 0.5) / max(channels, 1))
    return arch


def variants(arch: Mapping[str, Any]) -> list[str]:
    """The names of the variants that begin with these stages."""
    stages = len(arch['channels'])
    hidden = [int(c * r) for c, r in zip(arch['channels'], arch['mlp_ratio'], strict=True)]
    return [
        name
        for name, known in ARCHS.items()
        if list(known['channels'][:stages]) == arch['channels']
        and list(known['depths'][:stages]) == arch['depths']
        and [int(c * known['mlp_ratio']) for c in arch['channels']] == hidden
    ]


def _expected(found: SortedWeights, arch: Mapping[str, Any]) -> dict[str, Tensor]:
    """All weights of backbone, output norms included, and classifier; only names and shapes."""
    stem, stages = found.backbone[STEM], len(arch['channels'])
    # Of batch and group norm, the latter has no statistics.
    batch_norm = any(name.endswith('.running_mean') for name in found.tensors)
    norm_cfg = dict(type='BN') if batch_norm else dict(type='GN', num_groups=1)
    fc, proj = (found.tensors.get(f'{part}.weight') for part in ('head.fc', 'neck.proj'))
    classes = 1 if fc is None or not fc.dim() else fc.shape[0]
    width = 1024
    if proj is not None and proj.dim():
        width = proj.shape[0]
    elif fc is not None and fc.dim() == 2:
        width = fc.shape[1]
    try:
        with torch.device('meta'):
            parts: dict[str, nn.Module] = dict(
                backbone=NaLaFormer(
                    {**arch, 'num_heads': [1] * stages},
                    in_channels=stem.shape[1] if stem.dim() == 4 else 3,
                    out_indices=range(stages),
                    stage_attention=['nala'] * stages,
                    norm_cfg=norm_cfg,
                ),
                neck=NaLaFormerNeck(arch['channels'][-1], width, norm_cfg),
                head=nn.ModuleDict(dict(fc=nn.Linear(width, classes))),
            )
    except ValueError as error:
        raise RuntimeError(f'its backbone cannot be a NaLaFormer: {error}') from None
    return nn.ModuleDict(parts).state_dict()


def _rename(name: str, value: Tensor, layout: str) -> tuple[str, Tensor]:
    if layout == 'release':
        return to_release(name, value)
    return name.removeprefix('backbone.') if layout == 'backbone' else name, value


def _angle_name(stage: int) -> str:
    return f'layers.{stage}.RoPE.angle'


def _fits(angle: Any, arch: Mapping[str, Any], stage: int) -> bool:
    """Whether a rotary buffer is what would be recomputed for some number of heads."""
    if not isinstance(angle, Tensor) or angle.dim() != 1 or stage >= len(arch['channels']):
        return False
    head_dim = 2 * len(angle)
    return head_dim > 0 and arch['channels'][stage] % head_dim == 0 and is_angle(angle, head_dim)


def _add_angles(
    result: Conversion,
    found: SortedWeights,
    arch: Mapping[str, Any],
    num_heads: Sequence[int] | None,
) -> None:
    """Add the rotary buffers of the release."""
    channels = arch['channels']
    if num_heads is not None and (
        len(num_heads) != len(channels)
        or any(n < 1 or c % (4 * n) for c, n in zip(channels, num_heads, strict=True))
    ):
        raise ValueError(
            f'num_heads must be one number a stage, a divisor of channels / 4 = '
            f'{[c // 4 for c in channels]}, got {list(num_heads)}'
        )
    names = variants(arch)
    for stage, width in enumerate(channels):
        angle = found.angles.get(stage)
        if angle is not None and _fits(angle, arch, stage):
            heads = width // (2 * len(angle))
            if num_heads is not None and num_heads[stage] != heads:
                raise ValueError(
                    f'num_heads must be {heads} in stage {stage}, as {_angle_name(stage)} in the '
                    f'file says, got {list(num_heads)}'
                )
            result.sources[_angle_name(stage)] = found.sources[_angle_name(stage)]
        else:
            known = ARCHS[names[0]]['num_heads'][stage] if names else None
            if names and num_heads is not None and num_heads[stage] != known:
                raise ValueError(
                    f'num_heads must be {known} in stage {stage}, as of NaLaFormer '
                    f'{names[0].upper()}, whose sizes the file has, got {list(num_heads)}'
                )
            heads = num_heads[stage] if num_heads is not None else known
            if heads is None:
                raise RuntimeError(
                    f'the number of heads is not in the file, and its channels {channels} and '
                    f'depths {arch["depths"]} are no variant of {list(ARCHS)}: give num_heads'
                )
            dtype = found.backbone[f'layers.{stage}.blocks.0.attn.qkvg.weight'].dtype
            angle = release_angle(width // heads).to(dtype)
        result.state[_angle_name(stage)] = angle
