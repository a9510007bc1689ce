"""Pictures of predictions: coloured label maps, and panels over a legend of classes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from matplotlib.font_manager import findfont
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MAX_VIDEO_ROWS = 3


class Entry(NamedTuple):
    """One line of a legend; without a colour, it is text alone."""

    colour: tuple[int, int, int] | None
    text: str


class Panel(NamedTuple):
    """One of the pictures side by side, RGB, with what stands above it."""

    caption: str
    picture: NDArray[np.uint8]


def blend(
    image: NDArray, label_map: NDArray, palette: Sequence[Sequence[int]], opacity: float
) -> NDArray[np.uint8]:
    """Lay the colours of a label map over an image.

    Args:
        image: (H, W, 3), RGB, 0 to 255.
        label_map: (H, W), indices of the palette; where it is none (255: not labelled), the image
            stays as it is.
        palette: A colour (RGB) for each class.
        opacity: From 0, the image alone, to 1, the colours alone.
    """
    known = label_map < len(palette)
    colours = np.array(palette, np.float32)[np.where(known, label_map, 0)]
    mixed = np.rint((1 - opacity) * image + opacity * colours)
    return np.where(known[..., None], mixed, image).astype(np.uint8)


def compose(
    panels: Sequence[Panel],
    legend: Sequence[Entry],
    widest: Sequence[str],
    fixed: bool = False,
) -> NDArray[np.uint8]:
    """Set panels side by side, with captions if there are several, and the legend below.

    Args:
        panels: Of equal sizes.
        legend: Its entries, in order.
        widest: All texts that a legend of this run may have: the picture is at least as wide as
            each, whatever the image.
        fixed: Whether all pictures of a run must have one size, with sides that divide by 2, as
            the frames of a video do. The legend then has the same few rows everywhere, and ends in
            an ellipsis where they do not suffice.

    Returns:
        (H, W, 3), RGB, with the panels' pixels as they were.
    """
    height, width = panels[0].picture.shape[:2]
    font = _font(int(np.clip(height / 28, 12, 36)))
    line = _line_height(font)
    widths = {text: line + _text_width(font, text) for text in {*widest, *(e.text for e in legend)}}
    total = max([width * len(panels), *widths.values()])
    rows = _wrap(legend, widths, total)
    shown = len(rows)
    if fixed:
        everything = [Entry(None, text) for text in widest]
        shown = min(len(_wrap(everything, widths, total)), MAX_VIDEO_ROWS)
        total += total % 2
    top = line if len(panels) > 1 else 0
    bottom = top + height + shown * line
    canvas = Image.new('RGB', (total, bottom + (bottom % 2 if fixed else 0)), 'white')
    draw = ImageDraw.Draw(canvas)
    for i, panel in enumerate(panels):
        canvas.paste(Image.fromarray(panel.picture), (i * width, top))
        if top:
            draw.text((i * width + 2, line / 2), panel.caption, 'black', font, anchor='lm')
    for i, row in enumerate(rows[:shown]):
        y = top + height + i * line
        x = 0
        for entry in row:
            if entry.colour is not None:
                margin = line // 5
                box = (x + margin, y + margin, x + line - margin, y + line - margin)
                draw.rectangle(box, entry.colour)
            draw.text((x + line, y + line / 2), entry.text, 'black', font, anchor='lm')
            x += widths[entry.text]
        if i == shown - 1 < len(rows) - 1:
            ellipsis = (total - _text_width(font, '…'), y + line / 2)
            draw.rectangle((ellipsis[0], y, total, y + line), 'white')
            draw.text(ellipsis, '…', 'black', font, anchor='lm')
    return np.asarray(canvas)


def _wrap(legend: Sequence[Entry], widths: dict[str, int], total: int) -> list[list[Entry]]:
    rows: list[list[Entry]] = []
    x = 0
    for entry in legend:
        if not rows or x + widths[entry.text] > total:
            rows.append([])
            x = 0
        rows[-1].append(entry)
        x += widths[entry.text]
    return rows


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # Matplotlib brings it; Pillow's own has Latin letters only.
    return ImageFont.truetype(findfont('DejaVu Sans'), size)


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    return round(1.5 * font.size)


@lru_cache
def _text_width(font: ImageFont.FreeTypeFont, text: str) -> int:
    return int(font.getlength(text)) + round(font.size / 2)
