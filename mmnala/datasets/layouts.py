"""How data sets lie on disk: the file names and label ids of ADE20K, COCO and Cityscapes.

Written in one of these layouts, the drawn scenes of :mod:`mmnala.datasets.shapes` are read by the
configs of the real data set with nothing but ``data_root`` changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from mmnala.datasets.official import (
    ADE20K_CLASSES,
    ADE20K_PREFIXES,
    CITYSCAPES_CITIES,
    CITYSCAPES_LABELS,
    COCO_CATEGORIES,
    IMAGENET_SYNSETS,
)

if TYPE_CHECKING:
    from mmnala.datasets.shapes import Instance, Scene


class Layout:
    """A way to write scenes.

    ``classes`` maps every drawn class, in the order of ``shapes.CLASSES``, to the data set's.
    Splits are those of ``shapes.SPLITS``, whatever their folders are called; indices count from 0.
    """

    classes: dict[str, str]

    def scene_files(self, split: str, index: int) -> dict[str, str]:
        """The files of one scene by what they hold, as paths relative to the root."""
        raise NotImplementedError

    def table_files(self) -> dict[str, str]:
        """The files about all scenes of a split, or of both."""
        return {}

    def files(self, root: Path, num_images: dict[str, int]) -> set[str]:
        """The files of the whole data set in ``root``, of so many scenes in each split."""
        scenes = [
            self.scene_files(split, index)
            for split, number in num_images.items()
            for index in range(number)
        ]
        return {
            *self.table_files().values(),
            *(file for scene in scenes for file in scene.values()),
        }

    def write_scene(self, root: Path, split: str, index: int, scene: Scene) -> Any:
        """Write one scene, in any thread; returns what ``write_tables`` needs to know of it."""
        raise NotImplementedError

    def write_tables(self, root: Path, records: dict[str, list], size: int) -> None:
        """Write the tables, given what ``write_scene`` returned for the scenes of every split."""


class ADE20K(Layout):
    """The layout of ADEChallengeData2016."""

    classes = {
        'background': 'sky',
        'wall': 'wall',
        'window': 'windowpane',
        'poster': 'poster',
        'striped ball': 'ball',
        'spotted ball': 'plaything',
        'star': 'flag',
    }

    def __init__(self) -> None:
        labels = [ADE20K_CLASSES.index(name) + 1 for name in self.classes.values()]
        self.labels = np.array(labels, np.uint8)

    def scene_files(self, split: str, index: int) -> dict[str, str]:
        name = f'{ADE20K_PREFIXES[split]}{index + 1:08d}'
        return {
            'image': f'images/{split}/{name}.jpg',
            'semantic': f'annotations/{split}/{name}.png',
        }

    def table_files(self) -> dict[str, str]:
        return {'classes': 'objectInfo150.txt', 'scenes': 'sceneCategories.txt'}

    def write_scene(self, root: Path, split: str, index: int, scene: Scene) -> Any:
        """Write image and semantic map; returns the number of pixels of every label."""
        files = self.scene_files(split, index)
        _write_jpeg(root / files['image'], scene)
        semantic = self.labels[scene.semantic]
        _write_png(root / files['semantic'], semantic)
        return np.bincount(semantic.ravel(), minlength=len(ADE20K_CLASSES) + 1)

    def write_tables(self, root: Path, records: dict[str, list], size: int) -> None:
        pixels = sum(np.sum(found, 0) for found in records.values())
        images = [np.count_nonzero(found, 0) for found in records.values()]
        classes = ['Idx\tRatio\tTrain\tVal\tName']
        for label, name in enumerate(ADE20K_CLASSES, 1):
            ratio, (train, val) = pixels[label] / pixels.sum(), (count[label] for count in images)
            classes.append(f'{label}\t{ratio:.4f}\t{train}\t{val}\t{name}')
        scenes = [
            f'{Path(self.scene_files(split, index)["image"]).stem} misc'
            for split, found in records.items()
            for index in range(len(found))
        ]
        for kind, lines in (('classes', classes), ('scenes', scenes)):
            (root / self.table_files()[kind]).write_text('\n'.join(lines) + '\n')


class COCO(Layout):
    """The layout of COCO 2017. Nothing is annotated of the background."""

    classes = {
        'background': '',
        'wall': 'couch',
        'window': 'tv',
        'poster': 'book',
        'striped ball': 'sports ball',
        'spotted ball': 'orange',
        'star': 'kite',
    }
    folders = {'training': 'train2017', 'validation': 'val2017'}

    def __init__(self) -> None:
        ids = {category['name']: category['id'] for category in COCO_CATEGORIES}
        self.ids = [ids.get(name, 0) for name in self.classes.values()]

    def image_id(self, split: str, index: int) -> int:
        """Odd in training and even in validation, since the real splits share no id either."""
        return 2 * index + 1 + list(self.folders).index(split)

    def scene_files(self, split: str, index: int) -> dict[str, str]:
        return {'image': f'{self.folders[split]}/{self.image_id(split, index):012d}.jpg'}

    def table_files(self) -> dict[str, str]:
        return {
            split: f'annotations/instances_{folder}.json' for split, folder in self.folders.items()
        }

    def write_scene(self, root: Path, split: str, index: int, scene: Scene) -> Any:
        """Write the image; returns the instances' annotations."""
        _write_jpeg(root / self.scene_files(split, index)['image'], scene)
        return [coco_annotation(found, self.ids[found.label]) for found in scene.instances]

    def write_tables(self, root: Path, records: dict[str, list], size: int) -> None:
        for split, found in records.items():
            images: list[dict[str, Any]] = [
                {
                    'license': 1,
                    'file_name': Path(self.scene_files(split, index)['image']).name,
                    'coco_url': '',
                    'height': size,
                    'width': size,
                    'date_captured': '',
                    'flickr_url': '',
                    'id': self.image_id(split, index),
                }
                for index in range(len(found))
            ]
            content = {
                'info': {
                    'description': 'The shapes data set of mmnala in the layout of COCO 2017',
                    'url': '',
                    'version': '1.0',
                    'year': 2017,
                    'contributor': 'mmnala',
                    'date_created': '',
                },
                'licenses': [
                    {
                        'url': 'https://www.apache.org/licenses/LICENSE-2.0',
                        'id': 1,
                        'name': 'Apache License 2.0',
                    }
                ],
                'images': images,
                'annotations': number_annotations([image['id'] for image in images], found),
                'categories': COCO_CATEGORIES,
            }
            path = root / self.table_files()[split]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))


