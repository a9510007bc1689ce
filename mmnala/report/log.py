"""Reading what mmengine's runs leave in their work folder."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.errors import InputError


class Point(NamedTuple):
    iteration: int
    value: float


@dataclass
class ClassTable:
    """The figures of each class from one evaluation: mmseg's in percent, mmdet's AP as a share."""

    columns: list[str]
    rows: dict[str, list[float]]  # by class


@dataclass
class RunLog:
    """A training, whichever number of times it was resumed.

    Attributes:
        name: The run's name in pictures.
        parts: Its folders ``work_dir/TIMESTAMP``, oldest first.
        curves: The logged scalars by name. One that both training and validation log is the
            training's; the validation's is ``val/NAME``.
        table: Each class in the last evaluation; None if it logged no table.
        metrics: What the last evaluation measured.
    """

    name: str
    parts: list[Path]
    curves: dict[str, list[Point]] = field(default_factory=dict)
    table: ClassTable | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """The config of the latest part, as it ran."""
        return self.parts[-1] / 'vis_data' / 'config.py'

    @property
    def environment(self) -> str:
        """What the latest part's log says about the machine; empty if nothing."""
        match = re.search(
            r'^System environment:\n(.*?)\n-{20,}\n', _log_text(self.parts[-1]), re.M | re.S
        )
        return match[1] if match else ''


def read_run(folder: str | Path, name: str | None = None) -> RunLog:
    """Read the logs of a training.

    A resumed training has several folders ``TIMESTAMP``. They are joined: a later one replaces what
    earlier ones logged from its first iteration on. A training that was not resumed, by its log and
    config, leaves out all before it.
    Evaluations alone, such as those of ``tools/test.py``, do not count. Metrics that are logged by
    epoch get the iteration at its end.

    Args:
        folder: A work folder, or one ``TIMESTAMP`` folder of it.
        name: The run's name in pictures. Defaults to the folder's.

    Raises:
        InputError: If there is no log of a training, or a line of it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f'run {folder}: there is no such folder')
    parts = [folder] if (folder / 'vis_data').is_dir() else sorted(folder.glob('*/'))
    logged = [(part, records) for part in parts if (records := list(_read_records(part)))]
    if not logged:
        raise InputError(
            f'run {folder}: no scalars of a training in TIMESTAMP/vis_data/*.json, which '
            "visualizer.vis_backends=[dict(type='LocalVisBackend')] writes"
        )
    anew = [i for i, (part, _) in enumerate(logged) if not _is_resumed(part)]
    logged = logged[max(anew, default=0) :]
    run = RunLog(name or folder.resolve().name, [part for part, _ in logged])
    for i, (part, records) in enumerate(logged):
        end = min((later[0].iteration for _, later in logged[i + 1 :]), default=None)
        for record in records:
            if end is None or record.iteration < end:
                _add(run, record)
        evaluated = max((r.iteration for r in records if not r.training), default=None)
        if evaluated is not None and (end is None or evaluated < end):
            run.table = last_table(part) or run.table
    return run


class _Record(NamedTuple):
    iteration: int
    training: bool
    scalars: dict[str, float]


def _read_records(part: Path) -> Iterator[_Record]:
    names = (f'{part.name}.json', 'scalars.json')
    file = next((p for name in names if (p := part / 'vis_data' / name).is_file()), None)
    if file is None:
        return
    lines = file.read_text(encoding='utf-8').splitlines()
    length, last = _epoch_length(part), 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = int(record['step'])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return  # a killed run may leave half a line
            raise InputError(f'{file}, line {number}: not a record of mmengine') from error
        if training := ('iter' in record):
            last = step
        elif step == 0:
            continue  # an evaluation without training
        elif length and step < last:
            step *= length  # mmengine counts metrics by epochs
        yield _Record(step, training, {k: v for k, v in record.items() if _is_scalar(k, v)})


def _is_scalar(name: str, value: Any) -> bool:
    return name not in ('step', 'iter', 'epoch') and type(value) in (int, float)


def _add(run: RunLog, record: _Record) -> None:
    for name, value in record.scalars.items():
        # LogProcessor(log_with_hierarchy=True) writes train/loss and val/mIoU.
        name = name.removeprefix('train/' if record.training else 'val/')
        if not record.training and name in ('time', 'data_time', 'loss', 'memory'):
            name = f'val/{name}'
        elif not record.training:
            run.metrics[name] = value
        run.curves.setdefault(name, []).append(Point(record.iteration, value))


def _log_text(part: Path) -> str:
    file = part / f'{part.name}.log'
    return file.read_text(encoding='utf-8', errors='replace') if file.is_file() else ''


def _is_resumed(part: Path) -> bool:
    """Whether the training of a part went on from a checkpoint, as mmengine logs it."""
    log = _log_text(part)
    if re.search(r' - resumed epoch: \d+, iter: \d+$', log, re.M):
        return True
    # The config's word, for logs without such lines; it also says so where there was no checkpoint.
    config = part / 'vis_data' / 'config.py'
    text = config.read_text(encoding='utf-8') if config.is_file() else ''
    asked = re.search(r'^resume = True$', text, re.M) is not None
    return asked and ' Auto resumed from the latest checkpoint None.' not in log


def _epoch_length(part: Path) -> int | None:
    match = re.search(r' Epoch\(train\)\s*\[\s*\d+\]\[\s*\d+/(\d+)\]', _log_text(part))
    return int(match[1]) if match else None


def last_table(part: Path) -> ClassTable | None:
    """The last table whose first column is the class: mmseg's, and mmdet's with ``classwise``.

    mmdet's columns get the name of what was matched, as in the metrics: ``bbox_mAP``, ``segm_mAP``.
    """
    log = _log_text(part)
    tables = re.finditer(r'^\+[-+]+\+\n\|.*\|\n\+[-+]+\+\n(?:\|.*\|\n)+\+[-+]+\+$', log, re.M)
    for table in reversed(list(tables)):
        header, *rows = [line for line in table[0].splitlines() if line.startswith('|')]
        first, *columns = [cell.strip() for cell in header.strip('|').split('|')]
        if first.lower() == 'category':
            matched = re.findall(r' Evaluating (\w+)\.\.\.$', log[: table.start()], re.M)
            columns = ['_'.join([*matched[-1:], column]) for column in columns]
        if first.lower() in ('class', 'category'):
            # From the right: a name may have a bar in it.
            cells = (row.strip()[1:-1].rsplit('|', len(columns)) for row in rows)
            return ClassTable(columns, {n.strip(): [float(v) for v in vs] for n, *vs in cells})
    return None
