"""From files to predictions: finding images and videos, reading them, and computing in batches."""

import glob
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import default_collate
from mmengine.device import get_device
from mmengine.registry import DATASETS, TRANSFORMS, init_default_scope
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ..datasets.untrusted import IMAGE_SUFFIXES, MAX_PIXELS, FileError, read_header
from .errors import InputError
from .model_check import check_model
from .testing import enable_tta, test_dataset, type_name, without_annotations
from .tools import check_weights

VIDEOS = ('.avi', '.m4v', '.mkv', '.mov', '.mp4', '.mpeg', '.mpg', '.webm')


class ReadError(Exception):
    """An image or video that cannot be read; the message is why."""


@dataclass(frozen=True)
class Source:
    """An input file.

    Attributes:
        path: As the user named it.
        relative: Its path from the folder that the user named, or that a pattern begins with.
        unique: ``relative``, or the path from the folder that all inputs share if two would
            otherwise have one name.
        name: ``unique`` without its ending, unless another image or video would share that, too.
    """

    path: Path
    relative: Path
    unique: Path
    name: str

    @property
    def is_video(self) -> bool:
        return _is_video(self.path)


@dataclass(frozen=True, eq=False)
class Frame:
    """An image, or the picture ``index`` of a video.

    Attributes:
        image: (H, W, 3), BGR, as the config's ``LoadImageFromFile`` reads it.
    """

    source: Source
    index: int | None
    image: NDArray

    @property
    def name(self) -> str:
        """A relative path of its own, without an ending."""
        if self.index is None:
            return self.source.name
        # No other input can lie under a video's whole name.
        return f'{self.source.unique.as_posix()}/{self.index:06d}'


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The images and videos that files, folders (with all in them) and patterns name.

    They keep the order of ``inputs``, are sorted within a folder or pattern, and come once each.

    Raises:
        InputError: Naming the input that there is not, or that holds no image or video.
    """
    found: dict[str, tuple[Path, Path]] = {}
    for given in inputs:
        base, files = _matching(given)
        if not files:
            reason = 'this folder holds' if base == Path(given) else 'no such file, it matches'
            raise InputError(f'INPUT {given!r}: {reason} no {" ".join(IMAGE_SUFFIXES + VIDEOS)}')
        for path in files:
            found.setdefault(os.path.abspath(path), (Path(path), Path(os.path.relpath(path, base))))
    common = os.path.commonpath([os.path.dirname(path) for path in found])
    paths = [path for path, _ in found.values()]
    relative = [path for _, path in found.values()]
    shared = [Path(os.path.relpath(path, common)) for path in found]
    unique = shared if _clashing([path.with_suffix('') for path in relative], paths) else relative
    names = [path.with_suffix('') for path in unique]
    while clashing := _clashing(names, paths):  # again: 1.jpg may be the name of 1.jpg.png
        for i in clashing:
            names[i] = unique[i]
    return list(map(Source, paths, relative, unique, map(Path.as_posix, names)))


def _clashing(names: Sequence[Path], paths: Sequence[Path]) -> list[int]:
    """Which images, or videos, have the name of another one."""
    kinds = list(zip(names, map(_is_video, paths), strict=True))
    numbers = Counter(kinds)
    return [i for i, kind in enumerate(kinds) if numbers[kind] > 1]


def _matching(given: str) -> tuple[Path, list[str]]:
    """The files of an input, and the folder from which they are counted."""
    base = Path(given)
    if base.is_file():
        return base.parent, [given]
    found = []
    for path in [given] if base.exists() else sorted(glob.glob(given, recursive=True)):
        inside = os.path.join(glob.escape(path), '**')
        found += sorted(glob.glob(inside, recursive=True)) if os.path.isdir(path) else [path]
    while not base.exists():  # the part with wildcards
        base = base.parent
    return base, [path for path in found if os.path.isfile(path) and _known(path)]


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEOS


def _known(path: str) -> bool:
    return path.lower().endswith(IMAGE_SUFFIXES + VIDEOS)


def count_frames(sources: Iterable[Source]) -> int:
    """The number of images and, as the videos announce it, frames."""
    return sum(_announced(cv2.VideoCapture(str(s.path))) if s.is_video else 1 for s in sources)


def frame_rate(source: Source) -> float:
    """Frames a second of a video, 25 if it does not tell."""
    rate = cv2.VideoCapture(str(source.path)).get(cv2.CAP_PROP_FPS)
    return rate if 0 < rate < 1000 else 25.0


def _announced(video: cv2.VideoCapture) -> int:
    return max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)


def read_image(path: Path, loader: Mapping[str, Any], max_pixels: int = MAX_PIXELS) -> NDArray:
    """Read an image by the config's own transform.

    Raises:
        ReadError: If it is missing, damaged or none, or has more than ``max_pixels``.
    """
    try:
        read_header(path, max_pixels)
        with Image.open(path) as image:
            image.load()  # OpenCV fills the missing part of a truncated file with grey
    except FileError as error:
        raise ReadError(str(error).removeprefix(f'{path}: ')) from error
    except UnidentifiedImageError:
        pass  # not for Pillow, but for the reader that found its size
    except (OSError, SyntaxError, ValueError) as error:
        raise ReadError(error) from error
    try:
        return TRANSFORMS.build(loader)(dict(img_path=str(path)))['img']
    # AssertionError, AttributeError or OpenCV's own, by the decoder.
    except Exception as error:
        raise ReadError('it is no image that can be decoded') from error


def read_video(source: Source, max_pixels: int = MAX_PIXELS) -> Iterator[Frame]:
    """The frames of a video, one after the other.

    Raises:
        ReadError: If it cannot be opened, or lacks more than 5 % (and one) of the frames that it
            announces, or those of more than a second, or announces more than ``max_pixels`` in one.
    """
    video = cv2.VideoCapture(str(source.path))
    width, height = (
        int(video.get(s)) for s in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    )
    if width * height > max_pixels:
        raise ReadError(f'claims {width}x{height} pixels, more than {max_pixels} (--max-pixels)')
    index = 0
    while True:
        there, image = video.read()
        if not there:
            break
        yield Frame(source, index, image)
        index += 1
    if index == 0:
        raise ReadError('it is no video that can be decoded')
    announced = _announced(video)
    # Some formats only estimate how many there are.
    if announced - index > max(1, min(frame_rate(source), announced / 20)):
        raise ReadError(f'it ends after {index} of {announced} frames')


class Predictor:
    """The model of an mmseg, mmdet or mmpretrain config behind its toolbox's inferencer.

    Args:
        cfg: The config, which is changed.
        checkpoint: What the file holds: every weight of the model, and the names and colours of
            the classes, else the config's are taken.
        filename: The checkpoint's name for messages.
        device: ``'cpu'``, ``'cuda:1'``, ...; None is the best there is.
        tta: Whether to test with the config's test-time augmentation.

    Attributes:
        scope: The toolbox.
        classes: The names.
        palette: A colour (RGB) for each.
        dataset: The config's test set, not loaded.
        loader: The config of its ``LoadImageFromFile``.
        inferencer: The toolbox's.

    Raises:
        InputError: If config and device do not allow it.
    """

    def __init__(
        self,
        cfg: Config,
        checkpoint: Mapping[str, Any],
        filename: str,
        device: str | None = None,
        tta: bool = False,
    ) -> None:
        self.scope = cfg.get('default_scope')
        if self.scope not in ('mmdet', 'mmpretrain', 'mmseg'):
            raise InputError(
                f'default_scope is {self.scope!r}, expected mmseg, mmdet or mmpretrain'
            )
        if cfg.get('test_dataloader') is None:
            raise InputError('the config has no test_dataloader, whose pipeline images go through')
        init_default_scope(self.scope)
        check_model(cfg.model)
        if cfg.get('data_preprocessor') is not None:
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        if tta:
            enable_tta(cfg)
        # The inferencers look for the pipeline outside of wrappers.
        dataset = cfg.test_dataloader.dataset = test_dataset(cfg)
        dataset.pipeline = without_annotations(dataset.pipeline)
        loaders = [step for step in dataset.pipeline if type_name(step) == 'LoadImageFromFile']
        if not loaders:
            raise InputError("the test set's pipeline has no LoadImageFromFile")
        self.loader = loaders[0]
        # Whatever the config has would send the pictures to its own backends.
        cfg.visualizer = dict(
            type='DetLocalVisualizer' if self.scope == 'mmdet' else 'SegLocalVisualizer'
        )
        self.dataset = DATASETS.build(ConfigDict(dataset, lazy_init=True))
        self.classes, self.palette = _classes(checkpoint, self.dataset.metainfo)
        self.inferencer = _inferencer(self.scope, cfg, _checked(device))
        check_weights(self.inferencer.model, checkpoint, filename)

    def prepare(self, image: NDArray) -> dict[str, Any]:
        """Pass an image through the test set's pipeline."""
        shape = image.shape[:2]
        return self.inferencer.pipeline(dict(img=image, img_shape=shape, ori_shape=shape))

    def predict(self, prepared: list[dict[str, Any]]) -> list[Any]:
        """The toolbox's data samples of a batch of equally large images, on the CPU."""
        collate = getattr(self.inferencer, 'collate_fn', default_collate)
        samples = [sample.cpu() for sample in self.inferencer.forward(collate(prepared))]
        for sample in samples:
            self._check_classes(sample)
        return samples

    def batches(
        self, frames: Iterable[Frame], batch_size: int
    ) -> Iterator[list[tuple[Frame, dict[str, Any]]]]:
        """Prepared frames in their order, as many at a time as are equally large.

        Padding would let the images of a batch change each other's predictions.
        """
        batch: list[tuple[Frame, dict[str, Any]]] = []
        for frame in frames:
            prepared = self.prepare(frame.image)
            if batch and (len(batch) == batch_size or _shapes(prepared) != _shapes(batch[0][1])):
                yield batch
                batch = []
            batch.append((frame, prepared))
        if batch:
            yield batch

    def _check_classes(self, sample: Any) -> None:
        if 'pred_sem_seg' in sample:
            indices = sample.pred_sem_seg.data
        elif 'pred_instances' in sample:
            indices = sample.pred_instances.labels
        else:
            indices = torch.arange(len(sample.pred_score))
        if indices.numel() and indices.max() >= len(self.classes):
            raise InputError(
                f'the model knows a class {int(indices.max())}, but checkpoint or config name '
                f'{len(self.classes)} classes: {", ".join(self.classes)}'
            )