class Cityscapes(Layout):
    """The layout of Cityscapes' leftImg8bit and gtFine, ``labelTrainIds`` included.

    Drawn one over the other, the polygons give the label maps exactly.
    """

    classes = {
        'background': 'sky',
        'wall': 'wall',
        'window': 'traffic light',
        'poster': 'traffic sign',
        'striped ball': 'bicycle',
        'spotted ball': 'motorcycle',
        'star': 'person',
    }
    folders = {'training': 'train', 'validation': 'val'}

    def __init__(self) -> None:
        by_name = {label.name: label for label in CITYSCAPES_LABELS}
        self.labels = [by_name[name] for name in self.classes.values()]

    def scene_files(self, split: str, index: int) -> dict[str, str]:
        folder = self.folders[split]
        cities = CITYSCAPES_CITIES[folder]
        city = cities[index % len(cities)]
        scene = f'{folder}/{city}/{city}_{index // len(cities):06d}_000019'
        files = {'image': f'leftImg8bit/{scene}_leftImg8bit.png'}
        for kind in ('labelIds', 'labelTrainIds', 'instanceIds', 'color'):
            files[kind] = f'gtFine/{scene}_gtFine_{kind}.png'
        return files | {'polygons': f'gtFine/{scene}_gtFine_polygons.json'}

    def write_scene(self, root: Path, split: str, index: int, scene: Scene) -> None:
        files = {kind: root / name for kind, name in self.scene_files(split, index).items()}
        height, width = scene.semantic.shape
        ids, train_ids, colours = (
            np.array([getattr(label, field) for label in self.labels], np.uint8)
            for field in ('id', 'train_id', 'colour')
        )
        instance_ids = ids[scene.semantic].astype(np.uint16)
        corners = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
        objects: list[dict] = [{'label': self.labels[0].name, 'polygon': corners}]
        counts = dict.fromkeys(self.labels, 0)
        for instance in scene.instances:
            label = self.labels[instance.label]
            name = f'{label.name}group' if instance.iscrowd else label.name
            objects += [
                {'label': name, 'polygon': outline}
                for part in instance.parts
                for outline in _outlines(part)
            ]
            if label.has_instances and not instance.iscrowd:
                instance_ids[instance.mask] = 1000 * label.id + counts[label]
                counts[label] += 1
        content = {'imgHeight': height, 'imgWidth': width, 'objects': objects}

        _write_png(files['image'], scene.image[..., ::-1])
        _write_png(files['labelIds'], ids[scene.semantic])
        _write_png(files['labelTrainIds'], train_ids[scene.semantic])
        _write_png(files['instanceIds'], instance_ids)
        opaque = np.full((height, width, 1), 255, np.uint8)
        bgr = colours[scene.semantic][..., ::-1]
        _write_png(files['color'], np.concatenate((bgr, opaque), -1))
        files['polygons'].write_text(json.dumps(content))


