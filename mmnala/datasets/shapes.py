"""The shapes data set: a small scene-parsing task that is drawn, not downloaded.

Walls of brick, windows, posters, balls and stars lie over each other on varied grounds. Every
class draws its colours from one distribution, so colour says nothing about the class. Instead,

* a striped and a spotted ball differ in texture alone;
* a star wears the stripes of a ball, and differs from it in shape;
* a window and a poster are the same quad: it is a window where it sits in a wall.

Image ``i`` depends on ``(seed, split, i, size)`` and on nothing else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np

from mmnala.datasets.layouts import (
    ADE20K,
    OFFICIAL_LAYOUTS,
    Layout,
    coco_annotation,
    number_annotations,
)

CLASSES = ('background', 'wall', 'window', 'poster', 'striped ball', 'spotted ball', 'star')
PALETTE = (
    (70, 70, 78), (189, 104, 78), (86, 180, 233), (240, 200, 60),
    (0, 158, 115), (204, 102, 178), (232, 62, 62),
)  # fmt: skip

SPLITS = ('training', 'validation')
_MARKER = 'meta.json'

_BACKGROUND, _WALL, _WINDOW, _POSTER, _STRIPED, _SPOTTED, _STAR = range(len(CLASSES))
_MIN_VISIBLE = 0.6
_PLACEMENT_TRIES = 30


@dataclass(frozen=True)
class Instance:
    """One object, or one crowd of small ones, of class ``CLASSES[label]``.

    ``mask`` is its visible part, (size, size) bool, and never empty. ``parts`` are what lies in the
    picture of it, or of each thing in the crowd, seen or hidden by later instances.
    """

    label: int
    iscrowd: bool
    mask: np.ndarray
    parts: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Scene:
    """An image with its truth.

    ``image`` is (size, size, 3) uint8 RGB, ``semantic`` (size, size) uint8 indices into
    ``CLASSES``. The instances' masks do not overlap; what they leave is background.
    """

    image: np.ndarray
    semantic: np.ndarray
    instances: tuple[Instance, ...]
    jpeg_quality: int


@dataclass(frozen=True)
class _Sprite:
    """One painted thing; lengths in pixels, angle in radians, colours RGB in 0..1."""

    label: int
    texture: str
    x: float
    y: float
    half_width: float
    half_height: float
    angle: float
    pitch: float
    colours: tuple[np.ndarray, np.ndarray]

    def local(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coordinates along the sprite's own axes, from its centre, of points in the picture."""
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        dx, dy = x - self.x, y - self.y
        return cos * dx + sin * dy, cos * dy - sin * dx


