"""Check a downloaded ADE20K (ADEChallengeData2016) and say what is missing or wrong."""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from mmnala.datasets.check import (
    Problem,
    Report,
    command_line,
    find_parts,
    in_parallel,
    label_problems,
    read_image,
    read_labels,
    run,
    size_problems,
    some,
)
from mmnala.datasets.official import ADE20K_CLASSES, ADE20K_COUNTS, ADE20K_PREFIXES

ROOT = 'data/ade/ADEChallengeData2016'
LABELS = range(len(ADE20K_CLASSES) + 1)
ARCHIVES = ['ADEChallengeData2016.zip']
MISTAKES = {
    'this looks like the full ADE20K; the configs need the challenge one, ADEChallengeData2016': [
        'images/ADE',
        'images/training/*/',
        'ADE20K_20*',
        'index_ade20k.*',
    ]
}


def find_names(folder: Path, split: str, suffix: str, report: Report) -> set[str]:
    """The names, without suffix, of the split's files in a folder; others are reported."""
    pattern = re.compile(rf'{ADE20K_PREFIXES[split]}(\d{{8}}){re.escape(suffix)}', re.ASCII)
    names = set()
    for name in report.list_names(folder):
        match = pattern.fullmatch(name)
        if match and 1 <= int(match[1]) <= ADE20K_COUNTS[split]:
            names.add(name.removesuffix(suffix))
        else:
            report.add('unexpected file', f'{folder / name}')
    return names


def check_pair(root: Path, split: str, name: str) -> list[Problem]:
    """What is wrong with an image and its label map."""
    image_name, labels_name = f'images/{split}/{name}.jpg', f'annotations/{split}/{name}.png'
    problems, sizes = [], []
    for file_name, read in ((image_name, read_image), (labels_name, read_labels)):
        try:
            image = read(root / file_name)
        except ValueError as error:
            problems.append(Problem('unreadable', f'{file_name}: {error}'))
            continue
        if read is read_labels:
            problems += label_problems(file_name, image, LABELS)
        sizes.append(image)
    if len(sizes) == 2:
        problems += size_problems(labels_name, sizes[1], 'the image', sizes[0].size)
    return problems


def check(args: argparse.Namespace, report: Report) -> None:
    root = args.root
    parts = [f'{kind}/{split}' for split in ADE20K_COUNTS for kind in ('images', 'annotations')]
    if not find_parts(root, parts, ARCHIVES, MISTAKES, report):
        return
    for split, official in ADE20K_COUNTS.items():
        images = find_names(root / 'images' / split, split, '.jpg', report)
        labels = find_names(root / 'annotations' / split, split, '.png', report)
        for name in sorted(images - labels):
            report.add('image without annotation', f'images/{split}/{name}.jpg')
        for name in sorted(labels - images):
            report.add('annotation without image', f'annotations/{split}/{name}.png')
        numbered = {f'{ADE20K_PREFIXES[split]}{number:08d}' for number in range(1, official + 1)}
        missing = f'; missing {some(sorted(numbered - images))}'
        report.check_count(f'{split} images', len(images), official, args.partial, missing)
        check_one = partial(check_pair, root, split)
        for problems in in_parallel(split, check_one, sorted(images & labels), args.workers):
            report.extend(problems)


if __name__ == '__main__':
    sys.exit(run(command_line(__doc__, ROOT, ADE20K_COUNTS), check))
