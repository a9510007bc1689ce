"""Loading checkpoints: strictly into the backbone, and by mmengine."""

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml
from mmengine.fileio.handlers import PickleHandler, YamlHandler, file_handlers
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from mmengine.runner import checkpoint as mmengine_checkpoint
from timm.models import adapt_input_conv
from torch import Tensor, nn

from .files import CheckpointError, local_file, read_checkpoint
from .layouts import (
    STEM,
    SortedWeights,
    find_state_dict,
    is_angle,
    shorten,
    sort_weights,
    takes_averages,
)
from .unpickling import unpickle

# mmengine's own names of published weights, and where it looks them up.
_TABLES = {
    'torchvision': mmengine_checkpoint.get_torchvision_models,
    'modelzoo': mmengine_checkpoint.get_torchvision_models,
    'open-mmlab': mmengine_checkpoint.get_external_models,
    'openmmlab': mmengine_checkpoint.get_external_models,
    'mmcls': mmengine_checkpoint.get_mmcls_models,
}


# mmengine takes the first pattern that fits, in descending order: the second comes before the one
# of all addresses.
@CheckpointLoader.register_scheme((r'.*\.safetensors$', r'https?://.*\.safetensors$'), force=True)
def load_from_safetensors(filename: str, map_location: Any = None) -> dict[str, Any]:
    """What mmengine loads of a ``.safetensors`` file or URL, such as ``load_from`` names."""
    return read_checkpoint(local_file(filename), map_location)


def load_from_untrusted(
    filename: str, map_location: Any = None, strict: bool = False
) -> dict[str, Any]:
    """Read a checkpoint from wherever mmengine finds one, as :func:`read_checkpoint` does.

    Args:
        filename: A file, an address (http, https, file) or one of mmengine's names, such as
            ``torchvision://resnet50``.
        map_location: As in :func:`torch.load`.
        strict: As in :func:`read_checkpoint`.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If there is no such name, or what :func:`read_checkpoint` and
            :func:`local_file` raise.
    """
    scheme, _, name = filename.rpartition('://')
    address = filename
    if scheme in _TABLES:
        table = _TABLES[scheme]()
        renamed = mmengine_checkpoint.get_deprecated_model_names() if 'mmlab' in scheme else {}
        address = table.get(renamed.get(name, name))
        if address is None:
            raise CheckpointError(f'checkpoint {filename!r}: mmengine knows no such model')
        if '://' not in address:
            address = os.path.join(mmengine_checkpoint._get_mmengine_home(), address)
    elif scheme not in ('', 'file', 'http', 'https'):
        names = ', '.join(f'{known}://' for known in ('file', 'http', 'https', *_TABLES))
        raise CheckpointError(f'checkpoint {filename!r}: expected a file or one of {names}')
    content = read_checkpoint(local_file(address), map_location, strict)
    if scheme == 'mmcls':
        content = mmengine_checkpoint._process_mmcls_checkpoint(content)
    if isinstance(content.get('meta'), dict):
        content['meta'].pop('config', None)  # mmengine's Runner.resume runs it as Python
    return content


class _DataPickles(PickleHandler):
    def load_from_fileobj(self, file: Any, **kwargs: Any) -> Any:
        return unpickle(file)


class _DataYaml(YamlHandler):
    def load_from_fileobj(self, file: Any, **kwargs: Any) -> Any:
        return super().load_from_fileobj(file, **{'Loader': _DataLoader, **kwargs})


class _DataLoader(yaml.SafeLoader):
    """YAML's own types, and the tuples that mmengine's configs have."""


_DataLoader.add_constructor(
    'tag:yaml.org,2002:python/tuple', lambda loader, node: tuple(loader.construct_sequence(node))
)


def distrust_files() -> None:
    """Let mmengine, in this process and from now on, execute nothing that lies in data files.

    Its loader of checkpoints, by which runners load and resume and models are initialised, becomes
    :func:`load_from_untrusted`. Pickles read by ``mmengine.load``, such as annotations, may hold
    what :func:`unpickle` knows, YAML files plain values. Configs in Python stay code.
    """
    CheckpointLoader.register_scheme(
        list(CheckpointLoader._schemes), load_from_untrusted, force=True
    )
    file_handlers.update(
        pkl=_DataPickles(), pickle=_DataPickles(), yaml=_DataYaml(), yml=_DataYaml()
    )