def _colour_pair(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two colours of clearly different lightness, so that a texture of them can be seen."""
    while True:
        hsv = rng.uniform((0, 0.1, 0.3), (360, 0.75, 1.0), (1, 2, 3)).astype(np.float32)
        first, second = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)[0]
        if abs(first.mean() - second.mean()) > 0.2:
            return first, second


def _distance(sprite: _Sprite, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Signed distance in pixels from the outline, negative inside."""
    width, height = sprite.half_width, sprite.half_height
    if sprite.label in (_STRIPED, _SPOTTED):
        return np.hypot(u, v) - width
    if sprite.label == _STAR:
        # Folding the plane into a tenth of the star leaves one straight edge, from tip to notch.
        sector = math.pi / 5
        theta = np.abs((np.arctan2(v, u) + sector) % (2 * sector) - sector)
        radius = np.hypot(u, v)
        tip, notch = width, 0.6 * width
        edge_x, edge_y = notch * math.cos(sector) - tip, notch * math.sin(sector)
        along_x, along_y = radius * np.cos(theta) - tip, radius * np.sin(theta)
        return (edge_y * along_x - edge_x * along_y) / math.hypot(edge_x, edge_y)
    over_u, over_v = np.abs(u) - width, np.abs(v) - height
    outside = np.hypot(np.maximum(over_u, 0), np.maximum(over_v, 0))
    return outside + np.minimum(np.maximum(over_u, over_v), 0)


def _cover(distance: np.ndarray) -> np.ndarray:
    """The share of a pixel inside the outline that runs at ``distance`` from its centre."""
    return np.clip(0.5 - distance, 0, 1)


def _pattern(sprite: _Sprite, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """How much of the second colour each pixel has, 0..1."""
    pitch = sprite.pitch
    if sprite.texture == 'stripes':
        return _cover(-np.sin(u * (2 * math.pi / pitch)) * pitch / (2 * math.pi))
    row = np.floor(v / pitch)
    dv = v - (row + 0.5) * pitch
    if sprite.texture == 'spots':
        du = (u + (row % 2) * pitch / 2) % pitch - pitch / 2
        return _cover(np.hypot(du, dv) - 0.32 * pitch)
    if sprite.texture == 'bricks':
        length = 2 * pitch
        du = (u + (row % 2) * pitch) % length - pitch
        joint = np.minimum(pitch - np.abs(du), pitch / 2 - np.abs(dv))
        return _cover(joint - 0.12 * pitch)
    bar = 0.16 * min(sprite.half_width, sprite.half_height)
    from_bar = np.minimum(np.abs(u), np.abs(v)) - bar / 2
    from_rim = np.minimum(sprite.half_width - np.abs(u), sprite.half_height - np.abs(v)) - bar
    return _cover(np.minimum(from_bar, from_rim))


def _shade(sprite: _Sprite, u: np.ndarray, v: np.ndarray, light: tuple[float, float]) -> np.ndarray:
    """Brightness of the surface, about 1; ``light`` is the unit vector towards the light."""
    cos, sin = math.cos(sprite.angle), math.sin(sprite.angle)
    light_u, light_v = cos * light[0] + sin * light[1], cos * light[1] - sin * light[0]
    across = (u * light_u + v * light_v) / sprite.half_width
    if sprite.label in (_STRIPED, _SPOTTED):
        radial = (u * u + v * v) / sprite.half_width**2
        return 0.7 + 0.35 * across + 0.35 * np.sqrt(np.clip(1 - radial, 0, 1))
    if sprite.label == _STAR:
        facet = np.sign(np.sin(5 * np.arctan2(v, u)))
        return 1 + 0.25 * facet + 0.1 * across
    return 1 + 0.08 * across


class _Painter:
    """A picture being painted back to front, and which object each of its pixels shows."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.rng = rng
        self.size = size
        axis = np.arange(size, dtype=np.float32) + np.float32(0.5)
        self.x, self.y = np.meshgrid(axis, axis)
        angle = rng.uniform(0, 2 * math.pi)
        self.light = math.cos(angle), math.sin(angle)
        self.image = self._ground()
        self.owner = np.zeros((size, size), np.int64)
        self.labels = [_BACKGROUND]
        self.crowds = [False]
        self.full_areas = [size * size]
        self.parts: list[tuple[np.ndarray, ...]] = [()]
        self.wall: _Sprite | None = None

    def _noise(self, cells: int) -> np.ndarray:
        coarse = self.rng.uniform(0, 1, (cells, cells)).astype(np.float32)
        return cv2.resize(coarse, (self.size, self.size), interpolation=cv2.INTER_CUBIC)

    def _ground(self) -> np.ndarray:
        rng, size = self.rng, self.size
        first, second = _colour_pair(rng)
        angle = rng.uniform(0, 2 * math.pi)
        across = math.cos(angle) * (self.x / size - 0.5) + math.sin(angle) * (self.y / size - 0.5)
        clouds = self._noise(int(rng.integers(3, 7))) - 0.5
        mix = 0.5 + rng.uniform(0, 0.6) * across + 0.5 * clouds
        texture = rng.choice(('plain', 'grain', 'waves', 'checks'))
        period = rng.uniform(0.08, 0.3)
        strength = rng.uniform(0.08, 0.18)
        if texture == 'grain':
            mix = mix + strength * (self._noise(max(size // 3, 4)) - 0.5) * 2
        elif texture == 'waves':
            bend = 0.15 * self._noise(4)
            mix = mix + strength * np.sin((across + bend) * 2 * math.pi / period)
        elif texture == 'checks':
            along = math.cos(angle) * self.y / size - math.sin(angle) * self.x / size
            checks = np.sin(across * math.pi / period) * np.sin(along * math.pi / period)
            mix = mix + strength * np.clip(checks * period * size / 3, -1, 1)
        mix = np.clip(mix, 0, 1)[..., None].astype(np.float32)
        return first * (1 - mix) + second * mix

    def _sprite(self, label: int, extent: float, x: float, y: float, angle: float) -> _Sprite:
        """A thing of class ``label`` whose larger side is ``extent``, the rest drawn at random."""
        rng = self.rng
        half = extent / 2
        half_height = half
        pitch = max(rng.uniform(0.3, 0.4) * extent, 4.0)
        if label == _WALL:
            texture, half_height = 'bricks', half * rng.uniform(0.75, 1)
            pitch = max(rng.uniform(0.055, 0.08) * self.size, 3.0)
        elif label in (_WINDOW, _POSTER):
            texture, half_height = 'panes', half * rng.uniform(0.75, 1)
        elif label == _STAR:
            texture = 'stripes'
        else:
            texture = 'stripes' if label == _STRIPED else 'spots'
        return _Sprite(label, texture, x, y, half, half_height, angle, pitch, _colour_pair(rng))

    def _window(self, sprite: _Sprite, margin: float) -> tuple[slice, slice]:
        """Rows and columns of the picture that hold the sprite and a margin about it."""
        reach = math.hypot(sprite.half_width, sprite.half_height) + margin

        def around(centre: float) -> slice:
            first, last = np.clip((centre - reach, centre + reach + 1), 0, self.size).astype(int)
            return slice(first, last)

        return around(sprite.y), around(sprite.x)

    def _inside(self, sprite: _Sprite) -> np.ndarray:
        mask = np.zeros((self.size, self.size), bool)
        at = self._window(sprite, 1)
        mask[at] = _distance(sprite, *sprite.local(self.x[at], self.y[at])) < 0
        return mask

    def _fits(self, mask: np.ndarray) -> bool:
        """Whether painting ``mask`` leaves enough to see of it and of every object under it."""
        if not mask.any():
            return False
        left = np.bincount(self.owner[~mask], minlength=len(self.labels))
        return bool((left >= _MIN_VISIBLE * np.array(self.full_areas))[1:].all())

    def _paint(self, sprite: _Sprite) -> None:
        reach = 0.03 * self.size
        at = self._window(sprite, 2 * reach)
        x, y = self.x[at], self.y[at]
        shifted = sprite.local(x + reach * self.light[0] / 2, y + reach * self.light[1] / 2)
        shadow = 0.45 * np.clip(0.5 - _distance(sprite, *shifted) / reach, 0, 1)[..., None]
        u, v = sprite.local(x, y)
        cover = _cover(_distance(sprite, u, v))[..., None]
        mix = _pattern(sprite, u, v)[..., None]
        first, second = sprite.colours
        surface = first * (1 - mix) + second * mix
        surface = surface * _shade(sprite, u, v, self.light)[..., None]
        self.image[at] = self.image[at] * (1 - shadow) * (1 - cover) + surface * cover

    def _add(self, label: int, sprites: list[_Sprite], iscrowd: bool = False) -> bool:
        """Paint the sprites as one object if they fit; whether they did."""
        parts = [self._inside(sprite) for sprite in sprites]
        mask = np.logical_or.reduce(parts)
        if not self._fits(mask):
            return False
        if label == _POSTER and self.wall and (mask & self._inside(self.wall)).any():
            return False
        if label == _WINDOW and (np.array(self.labels)[self.owner[mask]] != _WALL).any():
            return False
        for sprite in sprites:
            self._paint(sprite)
        self.owner[mask] = len(self.labels)
        self.labels.append(label)
        self.crowds.append(iscrowd)
        self.full_areas.append(int(mask.sum()))
        self.parts.append(tuple(part for part in parts if part.any()))
        return True

    def add_wall(self) -> None:
        rng, size = self.rng, self.size
        x, y = (rng.uniform(0.2, 0.8, 2) * size).tolist()
        self.wall = self._sprite(_WALL, rng.uniform(0.6, 0.85) * size, x, y, self._upright())
        self._add(_WALL, [self.wall])

    def add_window(self) -> None:
        """Add a window wholly inside the wall, brick all around it."""
        assert self.wall is not None
        rng, wall = self.rng, self.wall
        for _ in range(_PLACEMENT_TRIES):
            window = self._sprite(_WINDOW, self._quad_extent(), 0, 0, wall.angle)
            free = np.array((wall.half_width, wall.half_height)) - 0.04 * self.size
            free -= (window.half_width, window.half_height)
            if (free < 0).any():
                continue
            u, v = rng.uniform(-free, free).tolist()
            cos, sin = math.cos(wall.angle), math.sin(wall.angle)
            moved = {'x': wall.x + cos * u - sin * v, 'y': wall.y + sin * u + cos * v}
            if not all(0 < at < self.size for at in moved.values()):
                continue
            if self._add(_WINDOW, [replace(window, **moved)]):
                return

    def add_object(self, label: int) -> None:
        rng, size = self.rng, self.size
        for _ in range(_PLACEMENT_TRIES):
            x, y = (rng.uniform(0.08, 0.92, 2) * size).tolist()
            if label == _POSTER:
                extent, angle = self._quad_extent(), self._upright()
            else:
                extent, angle = rng.uniform(0.28, 0.55) * size, rng.uniform(0, 2 * math.pi)
                if label == _STAR:
                    extent *= 1.3  # a star covers about half of its circle
            if self._add(label, [self._sprite(label, extent, x, y, angle)]):
                return

    def add_crowd(self, label: int) -> None:
        """Add a pile of small things, too entangled to be told apart."""
        rng, size = self.rng, self.size
        for _ in range(_PLACEMENT_TRIES):
            centre = rng.uniform(0.15, 0.85, 2)
            sprites = []
            for _ in range(rng.integers(8, 15)):
                x, y = ((centre + rng.normal(0, 0.07, 2)) * size).tolist()
                extent = rng.uniform(0.12, 0.18) * size
                sprites.append(self._sprite(label, extent, x, y, rng.uniform(0, 2 * math.pi)))
            if self._add(label, sprites, iscrowd=True):
                return

    def _upright(self) -> float:
        return self.rng.uniform(-0.35, 0.35)

    def _quad_extent(self) -> float:
        return self.rng.uniform(0.24, 0.42) * self.size

    def photograph(self) -> np.ndarray:
        """The finished picture through an imperfect lens: light falling off, blur and noise."""
        rng, size = self.rng, self.size
        slope = (self.x / size - 0.5) * self.light[0] + (self.y / size - 0.5) * self.light[1]
        lit = self.image * (1 + rng.uniform(0, 0.5) * slope[..., None])
        image = cv2.GaussianBlur(lit, (0, 0), rng.uniform(0.2, 0.7) * max(size / 160, 0.5))
        noise = rng.normal(0, rng.uniform(0.005, 0.025), image.shape)
        return (np.clip(image + noise, 0, 1) * 255).round().astype(np.uint8)


def draw_scene(seed: int, split: str, index: int, size: int) -> Scene:
    """Draw image ``index`` (from 0) of a split; the same arguments give the same scene."""
    rng = np.random.default_rng((seed, SPLITS.index(split), index))
    painter = _Painter(rng, size)
    remaining = int(rng.integers(4, 8))
    if rng.random() < 0.7:
        painter.add_wall()
        windows = int(rng.integers(1, 3))
        for _ in range(windows):
            painter.add_window()
        remaining -= 1 + windows
    crowd = rng.random() < 0.15
    for label in rng.choice((_POSTER, _STRIPED, _SPOTTED, _STAR), max(remaining, 2)).tolist():
        if crowd and label != _POSTER:
            painter.add_crowd(label)
            crowd = False
        else:
            painter.add_object(label)
    labels = np.array(painter.labels, np.uint8)
    instances = tuple(
        Instance(
            painter.labels[number],
            painter.crowds[number],
            painter.owner == number,
            painter.parts[number],
        )
        for number in range(1, len(labels))
    )
    return Scene(painter.photograph(), labels[painter.owner], instances, int(rng.integers(75, 96)))


class _ShapesLayout(ADE20K):
    """ADE20K's file names with the drawn classes, and COCO's instances of the same images."""

    classes = dict(zip(CLASSES, CLASSES, strict=True))

    def __init__(self) -> None:
        # As in ADE20K, 0 would be "unlabelled" and the classes count from 1.
        self.labels = np.arange(1, len(CLASSES) + 1, dtype=np.uint8)

    def table_files(self) -> dict[str, str]:
        return {split: f'annotations/instances_{split}.json' for split in SPLITS}

    def write_scene(self, root: Path, split: str, index: int, scene: Scene) -> list[dict]:
        """Write image and semantic map; returns the instances' annotations."""
        super().write_scene(root, split, index, scene)
        return [coco_annotation(instance, instance.label) for instance in scene.instances]

    def write_tables(self, root: Path, records: dict[str, list], size: int) -> None:
        categories = [{'id': label, 'name': name} for label, name in enumerate(CLASSES) if label]
        for split, found in records.items():
            images: list[dict[str, Any]] = [
                {
                    'id': index + 1,
                    'file_name': Path(self.scene_files(split, index)['image']).name,
                    'width': size,
                    'height': size,
                }
                for index in range(len(found))
            ]
            annotations = number_annotations([image['id'] for image in images], found)
            content = {'images': images, 'annotations': annotations, 'categories': categories}
            (root / self.table_files()[split]).write_text(json.dumps(content))


LAYOUTS: dict[str, Layout] = {'shapes': _ShapesLayout(), **OFFICIAL_LAYOUTS}


def _write_scene(root: Path, layout: Layout, seed: int, split: str, index: int, size: int) -> Any:
    return layout.write_scene(root, split, index, draw_scene(seed, split, index, size))


def _write_split(
    root: Path,
    layout: Layout,
    seed: int,
    split: str,
    num_images: int,
    size: int,
    workers: int,
    advance: Callable[[], None],
) -> list:
    """Write one split's scenes, calling ``advance`` after each; returns their records."""
    write = partial(_write_scene, root, layout, seed, split, size=size)
    records = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for record in pool.map(write, range(num_images)):
                records.append(record)
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return records


def _check_replaceable(out: Path) -> None:
    """Raise unless ``out`` is a folder that this module wrote and nobody has added to."""
    try:
        meta = json.loads((out / _MARKER).read_text())
        layout = LAYOUTS[meta.get('layout', 'shapes')]
        num_images = dict(zip(SPLITS, (meta['num_train'], meta['num_val']), strict=True))
        expected = {_MARKER, *layout.files(out, num_images)}
        found = {path.relative_to(out).as_posix() for path in out.rglob('*') if not path.is_dir()}
        strange = sorted(found - expected)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileExistsError(
            f'out={str(out)!r} is not a shapes data set, so it is not overwritten ({error!r})'
        ) from None
    if strange:
        raise FileExistsError(
            f'out={str(out)!r} holds files of others, so it is not overwritten: '
            f'{", ".join(strange[:5])}'
        )


def make_dataset(
    out: str | os.PathLike,
    num_train: int = 400,
    num_val: int = 100,
    size: int = 128,
    seed: int = 0,
    overwrite: bool = False,
    workers: int = os.cpu_count() or 1,
    layout: str = 'shapes',
) -> None:
    """Write the data set to the folder ``out``.

    ``layout`` is ``'ade20k'``, ``'coco'``, ``'cityscapes'`` or ``'imagenet'``, of which
    :mod:`mmnala.datasets.layouts` tells the files and classes, or ``'shapes'``, where semantic maps
    and instances of the drawn classes lie side by side:

    * ``images/{training,validation}/ADE_{train,val}_00000001.jpg``: (size, size) RGB.
    * ``annotations/{training,validation}/*.png``: (size, size) uint8, where 1 is the first of
      ``CLASSES`` and 0 (unlabelled) does not occur: read it with ``reduce_zero_label=True``.
    * ``annotations/instances_{training,validation}.json``: COCO instances of the classes after
      the background, whose category ids are their indices in ``CLASSES``.

    Every layout adds ``meta.json``: the arguments, drawn classes and palette.

    The folder appears when it is complete and not before. The same arguments give the same bytes,
    whatever the number of ``workers`` (threads).

    Raises:
        ValueError: an argument is out of range.
        FileExistsError: ``out`` exists and ``overwrite`` is not set, or it is not a shapes data
            set and therefore not overwritten.
    """
    lowest = {'num_train': 1, 'num_val': 1, 'size': 32, 'seed': 0, 'workers': 1}
    given = dict(num_train=num_train, num_val=num_val, size=size, seed=seed, workers=workers)
    for name, value in given.items():
        if value < lowest[name]:
            raise ValueError(f'{name}={value} must be at least {lowest[name]}')
    if layout not in LAYOUTS:
        raise ValueError(f'layout={layout!r} must be one of {", ".join(LAYOUTS)}')
    out = Path(out).resolve()
    if out.exists():
        if not overwrite:
            raise FileExistsError(f'out={str(out)!r} already exists; overwrite replaces it')
        _check_replaceable(out)

    from rich.progress import Progress

    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f'.{out.name}-') as temporary:
        new, old = Path(temporary, 'new'), Path(temporary, 'old')
        records = {}
        with Progress() as progress:
            for split, num_images in zip(SPLITS, (num_train, num_val), strict=True):
                task = progress.add_task(f'{split} images', total=num_images)
                advance = partial(progress.advance, task)
                records[split] = _write_split(
                    new, LAYOUTS[layout], seed, split, num_images, size, workers, advance
                )
        LAYOUTS[layout].write_tables(new, records, size)
        del given['workers']
        meta: dict[str, Any] = given | {'classes': CLASSES, 'palette': PALETTE}
        if layout != 'shapes':
            meta['layout'] = layout
        (new / _MARKER).write_text(json.dumps(meta, indent=1) + '\n')
        try:
            if overwrite and out.exists():
                out.rename(old)
            new.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
