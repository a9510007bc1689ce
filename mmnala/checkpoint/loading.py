"""Reading checkpoints as untrusted files, and loading them strictly into the backbone."""

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.logging import print_log
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.hub import HASH_REGEX, download_url_to_file, get_dir

# What a file of tensors needs; torch itself turns the storages' names into plain tags.
_TRUSTED = {
    ('collections', 'OrderedDict'),
    ('torch', 'Size'),
    ('torch', 'device'),
    ('torch._utils', '_rebuild_parameter'),
    ('torch._utils', '_rebuild_tensor_v2'),
}

# Parts of the release that are no backbone weights: the classifier and a recomputable buffer.
_RELEASE_EXTRAS = re.compile(r'(proj|norm|head)\.|layers\.\d+\.RoPE\.angle$')


class _Inert:
    """Stands for any pickled object that is not a tensor or a container: takes all, does nothing.

    A release checkpoint carries its ``argparse.Namespace``, one of mmengine its log buffers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> '_Inert':
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    __setstate__ = append = extend = __call__


class _TensorUnpickler(pickle.Unpickler):
    """Builds tensors and containers; a name that is not trusted becomes :class:`_Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in _TRUSTED else _Inert


_TENSOR_PICKLE = SimpleNamespace(
    __name__='tensors only',
    Unpickler=_TensorUnpickler,
    load=lambda file, **kwargs: _TensorUnpickler(file, **kwargs).load(),
)


def read_checkpoint(path: str | os.PathLike, map_location: Any = 'cpu') -> dict[str, Any]:
    """Read a ``.safetensors`` or a torch checkpoint without executing pickled code.

    Args:
        path: A local file, whatever its name; safetensors are recognised by their ending.
        map_location: As in :func:`torch.load`.

    Returns:
        The file's top-level dict. Objects that are neither tensors nor builtin values are replaced
        by inert stand-ins.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If the file is truncated or no checkpoint.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'checkpoint must be an existing file, got {path!r}')
    try:
        if path.endswith('.safetensors'):
            return load_file(path, device=str(map_location or 'cpu'))
        if zipfile.is_zipfile(path) and any(
            name.endswith('/constants.pkl') for name in zipfile.ZipFile(path).namelist()
        ):
            raise pickle.UnpicklingError('a TorchScript archive holds code, not only weights')
        content = torch.load(
            path, map_location=map_location, pickle_module=_TENSOR_PICKLE, weights_only=False
        )
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f'it holds a {type(content).__name__}, not a dict')
    # Damaged bytes surface as almost any exception, depending on where the damage lies.
    except (Exception, SafetensorError) as error:
        raise RuntimeError(f'checkpoint {path!r} is truncated or no checkpoint: {error}') from error
    return content


def find_state_dict(content: Mapping[str, Any], prefix: str | None = None) -> dict[str, Tensor]:
    """The weights in a checkpoint's dict, by the names of the module that ``prefix`` selects.

    Weights are looked for under ``state_dict`` (OpenMMLab), ``model`` (the release) and at the top
    level; a ``module.`` in front of all names (data-parallel wrappers) is dropped.

    Raises:
        RuntimeError: If no name starts with ``prefix``, or names are no strings.
    """
    state = next(
        (content[key] for key in ('state_dict', 'model') if isinstance(content.get(key), Mapping)),
        content,
    )
    if not all(isinstance(name, str) for name in state):
        raise RuntimeError('its state dict has names that are no strings')
    if state and all(name.startswith('module.') for name in state):
        state = {name.removeprefix('module.'): value for name, value in state.items()}
    if prefix:
        prefix = prefix.rstrip('.') + '.'
        chosen = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if not chosen:
            raise RuntimeError(f'prefix {prefix!r} fits no name in it; it has {_shorten(state)}')
        state = chosen
    return dict(state)


def from_release(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the release's backbone weights to ours; names that are ours already stay."""
    renamed = {}
    for name, value in state.items():
        if _RELEASE_EXTRAS.match(name):
            continue
        name = re.sub(r'\.(norm[12])\.norm\.', r'.\1.', name)
        if re.search(r'\.gamma_[12]$', name) and value.dim() == 4:
            value = value.flatten()  # the release's layer scales are (1, C, 1, 1)
        renamed[name] = value
    return renamed


def load_pretrained(
    model: nn.Module,
    checkpoint: str | os.PathLike,
    prefix: str | None = None,
    map_location: Any = 'cpu',
) -> None:
    """Load a checkpoint's backbone weights into ``model``, strictly.

    The release's layout and this project's own are accepted. Knowingly left out are the classifier
    and rotary buffer, stages behind the last one that ``model`` returns, and norms of outputs it
    does not return; norms of its outputs that the file lacks keep their fresh values.

    Args:
        model: A :class:`~mmnala.NaLaFormer`; untouched if an error is raised.
        checkpoint: A local file or an http(s) URL; of a URL, a sha256 prefix in the file name
            (``name-1a2b3c4d.pth``) is checked.
        prefix: Name of the backbone in a larger model's checkpoint, e.g. ``'backbone.'``.
        map_location: Where tensors are read to, as in :func:`torch.load`.

    Raises:
        FileNotFoundError: If the file does not exist.
        RuntimeError: If it is no checkpoint, or if names or shapes do not fit; all are listed.
    """
    checkpoint = os.fspath(checkpoint)
    path = _download(checkpoint) if urlparse(checkpoint).scheme in ('http', 'https') else checkpoint
    content = read_checkpoint(path, map_location)
    try:
        state = from_release(find_state_dict(content, prefix))
        own = model.state_dict()
        dropped = {k for k in state if k not in own and _is_unbuilt(k, model)}
        kept = {k: v for k, v in state.items() if k not in dropped}
        _check_fit(kept, own)
    except RuntimeError as error:
        raise RuntimeError(
            f'checkpoint {checkpoint!r} does not fit the backbone: {error}'
        ) from None
    model.load_state_dict(kept, strict=False)
    fresh = [k for k in own if k not in kept]
    print_log(
        f'Loaded {len(kept)} backbone tensors from {checkpoint}; '
        f'fresh: {_shorten(fresh)}; left out: {_shorten(sorted(dropped))}',
        logger='current',
    )


def _download(url: str) -> str:
    name = os.path.basename(urlparse(url).path)
    path = os.path.join(get_dir(), 'checkpoints', name)
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        match = HASH_REGEX.search(name)
        download_url_to_file(url, path, match.group(1) if match else None)
    return path


def _is_unbuilt(name: str, model: nn.Module) -> bool:
    """Whether a weight belongs to a stage or output norm that this model was built without."""
    if re.match(r'norm\d+\.', name):
        return True
    match = re.match(r'layers\.(\d+)\.(downsample\.)?', name)
    if match is None:
        return False
    stage, last = int(match[1]), len(model.layers) - 1  # type: ignore[arg-type]
    return stage > last or (stage == last and match[2] is not None)


def _check_fit(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    problems = []
    missing = [k for k in own if k not in state and not re.match(r'norm\d+\.', k)]
    unexpected = [k for k in state if k not in own]
    wrong = [
        f'{k}: {tuple(getattr(state[k], "shape", ()))} in the file, {tuple(own[k].shape)} here'
        for k in own
        if k in state and getattr(state[k], 'shape', None) != own[k].shape
    ]
    for kind, names in (('missing', missing), ('unexpected', unexpected), ('shapes', wrong)):
        if names:
            problems.append(f'\n  {kind} ({len(names)}): ' + ', '.join(names))
    if problems:
        hint = ''
        if any(name.startswith('backbone.') for name in unexpected):
            hint = "\n  (a whole model's checkpoint? then set prefix='backbone.')"
        raise RuntimeError(''.join(problems) + hint)


def _shorten(names: Any, most: int = 6) -> str:
    names = list(names)
    rest = f' and {len(names) - most} more' if len(names) > most else ''
    return (', '.join(names[:most]) or 'nothing') + rest
