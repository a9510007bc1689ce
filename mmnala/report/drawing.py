"""The pictures of trainings, and their numbers as CSV."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ..engine.errors import InputError
from .log import RunLog

# What is drawn if it is logged: loss, learning rate, the usual metrics, AttentionMonitorHook's.
USUAL = (
    *('loss', 'lr', r'mIoU', r'(.*/)?PQ', r'(.*/)?(bbox|segm)_mAP', r'(.*/)?(bbox|segm)_mAP_50'),
    *(r'(.*/)?top1', r'attention/stage\d+/entropy'),
)
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')


def usual_curves(runs: Iterable[RunLog]) -> list[str]:
    """The names of the logged curves that :data:`USUAL` lists, in its order."""
    names = {name: None for run in runs for name in run.curves}
    return [name for pattern in USUAL for name in names if re.fullmatch(pattern, name)]


def draw_curves(runs: Sequence[RunLog], names: Sequence[str], columns: int = 3) -> Figure:
    """A panel for each curve, with all runs in it over the iterations.

    Raises:
        InputError: If there is no curve, as of a run that was shorter than its logging interval.
    """
    if not names:
        raise InputError('no scalar was logged (default_hooks.logger.interval says how often)')
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(
        figsize=(4.6 * columns, 3.1 * rows + 0.3 * (len(runs) > 1)), layout='constrained'
    )
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for name, axis in zip(names, axes, strict=False):
        for i, run in enumerate(runs):
            points = run.curves.get(name, [])
            style = 'o-' if len(points) <= 12 else '-'
            colour = COLOURS[i % len(COLOURS)]
            axis.plot(*_xy(points), style, ms=3, lw=1.3, color=colour, label=_plain(run.name))
        axis.set_title(_plain(name), fontsize=10)
        axis.set_xlabel('iteration', fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in axes:  # those left over
        axis.set_axis_off()
    if len(runs) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc='outside lower center', ncols=min(len(runs), 4))
    return figure


def draw_classes(runs: Sequence[RunLog]) -> Figure:
    """Bars of each class: the first column of the table (IoU, AP), of all runs that have one."""
    tables = {run.name: run.table for run in runs if run.table is not None}
    classes = list({name: None for table in tables.values() for name in table.rows})
    height = 0.8 / len(tables)
    figure = Figure(
        figsize=(6, 1.2 + len(classes) * (0.14 + 0.16 * len(tables))), layout='constrained'
    )
    axis = figure.subplots()
    for i, (run, table) in enumerate(tables.items()):
        values = [table.rows.get(name, [np.nan])[0] for name in classes]
        places = np.arange(len(classes)) + (i - (len(tables) - 1) / 2) * height
        colour = COLOURS[i % len(COLOURS)]
        bars = axis.barh(places, values, height, color=colour, label=_plain(run))
        axis.bar_label(bars, fmt='%.3g', fontsize=7, padding=2)
    axis.set_yticks(range(len(classes)), [_plain(name) for name in classes], fontsize=8)
    axis.set_ylim(len(classes) - 0.5, -0.5)
    axis.margins(x=0.1)
    axis.set_xlabel(', '.join({table.columns[0]: None for table in tables.values()}), fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis='x', alpha=0.3)
    if len(tables) > 1:
        figure.legend(loc='outside lower center', ncols=min(len(tables), 3))
    return figure


def draw_confusion(confusion: NDArray, classes: Sequence[str]) -> Figure:
    """Rows of truth, columns of prediction, in percent of the row."""
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    number = len(classes)
    side = max(4.0, min(0.42 * number, 16) + 1.5)
    figure = Figure(figsize=(side, side), layout='constrained')
    axis = figure.subplots()
    axis.imshow(shares, cmap='Blues', vmin=0, vmax=1)
    size = 8 if number <= 30 else 4
    labels = [_plain(name) for name in classes]
    axis.set_xticks(range(number), labels, rotation=90, fontsize=size)
    axis.set_yticks(range(number), labels, fontsize=size)
    axis.set(xlabel='predicted', ylabel='truth')
    if number <= 30:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                colour = 'white' if share > 0.5 else 'black'
                label = f'{100 * share:.0f}'
                axis.text(column, row, label, ha='center', va='center', fontsize=7, color=colour)
    return figure


def curves_csv(runs: Iterable[RunLog]) -> bytes:
    """``run, curve, iteration, value`` of everything that was logged."""
    return _csv(
        ('run', 'curve', 'iteration', 'value'),
        (
            (run.name, name, point.iteration, point.value)
            for run in runs
            for name, points in run.curves.items()
            for point in points
        ),
    )


def classes_csv(runs: Iterable[RunLog]) -> bytes:
    """``run, class, metric, value`` of each class in the last evaluation."""
    return _csv(
        ('run', 'class', 'metric', 'value'),
        (
            (run.name, name, column, value)
            for run in runs
            if run.table is not None
            for name, values in run.table.rows.items()
            for column, value in zip(run.table.columns, values, strict=True)
        ),
    )


def png(figure: Figure, dpi: int = 130) -> bytes:
    """The picture as a file."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=dpi)
    return buffer.getvalue()


def run_files(runs: Sequence[RunLog], names: Sequence[str]) -> dict[str, bytes]:
    """Pictures and tables of runs by their file names; those of classes only if they are logged."""
    files = {'curves.png': png(draw_curves(runs, names)), 'curves.csv': curves_csv(runs)}
    if any(run.table is not None for run in runs):
        files |= {'per_class.png': png(draw_classes(runs)), 'per_class.csv': classes_csv(runs)}
    return files


def _xy(points: Sequence[Any]) -> tuple[Any, Any]:
    return tuple(zip(*points, strict=True)) if points else ((), ())  # type: ignore[return-value]


def _plain(text: str) -> str:
    """Text that matplotlib takes for no formula and no hidden label."""
    return text.replace('$', r'\$') if not text.startswith('_') else f' {text}'


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue().encode()