class ImageNet(Layout):
    """The layout of ImageNet-1K: a folder for each class, of images that show one object.

    A scene gives one image for each of its objects, crowds apart: the square half as long again as
    the object's box, as far as it lies in the picture. ``meta`` lists all images with their labels.
    """

    classes = {
        'background': '',
        'wall': 'stone wall',
        'window': 'window screen',
        'poster': 'book jacket',
        'striped ball': 'volleyball',
        'spotted ball': 'soccer ball',
        'star': 'starfish',
    }
    folders = {'training': 'train', 'validation': 'val'}

    def __init__(self) -> None:
        self.synsets = [IMAGENET_SYNSETS.get(name, ('', -1)) for name in self.classes.values()]

    def scene_files(self, split: str, index: int) -> dict[str, str]:
        raise NotImplementedError('the number of images depends on the scene: see files()')

    def table_files(self) -> dict[str, str]:
        return {split: f'meta/{folder}.txt' for split, folder in self.folders.items()}

    def files(self, root: Path, num_images: dict[str, int]) -> set[str]:
        files = set(self.table_files().values())
        for split, table in self.table_files().items():
            lines = (root / table).read_text().splitlines()
            files.update(f'{self.folders[split]}/{line.rpartition(" ")[0]}' for line in lines)
        return files

    def write_scene(self, root: Path, split: str, index: int, scene: Scene) -> list[str]:
        """Write the objects' images; returns their lines of the table."""
        lines = []
        for number, instance in enumerate(scene.instances):
            if instance.iscrowd:
                continue
            synset, label = self.synsets[instance.label]
            count = 100 * index + number
            stem = f'{synset}_{count}' if split == 'training' else f'ILSVRC2012_val_{count + 1:08d}'
            file = f'{synset}/{stem}.JPEG'
            _write_jpeg(root / self.folders[split] / file, _close_up(scene, instance))
            lines.append(f'{file} {label}')
        return lines

    def write_tables(self, root: Path, records: dict[str, list], size: int) -> None:
        for split, found in records.items():
            path = root / self.table_files()[split]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(''.join(f'{line}\n' for lines in found for line in lines))
            # Labels are counted by folders, so a class that was not drawn has one, too.
            for synset, _ in self.synsets[1:]:
                (root / self.folders[split] / synset).mkdir(parents=True, exist_ok=True)


OFFICIAL_LAYOUTS: dict[str, Layout] = {
    'ade20k': ADE20K(),
    'coco': COCO(),
    'cityscapes': Cityscapes(),
    'imagenet': ImageNet(),
}


