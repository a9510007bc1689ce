"""tools/report.py: the numbers on the page, the images it chooses, and that it stands alone."""

import base64
import io
import re
import runpy
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.structures import InstanceData
from PIL import Image
from torch import nn
from toy import run_tool, write_detection_config, write_scenes, write_segmentation_config

from mmnala.engine.errors import InputError
from mmnala.report.evaluation import (
    CollectHook,
    class_ious,
    count_box_confusion,
    count_confusion,
)
from mmnala.report.log import RunLog
from mmnala.report.page import render

EVIL = '<script>alert("&")</script>'
VOID = {'meta', 'img', 'link', 'br', 'input', 'hr'}


class Page(HTMLParser):
    """The page's tags, tables and images; closing tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.images: dict[str, bytes] = {}
        self.figures: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)
        if tag == 'tr':
            self.rows.append([])
        if tag in ('td', 'th'):
            self.rows[-1].append('')
        if tag == 'img':
            named = dict(attrs)
            data = re.fullmatch(r'data:image/(?:png|jpeg);base64,(.*)', named['src'])[1]
            self.images[named['alt']] = base64.b64decode(data)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self._open and self._open[-1] in ('td', 'th'):
            self.rows[-1][-1] += data
        if self._open and self._open[-1] == 'figcaption':
            self.figures.append(data.strip())

    @property
    def text(self) -> str:
        return ''.join(self.texts)

    def cells(self, first: str) -> list[str]:
        (row,) = [row for row in self.rows if row[0] == first]
        return row[1:]


def check_alone(page: Page) -> None:
    """Nothing on the page is asked from elsewhere, and nothing runs."""
    assert not {'script', 'link', 'iframe', 'object', 'base', 'form', 'video'} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith('on')
        if name in ('src', 'href', 'srcset', 'data', 'action', 'poster'):
            assert value.startswith('data:')
    assert not re.search(r'url\(|@import', page.text)
    viewport = [v for n, v in page.attributes if n == 'content']
    assert 'width=device-width, initial-scale=1' in viewport
    assert any("default-src 'none'" in value for value in viewport)


@pytest.fixture(scope='module')
def segmentation(tmp_path_factory) -> Path:
    """The work folder of a training with a class whose name is HTML."""
    folder = tmp_path_factory.mktemp('report')
    write_scenes(folder / 'data')
    lines = 'for loader in (train_dataloader, val_dataloader, test_dataloader):\n'
    lines += f'    loader["dataset"]["metainfo"]["classes"] = ("ground", {EVIL!r})\n'
    lines += 'del loader\n'
    config = write_segmentation_config(folder / 'seg.py', folder / 'data', lines)
    finished = run_tool('train.py', config, cwd=folder)
    assert finished.code == 0, finished.output
    work_dir = folder / 'work_dirs' / 'seg'
    # So short a training predicts one class alone.
    content = torch.load(work_dir / 'iter_8.pth', weights_only=False)
    classifier = content['state_dict']['decode_head.conv_seg.weight']
    classifier.normal_(generator=torch.Generator().manual_seed(5))
    torch.save(content, work_dir / 'iter_8.pth')
    return work_dir


@pytest.fixture(scope='module')
def page_file(segmentation) -> Path:
    """The report on its 8th iteration."""
    before = sorted(segmentation.rglob('*'))
    page = segmentation.parents[1] / 'page.html'
    arguments = [segmentation, '--checkpoint', segmentation / 'iter_8.pth', '--num-images', 2]
    finished = run_tool('report.py', *arguments, '--out', page, cwd=page.parent)
    assert finished.code == 0, finished.output
    assert sorted(segmentation.rglob('*')) == before  # its own logs are gone
    return page


def test_a_segmentation_report(segmentation, page_file, tmp_path):
    maps = ['--out', 'maps', '--work-dir', 'test']
    config, checkpoint = segmentation.parents[1] / 'seg.py', segmentation / 'iter_8.pth'
    tested = run_tool('test.py', config, checkpoint, *maps, cwd=tmp_path)
    assert tested.code == 0, tested.output
    page = Page(page_file.read_text())
    check_alone(page)
    assert 'The checkpoint iter_8.pth on the validation set.' in page.text

    # The metrics are the test's, the classes' and the images' those of its label maps.
    data = segmentation.parents[1] / 'data' / 'masks' / 'val'
    truths, predictions = (
        [np.array(Image.open(folder / f'{i}.png')) for i in range(5)]
        for folder in (data, tmp_path / 'maps')
    )
    confusion = np.zeros((2, 2), int)
    np.add.at(confusion, (np.stack(truths), np.stack(predictions)), 1)
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    ious = 100 * confusion.diagonal() / union
    mean_iou = float(re.search(r'mIoU: ([\d.]+)', tested.output)[1])
    assert float(page.cells('mIoU')[0]) == pytest.approx(mean_iou, rel=1e-3)
    assert float(page.cells('ground')[0]) == pytest.approx(ious[0], rel=1e-3)
    assert float(page.cells(EVIL)[0]) == pytest.approx(ious[1], rel=1e-3, abs=0.01)
    wrong = 100 * confusion[1, 0] / confusion[1].sum()
    assert wrong > 0
    assert float(page.cells(f'{EVIL} → ground')[0]) == pytest.approx(wrong, rel=1e-3)

    def image_iou(truth, prediction):
        pairs = [(truth == label, prediction == label) for label in range(2)]
        return 100 * np.mean([(t & p).sum() / (t | p).sum() for t, p in pairs if (t | p).any()])

    scores = {f'{i}.png': image_iou(truths[i], predictions[i]) for i in range(5)}
    assert len(set(scores.values())) == 5
    order = sorted(scores, key=scores.get)
    captions = [caption for caption in page.figures if 'mean IoU (%)' in caption]
    shown = [caption.split(': mean IoU (%) ') for caption in captions]
    assert [name for name, _ in shown] == [*order[:2], *order[:-3:-1]]
    assert [float(score) for _, score in shown] == pytest.approx(
        [scores[name] for name, _ in shown], rel=1e-3
    )

    assert page.cells('iterations') == ['10']
    assert page.cells('peak GPU memory, MB') == ['not logged']
    model_parameters = sum(
        value.numel()
        for name, value in torch.load(checkpoint, weights_only=False)['state_dict'].items()
        if not re.search(r'running_|num_batches', name)
    )
    assert page.cells('parameters, all') == [f'{model_parameters / 1e6:.2f} M']
    assert 'sys.platform: linux' in page.text
    assert "type='NaLaFormer'" in page.text
    assert {'loss', 'lr', 'mIoU', 'confusion matrix', 'bars of the classes'} <= page.images.keys()
    assert Image.open(io.BytesIO(page.images['prediction'])).size == (64, 64)


def test_a_detection_report(tmp_path):
    write_scenes(tmp_path / 'data')
    lines = 'train_cfg["max_epochs"] = 1\n'
    config = write_detection_config(tmp_path / 'det.py', tmp_path / 'data', lines)
    assert run_tool('train.py', config, cwd=tmp_path).code == 0
    work_dir = tmp_path / 'work_dirs' / 'det'
    finished = run_tool('report.py', work_dir, '--num-images', 1, cwd=tmp_path)
    assert finished.code == 0, finished.output
    page = Page((work_dir / 'report.html').read_text())
    check_alone(page)
    average = re.findall(r'coco/bbox_mAP: (-?[\d.]+)', finished.output)[-1]
    assert float(page.cells('coco/bbox_mAP')[0]) == float(average)
    assert float(page.cells('box')[0]) == pytest.approx(float(average), abs=1e-3)  # one class
    assert 'Boxes with a score from 0.3' in page.text and 'confusion matrix' in page.images
    assert 0 <= float(page.cells('box → no object')[0]) <= 100
    assert sum('AP50' in caption for caption in page.figures) == 2
    assert {'truth', 'prediction, scores from 0.3', 'loss', 'coco/bbox_mAP'} <= page.images.keys()


def test_without_images_neither_data_nor_checkpoint_is_needed(segmentation, tmp_path):
    run = tmp_path / 'moved'
    shutil.copytree(segmentation, run, ignore=shutil.ignore_patterns('*.pth', 'last_checkpoint'))
    arguments = [run, '--cfg-options', 'data_root=nowhere']
    finished = run_tool('report.py', *arguments, '--no-images', cwd=tmp_path)
    assert finished.code == 0, finished.output
    page = Page((run / 'report.html').read_text())
    check_alone(page)
    assert 'The last evaluation in the log.' in page.text
    assert page.text.count('Left out: the validation set was not evaluated.') == 2
    assert set(page.images) == {'loss', 'lr', 'mIoU', 'bars of the classes'}
    (log,) = run.glob('*/*.log')
    last = float(re.findall(r'mIoU: ([\d.]+)', log.read_text())[-1])
    assert float(page.cells('mIoU')[0]) == pytest.approx(last, rel=1e-3)
    assert page.cells(EVIL)  # from the log's table


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['nowhere'], 'run nowhere: there is no such folder'),
        (['{run}', '--num-images', 0], '--num-images 0: expected a positive number'),
        (['{run}', '--out', 'no/page.html'], '--out no/page.html: there is no such folder'),
        (['{run}', '--checkpoint', 'no.pth'], 'checkpoint no.pth: FileNotFoundError'),
        (['{run}', '--out', 'full.html'], '--out full.html: exists already'),
        (['bare'], 'bare: no checkpoint; --checkpoint names one, --no-images does without'),
        (
            ['{run}', '--cfg-options', 'data_root=nowhere'],
            'the validation set: .*nowhere.*--no-images does without',
        ),
    ],
)
def test_bad_input_is_named(segmentation, tmp_path, arguments, message):
    ignore = shutil.ignore_patterns('*.pth', 'last_checkpoint')
    shutil.copytree(segmentation, tmp_path / 'bare', ignore=ignore)
    arguments = [str(argument).replace('{run}', str(segmentation)) for argument in arguments]
    (tmp_path / 'full.html').write_text('kept')
    if '--out' not in arguments:
        arguments += ['--out', 'page.html']
    finished = run_tool('report.py', *arguments, cwd=tmp_path)
    assert finished.code == 1
    assert re.search(f'^error: {message}', finished.output, re.M), finished.output
    assert 'Traceback' not in finished.output
    assert [file.read_text() for file in tmp_path.rglob('*.html')] == ['kept']


def test_the_best_checkpoint_is_evaluated(segmentation, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(segmentation, run)
    (run / 'iter_4.pth').rename(run / 'best_mIoU_iter_4.pth')
    finished = run_tool('report.py', run, cwd=tmp_path)
    assert finished.code == 0, finished.output
    text = Page((run / 'report.html').read_text()).text
    assert 'The checkpoint best_mIoU_iter_4.pth on the validation set.' in text


@pytest.mark.parametrize(
    ('files', 'chosen'),
    [
        (['iter_2.pth', 'iter_10.pth', 'iter_9.pth'], 'iter_9.pth'),
        (['iter_2.pth', 'iter_10.pth', 'iter_x.pth'], 'iter_10.pth'),
        (['epoch_8.pth', 'epoch_12.pth'], 'epoch_12.pth'),
        (['other.pth'], None),
    ],
)
def test_a_copied_folder_has_its_own_checkpoint(tmp_path, files, chosen):
    old, new = tmp_path / 'old', tmp_path / 'new'
    for folder, names in ((old, ['iter_9.pth']), (new, files)):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        (folder / 'last_checkpoint').write_text(str(old / 'iter_9.pth'))
    tool = Path(__file__).parents[1] / 'tools' / 'report.py'
    choose_checkpoint = runpy.run_path(str(tool))['choose_checkpoint']
    args = SimpleNamespace(run=str(new), checkpoint=None)
    if chosen:
        assert choose_checkpoint(args) == str(new / chosen)
    else:
        with pytest.raises(SystemExit, match=f'error: {new}: no checkpoint'):
            choose_checkpoint(args)


def test_confusion_is_numpys_and_gives_the_ious():
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 4, (3, 20, 30))
    truth[draw.random(truth.shape) < 0.1] = 255
    prediction = draw.integers(0, 5, truth.shape)  # class 4 is predicted only, class 5 nowhere
    expected = np.zeros((6, 6), np.int64)
    kept = truth != 255
    np.add.at(expected, (truth[kept], prediction[kept]), 1)
    confusion = count_confusion(torch.tensor(truth), torch.tensor(prediction), 6)
    np.testing.assert_array_equal(confusion, expected)

    from mmseg.evaluation import IoUMetric

    areas = IoUMetric.intersect_and_union(torch.tensor(prediction), torch.tensor(truth), 6, 255)
    np.testing.assert_allclose(class_ious(confusion), (areas[0] / areas[1]).numpy(), rtol=1e-6)
    assert np.isnan(class_ious(confusion)[5]) and class_ious(confusion)[4] == 0


def boxes_of(rows, **columns) -> InstanceData:
    columns = {name: torch.tensor(values) for name, values in columns.items()}
    return InstanceData(bboxes=torch.tensor(rows).reshape(-1, 4), **columns)


def test_confusion_of_boxes_by_hand():
    truth = boxes_of(
        [[0.0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 70, 10], [0, 50, 90, 90]],
        labels=[0, 1, 1, 0, 0],
        ignored=[False, False, False, False, True],
    )
    found = [  # box, label, score
        ([0.0, 0, 10, 8], 0, 0.8),  # upon the first object, but second to the next
        ([0.0, 0, 10, 6], 1, 0.9),  # finds it, as another class
        ([20.0, 0, 30, 10], 1, 0.3),  # right, and just scored enough
        ([40.0, 0, 50, 10], 1, 0.29),  # right, but scored too low: missed
        ([60.0, 0, 70, 4.9], 0, 0.9),  # overlaps too little: a miss, and a box upon nothing
        ([10.0, 60, 20, 70], 0, 0.9),  # among the ignored
        ([10.0, 44, 20, 54], 1, 0.9),  # less than half of it is
    ]
    boxes, labels, scores = zip(*found, strict=True)
    found = boxes_of(list(boxes), labels=labels, scores=scores)
    expected = [[0, 1, 1], [0, 1, 1], [2, 1, 0]]
    assert count_box_confusion(truth, found, 2).tolist() == expected
    nothing = boxes_of([], labels=np.zeros(0, int), scores=[])
    assert count_box_confusion(truth, nothing, 2).tolist() == [[0, 0, 2], [0, 0, 2], [0, 0, 0]]
    truth = boxes_of([], labels=np.zeros(0, int), ignored=np.zeros(0, bool))
    assert count_box_confusion(truth, found, 2).tolist() == [[0, 0, 0], [0, 0, 0], [3, 3, 0]]


@pytest.mark.parametrize('seed', range(5))
def test_confusion_of_boxes_of_one_class_is_cocos(seed):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def draw_boxes(number):
        corners = torch.rand(number, 2, generator=draw) * 60
        return torch.cat((corners, corners + 10 + 30 * torch.rand(number, 2, generator=draw)), 1)

    draw = torch.Generator().manual_seed(seed)
    truth = InstanceData(
        bboxes=draw_boxes(12), labels=torch.zeros(12).long(), ignored=torch.arange(12) > 9
    )
    found = InstanceData(
        bboxes=draw_boxes(60),
        labels=torch.zeros(60).long(),
        scores=torch.rand(60, generator=draw),
    )

    def annotations(boxes, **columns):
        boxes[:, 2:] -= boxes[:, :2]
        return [
            dict(id=i + 1, image_id=1, category_id=1, bbox=box, area=box[2] * box[3])
            | {name: column[i].item() for name, column in columns.items()}
            for i, box in enumerate(boxes.tolist())
        ]

    api = COCO()
    api.dataset = dict(
        images=[dict(id=1)],
        categories=[dict(id=1)],
        annotations=annotations(truth.bboxes.clone(), iscrowd=truth.ignored.int()),
    )
    api.createIndex()
    counted = found[found.scores >= 0.3]
    results = api.loadRes(annotations(counted.bboxes.clone(), score=counted.scores))
    evaluation = COCOeval(api, results, 'bbox')
    evaluation.params.iouThrs = np.array([0.5])
    evaluation.evaluate()
    image = evaluation.evalImgs[0]
    right = ((image['dtMatches'] > 0) & ~image['dtIgnore']).sum()
    wrong = ((image['dtMatches'] == 0) & ~image['dtIgnore']).sum()
    assert image['dtIgnore'].any() and right > 2  # so that the comparison says something
    assert count_box_confusion(truth, found, 1).tolist() == [[right, 10 - right], [wrong, 0]]


def classified(scores: list[list[float]], truths: list[int]) -> CollectHook:
    """A collector that has seen images of a classification, the first red, in BGR."""
    from mmpretrain.structures import DataSample

    hook = CollectHook(2)
    runner = SimpleNamespace(
        cfg=Config(dict(model=dict(data_preprocessor=dict(to_rgb=True)))),
        test_dataloader=SimpleNamespace(
            dataset=SimpleNamespace(metainfo=dict(classes=('cat', EVIL, 'dog')))
        ),
        test_evaluator=SimpleNamespace(metrics=[]),
    )
    hook.before_test_epoch(runner)
    for i, (score, truth) in enumerate(zip(scores, truths, strict=True)):
        sample = DataSample(metainfo=dict(img_path=f'{i}.png'))
        sample.set_gt_label(truth).set_pred_score(torch.tensor(score))
        image = torch.zeros(3, 8, 6, dtype=torch.uint8)
        image[2 if i == 0 else 1] = 200
        hook.after_test_iter(runner, i, dict(inputs=[image]), [sample])
    return hook


def test_classified_images_are_judged_by_the_true_class():
    scores = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.25, 0.25, 0.5]]
    hook = classified(scores, [0, 1, 1, 0])
    assert [(j.path, round(j.score, 4)) for j in hook.best] == [('1.png', 0.8), ('0.png', 0.7)]
    assert [(j.path, round(j.score, 4)) for j in hook.worst] == [('3.png', 0.25), ('2.png', 0.3)]
    np.testing.assert_array_equal(hook.confusion, [[1, 0, 1], [1, 1, 0], [0, 0, 0]])
    (caption, picture), *_ = hook.best[1].panels.items()
    assert caption == 'cat, predicted cat (0.70)'
    assert picture.shape == (8, 6, 3) and picture[0, 0].tolist() == [200, 0, 0]


def test_detections_are_counted_in_images_without_objects_too(log_of_nothing):
    from mmdet.structures import DetDataSample

    def instances(*boxes):
        return [dict(bbox=box, bbox_label=label, ignore_flag=0) for box, label in boxes]

    infos = [
        dict(img_id=3, instances=instances(([0, 0, 20, 20], 0), ([30, 30, 50, 50], 1))),
        dict(img_id=5, instances=[]),
    ]
    found = boxes_of(
        [[0.0, 0, 20, 20], [0, 0, 20, 10], [31, 31, 50, 50]],
        labels=[0, 1, 0],
        scores=[0.9, 0.2, 0.6],
    )

    class Detections(list):
        metainfo = dict(classes=('cell', 'dot'))
        get_data_info = list.__getitem__

    hook = CollectHook(1)
    hook.before_test_epoch(
        SimpleNamespace(
            cfg=Config(dict(model=dict())),
            test_dataloader=SimpleNamespace(dataset=Detections(infos)),
            test_evaluator=SimpleNamespace(metrics=[]),
        )
    )
    for info in infos:
        meta = dict(img_id=info['img_id'], img_path='0.png', ori_shape=(64, 64))
        sample = DetDataSample(metainfo=meta, pred_instances=found)
        image = torch.zeros(3, 32, 32, dtype=torch.uint8)
        hook.after_test_iter(None, 0, dict(inputs=[image]), [sample])
    np.testing.assert_array_equal(hook.confusion, [[1, 0, 0], [1, 0, 0], [2, 0, 0]])
    assert hook.names == ['cell', 'dot', 'no object']
    assert [(judged.path, judged.score) for judged in hook.worst] == [('0.png', 0.5)]
    page = Page(render(log_of_nothing, nn.Identity(), hook, {}))
    assert page.cells('dot → cell') == ['100']
    assert 'no object → cell' not in page.text


@pytest.fixture
def log_of_nothing(tmp_path) -> RunLog:
    part = tmp_path / '20260101_000000'
    (part / 'vis_data').mkdir(parents=True)
    (part / 'vis_data' / 'config.py').touch()
    return RunLog('run', [part])


@pytest.mark.parametrize(
    ('scores', 'worst', 'best'),
    [
        ([0.5, 0.9, 0.7], ['0.png', '2.png'], ['1.png']),
        ([0.5], ['0.png'], []),
        ([0.0, 0.0, 0.0, 0.0], ['0.png', '1.png'], []),
    ],
)
def test_no_image_is_shown_twice(log_of_nothing, scores, worst, best):
    hook = classified([[score, 0.0, 0.0] for score in scores], [0] * len(scores))
    assert [judged.path for judged in hook.worst] == worst
    assert [judged.path for judged in hook.best] == best
    page = Page(render(log_of_nothing, nn.Linear(1, 1), hook, {'top1': 1.0}))
    shown = [figure.split(':')[0] for figure in page.figures if ': score' in figure]
    assert shown == [*worst, *best]
    assert ('None but the above.' in page.text) == (not best)


def test_an_evaluation_without_metrics_is_said(log_of_nothing):
    missing = 'The evaluation gave no metrics.'
    for metrics in ({}, {'top1': 1.0}):
        page = Page(render(log_of_nothing, nn.Linear(1, 1), CollectHook(1), metrics))
        assert (missing in page.text) == (not metrics)
        assert (['metric', 'value'] in page.rows) == bool(metrics)


def test_everything_from_outside_is_escaped(tmp_path):
    hook = classified([[0.1, 0.8, 0.1], [0.1, 0.8, 0.1]], [0, 1])
    part = tmp_path / '20260101_000000'
    (part / 'vis_data').mkdir(parents=True)
    (part / 'vis_data' / 'config.py').write_text(f"name = '{EVIL} https://example.org'")
    (part / f'{part.name}.log').write_text(f'System environment:\n{EVIL}\n{"-" * 60}\n')
    run = RunLog(EVIL, [part])
    text = render(run, nn.Linear(1, 1), hook, {EVIL: 0.5}, f'{EVIL}.pth')
    page = Page(text)
    check_alone(page)
    assert '<script' not in text
    assert page.text.count(EVIL) >= 7
    assert page.cells('parameters, all') == ['0.00 M']
    assert page.cells(f'cat → {EVIL}') == ['100']


@pytest.mark.parametrize('number', [0, 1.0, True])
def test_number_of_images_is_checked(number):
    with pytest.raises(InputError, match=f'number must be a positive integer, got {number}'):
        CollectHook(number)


CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium to open the page in')
def test_a_browser_shows_it_on_a_phone(page_file, tmp_path):
    # A script of the test's own, which the page's policy would forbid, asks what was laid out.
    probe = tmp_path / 'probe.html'
    script = """<script>addEventListener('load', () => {
        const images = [...document.images];
        document.title = [images.length, images.filter(i => i.naturalWidth > 0).length,
            document.documentElement.scrollWidth <= innerWidth].join(' ');
    })</script></body>"""
    text = re.sub(r'<meta http-equiv.*?>', '', page_file.read_text(), flags=re.S)
    probe.write_text(text.replace('</body>', script))
    options = ['--headless', '--no-sandbox', '--disable-gpu', '--window-size=500,900']
    options += [f'--user-data-dir={tmp_path / "profile"}', '--dump-dom', probe.as_uri()]
    shown = subprocess.run([CHROMIUM, *options], capture_output=True, text=True, timeout=120)
    title = re.search('<title>(.*?)</title>', shown.stdout)[1]
    number = page_file.read_text().count('<img')
    assert title == f'{number} {number} true'
