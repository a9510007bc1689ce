"""Check a downloaded COCO 2017 and say what is missing or wrong."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mmnala.datasets.check import (
    Problem,
    Report,
    command_line,
    find_parts,
    in_parallel,
    read_image,
    read_json,
    run,
    size_problems,
)
from mmnala.datasets.official import COCO_ANNOTATED_COUNTS, COCO_CATEGORIES, COCO_COUNTS

ROOT = 'data/coco'
ARCHIVES = ['annotations_trainval2017.zip', *(f'{folder}.zip' for folder in COCO_COUNTS)]
MISTAKES = {
    'images/train2017 and images/val2017 belong directly under ROOT': ['images/*2017'],
    'annotations/annotations is one folder too many': ['annotations/annotations'],
    'this is COCO 2014; the configs need the splits of 2017': ['*2014', 'annotations/*2014.json'],
}
# instances_train2017.json has 448 MB.
MAX_JSON_BYTES = 2**30
NAMES = {category['id']: category['name'] for category in COCO_CATEGORIES}
FILE_NAME = re.compile(r'\d{12}\.jpg', re.ASCII)
# Each has one box of no height in train2017 as it is published; mmdet passes over it.
KNOWN_FLAT = {200365, 550395}


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def are_numbers(values: Any) -> bool:
    """Whether it is a list of numbers of a sensible size, which infinity has not."""
    return isinstance(values, list) and all(
        (is_integer(value) or isinstance(value, float)) and abs(value) < 1e9 for value in values
    )


def by_id(content: dict, kind: str, report: Report, file: str) -> dict[int, dict]:
    """The entries of one list of the file by their ids; what has none is reported."""
    found: dict[int, dict] = {}
    for position, entry in enumerate(content[kind]):
        number = entry.get('id') if isinstance(entry, dict) else None
        if not is_integer(number):
            report.add('malformed', f'{file}: {kind}[{position}] has no integer id')
        elif number in found:
            report.add('id used twice', f'{file}: {kind}, id {number}')
        else:
            found[number] = entry
    return found


def check_categories(categories: dict[int, dict], report: Report, file: str) -> None:
    for number in sorted(NAMES.keys() | categories.keys()):
        name = categories.get(number, {}).get('name')
        if number not in categories:
            report.add('missing category', f'{file}: {number}, {NAMES[number]!r}')
        elif name != NAMES.get(number):
            official = f', officially {NAMES[number]!r}' if number in NAMES else ''
            report.add('category not official', f'{file}: {number} is {name!r}{official}')


def image_problems(image: dict) -> Iterator[Problem]:
    """What is wrong with an entry of ``images``, its file apart."""
    number, name = image['id'], image.get('file_name')
    if not (all(is_integer(image.get(side)) and image[side] > 0 for side in ('width', 'height'))):
        yield Problem('malformed', f'image {number} has no positive width and height')
    if not isinstance(name, str):
        yield Problem('malformed', f'image {number} has no file_name')
    elif re.search(r'[/\\]', name) or name in ('.', '..'):
        yield Problem('path in file_name', f'image {number}: {name!r} is refused')
    elif not FILE_NAME.fullmatch(name):
        yield Problem('unexpected file name', f'image {number}: {name!r}')
    elif int(name.removesuffix('.jpg')) != number:
        yield Problem('unexpected file name', f'image {number}: {name!r} has another number')


def segmentation_problems(segmentation: Any, is_crowd: bool, size: list) -> Iterator[str]:
    """What is wrong with polygons or run lengths; ``size`` is height and width of the image."""
    if isinstance(segmentation, dict):
        counts = segmentation.get('counts')
        if segmentation.get('size') != size:
            yield f'run lengths of size {segmentation.get("size")!r} and not {size}'
        elif not (isinstance(counts, list) and all(is_integer(c) and c >= 0 for c in counts)):
            yield 'run lengths that are no counts'
        elif sum(counts) != math.prod(size):
            yield f'run lengths of {sum(counts)} pixels and not {math.prod(size)}'
    elif is_crowd:
        yield 'a crowd without run lengths'
    elif not (isinstance(segmentation, list) and segmentation):
        yield 'no segmentation'
    elif not all(are_numbers(p) and len(p) >= 6 and len(p) % 2 == 0 for p in segmentation):
        yield 'a polygon that is not at least three points'


def annotation_problems(annotation: dict, images: dict[int, dict]) -> Iterator[Problem]:
    """What is wrong with an entry of ``annotations``."""
    number = annotation['id']
    image_id, category_id = annotation.get('image_id'), annotation.get('category_id')
    if not (is_integer(category_id) and category_id in NAMES):
        yield Problem('category not official', f'annotation {number}: {category_id!r}')
    if annotation.get('iscrowd') not in (0, 1):
        yield Problem('malformed', f'annotation {number}: iscrowd is not 0 or 1')
    if not (are_numbers([annotation.get('area')]) and annotation['area'] >= 0):
        yield Problem('malformed', f'annotation {number}: area is no number from 0')
    if not (is_integer(image_id) and image_id in images):
        yield Problem('image not listed', f'annotation {number}: image {image_id!r}')
        return
    size = [images[image_id].get(side) for side in ('height', 'width')]
    if not all(is_integer(side) and side > 0 for side in size):
        return  # said of the image
    box = annotation.get('bbox')
    if not (are_numbers(box) and len(box) == 4):
        yield Problem('malformed', f'annotation {number}: bbox is not four numbers')
    else:
        x, y, width, height = box
        if not (width > 0 and height > 0) and image_id not in KNOWN_FLAT:
            yield Problem('box of no extent', f'annotation {number}: {box}')
        # The published boxes are rounded and reach over the rim by parts of a pixel.
        if min(x, y) < -1 or x + width > size[1] + 1 or y + height > size[0] + 1:
            yield Problem('box outside the image', f'annotation {number}: {box}, image {image_id}')
    is_crowd = bool(annotation.get('iscrowd'))
    for message in segmentation_problems(annotation.get('segmentation'), is_crowd, size):
        yield Problem('segmentation', f'annotation {number}: {message}')


def check_file(folder: Path, image: dict) -> list[Problem]:
    """What is wrong with the file of an entry of ``images``."""
    name = f'{folder.name}/{image["file_name"]}'
    try:
        picture = read_image(folder / image['file_name'])
    except ValueError as error:
        return [Problem('unreadable', f'{name}: {error}')]
    return list(size_problems(name, picture, 'the JSON', (image.get('width'), image.get('height'))))


def check_split(root: Path, split: str, args: argparse.Namespace, report: Report) -> None:
    file = f'annotations/instances_{split}.json'
    try:
        content = read_json(root / file, MAX_JSON_BYTES)
        for kind in ('images', 'annotations', 'categories'):
            if not (isinstance(content, dict) and isinstance(content.get(kind), list)):
                raise ValueError(f'has no list {kind!r}')
    except ValueError as error:
        report.add('unreadable', f'{file}: {error}')
        return

    check_categories(by_id(content, 'categories', report, file), report, file)
    images = by_id(content, 'images', report, file)
    named: dict[str, dict] = {}
    for image in images.values():
        problems = list(image_problems(image))
        for problem in problems:
            report.add(problem.kind, f'{file}: {problem.message}')
        if not problems:
            named[image['file_name']] = image
    annotated = set()
    for annotation in by_id(content, 'annotations', report, file).values():
        for problem in annotation_problems(annotation, images):
            report.add(problem.kind, f'{file}: {problem.message}')
        if is_integer(annotation.get('image_id')):
            annotated.add(annotation['image_id'])

    files = set(report.list_names(root / split))
    for name in sorted(named.keys() - files):
        report.add('missing file', f'{split}/{name}')
    for name in sorted(files - named.keys()):
        kind = 'image not listed' if FILE_NAME.fullmatch(name) else 'unexpected file'
        report.add(kind, f'{split}/{name}')
    present = [named[name] for name in sorted(named.keys() & files)]
    report.check_count(f'{split} images', len(present), COCO_COUNTS[split], args.partial)
    report.check_count(
        f'{split} images with instances',
        len(annotated & images.keys()),
        COCO_ANNOTATED_COUNTS[split],
        args.partial,
    )
    for problems in in_parallel(split, partial(check_file, root / split), present, args.workers):
        report.extend(problems)


def check(args: argparse.Namespace, report: Report) -> None:
    parts = [*COCO_COUNTS, *(f'annotations/instances_{split}.json' for split in COCO_COUNTS)]
    if find_parts(args.root, parts, ARCHIVES, MISTAKES, report):
        files = report.list_names(args.root / 'annotations')
        for split in COCO_COUNTS:
            if f'instances_{split}.json' in files:
                check_split(args.root, split, args, report)


if __name__ == '__main__':
    sys.exit(run(command_line(__doc__, ROOT, COCO_COUNTS), check))
