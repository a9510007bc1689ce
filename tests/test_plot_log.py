"""Reading logs, tools/analysis/plot_log.py, PlotLogHook and tools/train.py --tensorboard."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy import run_tool, write_detection_config, write_scenes, write_segmentation_config

from mmnala.engine.errors import InputError
from mmnala.report.drawing import (
    classes_csv,
    curves_csv,
    draw_classes,
    draw_curves,
    png,
    usual_curves,
)
from mmnala.report.log import read_run

TABLE = """2026/01/01 00:00:00 - mmengine - INFO - per class results:
2026/01/01 00:00:00 - mmengine - INFO -
+-----------+-------+-------+
|   Class   |  IoU  |  Acc  |
+-----------+-------+-------+
|    sky    | 90.5  | 95.0  |
| a | $b_1$ |  {}   |  nan  |
+-----------+-------+-------+
"""
DETECTION_TABLE = """2026/01/01 00:00:00 - mmengine - INFO - Evaluating bbox...
2026/01/01 00:00:00 - mmengine - INFO -
+----------+-------+--------+
| category | mAP   | mAP_50 |
+----------+-------+--------+
| RBC      | 0.625 | 0.9    |
| WBC      | nan   | 0.5    |
+----------+-------+--------+
"""


def train(step: int, loss: float, **more: object) -> dict:
    return dict(lr=0.1, loss=loss, time=0.5, iter=step, step=step, **more)


def write_part(
    folder: Path, stamp: str, records: list, log: str = '', config: str = '', tail: str = ''
) -> Path:
    part = folder / stamp
    (part / 'vis_data').mkdir(parents=True)
    lines = ''.join(json.dumps(record) + '\n' for record in records)
    (part / 'vis_data' / f'{stamp}.json').write_text(lines + tail)
    (part / 'vis_data' / 'config.py').write_text(config)
    (part / f'{stamp}.log').write_text(log)
    return part


RESUMED = '2026/01/01 00:00:00 - mmengine - INFO - resumed epoch: 0, iter: 100\n'
NO_CHECKPOINT = (
    '2026/01/01 00:00:00 - mmengine - INFO - Auto resumed from the latest checkpoint None.\n'
)


@pytest.mark.parametrize(
    ('log', 'config'), [(RESUMED, 'resume = False\n'), ('', 'resume = True\n')]
)
def test_a_resumed_training_is_joined(tmp_path, log, config):
    first = [train(50, 3.0), train(100, 2.0), dict(mIoU=10.0, time=0.1, step=100), train(150, 1.9)]
    second = [train(150, 1.5), train(200, float('nan')), dict(mIoU=20.0, time=0.2, step=200)]
    write_part(tmp_path / 'run', '20260101_000000', first, TABLE.format(10), tail='{"lr": 0.')
    write_part(tmp_path / 'run', '20260101_010000', second, log + TABLE.format(20), config)
    # An evaluation alone, and a folder that is no run at all.
    write_part(tmp_path / 'run', '20260101_020000', [dict(mIoU=5.0, step=0)], TABLE.format(5))
    (tmp_path / 'run' / 'predictions').mkdir()

    run = read_run(tmp_path / 'run')
    assert run.name == 'run'
    assert [part.name for part in run.parts] == ['20260101_000000', '20260101_010000']
    assert run.curves['loss'][:3] == [(50, 3.0), (100, 2.0), (150, 1.5)]
    assert np.isnan(run.curves['loss'][3].value)
    assert run.curves['mIoU'] == [(100, 10.0), (200, 20.0)]
    assert run.curves['val/time'] == [(100, 0.1), (200, 0.2)]
    assert run.curves['time'] == [(50, 0.5), (100, 0.5), (150, 0.5), (200, 0.5)]
    assert run.table.columns == ['IoU', 'Acc']
    assert run.table.rows['sky'] == [90.5, 95.0]
    assert run.table.rows['a | $b_1$'][0] == 20 and np.isnan(run.table.rows['a | $b_1$'][1])

    alone = read_run(tmp_path / 'run' / '20260101_000000', 'before')
    assert (alone.name, alone.curves['loss'][-1]) == ('before', (150, 1.9))


@pytest.mark.parametrize(
    ('log', 'config'),
    [
        ('', 'resume = False\n'),
        ('', 'dataset = dict(\n    resume = True)\n'),
        (NO_CHECKPOINT, 'resume = True\n'),
    ],
)
def test_a_training_started_anew_replaces_the_old(tmp_path, log, config):
    old = [train(25, 4.0), train(50, 3.0), dict(mIoU=10.0, step=50), train(100, 2.0)]
    write_part(tmp_path, '20260101_000000', old, TABLE.format(10))
    write_part(tmp_path, '20260101_003000', [train(40, 9.0)], RESUMED)
    write_part(tmp_path, '20260101_010000', [train(50, 2.5)], log, config)
    write_part(tmp_path, '20260101_020000', [train(75, 2.0)], RESUMED)
    run = read_run(tmp_path)
    assert [part.name for part in run.parts] == ['20260101_010000', '20260101_020000']
    assert run.curves['loss'] == [(50, 2.5), (75, 2.0)]
    assert 'mIoU' not in run.curves
    assert run.table is None


def test_metrics_by_epoch_stand_at_its_end(tmp_path):
    log = '2026/01/01 00:00:00 - mmengine - INFO - Epoch(train)  [1][ 50/157]  lr: 1.0\n'
    records = [
        *(train(50, 2.0, epoch=1), train(150, 1.5, epoch=1)),
        {'coco/bbox_mAP': 0.25, 'time': 0.3, 'step': 1},
        *(train(207, 1.25, epoch=2), {'coco/bbox_mAP': 0.5, 'time': 0.3, 'step': 2}),
    ]
    write_part(tmp_path, '20260101_000000', records, log + DETECTION_TABLE)
    run = read_run(tmp_path)
    assert run.curves['coco/bbox_mAP'] == [(157, 0.25), (314, 0.5)]
    assert 'epoch' not in run.curves and 'step' not in run.curves
    assert run.table.columns == ['bbox_mAP', 'bbox_mAP_50']
    assert run.table.rows['RBC'] == [0.625, 0.9]


def test_logs_with_hierarchy_have_the_same_names(tmp_path):
    records = [
        {'train/loss': 2.0, 'train/time': 0.5, 'iter': 10, 'step': 10},
        {'val/mIoU': 30.0, 'val/time': 0.1, 'step': 10},
    ]
    write_part(tmp_path, '20260101_000000', records)
    curves = read_run(tmp_path).curves
    assert curves == {
        'loss': [(10, 2.0)],
        'time': [(10, 0.5)],
        'mIoU': [(10, 30.0)],
        'val/time': [(10, 0.1)],
    }


def test_damage_and_absence_are_named(tmp_path):
    with pytest.raises(InputError, match='run .*nowhere: there is no such folder'):
        read_run(tmp_path / 'nowhere')
    with pytest.raises(InputError, match='no scalars of a training in .*LocalVisBackend'):
        read_run(tmp_path)
    part = write_part(tmp_path, '20260101_000000', [train(1, 1.0)], tail='[]\n{"step": 2}\n')
    file = part / 'vis_data' / '20260101_000000.json'
    with pytest.raises(InputError, match=f'{file}, line 2: not a record'):
        read_run(tmp_path)


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    one = [train(50, 3.0), train(100, 0.1 + 0.2), dict(mIoU=10.0, aAcc=40.0, step=100)]
    two = [train(50, 2.0), dict(mIoU=12.5, step=50)]
    write_part(tmp_path / 'one', '20260101_000000', one, TABLE.format(12))
    write_part(tmp_path / 'two', '20260101_000000', two, DETECTION_TABLE)
    return [tmp_path / 'one', tmp_path / 'two']


def test_pictures_show_the_log(runs):
    logs = [read_run(folder) for folder in runs]
    assert usual_curves(logs) == ['loss', 'lr', 'mIoU']
    figure = draw_curves(logs, ['loss', 'mIoU', 'aAcc', 'lr'])
    # Four panels; the empty places of the second row are hidden.
    assert [axis.axison for axis in figure.axes] == [True] * 4 + [False] * 2
    shown = [[line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes[:3]]
    assert shown == [
        [[[50, 3.0], [100, 0.1 + 0.2]], [[50, 2.0]]],
        [[[100, 10.0]], [[50, 12.5]]],
        [[[100, 40.0]], []],
    ]
    assert [text.get_text() for text in figure.legends[0].texts] == ['one', 'two']

    axis = draw_classes(logs).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ['sky', r'a | \$b_1\$', 'RBC', 'WBC']
    widths = [[bar.get_width() for bar in bars] for bars in axis.containers]
    np.testing.assert_equal(widths, [[90.5, 12, np.nan, np.nan], [np.nan, np.nan, 0.625, np.nan]])
    assert axis.get_xlabel() == 'IoU, bbox_mAP'
    assert png(draw_classes(logs))[:8] == b'\x89PNG\r\n\x1a\n'


def test_a_run_that_logged_nothing_is_named(runs):
    with pytest.raises(InputError, match='no scalar was logged'):
        draw_curves([read_run(run) for run in runs], [])


def test_tables_have_every_value(runs):
    logs = [read_run(folder) for folder in runs]
    rows = list(csv.DictReader(curves_csv(logs).decode().splitlines()))
    expected = [
        dict(run=log.name, curve=name, iteration=str(i), value=repr(value))
        for log in logs
        for name, points in log.curves.items()
        for i, value in points
    ]
    assert rows == expected
    assert dict(run='one', curve='loss', iteration='100', value='0.30000000000000004') in rows
    classes = list(csv.reader(classes_csv(logs).decode().splitlines()))
    assert classes[0] == ['run', 'class', 'metric', 'value']
    assert ['one', 'a | $b_1$', 'IoU', '12.0'] in classes
    assert ['two', 'RBC', 'bbox_mAP', '0.625'] in classes
    assert len(classes) == 9


def test_tool_draws_several_runs(runs, tmp_path):
    arguments = [*runs, '--names', 'A', '_B$', '--curves', 'lr', 'aAcc', '--out', 'new/folder']
    finished = run_tool('analysis/plot_log.py', *arguments, cwd=tmp_path)
    assert finished.code == 0, finished.output
    folder = tmp_path / 'new' / 'folder'
    names = ['curves.csv', 'curves.png', 'per_class.csv', 'per_class.png']
    assert sorted(file.name for file in folder.iterdir()) == names
    rows = list(csv.reader((folder / 'curves.csv').read_text().splitlines()))
    assert {row[0] for row in rows[1:]} == {'A', '_B$'}
    with Image.open(folder / 'curves.png') as picture:
        assert picture.width > picture.height  # two panels beside each other

    again = run_tool('analysis/plot_log.py', *arguments, cwd=tmp_path)
    assert again.code == 1
    assert 'curves.png exists already' in again.output


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['nowhere', '--out', 'new'], 'run nowhere: there is no such folder'),
        (['one', 'two', '--names', 'a', '--out', 'new'], '--names: expected 2, .* got 1'),
        (['one', 'one', '--out', 'new'], '--names: the runs need different names, got one, one'),
        (['one', '--curves', 'IoU', '--out', 'new'], '--curves IoU: not in the logs.* aAcc, loss,'),
        (['bare', '--out', 'new'], '--curves: none of the usual ones is in the logs.* other'),
    ],
)
def test_tool_names_bad_input(runs, tmp_path, arguments, message):
    write_part(tmp_path / 'bare', '20260101_000000', [dict(other=1.0, iter=1, step=1)])
    finished = run_tool('analysis/plot_log.py', *arguments, cwd=tmp_path)
    assert finished.code == 1
    assert re.search(f'^error: {message}', finished.output, re.M), finished.output
    assert not (tmp_path / 'new').exists()


PLOT = 'custom_hooks.append(dict(type="PlotLogHook"))\n'


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = csv.DictReader((folder / 'curves.csv').read_text().splitlines())
    return [(int(r['iteration']), float(r['value'])) for r in rows if r['curve'] == name]


def test_a_training_is_drawn_when_it_ends(tmp_path):
    write_scenes(tmp_path / 'data')
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', PLOT)
    finished = run_tool('train.py', config, cwd=tmp_path)
    assert finished.code == 0, finished.output
    (log,) = (tmp_path / 'work_dirs' / 'seg').glob('*/*.log')
    text = log.read_text()
    scores = re.findall(r'mIoU: ([\d.]+)', text)
    assert [value for _, value in curve(log.parent, 'mIoU')] == pytest.approx(
        [float(score) for score in scores], abs=1e-4
    )
    assert [i for i, _ in curve(log.parent, 'mIoU')] == [5, 10]
    losses = [float(loss) for loss in re.findall(r'Iter\(train\).* loss: ([\d.]+)', text)]
    assert [i for i, _ in curve(log.parent, 'loss')] == list(range(1, 11))
    assert [v for _, v in curve(log.parent, 'loss')] == pytest.approx(losses, abs=1e-4)
    classes = list(csv.DictReader((log.parent / 'per_class.csv').read_text().splitlines()))
    ious = [float(row['value']) for row in classes if row['metric'] == 'IoU']
    assert np.mean(ious) == pytest.approx(float(scores[-1]), abs=0.01)
    assert 'PlotLogHook: curves are in' in text


def test_a_detection_is_drawn_when_it_ends(tmp_path):
    write_scenes(tmp_path / 'data')
    lines = PLOT + 'val_evaluator["classwise"] = True\n'
    config = write_detection_config(tmp_path / 'det.py', tmp_path / 'data', lines)
    finished = run_tool('train.py', config, cwd=tmp_path)
    assert finished.code == 0, finished.output
    (log,) = (tmp_path / 'work_dirs' / 'det').glob('*/*.log')
    scores = curve(log.parent, 'coco/bbox_mAP')
    assert [i for i, _ in scores] == [5, 10, 15]  # epochs of 5 iterations
    classes = list(csv.DictReader((log.parent / 'per_class.csv').read_text().splitlines()))
    assert [(row['class'], row['metric']) for row in classes[:2]] == [
        ('box', 'bbox_mAP'),
        ('box', 'bbox_mAP_50'),
    ]
    assert float(classes[0]['value']) == pytest.approx(scores[-1][1], abs=1e-3)


def test_a_training_without_local_files_ends_well(tmp_path):
    write_scenes(tmp_path / 'data')
    lines = PLOT + 'train_cfg["max_iters"] = 1\nvisualizer["vis_backends"] = []\n'
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', lines)
    finished = run_tool('train.py', config, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert 'WARNING - PlotLogHook: nothing drawn: run ' in finished.output
    assert not list(tmp_path.rglob('curves.png'))


# Stands in for the package, of which only the writer is used.
STUB = """
import json, sys, types

