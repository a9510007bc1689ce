"""A look at a config's model before it is built."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..backbones import NaLaFormer
from ..necks import NaLaFormerNeck
from .errors import InputError

# Necks that list the outputs from the coarsest on, or only the last ones.
_OTHER_NECKS = ('YOLOV3Neck', 'CLRFPN')


def check_model(model: Mapping[str, Any]) -> None:
    """Refuse a NaLaFormer, or the neck or heads behind it, that cannot work as the config has it.

    A wrong number of channels would otherwise only show in the first forward pass, as an error of
    some convolution. Models with another backbone pass.

    Args:
        model: The config's ``model``, of mmdet, mmseg or mmpretrain, in a test-time augmentation or
            not.

    Raises:
        InputError: Naming the backbone's arguments, or each ``in_channels`` or ``in_index`` that
            does not fit and what the backbone gives.
    """
    while isinstance(inner := model.get('module'), Mapping):
        model = inner
    backbone = model.get('backbone')
    if not isinstance(backbone, Mapping) or _type_name(backbone) != NaLaFormer.__name__:
        return
    channels = _out_channels(model, backbone)
    arch = backbone.get('arch', 't')
    name = f'NaLaFormer {arch!r}' if isinstance(arch, str) else 'NaLaFormer'
    misfits = [
        f'{path} is {given}, but {name} gives {gives}'
        for path, given, gives in _settings(model, channels)
        if given != gives
    ]
    misfits += _classification_heads(model, channels, name)
    if misfits:
        raise InputError('; '.join(misfits))


def _out_channels(model: Mapping[str, Any], backbone: Mapping[str, Any]) -> list[int]:
    arguments = {key: value for key, value in backbone.items() if key not in ('type', '_scope_')}
    if 'decode_head' in model and model.get('pretrained') is not None:
        arguments['pretrained'] = model['pretrained']  # mmseg hands it on
    norm_cfg = arguments.get('norm_cfg')
    if isinstance(norm_cfg, Mapping) and _type_name(norm_cfg) == 'MMSyncBN':
        del arguments['norm_cfg']  # it needs the process group, which the runner creates
    try:
        with torch.device('meta'):
            return list(NaLaFormer(**arguments).out_channels)
    except (TypeError, ValueError) as error:
        raise InputError(f'model.backbone: {error}') from error


def _settings(model: Mapping[str, Any], channels: list[int]) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and the backbone's value of each setting that must agree with its outputs."""
    for path, neck in _parts(model, 'neck'):
        given = _plain(neck.get('in_channels'))
        if isinstance(given, list) and _type_name(neck) not in _OTHER_NECKS:
            yield f'{path}.in_channels', given, channels
        elif isinstance(given, int) and (
            given not in channels or _type_name(neck) == NaLaFormerNeck.__name__
        ):
            yield f'{path}.in_channels', given, channels[-1]
        return  # whatever follows reads the neck
    for path, head in _parts(model, 'rpn_head', 'bbox_head', 'panoptic_head', 'track_head'):
        given = _plain(head.get('in_channels'))
        if isinstance(given, list) or (
            given is not None and any(given != number for number in channels)
        ):
            yield f'{path}.in_channels', given, channels
    for path, head in _parts(model, 'decode_head', 'auxiliary_head'):
        if isinstance(inner := head.get('kernel_generate_head'), Mapping):  # K-Net
            path, head = f'{path}.kernel_generate_head', inner
        yield from _segmentation_head(path, head, channels)


def _classification_heads(
    model: Mapping[str, Any], channels: list[int], name: str
) -> Iterator[str]:
    for _, neck in _parts(model, 'neck'):
        if _type_name(neck) == NaLaFormerNeck.__name__:
            name, gives = NaLaFormerNeck.__name__, neck.get('out_channels', 1024)
        elif _type_name(neck) == 'GlobalAveragePooling':
            gives = channels[-1]
        else:
            continue
        for path, head in _parts(model, 'head'):
            given = head.get('in_channels')
            if given not in (None, gives):
                yield f'{path}.in_channels is {given}, but {name} gives {gives}'


def _segmentation_head(
    path: str, head: Mapping[str, Any], channels: list[int]
) -> Iterator[tuple[str, Any, Any]]:
    given = _plain(head.get('in_channels'))
    if given is None:
        return
    index = _plain(head.get('in_index'))
    if index is None:  # mmseg's default is the last output, and all for those that ask for a list
        index = list(range(len(channels))) if isinstance(given, list) else -1
    try:
        gives: Any = [channels[i] for i in index] if isinstance(index, list) else channels[index]
    except (IndexError, TypeError):
        yield f'{path}.in_index', index, f'{len(channels)} outputs'
        return
    yield f'{path}.in_channels', given, gives
    if head.get('c1_in_channels'):  # DeepLabV3+ also reads the finest
        yield f'{path}.c1_in_channels', head['c1_in_channels'], channels[0]


def _parts(model: Mapping[str, Any], *names: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in names:
        part = model.get(name)
        if isinstance(part, Mapping):
            yield f'model.{name}', part
        elif isinstance(part, Sequence):
            for i, item in enumerate(part):
                if isinstance(item, Mapping):  # else it is its builder that complains
                    yield f'model.{name}.{i}', item


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else value


def _type_name(cfg: Mapping[str, Any]) -> str:
    kind = cfg.get('type')
    return kind.rsplit('.')[-1] if isinstance(kind, str) else getattr(kind, '__name__', '')