def load_pretrained(
    model: nn.Module,
    checkpoint: str | os.PathLike | None,
    prefix: str | None = None,
    map_location: Any = 'cpu',
) -> None:
    """Load a checkpoint's backbone weights into ``model``, strictly.

    All layouts of this module are accepted, and the larger models' files with or without
    ``prefix``. Of a training checkpoint the weights are those of :func:`find_state_dict`; the log
    says which where there are averages, too. Knowingly left out are all other parts of a larger
    model, the release's classifier and rotary buffers (whose values must be the model's), stages
    behind the last one that ``model`` returns, and norms of outputs it does not return; norms of
    its outputs that the file lacks keep their fresh values.

    A model whose ``in_channels`` is not 3 takes a stem of 3 channels by timm's rule: for one
    channel their sum, for more their repetition, scaled by 3 / ``in_channels``.

    Args:
        model: A :class:`~mmnala.NaLaFormer`; untouched if an error is raised.
        checkpoint: Must be given: a local file or an http(s) or file URL. A sha256 prefix in the
            file name (``name-1a2b3c4d.pth``) is checked, of a local file if it is no mere number.
        prefix: Name of the backbone in a larger model's checkpoint, e.g. ``'backbone.'``; needed
            only where the file holds several.
        map_location: Where tensors are read to, as in :func:`torch.load`.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: A RuntimeError: it is no checkpoint, cannot be downloaded or has another
            hash, or names or shapes do not fit.
    """
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise CheckpointError(f'init_cfg.checkpoint must be a file or URL, got {checkpoint!r}')
    checkpoint = os.fspath(checkpoint)
    content = read_checkpoint(local_file(checkpoint), map_location)
    try:
        found = sort_weights(find_state_dict(content), prefix)
        state, own = found.backbone, model.state_dict()
        adapted = _adapt_stem(state, own)
        dropped = {k for k in state if k not in own and _is_unbuilt(k, model)}
        kept = {k: v for k, v in state.items() if k not in dropped}
        _check_fit(kept, own, _other_variant(found, own))
        _check_angles(found.angles, model)
    except RuntimeError as error:
        raise CheckpointError(
            f'checkpoint {checkpoint!r} does not fit the backbone: {error}'
        ) from None
    model.load_state_dict(kept, strict=False)
    fresh = [k for k in own if k not in kept]
    left = sorted(dropped) + [k for k in found.tensors if not k.startswith('backbone.')]
    averaged = takes_averages(content)
    which = '' if averaged is None else ' averaged (EMA)' if averaged else ' trained, not averaged'
    print_log(
        f'Loaded {len(kept)}{which} backbone tensors from {checkpoint}{adapted}; '
        f'fresh: {shorten(fresh)}; left out: {shorten(left + found.others)}',
        logger='current',
    )


def _adapt_stem(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Fit the stem in ``state`` to the model's image channels, and say so."""
    weight, channels = state.get(STEM), own[STEM].shape[1]
    if not isinstance(weight, Tensor) or weight.dim() != 4 or weight.shape[1] == channels:
        return ''
    if weight.shape[1] != 3:
        raise RuntimeError(
            f'its images have {weight.shape[1]} channels and in_channels is {channels}: '
            'only weights for 3 channels can be adapted'
        )
    state[STEM] = adapt_input_conv(channels, weight)
    return f' ({STEM} adapted from 3 to {channels} image channels)'


def _check_angles(angles: Mapping[int, Tensor], model: nn.Module) -> None:
    """Another number of heads has the same shapes of weights, but other rotary frequencies."""
    for stage, angle in angles.items():
        if stage >= len(model.layers):  # type: ignore[arg-type]
            continue
        head_dim = model.layers[stage].head_dim  # type: ignore[index,union-attr]
        if not is_angle(angle, head_dim, rtol=1e-6):
            raise RuntimeError(
                f'layers.{stage}.RoPE.angle are not the rotary frequencies of {head_dim} channels '
                'a head; are num_heads those of the file?'
            )


def _is_unbuilt(name: str, model: nn.Module) -> bool:
    """Whether a weight belongs to a stage or output norm that this model was built without."""
    if re.match(r'norm\d+\.', name):
        return True
    match = re.match(r'layers\.(\d+)\.(downsample\.)?', name)
    if match is None:
        return False
    stage, last = int(match[1]), len(model.layers) - 1  # type: ignore[arg-type]
    return stage > last or (stage == last and match[2] is not None)


def _other_variant(found: SortedWeights, own: Mapping[str, Tensor]) -> str:
    """The variants whose sizes the file has, unless they may be the model's, too."""
    from ..conversion import infer_arch, variants  # it knows the variants, which load by this

    try:
        names, ours = (variants(infer_arch(each)) for each in (found, sort_weights(own)))
    except RuntimeError:
        return ''
    return '' if set(names) & set(ours) else ' or '.join(name.upper() for name in names)


def _check_fit(state: Mapping[str, Any], own: Mapping[str, Tensor], variant: str) -> None:
    """Fail unless names and shapes are ``own``; ``variant`` is the file's if it is another."""
    if not state.keys() & own.keys():
        raise RuntimeError(f'it holds no NaLaFormer, its names are {shorten(state)}')
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
            problems.append(f'{kind} ({len(names)}): {shorten(names)}')
    if problems:
        raise RuntimeError(
            '; '.join([f'the file is NaLaFormer {variant}'] * bool(variant) + problems)
        )