def _classes(
    checkpoint: Mapping[str, Any], metainfo: Mapping[str, Any]
) -> tuple[list[str], list[tuple[int, int, int]]]:
    meta = checkpoint.get('meta')
    meta = meta if isinstance(meta, Mapping) else {}
    saved = meta.get('dataset_meta') or meta  # the toolboxes' versions 0 and 2: CLASSES, PALETTE
    saved = {str(key).lower(): value for key, value in saved.items()}
    classes = saved.get('classes') or metainfo.get('classes')
    if not classes:
        raise InputError('neither the checkpoint nor the config names the classes')
    palette = saved.get('palette') or metainfo.get('palette')
    if palette is None or isinstance(palette, str) or len(palette) < len(classes):
        palette = np.random.default_rng(0).integers(0, 256, (len(classes), 3))
    colours = [(int(red), int(green), int(blue)) for red, green, blue in palette]
    return [str(name) for name in classes], colours[: len(classes)]


def _checked(device: str | None) -> str:
    try:
        torch.empty(0, device=device or 'cpu')
    except (AssertionError, RuntimeError) as error:
        raise InputError(f'--device {device}: {str(error).splitlines()[0]}') from error
    return device or get_device()


def _inferencer(scope: str, cfg: Config, device: str) -> Any:
    # They load weights without a check, so they get none, which they warn of.
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if scope == 'mmseg':
            from mmseg.apis import MMSegInferencer

            inferencer = MMSegInferencer(cfg, device=device)
            inferencer.show_progress = False  # no argument in mmseg 1.2.2
            return inferencer
        if scope == 'mmdet':
            from mmdet.apis import DetInferencer

            return DetInferencer(cfg, device=device, show_progress=False)
        from mmpretrain import ImageClassificationInferencer, get_model

        return ImageClassificationInferencer(get_model(cfg, device=device))


def _shapes(prepared: dict[str, Any]) -> list[torch.Size]:
    inputs = prepared['inputs']
    return [view.shape for view in (inputs if isinstance(inputs, list) else [inputs])]
