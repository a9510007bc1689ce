"""What is checked of a data set's files before a toolbox reads them.

Files come from somewhere: an image's header can ask for any amount of memory, an annotation can
name a file of another folder, and the toolboxes' own errors at damaged ones seldom name the file.
"""

import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..engine.errors import InputError

# Beyond any camera's picture: 400 MB as RGB.
MAX_PIXELS = 2**27
# What the tools take for an image in a folder.
IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')


class FileError(InputError):
    """A data file that is not read; the message names it and says why."""


class Header(NamedTuple):
    """What an image file says of itself: its size in pixels and Pillow's word for its channels."""

    size: tuple[int, int]
    mode: str
    turned: bool
    """Whether its EXIF data say that the picture lies on its side."""


def read_header(path: str | os.PathLike, max_pixels: int = MAX_PIXELS) -> Header:
    """Read the beginning of an image file.

    Raises:
        FileError: If it is no image, or has more than ``max_pixels``.
    """
    try:
        with Image.open(path) as image:
            # Pillow decodes a PNG to look for its EXIF data.
            exif = {} if image.format == 'PNG' else image.getexif()
            header = Header(image.size, image.mode, exif.get(0x0112) in (5, 6, 7, 8))
            planes = 1
    except Image.DecompressionBombError:  # from twice its own limit on
        raise FileError(f'{path}: claims more than {max_pixels} pixels (--max-pixels)') from None
    except UnidentifiedImageError as error:
        try:
            header, planes = _tiff_header(path)
        except Exception:
            empty = os.path.getsize(path) == 0
            reason = 'the file is empty' if empty else str(error).splitlines()[0]
            raise FileError(f'{path}: {reason}') from None
    except Exception as error:  # Pillow's readers raise errors of any kind at damaged data
        if getattr(error, 'errno', None) is not None:  # it is not there, or may not be read
            raise
        raise FileError(f'{path}: {type(error).__name__} {error}') from None
    width, height = header.size
    if width * height * planes > max_pixels:
        raise FileError(
            f'{path}: claims {width}x{height} pixels, more than {max_pixels} (--max-pixels)'
        )
    return header


