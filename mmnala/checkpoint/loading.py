"""Loading checkpoints strictly into the backbone."""

import os
import re
from collections.abc import Mapping
from typing import Any

from mmengine.logging import print_log
from timm.models import adapt_input_conv
from torch import Tensor, nn

from .files import local_file, read_checkpoint
from .layouts import STEM, find_state_dict, is_angle, shorten, sort_weights


def load_pretrained(
    model: nn.Module,
    checkpoint: str | os.PathLike,
    prefix: str | None = None,
    map_location: Any = 'cpu',
) -> None:
    """Load a checkpoint's backbone weights into ``model``, strictly.

    All layouts of this module are accepted, and the larger models' files with or without
    ``prefix``. Of a training checkpoint the weights are those of :func:`find_state_dict`. Knowingly
    left out are all other parts of a larger model, the release's classifier and rotary buffers
    (whose values must be the model's), stages behind the last one that ``model`` returns, and norms
    of outputs it does not return; norms of its outputs that the file lacks keep their fresh values.

    A model whose ``in_channels`` is not 3 takes a stem of 3 channels by timm's rule: for one
    channel their sum, for more their repetition, scaled by 3 / ``in_channels``.

    Args:
        model: A :class:`~mmnala.NaLaFormer`; untouched if an error is raised.
        checkpoint: A local file or an http(s) or file URL; of a URL, a sha256 prefix in the file
            name (``name-1a2b3c4d.pth``) is checked.
        prefix: Name of the backbone in a larger model's checkpoint, e.g. ``'backbone.'``; needed
            only where the file holds several.
        map_location: Where tensors are read to, as in :func:`torch.load`.

    Raises:
        FileNotFoundError: If the file does not exist.
        RuntimeError: If it is no checkpoint, cannot be downloaded or has another hash, or if names
            or shapes do not fit; all are listed.
    """
    checkpoint = os.fspath(checkpoint)
    content = read_checkpoint(local_file(checkpoint), map_location)
    try:
        found = sort_weights(find_state_dict(content), prefix)
        state, own = found.backbone, model.state_dict()
        adapted = _adapt_stem(state, own)
        dropped = {k for k in state if k not in own and _is_unbuilt(k, model)}
        kept = {k: v for k, v in state.items() if k not in dropped}
        _check_fit(kept, own)
        _check_angles(found.angles, model)
    except RuntimeError as error:
        raise RuntimeError(
            f'checkpoint {checkpoint!r} does not fit the backbone: {error}'
        ) from None
    model.load_state_dict(kept, strict=False)
    fresh = [k for k in own if k not in kept]
    left = sorted(dropped) + [k for k in found.tensors if not k.startswith('backbone.')]
    print_log(
        f'Loaded {len(kept)} backbone tensors from {checkpoint}{adapted}; '
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
        raise RuntimeError(''.join(problems))
