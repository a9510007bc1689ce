"""Check a downloaded Cityscapes (leftImg8bit, gtFine) and say what is missing or wrong.

The configs train on gtFine's labelTrainIds, which are not part of the download: --make-train-ids
makes them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image, ImageChops

from mmnala.datasets.check import (
    Problem,
    Report,
    command_line,
    find_parts,
    in_parallel,
    label_problems,
    read_image,
    read_json,
    read_labels,
    run,
    size_problems,
    some,
)
from mmnala.datasets.official import CITYSCAPES_CITIES, CITYSCAPES_COUNTS, CITYSCAPES_LABELS

ROOT = 'data/cityscapes'
ARCHIVES = ['leftImg8bit_trainvaltest.zip', 'gtFine_trainvaltest.zip']
MISTAKES = {
    'gtCoarse is no substitute for gtFine: download gtFine_trainvaltest.zip': ['gtCoarse'],
    'move leftImg8bit and gtFine out of the folders named after the archives': [
        'leftImg8bit_trainvaltest/leftImg8bit',
        'gtFine_trainvaltest/gtFine',
    ],
}
IMAGE = '_leftImg8bit.png'
POLYGONS, TRAIN_IDS = '_gtFine_polygons.json', '_gtFine_labelTrainIds.png'
KINDS = (POLYGONS, TRAIN_IDS, *(f'_gtFine_{k}.png' for k in ('labelIds', 'instanceIds', 'color')))
# The largest of the published files has less than 1 MB.
MAX_JSON_BYTES = 2**24
BY_ID = {label.id: label for label in CITYSCAPES_LABELS}
TO_TRAIN_ID = [BY_ID[value].train_id if value in BY_ID else 255 for value in range(256)]
NAMES = {label.name for label in CITYSCAPES_LABELS} | {'license plate'}
GROUPS = {f'{label.name}group' for label in CITYSCAPES_LABELS if label.has_instances}
ALLOWED = {'_gtFine_labelIds.png': BY_ID, TRAIN_IDS: set(TO_TRAIN_ID)}


def find_scenes(folder: Path, split: str, suffixes: tuple, report: Report) -> dict[str, set[str]]:
    """The names (CITY/CITY_000000_000019) in a split's folder for each of the suffixes.

    A folder that does not exist has none: not all who have the test images have their annotations.
    """
    found: dict[str, set[str]] = {suffix: set() for suffix in suffixes}
    for city in report.list_names(folder) if folder.is_dir() else ():
        if city not in CITYSCAPES_CITIES[split] or not (folder / city).is_dir():
            report.add('unexpected file', f'{folder / city} is no city of {split}')
            continue
        pattern = re.compile(
            rf'({city}_\d{{6}}_\d{{6}})({"|".join(map(re.escape, suffixes))})', re.ASCII
        )
        for name in report.list_names(folder / city):
            if match := pattern.fullmatch(name):
                found[match[2]].add(f'{city}/{match[1]}')
            else:
                report.add('unexpected file', str(folder / city / name))
    return found


def instance_problems(name: str, image: Image.Image) -> Iterator[Problem]:
    """Name the values of an instance map that are neither a label nor 1000 label + number."""
    if not image.mode.startswith('I'):
        yield Problem('unreadable', f'{name}: has mode {image.mode}, and no 16-bit labels')
        return
    strange = []
    for value in np.unique(np.asarray(image)).tolist():
        label = BY_ID.get(value if value < 1000 else value // 1000)
        if label is None or (value >= 1000 and not label.has_instances):
            strange.append(value)
    if strange:
        yield Problem('labels outside the classes', f'{name}: {some(strange)}')


def polygon_messages(content: Any, size: tuple[int, int]) -> Iterator[str]:
    """What is wrong with a polygon file's content; ``size`` is the image's width and height."""
    if not isinstance(content, dict) or not isinstance(content.get('objects'), list):
        yield 'has no list of objects'
        return
    if (found := (content.get('imgWidth'), content.get('imgHeight'))) != size:
        yield f'is for an image of {found[0]!r}x{found[1]!r}, not {size[0]}x{size[1]}'
    for position, entry in enumerate(content['objects']):
        entry = entry if isinstance(entry, dict) else {}
        label, polygon = entry.get('label'), entry.get('polygon')
        if not (isinstance(label, str) and label in NAMES | GROUPS):
            yield f'objects[{position}] has the label {label!r}'
        if not (
            isinstance(polygon, list)
            and len(polygon) >= 3
            and all(
                isinstance(point, list)
                and len(point) == 2
                and all(isinstance(at, (int, float)) and abs(at) < 1e6 for at in point)
                for point in polygon
            )
        ):
            yield f'objects[{position}] has no polygon of at least three points'


def check_polygons(path: Path, name: str, size: tuple[int, int]) -> list[Problem]:
    """What is wrong with a polygon file, whose name is for the message."""
    try:
        messages = list(polygon_messages(read_json(path, MAX_JSON_BYTES), size))
    except ValueError as error:
        return [Problem('unreadable', f'{name}: {error}')]
    return [Problem('polygons', f'{name} {message}') for message in messages]


def check_scene(root: Path, split: str, item: tuple[str, list[str]]) -> list[Problem]:
    """What is wrong with an image and those files of its annotation that exist."""
    scene, kinds = item
    image_name = f'leftImg8bit/{split}/{scene}{IMAGE}'
    try:
        size = read_image(root / image_name).size
    except ValueError as error:
        return [Problem('unreadable', f'{image_name}: {error}')]
    problems: list[Problem] = []
    labels: dict[str, Image.Image] = {}
    for kind in kinds:
        name = f'gtFine/{split}/{scene}{kind}'
        if kind == POLYGONS:
            problems += check_polygons(root / name, name, size)
            continue
        try:
            image = (read_labels if kind in ALLOWED else read_image)(root / name)
        except ValueError as error:
            problems.append(Problem('unreadable', f'{name}: {error}'))
            continue
        problems += size_problems(name, image, 'the image', size)
        if kind in ALLOWED:
            problems += label_problems(name, image, ALLOWED[kind])
            labels[kind] = image
        elif kind == '_gtFine_instanceIds.png':
            problems += instance_problems(name, image)
    if not problems and len(labels) == 2:
        from_ids = labels['_gtFine_labelIds.png'].point(TO_TRAIN_ID)
        equal = ImageChops.difference(from_ids, labels[TRAIN_IDS]).histogram()[0]
        # Versions of Pillow fill polygons with slightly different edges.
        if equal < 0.98 * size[0] * size[1]:
            name = f'gtFine/{split}/{scene}{TRAIN_IDS}'
            problems.append(Problem('labelTrainIds do not fit labelIds', name))
    return problems


def make_train_ids(root: Path, split: str, scene: str) -> list[Problem]:
    """Write the labelTrainIds of a scene; the file appears when it is complete."""
    from cityscapesscripts.preparation.json2labelImg import json2labelImg

    polygons, out = (root / 'gtFine' / split / f'{scene}{kind}' for kind in (POLYGONS, TRAIN_IDS))
    image_name = f'leftImg8bit/{split}/{scene}{IMAGE}'
    try:
        size = read_image(root / image_name).size
    except ValueError as error:
        return [Problem('unreadable', f'{image_name}: {error}')]
    name = f'gtFine/{split}/{scene}{POLYGONS}'
    if not (problems := check_polygons(polygons, name, size)):
        with TemporaryDirectory(dir=out.parent, prefix='.') as temporary:
            made = Path(temporary, out.name)
            json2labelImg(str(polygons), str(made), 'trainIds')
            os.replace(made, out)
    return problems


def check_split(root: Path, split: str, args: argparse.Namespace, report: Report) -> None:
    images = find_scenes(root / 'leftImg8bit' / split, split, (IMAGE,), report)[IMAGE]
    annotations = find_scenes(root / 'gtFine' / split, split, KINDS, report)
    todo = sorted((images & annotations[POLYGONS]) - annotations[TRAIN_IDS])
    if todo and args.make_train_ids:
        make = partial(make_train_ids, root, split)
        for scene, problems in zip(
            todo, in_parallel(f'{split} labelTrainIds', make, todo, args.workers), strict=True
        ):
            if not problems:  # they are found again, and reported, below
                annotations[TRAIN_IDS].add(scene)
    for kind, scenes in annotations.items():
        for scene in sorted(images - scenes):
            report.add('image without annotation', f'gtFine/{split}/{scene}{kind} is missing')
        for scene in sorted(scenes - images):
            report.add('annotation without image', f'gtFine/{split}/{scene}{kind}')
    if todo and not args.make_train_ids:
        report.hint('--make-train-ids makes the labelTrainIds that are missing')
    cities = {scene.partition('/')[0] for scene in images}
    missing = [city for city in CITYSCAPES_CITIES[split] if city not in cities]
    hint = f'; no images of {", ".join(missing)}' if missing else ''
    report.check_count(f'{split} images', len(images), CITYSCAPES_COUNTS[split], args.partial, hint)
    items = [
        (scene, [kind for kind, scenes in annotations.items() if scene in scenes])
        for scene in sorted(images)
    ]
    for problems in in_parallel(split, partial(check_scene, root, split), items, args.workers):
        report.extend(problems)


def check(args: argparse.Namespace, report: Report) -> None:
    if args.make_train_ids:
        try:
            import cityscapesscripts.preparation.json2labelImg  # noqa: F401
        except ImportError as error:
            # From 2.0 on it requires a `typing` that shadows the standard library's.
            sys.exit(
                f'--make-train-ids needs cityscapesscripts ({error}): '
                "pip install 'cityscapesscripts<2'"
            )
    parts = [f'{kind}/{split}' for split in ('train', 'val') for kind in ('leftImg8bit', 'gtFine')]
    if not find_parts(args.root, parts, ARCHIVES, MISTAKES, report):
        return
    for split, official in CITYSCAPES_COUNTS.items():
        if split == 'test' and not (args.root / 'leftImg8bit/test').is_dir():
            report.note(f'test images: 0 of {official}, which no config here needs')
        else:
            check_split(args.root, split, args, report)


if __name__ == '__main__':
    parser = command_line(__doc__, ROOT, CITYSCAPES_COUNTS)
    parser.add_argument(
        '--make-train-ids',
        action='store_true',
        help='first make the labelTrainIds that are missing (needs cityscapesscripts)',
    )
    sys.exit(run(parser, check))
