"""The backbone that an analysis looks at, and the images that it is shown."""

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.device import get_device
from mmengine.registry import DATASETS, MODELS, init_default_scope
from numpy.typing import NDArray
from PIL import Image, ImageOps
from timm.data import resolve_data_config
from timm.layers import Format
from timm.models import clean_state_dict
from torch import Tensor, nn

from .. import timm_models  # noqa: F401, registers nalaformer_*
from ..checkpoint.files import CheckpointError, local_file, read_checkpoint
from ..checkpoint.layouts import find_state_dict
from ..datasets.untrusted import IMAGE_SUFFIXES
from ..engine.errors import InputError
from ..engine.model_check import check_model
from ..engine.testing import without_annotations
from ..engine.tools import CfgOptions, check_weights, innermost_dataset, load_config

TIMM = 'timm:'
# What a test pipeline may do so that pixels of the file can be found in its output.
RESIZES = ('FixScaleResize', 'Resize', 'ResizeEdge', 'ResizeShortestEdge', 'ResizeToMultiple')
STAYS = ('AdjustGamma', 'CLAHE', 'Normalize', 'Pad', 'PhotoMetricDistortion', 'RandomFlip')


class Picture(NamedTuple):
    """An image as a model gets it.

    Attributes:
        name: Its file's name without suffix.
        tensor: ``(1, 3, H, W)``, normalised and, below and to the right, padded.
        image: ``(h, w, 3)``, uint8 RGB, without the padding.
        size: Height and width of the file, of which ``image`` is the whole unless it was moved.
        moved_by: The transform that moved it: cropped, flipped or what is not known here.
    """

    name: str
    tensor: Tensor
    image: NDArray[np.uint8]
    size: tuple[int, int]
    moved_by: str | None = None

    def locate(self, x: float, y: float) -> tuple[float, float]:
        """The place in ``tensor`` of a pixel of the file, in pixels from its left upper corner.

        Raises:
            InputError: If the pixel is outside, or the image was moved.
        """
        if self.moved_by is not None:
            raise InputError(
                f'point {x:g},{y:g}: pixels are followed through resizing and padding alone, and '
                f'the test pipeline has {self.moved_by}; take it out (--cfg-options)'
            )
        height, width = self.size
        if not (0 <= x < width and 0 <= y < height):
            raise InputError(f'point {x:g},{y:g}: {self.name} is {width} wide and {height} high')
        return (
            (x + 0.5) * self.image.shape[1] / width,
            (y + 0.5) * self.image.shape[0] / height,
        )


@dataclass
class Subject:
    """A backbone in eval mode with what it needs to see images.

    Attributes:
        model: The whole model.
        backbone: Its backbone; of timm, the model itself.
        prepare: From an image file to a :class:`Picture`.
        list_images: The files of the config's test set.
    """

    model: nn.Module
    backbone: nn.Module
    prepare: Callable[[Path], Picture]
    list_images: Callable[[], list[Path]]


