"""Predict thousands of images of all sizes in one process, and compare with single runs.

By hand, with the micro model and sizes that are uniform in their logarithm:

    OMP_NUM_THREADS=1 python tests/soak_predict.py FOLDER --images 2000 --sample 40

FOLDER gets the images, the model and the results. Printed are the memory of the process in each
tenth of the run, and how many results were compared.
"""

import argparse
import filecmp
import json
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from toy import TOOLS, run_tool, write_scenes, write_segmentation_config

from mmnala.engine.results import Results


class Moment(NamedTuple):
    """After an image: how many there were, seconds, its pixels, and the process's memory (MiB)."""

    number: int
    seconds: float
    pixels: int
    memory: float


def make_images(folder: Path, number: int, low: int = 32, high: int = 4096) -> list[Path]:
    """Draw images whose sides are independent, so that some are very long; the first are extreme.

    They are coarse noise, JPEG and PNG in turn.
    """
    folder.mkdir()
    draw = np.random.default_rng(0)
    sides = np.exp(draw.uniform(np.log(low), np.log(high), (number, 2))).round().astype(int)
    sides[:3] = [low, high], [high, low], [low, low]
    paths = []
    for index, (width, height) in enumerate(sides.tolist()):
        small = draw.integers(0, 256, (-(-height // 16), -(-width // 16), 3), dtype=np.uint8)
        path = folder / f'{index:04d}.{("jpg", "png")[index % 2]}'
        Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(path)
        paths.append(path)
    return paths


def predict_all(
    config: Path, checkpoint: Path, images: Sequence[Path], out: Path, *options: str
) -> list[Moment]:
    """Run tools/predict.py in this process, and return what happened after each image."""
    trace: list[Moment] = []
    add, start = Results.add, time.monotonic()

    def add_and_measure(self, frame, sample) -> None:
        add(self, frame, sample)
        pages = int(Path('/proc/self/statm').read_text().split()[1])
        height, width = frame.image.shape[:2]
        seconds = time.monotonic() - start
        trace.append(Moment(len(trace) + 1, seconds, height * width, pages * 4096 / 2**20))

    script = str(TOOLS / 'predict.py')
    arguments = [config, checkpoint, *images, '--out', out, '--device', 'cpu', *options]
    with (
        patch.object(Results, 'add', add_and_measure),
        patch.object(sys, 'argv', [script, *map(str, arguments)]),
    ):
        runpy.run_path(script, run_name='__main__')
    return trace


def compare(config: Path, checkpoint: Path, images: Sequence[Path], out: Path, sample: int) -> int:
    """Compare results, bit by bit, with those of fresh processes for one image each.

    Checked of all images is that their results are there, in order and of their sizes.
    """
    records = json.loads((out / 'results.json').read_text())
    assert [record['input'] for record in records] == [str(path) for path in images]
    for path, record in zip(images, records, strict=True):
        with Image.open(path) as image, Image.open(out / record['label_map']) as labels:
            assert image.size == labels.size == (record['width'], record['height'])
        assert sum(record['pixels'].values()) == record['width'] * record['height']
    compared = np.unique(np.linspace(0, len(images) - 1, sample).astype(int)).tolist()
    for index in compared:
        single = out.parent / f'single{index}'
        pictures = [] if 'picture' in records[index] else ['--no-pictures']
        options = ['--out', single, '--device', 'cpu', *pictures]
        finished = run_tool('predict.py', config, checkpoint, images[index], *options,
                            cwd=out.parent)  # fmt: skip
        assert finished.code == 0, finished.output
        (record,) = json.loads((single / 'results.json').read_text())
        assert record == records[index]
        for kind in {'label_map', 'picture'} & record.keys():
            assert filecmp.cmp(single / record[kind], out / record[kind], shallow=False), record
    return len(compared)


def report(trace: Sequence[Moment]) -> str:
    """Memory in each tenth of a run: the least (what stays), the median and the most."""
    lines = ['images      seconds  least MiB  median MiB  most MiB  largest image']
    for part in np.array_split(np.array(trace), 10):
        memory = part[:, 3]
        lines.append(
            f'{int(part[0, 0]):5d}-{int(part[-1, 0]):5d} {part[-1, 1]:8.0f}  '
            f'{memory.min():9.0f}  {np.median(memory):10.0f}  {memory.max():8.0f}  '
            f'{int(part[:, 2].max()):13d}'
        )
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=lambda text: Path(text).resolve(), help='new folder')
    parser.add_argument('--images', type=int, default=2000)
    parser.add_argument('--sample', type=int, default=40, help='results to compare')
    args = parser.parse_args()

    from conftest import Golden
    from test_evaluation import build_with_weights

    args.folder.mkdir()
    write_scenes(args.folder / 'data')
    arch = Golden('nalaformer_micro').arch
    head = "model['decode_head'].update(in_channels=[16, 32, 48, 64])\n"
    extra = f"model['backbone']['arch'] = {arch}\n{head}"
    config = write_segmentation_config(args.folder / 'micro.py', args.folder / 'data', extra)
    checkpoint = args.folder / 'micro.pth'
    torch.save(dict(state_dict=build_with_weights(config).state_dict()), checkpoint)
    images = make_images(args.folder / 'images', args.images)
    out = args.folder / 'out'
    trace = predict_all(config, checkpoint, images, out, '--no-pictures')
    print(report(trace), flush=True)
    compared = compare(config, checkpoint, images, out, args.sample)
    print(f'{len(trace)} images; {compared} results are bit-equal to those of fresh processes')


if __name__ == '__main__':
    main()
