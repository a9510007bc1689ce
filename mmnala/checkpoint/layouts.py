"""The names and shapes that one model's weights have in different files.

Three layouts name the weights of one model:

- ``release``: the public release's names;
- ``backbone``: :class:`~mmnala.NaLaFormer`'s own;
- ``classifier``: ``backbone.*``, ``neck.*`` and ``head.fc.*``, as in mmpretrain's ImageClassifier
  and in our timm models.

Other models (mmseg, mmdet) hold a backbone and foreign parts, timm's ``features_only`` models a
classifier without its last parts, under ``model.``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEM = 'patch_embed.proj.0.weight'  # where this ends a name, a backbone begins
_WRAPPERS = ('module.', '_orig_mod.', 'model.')  # data-parallel, torch.compile, timm's features
# Where files hold weights: the averages beside the trained ones, and with mmengine, whose EMAHook
# saves the averages as the model's, the trained ones beside the averages.
WEIGHTS = ('state_dict', 'model')
AVERAGES = ('state_dict_ema', 'model_ema')
TRAINED = 'ema_state_dict'
_CLASSIFIER = ('neck.proj.', 'neck.norm.', 'head.fc.')
_ANGLE = re.compile(r'layers\.(\d+)\.RoPE\.angle')


def find_state_dict(content: Mapping[str, Any], ema: bool | None = None) -> dict[str, Tensor]:
    """The weights in a checkpoint's dict, by their names in the file.

    Args:
        content: The file's dict. Weights are looked for under ``state_dict`` (OpenMMLab, timm),
            ``model`` (the release) and at the top level.
        ema: True takes the averages (EMA), False the trained weights, None what
            :func:`takes_averages` says.

    Raises:
        RuntimeError: If ``ema`` is True and there are no averages, if there are no weights at all,
            or if names are no strings.
    """

    def part(*keys: str) -> Mapping[str, Any] | None:
        return next((content[k] for k in keys if isinstance(content.get(k), Mapping)), None)

    state, averages, raw = part(*WEIGHTS), part(*AVERAGES), part(TRAINED)
    averaged = takes_averages(content, ema)
    if ema and averaged is None:
        raise RuntimeError(f'it holds no averaged weights (EMA); it has {shorten(content)}')
    if averaged and averages is not None:
        state = averages
    elif state is None:
        state = content
    elif averaged is False and raw is not None:
        state = {**state, **_under('module.', raw)}  # beside them stands a counter
    if not state:
        raise RuntimeError('empty state dict')
    if not all(isinstance(name, str) for name in state):
        raise RuntimeError('its state dict has names that are no strings')
    return dict(state)


def takes_averages(content: Mapping[str, Any], ema: bool | None = None) -> bool | None:
    """Whether :func:`find_state_dict` takes averaged weights; None of a file without averages.

    By default they are those that the projects' own loaders take: the trained ones of the release
    (``model`` beside ``model_ema``), the averages of timm (``state_dict_ema``) and of mmengine
    (``state_dict`` beside ``ema_state_dict``).
    """
    beside = [key for key in (*AVERAGES, TRAINED) if isinstance(content.get(key), Mapping)]
    if not beside:
        return None
    return beside != ['model_ema'] if ema is None else ema


@dataclass
class SortedWeights:
    """What :func:`sort_weights` finds in a state dict."""

    layout: str
    """``'release'``, ``'backbone'``, ``'classifier'``, or ``'model'`` with foreign parts."""
    tensors: dict[str, Tensor]
    """Backbone and classifier, by the names and in the shapes of the ``classifier`` layout."""
    sources: dict[str, str]
    """For each of them and of the frequencies, its name in the file."""
    angles: dict[int, Tensor]
    """For each stage, the rotary frequencies that the release stores."""
    others: list[str]
    """Names in the file outside backbone and classifier."""

    @property
    def backbone(self) -> dict[str, Tensor]:
        """The backbone's weights by its own names."""
        return {
            name.removeprefix('backbone.'): value
            for name, value in self.tensors.items()
            if name.startswith('backbone.')
        }


