"""Draw a data set, train UperNet + NaLaFormer-XT on it from scratch, evaluate, make pictures.

Everything runs through the ordinary tools: make_demo_dataset.py, train.py and test.py.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from mmengine.config import Config
from mmengine.runner import find_latest_checkpoint
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / 'configs/shapes/upernet_nala-xt_shapes.py'
console = Console()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/demo'))
    parser.add_argument('--num-train', type=int, default=400, help='training images to draw')
    parser.add_argument('--num-val', type=int, default=100, help='validation images to draw')
    parser.add_argument('--max-iters', type=int, help="iterations (default: the config's)")
    return parser.parse_args()


def tool(name: str, *args: object) -> list[str]:
    return [sys.executable, str(ROOT / 'tools' / name), *map(str, args)]


def run_logged(command: list[str], log: Path, on_line=lambda line: None) -> None:
    """Run a tool with its output in ``log``; a failure ends the demo with the log's last lines."""
    with log.open('w') as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            file.write(line)
            file.flush()
            on_line(line)
    if process.wait():
        tail = ''.join(log.read_text().splitlines(keepends=True)[-20:])
        raise SystemExit(f'{tail}\nerror: {command[1]} failed, the whole log is {log}')


def write_config(work_dir: Path, data: Path, max_iters: int) -> Path:
    """The demo's config with the drawn data set, more lines in the log and another length."""
    lines = [f'_base_ = {str(CONFIG)!r}']
    for loader in ('train', 'val', 'test'):
        lines.append(f'{loader}_dataloader = dict(dataset=dict(data_root={str(data.resolve())!r}))')
    interval = min(max_iters, 200)
    lines += [
        f'train_cfg = dict(max_iters={max_iters}, val_interval={interval})',
        f'default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval={interval}))',
    ]
    path = work_dir / 'demo_config.py'
    path.write_text('\n'.join(lines) + '\n')
    return path


def train(work_dir: Path, config: Path, max_iters: int) -> None:
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task('training', total=max_iters)

        def advance(line: str) -> None:
            match = re.search(r'Iter\(train\) \[\s*(\d+)/\d+\].*?\sloss: ([\d.]+)', line)
            if match is None:
                return
            progress.update(bar, completed=int(match[1]), description=f'training, loss {match[2]}')
            if not console.is_terminal and int(match[1]) % max(max_iters // 20, 1) == 0:
                console.print(f'iteration {match[1]} of {max_iters}, loss {match[2]}')

        command = tool('train.py', config, '--work-dir', work_dir)
        run_logged(command, work_dir / 'train.log', advance)
        progress.update(bar, completed=max_iters)


def evaluate(work_dir: Path, config: Path) -> None:
    """Print the table of test.py and leave the predicted maps under ``predictions``."""
    checkpoint = find_latest_checkpoint(str(work_dir))
    for name in ('predictions', 'overlays'):
        shutil.rmtree(work_dir / name, ignore_errors=True)
    command = tool(
        *('test.py', config, checkpoint, '--work-dir', work_dir / 'test'),
        *('--out', work_dir / 'predictions'),
    )

    def show(line: str) -> None:
        if line.startswith(('+', '|')):
            console.print(line, end='', markup=False, highlight=False)
        if match := re.search(r'aAcc.*mIoU: ([\d.]+)', line):
            console.print(f'mIoU {float(match[1]):.1f} % on {work_dir / "data/images/validation"}')

    run_logged(command, work_dir / 'test.log', show)


def plot_loss(work_dir: Path) -> Path:
    """Draw the training loss and the validation mIoU of the latest run."""
    scalars = max(work_dir.glob('*/vis_data/scalars.json'))
    records = [json.loads(line) for line in scalars.read_text().splitlines()]
    steps = [(r['step'], r['loss']) for r in records if 'loss' in r]
    scores = [(r['step'], r['mIoU']) for r in records if 'mIoU' in r]
    figure, axis = plt.subplots(figsize=(6, 3.5), layout='constrained')
    axis.plot(*zip(*steps, strict=True), label='training loss')
    axis.set(xlabel='iteration', ylabel='loss', ylim=(0, None))
    right = axis.twinx()
    right.plot(*zip(*scores, strict=True), 'o-', color='tab:green', label='validation mIoU')
    right.set(ylabel='mIoU (%)', ylim=(0, 100))
    figure.legend(loc='outside upper center', ncols=2)
    path = work_dir / 'loss.png'
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_overlays(work_dir: Path, data: Path, rows: int = 4) -> Path:
    """A picture of image, truth and prediction for each validation image, and one of a few."""
    metainfo = Config.fromfile(CONFIG).metainfo
    palette = np.array(metainfo.palette, dtype=np.uint8)
    legend = [
        Patch(color=np.array(color) / 255, label=name)
        for name, color in zip(metainfo.classes, metainfo.palette, strict=True)
    ]
    folder = work_dir / 'overlays'
    folder.mkdir(exist_ok=True)
    strips = []
    for prediction in sorted((work_dir / 'predictions').glob('*.png')):
        image = np.array(Image.open(data / f'images/validation/{prediction.stem}.jpg'))
        truth = data / f'annotations/validation/{prediction.name}'
        # Label 0 means "not labelled", the classes start at 1.
        maps = [palette[np.array(Image.open(path)) - 1] for path in (truth, prediction)]
        panels = [image, *((0.35 * image + 0.65 * colours).astype(np.uint8) for colours in maps)]
        strips.append(panels)
        Image.fromarray(np.hstack(panels)).save(folder / prediction.name)

    figure, axes = plt.subplots(
        rows, 6, figsize=(11, 11 / 6 * rows + 0.8), layout='constrained', squeeze=False
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for place, panels in enumerate(strips[: 2 * rows]):
        for column, panel in enumerate(panels):
            axis = axes[place // 2, 3 * (place % 2) + column]
            axis.imshow(panel)
            if place < 2:
                axis.set_title(('image', 'truth', 'prediction')[column])
    figure.legend(handles=legend, loc='outside lower center', ncols=len(legend))
    path = work_dir / 'overlays.png'
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def main() -> None:
    args = parse_args()
    work_dir = args.work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    data = work_dir / 'data'
    console.print(f'Drawing the data set into {data}')
    size = ['--num-train', args.num_train, '--num-val', args.num_val]
    drawing = tool('make_demo_dataset.py', '--out', data, '--overwrite', *size)
    if subprocess.run(drawing, check=False).returncode:
        raise SystemExit(1)

    max_iters = args.max_iters or Config.fromfile(CONFIG).train_cfg.max_iters
    config = write_config(work_dir, data, max_iters)
    console.print(f'Training {CONFIG.relative_to(ROOT)} from scratch, log: {work_dir}/train.log')
    train(work_dir, config, max_iters)

    console.print('Evaluating on the validation images')
    evaluate(work_dir, config)
    console.print(f'Loss curve:     {plot_loss(work_dir)}')
    console.print(f'Some overlays:  {draw_overlays(work_dir, data)}')
    console.print(f'All of them:    {work_dir / "overlays"}')
    console.print(f'Checkpoint:     {find_latest_checkpoint(str(work_dir))}')


if __name__ == '__main__':
    main()
