"""Pictures of predictions: label maps and objects in their classes' colours, over a legend.

mmdet's own visualizer resamples the image and shifts the colours of masks at random, so that they
are none of a legend's.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np
from matplotlib.font_manager import findfont
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MAX_VIDEO_ROWS = 3


class Entry(NamedTuple):
    """One line of a legend; without a colour, it is text alone."""

    colour: tuple[int, int, int] | None
    text: str


class Object(NamedTuple):
    """What a detector found, or should have.

    Attributes:
        label: Index of its class.
        text: What its tag says.
        box: Left, top, right, bottom.
        mask: (H, W), bool; None if there are boxes only.
    """

    label: int
    text: str
    box: tuple[float, float, float, float]
    mask: NDArray[np.bool_] | None = None


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


def draw_objects(
    image: NDArray,
    objects: Sequence[Object],
    palette: Sequence[Sequence[int]],
    opacity: float | None = None,
) -> NDArray[np.uint8]:
    """Draw masks with their outlines, boxes and tags.

    Args:
        image: (H, W, 3), RGB, 0 to 255.
        objects: The last of them covers the others.
        palette: A colour (RGB) for each class.
        opacity: Of masks and lines; None is 0.5 for masks and 1 for lines. Tags are opaque.
    """
    height, width = image.shape[:2]
    areas = np.full((height, width), len(palette), np.int32)
    lines = areas.copy()
    thickness = max(1, round(min(height, width) / 250))
    for found in objects:
        if found.mask is not None:
            mask = found.mask.astype(np.uint8)
            areas[mask > 0] = found.label
            inside = cv2.erode(mask, np.ones((3, 3), np.uint8))
            lines[mask > inside] = found.label
        left, top, right, bottom = map(round, found.box)
        cv2.rectangle(lines, (left, top), (right - 1, bottom - 1), found.label, thickness)
    picture = blend(image, areas, palette, 0.5 if opacity is None else opacity)
    picture = blend(picture, lines, palette, 1 if opacity is None else opacity)

    font = _font(int(np.clip(height / 40, 9, 24)))
    line = _line_height(font)
    canvas = Image.fromarray(picture)
    draw = ImageDraw.Draw(canvas)
    for found in objects:
        tag = _text_width(font, found.text)
        x = np.clip(found.box[0], 0, max(width - tag, 0))
        y = found.box[1] - line if found.box[1] >= line else found.box[1]
        colour = tuple(palette[found.label])
        luminance = np.dot(colour, (0.299, 0.587, 0.114))
        draw.rectangle((x, y, x + tag, y + line), colour)
        ink = 'black' if luminance > 128 else 'white'
        draw.text((x + font.size / 4, y + line / 2), found.text, ink, font, anchor='lm')
    return np.asarray(canvas)


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