def _tiff_header(path: str | os.PathLike) -> tuple[Header, int]:
    """Of files with other channels than Pillow knows, by the reader that the toolboxes use."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        page: Any = file.pages[0]
        header = Header((page.imagewidth, page.imagelength), str(page.dtype), False)
        return header, math.ceil(page.samplesperpixel / 4)


def check_labels(
    path: str | os.PathLike, image: Header | None = None, max_pixels: int = MAX_PIXELS
) -> None:
    """Check a label image, which the toolboxes read as 8-bit numbers whatever it is.

    Args:
        path: The file.
        image: The header of the image that it labels.
        max_pixels: As of :func:`read_header`.

    Raises:
        FileError: If it is none, has several channels or labels beyond 255, or another size than
            the image.
    """
    header = read_header(path, max_pixels)
    if header.mode[0] in 'IF':
        try:
            with Image.open(path) as labels:
                values = np.asarray(labels)
        except Exception as error:  # as in read_header
            raise FileError(f'{path}: {type(error).__name__} {error}') from None
        if values.min() < 0 or values.max() > 255:
            raise FileError(
                f'{path}: has labels from {values.min()} to {values.max()}, allowed are 0 to 255'
            )
    elif header.mode not in ('1', 'L', 'P'):
        raise FileError(f'{path}: has mode {header.mode}, expected one channel of labels (L or P)')
    if image is not None and header.size != image.size:
        if image.turned and header.size == image.size[::-1]:
            return
        sizes = ('x'.join(map(str, size)) for size in (header.size, image.size))
        raise FileError('{}: has {} pixels, its image {}'.format(path, *sizes))


def check_inside(path: str, folders: Sequence[str]) -> None:
    """Check that a file which annotations name lies in one of the folders, by its name.

    Raises:
        FileError: If it does not.
    """
    absolute = os.path.abspath(path)
    for folder in map(os.path.abspath, folders):
        if os.path.commonpath([absolute, folder]) == folder:
            return
    raise FileError(f'{path}: an annotation names this file outside of {" and ".join(folders)}')


class FileCheck:
    """The first step of a pipeline: checks the files that the next ones read.

    Args:
        folders: Those of the data set; empty if the config names none.
        max_pixels: Of an image.
        images: Whether the pipeline decodes ``img_path``.
        labels: Whether it decodes ``seg_map_path`` as a label image.
    """

    def __init__(self, folders: Sequence[str], max_pixels: int, images: bool, labels: bool) -> None:
        self.folders = folders
        self.max_pixels = max_pixels
        self.images = images
        self.labels = labels

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        image, labels = (self._local(sample.get(key)) for key in ('img_path', 'seg_map_path'))
        header = read_header(image, self.max_pixels) if image and self.images else None
        if labels and self.labels:
            check_labels(labels, header, self.max_pixels)
        return sample

    def _local(self, path: Any) -> str | None:
        """The path, if it is one of a file that is there: the loaders name one that is not."""
        if not isinstance(path, str) or '://' in path:
            return None
        if self.folders:
            check_inside(path, self.folders)
        return path if os.path.exists(path) else None


def watch_files(dataset: Any, max_pixels: int = MAX_PIXELS) -> None:
    """Put a :class:`FileCheck` before the pipeline of a data set, or of those in its wrappers."""
    for inner in _innermost(dataset):
        transforms = getattr(getattr(inner, 'pipeline', None), 'transforms', None)
        if not isinstance(transforms, list):
            continue
        names = [{base.__name__ for base in type(step).__mro__} for step in transforms]
        prefixes = getattr(inner, 'data_prefix', None)
        folders = list(prefixes.values()) if isinstance(prefixes, Mapping) else []
        folders = [getattr(inner, 'data_root', None), *folders]
        labels = any(
            # Not its subclasses, such as those of panoptic maps in colours.
            type(step).__name__ == 'LoadAnnotations' and getattr(step, 'with_seg', False)
            for step in transforms
        )
        check = FileCheck(
            [folder for folder in folders if folder and isinstance(folder, str)],
            max_pixels,
            images=any('LoadImageFromFile' in bases for bases in names),
            labels=labels,
        )
        transforms.insert(0, check)


def _innermost(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, 'datasets'):
        for part in dataset.datasets:
            yield from _innermost(part)
    elif hasattr(dataset, 'dataset'):
        yield from _innermost(dataset.dataset)
    else:
        yield dataset


def check_coco(
    path: str | os.PathLike, max_pixels: int = MAX_PIXELS, complete: bool = True
) -> None:
    """Check the types and sizes in a JSON file of COCO annotations.

    Args:
        path: The file.
        max_pixels: Of an image, by the sides that the file gives.
        complete: Whether it must have all that mmdet reads; else only what it has is checked.

    Raises:
        FileError: Naming the first entry that is wrong.
    """
    try:
        with open(path, 'rb') as file:
            content = json.load(file)
    except RecursionError:
        raise FileError(f'{path}: is nested too deeply') from None
    except ValueError as error:
        raise FileError(f'{path}: is no JSON: {error}') from None
    if message := next(_coco_problems(content, max_pixels, complete), None):
        raise FileError(f'{path}: {message}')


def _coco_problems(content: Any, max_pixels: int, complete: bool) -> Iterator[str]:
    if not isinstance(content, dict):
        yield f'expected an object with images, annotations and categories, got {_short(content)}'
        return
    for kind in ('images', 'annotations', 'categories'):
        entries = content.get(kind, [] if kind == 'annotations' else None)
        if not isinstance(entries, list):
            yield f'{kind} must be a list, got {_short(entries)}'
            return
        seen = set()
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict) or type(entry.get('id')) not in (int, str):
                yield f'{kind}[{i}] must be an object with an id, got {_short(entry)}'
                return
            if entry['id'] in seen:
                yield f'{kind}[{i}] has the id {entry["id"]!r}, which another one has'
            seen.add(entry['id'])
    sizes = {}
    for i, image in enumerate(content['images']):
        width, height = (image.get(side) for side in ('width', 'height'))
        if not isinstance(image.get('file_name'), str):
            yield f'images[{i}].file_name must be a text, got {_short(image.get("file_name"))}'
        if not complete and width is height is None:
            continue
        if not (_is_number(width) and _is_number(height) and min(width, height) > 0):
            yield f'images[{i}] must have a positive width and height, got {width!r}, {height!r}'
        elif width * height > max_pixels:
            yield f'images[{i}] claims {width}x{height} pixels, more than {max_pixels}'
        sizes[image['id']] = [height, width]
    for i, category in enumerate(content['categories']):
        if not isinstance(category.get('name'), str):
            yield f'categories[{i}].name must be a text, got {_short(category.get("name"))}'
    for i, annotation in enumerate(content.get('annotations', ())):
        for name, message in _annotation_problems(annotation, sizes, max_pixels, complete):
            yield f'annotations[{i}].{name} {message}, got {_short(annotation.get(name))}'


def _annotation_problems(
    annotation: dict, sizes: dict[Any, list], max_pixels: int, complete: bool
) -> Iterator[tuple[str, str]]:
    for name in ('image_id', 'category_id'):
        if type(annotation.get(name)) not in (int, str):
            yield name, 'must be an id'
            return
    box, area = annotation.get('bbox'), annotation.get('area')
    if (complete or box is not None) and not (
        isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
    ):
        yield 'bbox', 'must be four numbers'
    if (complete or area is not None) and not _is_number(area):
        yield 'area', 'must be a number'
    segmentation = annotation.get('segmentation')
    if isinstance(segmentation, dict):
        size, counts = segmentation.get('size'), segmentation.get('counts')
        if size != sizes.get(annotation['image_id'], size) or not (
            isinstance(size, list)
            and len(size) == 2
            and all(type(side) is int and side > 0 for side in size)
            and math.prod(size) <= max_pixels
        ):
            yield 'segmentation', 'must be run lengths of the size of the image'
        elif isinstance(counts, list):
            if {*map(type, counts)} - {int} or min(counts, default=0) < 0:
                yield 'segmentation', 'must have counts from 0 on'
            elif sum(counts) != math.prod(size):
                yield 'segmentation', f'must have counts for {math.prod(size)} pixels'
        elif not (isinstance(counts, str) and counts.isascii()):
            yield 'segmentation', 'must have counts'
    elif segmentation and not (
        isinstance(segmentation, list)
        and all(isinstance(p, list) and {*map(type, p)} <= {int, float} for p in segmentation)
    ):
        yield 'segmentation', 'must be lists of coordinates, or run lengths'


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12  # nor nan


def _short(value: Any) -> str:
    return reprlib.repr(value)