def _close_up(scene: Scene, instance: Instance) -> Scene:
    """The part of the scene that shows the instance with its surroundings."""
    rows, columns = (np.flatnonzero(instance.mask.any(axis)) for axis in (1, 0))
    reach = 0.75 * max(np.ptp(rows) + 1, np.ptp(columns) + 1)
    window = tuple(
        slice(max(round(middle - reach), 0), round(middle + reach))
        for middle in ((rows[0] + rows[-1] + 1) / 2, (columns[0] + columns[-1] + 1) / 2)
    )
    return replace(scene, image=scene.image[window])


def _write_image(path: Path, image: np.ndarray, *options: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written, data = cv2.imencode(path.suffix, image, options)
    assert written
    path.write_bytes(data.tobytes())


def _write_png(path: Path, image: np.ndarray) -> None:
    _write_image(path, image)


def _write_jpeg(path: Path, scene: Scene) -> None:
    _write_image(path, scene.image[..., ::-1], cv2.IMWRITE_JPEG_QUALITY, scene.jpeg_quality)


def _outlines(mask: np.ndarray) -> list[list[list[int]]]:
    """Polygons through the outermost pixels of a mask's pieces, as lists of [x, y]."""
    found, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    # A piece of a pixel or two repeats its points, since a polygon has three.
    return [np.resize(outline.astype(int), (max(len(outline), 3), 2)).tolist() for outline in found]


def _polygons(mask: np.ndarray, left: int, top: int) -> list[list[float]]:
    """Outlines of a mask's pieces, as COCO's flat lists of x, y in pixels.

    ``left`` and ``top`` say where in the image the mask lies. It is enlarged fourfold, so that
    the outline runs between the centres of the pixels inside and outside, and not through them.
    """
    scale = 4
    enlarged = np.kron(mask.astype(np.uint8), np.ones((scale, scale), np.uint8))
    outlines, _ = cv2.findContours(enlarged, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    polygons = []
    for outline in outlines:
        corners = cv2.approxPolyDP(outline, 0.4 * scale, closed=True)
        if len(corners) < 3:  # a piece of a pixel or two
            corners = outline
        corners = (corners[:, 0] + 0.5) / scale + (left, top)
        polygons.append(corners.ravel().round(2).tolist())
    return polygons


def _run_lengths(mask: np.ndarray) -> dict:
    """COCO's uncompressed run-length code: columns first, starting with a run of zeros."""
    flat = np.concatenate(([False], mask.ravel(order='F')))
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff(np.concatenate(([0], changes, [mask.size])))
    return {'size': list(mask.shape), 'counts': counts.tolist()}


def _has_hole(mask: np.ndarray) -> bool:
    """Whether the mask encloses pixels that are not its own."""
    pieces, _ = cv2.connectedComponents(1 - np.pad(mask, 1).astype(np.uint8), connectivity=4)
    return pieces > 2


def coco_annotation(instance: Instance, category_id: int) -> dict:
    """One entry of COCO's ``annotations``, of the visible part, without id and image id.

    Crowds, and masks with holes (which polygons cannot tell), are run-length coded.
    """
    mask = instance.mask
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    (left, right), (top, bottom) = columns[[0, -1]].tolist(), rows[[0, -1]].tolist()
    visible = mask[top : bottom + 1, left : right + 1]
    run_lengths = instance.iscrowd or _has_hole(visible)
    return {
        'category_id': category_id,
        'iscrowd': int(instance.iscrowd),
        'area': float(mask.sum()),
        'bbox': [float(left), float(top), float(right + 1 - left), float(bottom + 1 - top)],
        'segmentation': _run_lengths(mask) if run_lengths else _polygons(visible, left, top),
    }


def number_annotations(image_ids: list[int], found: list[list[dict]]) -> list[dict]:
    """The annotations ``found`` in every image as one list, with their ids."""
    annotations: list[dict] = []
    for image_id, of_image in zip(image_ids, found, strict=True):
        for annotation in of_image:
            annotations.append({'id': len(annotations) + 1, 'image_id': image_id} | annotation)
    return annotations