class SummaryWriter:
    def __init__(self, folder):
        self.file = open(f'{folder}/events', 'a')
    def add_scalar(self, name, value, step):
        print(json.dumps([name, float(value), step]), file=self.file)
    def add_text(self, name, text):
        pass
    def close(self):
        self.file.close()

import torch.utils
torch.utils.tensorboard = types.ModuleType('torch.utils.tensorboard')
torch.utils.tensorboard.SummaryWriter = SummaryWriter
sys.modules['torch.utils.tensorboard'] = torch.utils.tensorboard
"""


def with_module(folder: Path, code: str) -> str:
    """Lines of a config that runs the code when it is loaded."""
    (folder / 'imported_by_config.py').write_text(code)
    path = f'__import__("sys").path.append({str(folder)!r})\n'
    return path + 'custom_imports["imports"].append("imported_by_config")\n'


@pytest.mark.parametrize(
    'visualizer',
    [
        '',
        'del visualizer\n',
        'visualizer["vis_backends"].append(dict(type="TensorboardVisBackend"))\n',
    ],
)
def test_tensorboard_gets_what_the_local_files_get(tmp_path, visualizer):
    write_scenes(tmp_path / 'data')
    lines = f'{visualizer}train_cfg["max_iters"] = train_cfg["val_interval"] = 2\n'
    lines += with_module(tmp_path, STUB)
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', lines)
    finished = run_tool('train.py', config, '--tensorboard', cwd=tmp_path)
    assert finished.code == 0, finished.output
    (events,) = tmp_path.rglob('events')
    (local,) = tmp_path.rglob('scalars.json')
    expected = [
        [name, value, record['step']]
        for record in map(json.loads, local.read_text().splitlines())
        for name, value in record.items()
        if name != 'step'
    ]
    assert [json.loads(line) for line in events.read_text().splitlines()] == expected
    assert {'loss', 'mIoU', 'lr'} <= {name for name, _, _ in expected}


def test_tensorboard_must_be_installed(tmp_path):
    write_scenes(tmp_path / 'data')
    lines = with_module(tmp_path, 'import sys\nsys.modules["torch.utils.tensorboard"] = None\n')
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', lines)
    finished = run_tool('train.py', config, '--tensorboard', cwd=tmp_path)
    assert finished.code == 1
    assert re.search(
        '^error: --tensorboard: .*; it needs: pip install tensorboard$', finished.output, re.M
    )
    assert 'Traceback' not in finished.output
    assert not (tmp_path / 'work_dirs').exists()
