"""What the commands of ``tools/dataset`` share: reading untrusted files, listing problems.

Images are decoded only if their header tells a size that fits into memory, JSON files are read up
to a limit, and nothing is unpickled.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

# Far above any image of these data sets, and 100 MB as RGB for each worker.
MAX_PIXELS = 2**25
LARGEST_LIMIT = 2**30  # OpenCV's own
MAX_LISTED = 10

Item = TypeVar('Item')
Result = TypeVar('Result')


class Problem(NamedTuple):
    """One thing that is wrong; problems of a kind are listed together."""

    kind: str
    message: str


class Report:
    """The problems found so far, of which the first :data:`MAX_LISTED` of every kind are kept.

    Args:
        root: The data set's folder.
        allow_links: Whether files may be links that lead out of it.
    """

    def __init__(self, root: Path, allow_links: bool = False) -> None:
        self.root = root
        self.allow_links = allow_links
        self.counts: Counter[str] = Counter()
        self.messages: dict[str, list[str]] = {}
        self.hints: list[str] = []

    def note(self, message: str) -> None:
        """Print what is no problem."""
        print(message, flush=True)

    def hint(self, message: str) -> None:
        """Say once, after the problems, what may be behind them."""
        if (message := printable(message)) not in self.hints:
            self.hints.append(message)

    def add(self, kind: str, message: str) -> None:
        self.counts[kind] += 1
        messages = self.messages.setdefault(kind, [])
        if len(messages) < MAX_LISTED:
            messages.append(printable(message))

    def extend(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.add(*problem)

    def list_names(self, folder: Path) -> list[str]:
        """The sorted names in a folder, without the hidden ones, which the toolboxes pass over too.

        Left out and reported are files that are links to somewhere outside of the data set, unless
        they are allowed. The folders themselves may lie anywhere.
        """
        names = sorted(name for name in os.listdir(folder) if not name.startswith('.'))
        if self.allow_links:
            return names
        homes = self.root.resolve(), folder.resolve()
        inside = []
        for name in names:
            path = folder / name
            if path.is_symlink() and not path.is_dir():
                target = path.resolve()
                if not any(target.is_relative_to(home) for home in homes):
                    self.add('link out of the data set', f'{path} leads to {target}')
                    continue
            inside.append(name)
        return inside

    def check_count(
        self, what: str, found: int, official: int, partial: bool, hint: str = ''
    ) -> None:
        """Note how many of the ``official`` number were found; fewer are right if ``partial``."""
        self.note(f'{what}: {found} of {official}')
        if found > official or not found or (found < official and not partial):
            self.add('wrong number', f'{what}: {found} of {official}{hint}')

    def finish(self) -> int:
        """Print the problems and, as the last line, the summary; returns the exit code."""
        for kind, messages in self.messages.items():
            print(f'{kind} ({self.counts[kind]}):')
            for message in messages:
                print(f'  {message}')
            if self.counts[kind] > len(messages):
                print(f'  ... and {self.counts[kind] - len(messages)} more')
        for hint in self.hints:
            print(f'hint: {hint}')
        if not self.counts:
            print('OK: no problem found')
            return 0
        print(f'FAILED: {plural(self.counts.total(), "problem")} found')
        return 1


def printable(message: str, limit: int = 400) -> str:
    """One line of text, also of file names with line breaks or bytes that are no text in them."""
    text = message if len(message) <= limit else f'{message[:limit]}...'
    return ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plural(number: int, noun: str) -> str:
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def some(values: Collection, limit: int = 5) -> str:
    """The first values, and how many follow."""
    listed = ', '.join(map(str, islice(values, limit)))
    return f'{listed} and {len(values) - limit} more' if len(values) > limit else listed


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_positive.__name__ = 'positive integer'


def command_line(
    description: str | None, root: str, official: dict[str, int]
) -> argparse.ArgumentParser:
    """The options of every checking command; ``official`` is the number of images by split."""
    whole = ', '.join(f'{number} {split}' for split, number in official.items())
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        'root', nargs='?', type=Path, default=Path(root), metavar='ROOT', help=f'default: {root}'
    )
    parser.add_argument('--partial', action='store_true', help=f'accept fewer images than {whole}')
    parser.add_argument(
        '--workers',
        type=_positive,
        default=os.cpu_count() or 1,
        help='threads that decode the images (default: one for every CPU)',
    )
    parser.add_argument(
        '--max-pixels',
        type=_positive,
        default=MAX_PIXELS,
        help='do not decode images whose headers claim more (default: %(default)s)',
    )
    parser.add_argument(
        '--allow-links',
        action='store_true',
        help='accept files that are symbolic links to somewhere outside of ROOT',
    )
    return parser


def run(
    parser: argparse.ArgumentParser, check: Callable[[argparse.Namespace, Report], None]
) -> int:
    """Parse the command line, check and print the report; returns the exit code."""
    args = parser.parse_args()
    if args.max_pixels > LARGEST_LIMIT:
        parser.error(f'--max-pixels {args.max_pixels}: expected at most {LARGEST_LIMIT}')
    report = Report(args.root, args.allow_links)
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, args.max_pixels
    try:
        check(args, report)
    except OSError as error:
        parser.exit(1, f'{parser.prog}: error: {error}\n')
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    return report.finish()


def in_parallel(
    description: str, function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[Result]:
    """``map`` in threads (Pillow decodes without Python's lock), with a bar of progress."""
    from rich.console import Console
    from rich.progress import Progress

    todo = iter(items)
    with (
        warnings.catch_warnings(),
        Progress(console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        # Pillow warns of headers that read_image refuses, and of damaged EXIF data, which are
        # harmless.
        warnings.simplefilter('ignore')
        task = progress.add_task(description, total=len(items))
        # In batches: a future for each of a hundred thousand files would take up the memory.
        while batch := list(islice(todo, 64 * workers)):
            for result in pool.map(function, batch):
                yield result
                progress.advance(task)


def _require_file(path: Path) -> None:
    if not path.is_file():  # but a folder, a pipe or a broken link
        raise ValueError('is no file')


def read_image(path: Path) -> Image.Image:
    """Read and decode a JPEG or PNG file.

    Raises:
        ValueError: it is no such file, its header tells a size beyond Pillow's own limit, which
            :func:`run` sets, or its data are damaged.
    """
    try:
        _require_file(path)
        with Image.open(path, formats=('JPEG', 'PNG')) as image:
            width, height = image.size
            limit = Image.MAX_IMAGE_PIXELS or LARGEST_LIMIT
            if width * height > limit:  # of which Pillow only warns
                raise ValueError(f'claims {width}x{height} pixels, more than {limit}')
            image.load()
    except Exception as error:  # Pillow's readers raise errors of any kind at damaged data.
        raise ValueError(str(error) or repr(error)) from None
    return image


def read_labels(path: Path) -> Image.Image:
    """Read a label map, stored as grey values or as indices into a palette, in mode L.

    Raises:
        ValueError: as in :func:`read_image`, or it has no 8-bit labels.
    """
    image = read_image(path)
    if image.mode == 'P':
        return Image.frombytes('L', image.size, image.tobytes())
    if image.mode != 'L':
        raise ValueError(f'has mode {image.mode}, and no 8-bit labels')
    return image


def label_problems(name: str, labels: Image.Image, allowed: Collection[int]) -> Iterator[Problem]:
    """Name the values of a label map in mode L that are not ``allowed``."""
    found = [value for value, pixels in enumerate(labels.histogram()) if pixels]
    if strange := [value for value in found if value not in allowed]:
        yield Problem('labels outside the classes', f'{name}: {some(strange)}')


def size_problems(name: str, image: Image.Image, other: str, size: tuple) -> Iterator[Problem]:
    """Say if the image is not as large as the other, whose size is given."""
    if image.size != size:
        sizes = 'x'.join(map(str, image.size)), 'x'.join(map(str, size))
        yield Problem('sizes differ', f'{name} has {sizes[0]}, {other} {sizes[1]}')


def _refuse_constant(constant: str) -> None:
    raise ValueError(f'{constant} is not JSON')


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it has more than ``max_bytes``, is nested too deeply or no JSON.
    """
    _require_file(path)
    if path.stat().st_size > max_bytes:
        raise ValueError(f'has more than {max_bytes} bytes')
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError('is nested too deeply') from None


def find_parts(
    root: Path,
    parts: Sequence[str],
    archives: Sequence[str],
    mistakes: Mapping[str, Sequence[str]],
    report: Report,
) -> bool:
    """Whether the ``parts`` (paths) are under ``root``; if not, report that and what may be behind.

    ``archives`` are the names of the downloads, ``mistakes`` maps hints to what else may lie under
    ``root`` (patterns) when they apply.
    """
    missing = [root / part for part in parts if not (root / part).exists()]
    if not missing:
        return True
    for path in missing if root.exists() else [root]:
        report.add('missing', str(path))

    def complete(candidate: Path) -> bool:
        return all((candidate / part).exists() for part in parts)

    above = [root.resolve().parent, root.resolve().parent.parent]
    below = sorted(found for pattern in ('*/', '*/*/') for found in root.glob(pattern))
    if found := next(filter(complete, (*above, *below)), None):
        report.hint(f'the data set is in {found}')
    for archive in archives:
        if found := next((f for f in (root, *above) if (f / archive).is_file()), None):
            report.hint(f'{found / archive} has to be unpacked')
    for hint, patterns in mistakes.items():
        if any(next(root.glob(pattern), None) for pattern in patterns):
            report.hint(hint)
    return False
