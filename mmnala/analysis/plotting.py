"""One look for the pictures of the analyses, and writing them with their tables."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ..checkpoint.files import write_new
from ..engine.errors import InputError

# The report's colours are the qualitative ones; these are of quantities with and without a sign.
DIVERGING, SEQUENTIAL = 'RdBu_r', 'viridis'


def panels(
    rows: int, columns: int, width: float = 3.2, height: float = 2.8
) -> tuple[Figure, NDArray[Any]]:
    """A figure and its axes ``(rows, columns)``, each of ``width`` x ``height`` inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
    return figure, axes


def label(axis: Axes, title: str = '', x: str = '', y: str = '') -> None:
    """Title and names of the axes; names of files and heads are no formulas."""
    axis.set_title(title.replace('$', r'\$'), fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)


def show_image(axis: Axes, image: NDArray[Any], **options: Any) -> Any:
    """An image without ticks, in its own pixels."""
    shown = axis.imshow(image, **options)
    axis.set(xticks=[], yticks=[])
    return shown


def overlay_weights(
    axis: Axes, image: NDArray[Any], weights: NDArray[Any], size: Sequence[int]
) -> None:
    """Weights over a faint grey image: red where positive, blue where negative, clear at 0.

    Args:
        axis: Where to draw.
        image: ``(h, w, 3)``, uint8.
        weights: ``(rows, columns)`` of cells. The scale ends at the 99.5th percentile of their
            sizes.
        size: Height and width that the cells cover, with the padding of the image.
    """
    height, width = image.shape[:2]
    grey = np.repeat(image.mean(-1, keepdims=True), 3, axis=-1) / 255
    limit = float(np.percentile(np.abs(weights), 99.5)) or 1.0
    show_image(axis, 0.35 + 0.65 * grey)
    axis.imshow(
        weights,
        cmap=DIVERGING,
        vmin=-limit,
        vmax=limit,
        alpha=np.minimum(np.abs(weights) / limit, 1) * 0.85,
        extent=(-0.5, size[1] - 0.5, size[0] - 0.5, -0.5),
        interpolation='nearest',
    )
    axis.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A CSV file of the named columns; a missing value is an empty field."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


def as_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The same as aligned text, with four digits of a number."""

    def text(value: Any) -> str:
        return f'{value:.4g}' if isinstance(value, float) else str('' if value is None else value)

    cells = [list(columns), *([text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return '\n'.join(
        '  '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def save(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write new files, each whole or not at all, and print their names.

    Raises:
        InputError: If one cannot be written.
    """
    for name, data in files.items():
        try:
            write_new(folder / name, data)
        except OSError as error:
            raise InputError(f'--out {folder}: {error}') from error
        print(folder / name)