def add_model_arguments(
    parser: argparse.ArgumentParser, optional: bool = False, weights: bool = True
) -> None:
    """Arguments from which :func:`load_subject` builds a model.

    Args:
        parser: Where they go.
        optional: Whether the config may be absent.
        weights: Whether they matter.
    """
    parser.add_argument(
        'config',
        nargs='?' if optional else None,
        help="config file of mmseg, mmdet or mmpretrain, or 'timm:' and the name of a timm model, "
        'whose arguments --cfg-options gives',
    )
    if weights:
        parser.add_argument(
            'checkpoint',
            nargs='?',
            help="weights of the whole model (default: those that the config's init_cfg names, "
            'else random ones)',
        )
        parser.add_argument(
            '--seed', type=int, default=0, help='of random weights and choices (default: 0)'
        )
    else:
        parser.set_defaults(checkpoint=None, seed=0)
    parser.add_argument(
        '--cfg-options', nargs='+', action=CfgOptions, default={}, metavar='KEY=VALUE'
    )
    parser.set_defaults(launcher='none', local_rank=0, work_dir=None)


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments from which :func:`load_pictures` reads images."""
    parser.add_argument(
        '--images',
        nargs='+',
        type=Path,
        metavar='PATH',
        help='image files, or folders of them (default: the test set of the config)',
    )
    parser.add_argument(
        '--num-images',
        type=positive,
        default=4,
        help='how many to take of a folder or of the test set, evenly spaced (default: 4)',
    )


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--out', type=Path, required=True, metavar='DIR', help='new or empty folder for results'
    )


def positive(text: str) -> int:
    """A positive integer on a command line."""
    if not re.fullmatch(r'0*[1-9]\d*', text):
        raise argparse.ArgumentTypeError(f'expected a positive integer, got {text!r}')
    return int(text)


def point(text: str) -> tuple[float, float]:
    """A pixel ``x,y`` on a command line."""
    match = re.fullmatch(r'(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)', text)
    if match is None:
        raise argparse.ArgumentTypeError(f'expected X,Y such as 120,64, got {text!r}')
    return float(match[1]), float(match[2])


def size(text: str) -> tuple[int, int]:
    """Height and width on a command line, ``224`` or ``800x1344``."""
    match = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', text)
    if match is None:
        raise argparse.ArgumentTypeError(f'expected 224 or HEIGHTxWIDTH, got {text!r}')
    return int(match[1]), int(match[2] or match[1])


def load_subject(args: argparse.Namespace, whole: bool = False) -> Subject:
    """Build the model that the arguments name, on the GPU if there is one.

    Args:
        args: Those of :func:`add_model_arguments`.
        whole: Of a timm model, take the classifier too, not the feature maps of its stages.

    Raises:
        InputError: If there is no such model, or the weights do not fit.
        SystemExit: The same, of a config.
    """
    torch.manual_seed(args.seed)
    if args.config.startswith(TIMM):
        return _load_timm(args, whole)
    cfg = load_config(args)
    if 'model' not in cfg:
        raise InputError(f'config {args.config}: it has no model')
    check_model(cfg.model)
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    if cfg.get('data_preprocessor') is not None:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(cfg.model)
    if not isinstance(getattr(model, 'backbone', None), nn.Module):
        raise InputError(f'config {args.config}: its model {type(model).__name__} has no backbone')
    if args.checkpoint is None:
        model.init_weights()
    else:
        try:
            content = read_checkpoint(local_file(args.checkpoint))
        except (CheckpointError, FileNotFoundError):
            raise  # they name the file
        except (RuntimeError, OSError) as error:
            raise InputError(f'checkpoint {args.checkpoint}: {_line(error)}') from error
        check_weights(model, content, args.checkpoint)
    model = model.to(get_device()).eval()
    return Subject(
        model,
        model.backbone,
        lambda path: _run_pipeline(cfg, model, path),
        lambda: _test_set(cfg),
    )


def _load_timm(args: argparse.Namespace, whole: bool) -> Subject:
    name, options = args.config.removeprefix(TIMM), dict(args.cfg_options)
    if not whole:
        options['features_only'] = True
    try:
        if args.checkpoint is not None:  # read here, since older versions of timm run pickles
            state = find_state_dict(read_checkpoint(local_file(args.checkpoint)))
            overlay = dict(state_dict=clean_state_dict(state))
            options |= dict(pretrained=True, pretrained_cfg_overlay=overlay)
        model = timm.create_model(name, **options)
    # Each model fails in its own way on arguments, weights and stages that it does not have.
    except Exception as error:
        raise InputError(f'{args.config}: {type(error).__name__}: {_line(error)}') from error
    model = model.to(get_device()).eval()
    data = resolve_data_config(model=model, args=_image_size(args.cfg_options))
    return Subject(model, model, lambda path: _prepare_timm(path, data), _no_test_set)


def _image_size(options: dict[str, Any]) -> dict[str, Any]:
    size = options.get('img_size')
    return {} if size is None else dict(img_size=size if isinstance(size, int) else tuple(size))


def _no_test_set() -> list[Path]:
    raise InputError('--images: a timm model has no test set, name files or a folder')


def _prepare_timm(path: Path, data: dict[str, Any]) -> Picture:
    """Stretch to the model's input size, and normalise."""
    original = _read_rgb(path)
    height, width = data['input_size'][1:]
    image = np.array(original.resize((width, height), Image.Resampling.BICUBIC))
    mean, std = (torch.tensor(data[name])[:, None, None] for name in ('mean', 'std'))
    tensor = (torch.from_numpy(image).permute(2, 0, 1) / 255 - mean) / std
    return Picture(path.stem, tensor[None].to(get_device()), image, original.size[::-1])


def _read_rgb(path: Path) -> Image.Image:
    """An image file as the toolboxes load it: turned as its EXIF data say, 8 bits a channel."""
    try:
        image = ImageOps.exif_transpose(Image.open(path))
        if image.mode.startswith('I'):  # 16 bits of grey, which convert would clip
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        return image.convert('RGB')
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f'--images {path}: {_line(error)}') from error