def sort_weights(state: Mapping[str, Any], prefix: str | None = None) -> SortedWeights:
    """Find backbone and classifier in a state dict of any layout.

    Args:
        state: Named weights. What wraps all names (``module.``, ``_orig_mod.``, ``model.``) is
            ignored.
        prefix: Name of the backbone in a larger model. Without it, the backbone is found by its
            stem's name. A plain backbone is found whatever the prefix.

    Raises:
        RuntimeError: If no name starts with ``prefix`` and this is no plain backbone, if there are
            several backbones, or if two names become the same.
    """
    sources = {name: name for name in state}
    if prefix:
        prefix = prefix.rstrip('.') + '.'
        chosen = _under(prefix, sources) or _under(prefix, _unwrap(sources))
        if not chosen and STEM not in _unwrap(sources):
            raise RuntimeError(f'prefix {prefix!r} fits no name in it; it has {shorten(state)}')
        sources = chosen or sources
    sources = _unwrap(sources)
    starts = {
        k.removesuffix(STEM) for k in sources if re.fullmatch(r'(.*\.)?' + re.escape(STEM), k)
    }
    if len(starts) > 1 and '' not in starts:
        raise RuntimeError(f'it holds several backbones, choose one by prefix: {sorted(starts)}')
    start = starts.pop() if len(starts) == 1 else ''
    whole = start.removesuffix('backbone.')

    found = SortedWeights('model' if start else 'backbone', {}, {}, {}, [])
    for name, source in sources.items():
        own, value = name.removeprefix(start), state[source]
        if name.startswith(start):
            if angle := _ANGLE.fullmatch(own):
                found.angles[int(angle[1])] = value
                found.sources[own] = source
                found.layout = 'model' if start else 'release'
                continue
            ours = _from_release(own)
            if ours != f'backbone.{own}' and not start:
                found.layout = 'release'
        elif start != whole and name.removeprefix(whole).startswith(_CLASSIFIER):
            ours = name.removeprefix(whole)
            found.layout = 'classifier'
        else:
            found.others.append(source)
            continue
        if ours in found.tensors:
            raise RuntimeError(f'{source} and {found.sources[ours]} name the same weight')
        found.sources[ours] = source
        found.tensors[ours] = _squeeze(ours, value)
    chosen_names = set(sources.values())
    found.others += [name for name in state if name not in chosen_names]
    return found


def _under(prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in names.items() if k.startswith(prefix)}


def _unwrap(names: Mapping[str, str]) -> dict[str, str]:
    for wrapper in _WRAPPERS:
        if names and all(name.startswith(wrapper) for name in names):
            return _unwrap(_under(wrapper, names))
    return dict(names)


def _from_release(name: str) -> str:
    """The ``classifier`` layout's name of a weight of the release or of our backbone."""
    if name.startswith(('proj.', 'norm.')):
        return f'neck.{name}'
    if name.startswith('head.'):
        return f'head.fc.{name.removeprefix("head.")}'
    return 'backbone.' + re.sub(r'\.(norm[12])\.norm\.', r'.\1.', name)


def _squeeze(name: str, value: Any) -> Any:
    """Our shape of a weight: the release's layer scales and head have further axes of length 1."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    if re.search(r'\.gamma_[12]$', name) and value.numel() == value.shape[1]:
        return value.flatten()
    if name == 'head.fc.weight' and value.shape[2:] == (1, 1):
        return value.flatten(1)
    return value


def to_release(name: str, value: Tensor) -> tuple[str, Tensor]:
    """The release's name and shape of a weight that has the ``classifier`` layout's."""
    if name.startswith('neck.'):
        return name.removeprefix('neck.'), value
    if name.startswith('head.fc.'):
        name = f'head.{name.removeprefix("head.fc.")}'
        return name, value[..., None, None] if name == 'head.weight' else value
    if re.search(r'\.gamma_[12]$', name):
        value = value.reshape(1, -1, 1, 1)
    return re.sub(r'(\.norm[12])\.', r'\1.norm.', name.removeprefix('backbone.')), value


def from_release(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our backbone's weights in a state dict of the release; names that are ours already stay."""
    return sort_weights(state).backbone


def release_angle(head_dim: int) -> Tensor:
    """The rotary frequencies as the release stores them, float32 of shape ``(head_dim / 2,)``.

    They are those of :func:`~mmnala.ops.rotary_table`, rounded as the release rounds them.
    """
    return (1.0 / 10000 ** torch.linspace(0, 1, head_dim // 4)).repeat_interleave(2)


def is_angle(angle: Any, head_dim: int, rtol: float = 0.0) -> bool:
    """Whether ``angle`` is :func:`release_angle` in its own dtype, up to ``rtol``."""
    expected = release_angle(head_dim)
    if getattr(angle, 'shape', None) != expected.shape:
        return False
    expected = expected.to(angle.dtype).double()
    return torch.allclose(angle.cpu().double(), expected, rtol=rtol, atol=0)


def shorten(names: Any, most: int = 6) -> str:
    names = [str(name) for name in names]
    rest = f' and {len(names) - most} more' if len(names) > most else ''
    return (', '.join(names[:most]) or 'nothing') + rest