def _run_pipeline(cfg: Config, model: Any, path: Path) -> Picture:
    """The config's own test pipeline, without annotations, and the model's data preprocessor."""
    size = _read_rgb(path).size[::-1]
    shown: tuple[int, ...] = size
    moved_by = before = None
    packed: Any = dict(img_path=str(path), img_id=0, ori_shape=size)
    for transform in Compose(without_annotations(_test_dataset(cfg).pipeline)).transforms:
        packed, name = transform(packed), type(transform).__name__
        if not isinstance(packed, dict):
            break
        if 'img' not in packed:  # they are inputs now
            continue
        shape = np.shape(packed['img'])[:2]
        if before is None:
            size = shown = (shape[0], shape[1])
        elif name in RESIZES:
            shown = tuple(round(s * n / o) for s, n, o in zip(shown, shape, before, strict=True))
        elif not name.startswith('Load') and (name not in STAYS or packed.get('flip')):
            moved_by = moved_by or name
        before = shape
    if not isinstance(packed, dict) or not isinstance(packed.get('inputs'), Tensor):
        raise InputError('test_dataloader: its pipeline gives no single image as inputs')
    image = packed['inputs'][[2, 1, 0]].permute(1, 2, 0)  # the toolboxes' pipelines have BGR
    batch = dict(inputs=[packed['inputs']], data_samples=[packed['data_samples']])
    with torch.no_grad():
        tensor = model.data_preprocessor(batch, training=False)['inputs']
    if moved_by is None:
        image = image[: shown[0], : shown[1]]
    return Picture(path.stem, tensor, image.to(torch.uint8).contiguous().numpy(), size, moved_by)


def _test_dataset(cfg: Config) -> Any:
    dataset = innermost_dataset((cfg.get('test_dataloader') or {}).get('dataset', {}))
    if not dataset.get('pipeline'):
        raise InputError('config: it has no test_dataloader.dataset with a pipeline')
    return dataset


def _test_set(cfg: Config) -> list[Path]:
    dataset = DATASETS.build(_test_dataset(cfg))
    return [Path(dataset.get_data_info(i)['img_path']) for i in range(len(dataset))]


def load_pictures(subject: Subject, args: argparse.Namespace) -> list[Picture]:
    """Read and prepare the images that the arguments name.

    Args:
        subject: Whose images they are.
        args: Those of :func:`add_image_arguments`.

    Raises:
        InputError: If there are none, or one is no image.
    """
    files: list[Path] = []
    for path in args.images or ():
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
            if not inside:
                raise InputError(f'--images {path}: no {", ".join(IMAGE_SUFFIXES)} in this folder')
            files += _spread(inside, args.num_images)
        else:
            files.append(path)
    if not args.images:
        files = _spread(subject.list_images(), args.num_images)
    return [subject.prepare(path) for path in files]


def _spread(files: Sequence[Path], number: int) -> list[Path]:
    picks = np.linspace(0, len(files) - 1, min(number, len(files))).round().astype(int)
    return [files[i] for i in picks]


def unique_names(pictures: Iterable[Picture]) -> list[str]:
    """Names for files, different even if two images in different folders have the same."""
    names: list[str] = []
    for picture in pictures:
        name, number = picture.name, 1
        while name in names:
            name, number = f'{picture.name}~{number}', number + 1
        names.append(name)
    return names


def stage_outputs(backbone: nn.Module, image: Tensor) -> list[Tensor]:
    """The feature maps of a backbone, ``(B, C, H, W)`` each, from the finest on.

    Args:
        backbone: One of a config, or timm's with ``features_only=True``.
        image: ``(B, 3, H, W)``.

    Raises:
        InputError: If it returns anything else, or does not take images of this size.
    """
    try:
        outputs = backbone(image)
    except (AssertionError, RuntimeError) as error:
        size = 'x'.join(map(str, image.shape[2:]))
        raise InputError(f'the backbone does not take images of {size}: {_line(error)}') from error
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in outputs):
        raise InputError(
            f'{type(backbone).__name__}: its outputs are no feature maps (B, C, H, W); of a ViT, '
            'model.backbone.out_type=featmap gives them'
        )
    if getattr(backbone, 'output_fmt', None) == Format.NHWC:
        outputs = [x.permute(0, 3, 1, 2) for x in outputs]
    return outputs


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ['']
    return lines[0] if len(lines) == 1 else f'{lines[0]} {lines[1].strip()}'
