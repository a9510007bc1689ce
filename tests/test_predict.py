"""tools/predict.py: what it predicts, draws and writes, and what it does with bad input."""

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import Golden
from mmdet.apis import inference_detector, init_detector
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmseg.apis import inference_model, init_model
from PIL import Image
from pycocotools import mask as rle
from pycocotools.coco import COCO
from test_evaluation import CATEGORIES, MASK_RCNN, build_with_weights
from toy import Finished, run_tool, write_detection_config, write_segmentation_config

from mmnala.engine.overlay import Entry, Panel, blend, compose
from mmnala.engine.predict import ReadError, find_sources, read_image, read_video
from mmnala.engine.results import JsonList

PALETTE = [[10, 200, 30], [250, 0, 120]]
SIZES = {'a/0': (64, 64), 'a/1': (64, 64), 'a/2': (48, 80), 'b/0': (64, 64)}
# Label 0 is none of the classes, as in ADE20K; the annotations' names have an ending of their own.
LABELS_FROM_ONE = """
test_dataloader['dataset'].update(reduce_zero_label=True, seg_map_suffix='_map.png')
"""
CLASSIFIER = """
default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmnala'])
data_preprocessor = dict(mean=[90] * 3, std=[60] * 3, to_rgb=True)
model = dict(
    type='ImageClassifier',
    backbone=dict(type='NaLaFormer', arch={arch}),
    neck=dict(type='NaLaFormerNeck', in_channels=64, out_channels=32),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32))
test_dataloader = dict(dataset=dict(
    type='CustomDataset', data_prefix='val', metainfo=dict(classes=('ant', 'bee', 'fly')),
    pipeline=[
        dict(type='LoadImageFromFile'), dict(type='Resize', scale=(64, 64)),
        dict(type='PackInputs')]))
"""


def save_with_meta(model: torch.nn.Module, config: Path, **meta: object) -> None:
    content = dict(state_dict=model.state_dict(), meta=dict(dataset_meta=meta))
    torch.save(content, config.with_suffix('.pth'))


def write_images(folder: Path, sizes: dict[str, tuple[int, int]]) -> None:
    draw = np.random.default_rng(0)
    for name, (height, width) in sizes.items():
        path = folder / f'{name}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(path)


def write_video(path: Path, images: list[Path], codec: str = 'MJPG') -> None:
    pictures = [cv2.imread(str(image)) for image in images]
    size = pictures[0].shape[1::-1]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 5, size)
    for picture in pictures:
        writer.write(picture)
    writer.release()


def predict(config: Path, *arguments: object, cwd: Path) -> Finished:
    return run_tool('predict.py', config, config.with_suffix('.pth'), *arguments, cwd=cwd)


def content(path: Path):
    return json.loads(path.read_text())


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file()}


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert('RGB'))


def legend_colours(picture: np.ndarray, top: int) -> list[tuple[int, ...]]:
    """The colours, in the order of reading, of which the strip below ``top`` has a square."""
    colours = []
    for line in picture[top + 9 :: 18]:
        changes = [0, *np.flatnonzero((line[1:] != line[:-1]).any(1)) + 1, len(line)]
        runs = [(start, end) for start, end in pairwise(changes) if end - start >= 8]
        colours += [tuple(map(int, line[start])) for start, _ in runs]
    return [colour for colour in colours if colour != (255, 255, 255)]


# Segmentation


@pytest.fixture(scope='module')
def segmentor(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('segmentor')
    write_images(folder / 'images', SIZES)
    (folder / 'images/a/notes.txt').write_text('not listed')
    write_video(folder / 'clip.avi', [folder / f'images/{n}.png' for n in ('a/0', 'a/1', 'b/0')])
    draw = np.random.default_rng(1)
    (folder / 'truth/a').mkdir(parents=True)
    for name in ('a/0', 'a/2'):
        labels = draw.integers(0, 3, SIZES[name], dtype=np.uint8)
        Image.fromarray(labels).save(folder / f'truth/{name}_map.png')
    config = write_segmentation_config(folder / 'seg.py', folder, LABELS_FROM_ONE)
    save_with_meta(build_with_weights(config), config, classes=('sea', 'land'), palette=PALETTE)
    return config


@pytest.fixture(scope='module')
def expected_maps(segmentor) -> dict[str, np.ndarray]:
    model = init_model(segmentor, str(segmentor.with_suffix('.pth')), device='cpu')
    maps = {}
    for name in SIZES:
        result = inference_model(model, str(segmentor.parent / f'images/{name}.png'))
        maps[name] = result.pred_sem_seg.data[0].numpy()
        assert len(np.unique(maps[name])) == 2
    return maps


@pytest.fixture(scope='module')
def segmented(segmentor, tmp_path_factory) -> Path:
    """Results with truth, of a batch of three and with bad files among the images."""
    folder = segmentor.parent
    images = folder / 'images'
    (folder / 'bad').mkdir()
    (folder / 'bad/broken.jpg').write_bytes(b'\xff\xd8 nothing')
    whole = (images / 'a/0.png').read_bytes()
    (folder / 'bad/half.png').write_bytes(whole[: len(whole) // 2])
    (folder / 'bad/video.mp4').write_text('nothing')
    cwd = tmp_path_factory.mktemp('segmented')
    inputs = [f'{images}/b*', f'{images}/*/*', folder / 'bad', images / 'a/0.png']
    finished = predict(segmentor, *inputs, '--truth', folder / 'truth', '--out', 'out',
                       '--batch-size', 3, cwd=cwd)  # fmt: skip
    assert finished.code == 1
    assert 'out: predictions of 4 images and frames\n' in finished.output
    lacking = f'--truth {folder / "truth"}: none for 4 of 6 images\n'  # two of them are bad
    assert lacking in finished.output
    (report,) = [finished.output[finished.output.index('error: ') :]]
    assert report.splitlines()[0] == 'error: 3 of 7 inputs could not be read:'
    lines = report.splitlines()[1:]
    assert [line.split(': ')[0].strip() for line in lines] == [
        str(folder / 'bad' / name) for name in ('broken.jpg', 'half.png', 'video.mp4')
    ]
    return cwd / 'out'


def test_label_maps_are_the_models_in_the_annotations_numbers(segmented, expected_maps):
    for name in SIZES:
        with Image.open(segmented / f'labels/{name}.png') as png:
            assert png.mode == 'P'
            assert np.array_equal(np.asarray(png), expected_maps[name] + 1)
            colours = np.asarray(png.convert('RGB'))
        assert np.array_equal(colours, np.array(PALETTE)[expected_maps[name]])


def test_results_list_what_was_found_in_order(segmented, segmentor, expected_maps):
    images = segmentor.parent / 'images'
    expected = []
    for name in ('b/0', 'a/0', 'a/1', 'a/2'):
        height, width = SIZES[name]
        sea = int((expected_maps[name] == 0).sum())
        expected.append(
            dict(
                input=str(images / f'{name}.png'),
                width=width,
                height=height,
                label_map=f'labels/{name}.png',
                pixels=dict(sea=sea, land=height * width - sea),
                picture=f'pictures/{name}.png',
            )
        )
    assert content(segmented / 'results.json') == expected
    names = {entry[key] for entry in expected for key in ('label_map', 'picture')}
    assert files(segmented) == {'results.json', *names}


def test_overlay_with_truth_and_legend(segmented, segmentor, expected_maps):
    picture = pixels(segmented / 'pictures/a/0.png')
    image = pixels(segmentor.parent / 'images/a/0.png')
    truth = np.asarray(Image.open(segmentor.parent / 'truth/a/0_map.png'))
    colours = np.array([image[0, 0], *PALETTE])  # any for the label that is no class
    in_truth = np.rint((image.astype(float) + colours[truth]) / 2)
    in_truth[truth == 0] = image[truth == 0]
    in_map = np.rint((image.astype(float) + np.array(PALETTE)[expected_maps['a/0']]) / 2)
    assert picture.shape[1] == 3 * 64
    assert np.array_equal(picture[18:82], np.hstack([image, in_truth, in_map]))
    assert legend_colours(picture, 82) == [tuple(colour) for colour in PALETTE]
    assert (picture[:18] == 0).any()  # captions


def test_overlay_without_truth(segmented, segmentor, expected_maps):
    picture = pixels(segmented / 'pictures/a/1.png')
    image = pixels(segmentor.parent / 'images/a/1.png').astype(float)
    expected = np.rint((image + np.array(PALETTE)[expected_maps['a/1']]) / 2)
    assert np.array_equal(picture[:64, :64], expected)


@pytest.mark.parametrize('frames', [False, True], ids=['mp4', 'png'])
def test_video_frames(segmentor, tmp_path, frames):
    clip = segmentor.parent / 'clip.avi'
    options = ['--video-frames'] if frames else []
    finished = predict(segmentor, clip, '--out', 'out', '--batch-size', 2, '--opacity', 0.25,
                       *options, cwd=tmp_path)  # fmt: skip
    assert finished.code == 0, finished.output
    labels = [f'labels/clip.avi/{i:06d}.png' for i in range(3)]
    drawn = [f'pictures/clip.avi/{i:06d}.png' for i in range(3)]
    records = content(tmp_path / 'out/results.json')
    assert [record['frame'] for record in records] == [0, 1, 2]
    assert [record['label_map'] for record in records] == labels
    assert [record['picture'] for record in records] == drawn if frames else ['pictures/clip.mp4']
    pictures = set(drawn) if frames else {'pictures/clip.mp4'}
    assert files(tmp_path / 'out') == {'results.json', *labels, *pictures}

    model = init_model(segmentor, str(segmentor.with_suffix('.pth')), device='cpu')
    video = cv2.VideoCapture(str(clip))
    written = cv2.VideoCapture(str(tmp_path / 'out/pictures/clip.mp4'))
    if not frames:
        assert written.get(cv2.CAP_PROP_FPS) == 5
    for i in range(3):
        image = video.read()[1]
        expected = inference_model(model, image).pred_sem_seg.data[0].numpy()
        assert np.array_equal(np.asarray(Image.open(tmp_path / 'out' / labels[i])), expected + 1)
        picture = pixels(tmp_path / 'out' / drawn[i]) if frames else written.read()[1][..., ::-1]
        assert picture.shape[0] % 2 == 0 or frames
        overlay = np.rint(0.75 * image[..., ::-1] + 0.25 * np.array(PALETTE)[expected])
        error = np.abs(picture[:64, :64] - overlay)
        assert error.max() == 0 if frames else error.mean() < 12
    assert frames or not written.read()[0]


def test_tta_predicts_the_mean_of_the_flips(segmentor, tmp_path):
    image = segmentor.parent / 'images/a/2.png'
    finished = predict(segmentor, image, '--tta', '--no-pictures', '--out', 'o', cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert files(tmp_path / 'o') == {'results.json', 'labels/2.png'}
    model = init_model(segmentor, str(segmentor.with_suffix('.pth')), device='cpu')
    pixels = torch.from_numpy(cv2.imread(str(image))[..., ::-1].copy()).permute(2, 0, 1)[None]
    pixels = (pixels.float() - 90) / 60
    with torch.no_grad():
        views = [model.encode_decode(x, [dict(img_shape=x.shape[2:])]) for x in
                 (pixels, pixels.flip(3))]  # fmt: skip
    mean = (views[0].softmax(1) + views[1].flip(3).softmax(1))[0]
    clear = (mean[0] - mean[1]).abs() > 1e-5
    found = np.asarray(Image.open(tmp_path / 'o/labels/2.png')) - 1
    plain = views[0].argmax(1)[0].numpy()
    assert np.array_equal(found[clear], mean.argmax(0).numpy()[clear])
    assert (found != plain).any()


def test_cityscapes_maps_have_label_ids(tmp_path):
    write_images(tmp_path, {'x_leftImg8bit': (48, 48)})
    extra = """
model['decode_head']['num_classes'] = 19
test_dataloader['dataset'] = dict(type='CityscapesDataset', pipeline=test_pipeline)
"""
    config = write_segmentation_config(tmp_path / 'cityscapes.py', tmp_path, extra)
    build_with_weights(config)  # its checkpoint names no classes: they are the data set's
    image = tmp_path / 'x_leftImg8bit.png'
    finished = predict(config, image, '--out', 'out', '--no-pictures', cwd=tmp_path)
    assert finished.code == 0, finished.output
    ids = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    found = np.asarray(Image.open(tmp_path / 'out/labels/x_leftImg8bit.png'))
    (record,) = content(tmp_path / 'out/results.json')
    from mmseg.utils import cityscapes_classes

    names = [cityscapes_classes()[ids.index(label)] for label in np.unique(found)]
    assert list(record['pixels']) == names
    assert len(names) > 3


# Detection


@pytest.fixture(scope='module')
def detector(tmp_path_factory) -> Path:
    """A Mask R-CNN, and annotations of two of its three images."""
    folder = tmp_path_factory.mktemp('detector')
    sizes = {'0': (64, 80), '1': (75, 50), '2': (64, 64)}
    write_images(folder / 'images', sizes)
    lines = MASK_RCNN.replace('{ann_file}', 'truth.json').replace('{data}', str(folder))
    config = write_detection_config(folder / 'det.py', folder, lines)
    model = build_with_weights(config)
    save_with_meta(model, config, classes=('cat', 'kite'), palette=[(0, 0, 250), (250, 0, 0)])
    images = [
        dict(id=image_id, file_name=f'{name}.png', height=sizes[name][0], width=sizes[name][1])
        for image_id, name in ((139, '2'), (285, '0'))
    ]
    box = dict(bbox=[20, 20, 30, 24], area=720, segmentation=[[20, 20, 50, 20, 50, 44, 20, 44]])
    annotations = [
        dict(box, id=1, image_id=139, category_id=38, iscrowd=0),
        dict(box, id=2, image_id=139, category_id=90, iscrowd=0),
    ]
    other = dict(id=90, name='other')
    truth = dict(images=images, annotations=annotations, categories=[*CATEGORIES, other])
    (folder / 'truth.json').write_text(json.dumps(truth))
    return config


def expected_objects(config: Path, name: str):
    model = init_detector(config, str(config.with_suffix('.pth')), device='cpu')
    return inference_detector(model, str(config.parent / f'images/{name}.png')).pred_instances


def test_detections(detector, tmp_path):
    folder = detector.parent
    finished = predict(detector, folder / 'images', '--truth', folder / 'truth.json', '--out',
                       'out', '--score-thr', 0.4, '--batch-size', 2, cwd=tmp_path)  # fmt: skip
    assert finished.code == 0, finished.output
    out = tmp_path / 'out'
    pictures = {f'pictures/{i}.png' for i in range(3)}
    lists = {'results.json', 'images.json', 'results.bbox.json', 'results.segm.json'}
    assert files(out) == pictures | lists

    records = content(out / 'results.json')
    assert [record['image_id'] for record in records] == [285, 286, 139]
    coco = COCO(str(out / 'images.json'))
    assert [coco.imgs[i]['file_name'] for i in (285, 286, 139)] == ['0.png', '1.png', '2.png']
    assert list(coco.cats.values()) == CATEGORIES
    boxes = coco.loadRes(str(out / 'results.bbox.json'))
    masks = coco.loadRes(str(out / 'results.segm.json'))
    assert len(boxes.anns) == len(masks.anns) > 50
    for record, name in zip(records, '012', strict=True):
        expected = expected_objects(detector, name)
        found = record['objects']
        assert [o['class'] for o in found] == [('cat', 'kite')[i] for i in expected.labels]
        near = dict(rtol=0, atol=1e-3)
        torch.testing.assert_close(
            torch.tensor([o['bbox'] for o in found]), expected.bboxes, **near
        )
        scores = torch.tensor([o['score'] for o in found])
        torch.testing.assert_close(scores, expected.scores, rtol=0, atol=1e-5)
        for loaded in (boxes, masks):
            entries = loaded.loadAnns(loaded.getAnnIds(imgIds=[record['image_id']]))
            corners = np.array([entry['bbox'] for entry in entries])
            assert [e['category_id'] for e in entries] == [(17, 38)[i] for i in expected.labels]
            if loaded is boxes:
                corners[:, 2:] += corners[:, :2]
                np.testing.assert_allclose(corners, expected.bboxes, atol=1e-3)
        decoded = np.stack([rle.decode(entry['segmentation']) for entry in entries])
        assert decoded.shape == expected.masks.shape
        assert (decoded != expected.masks.numpy()).mean() < 1e-3


def test_detection_pictures(detector, tmp_path):
    """Truth at the left, where there is one; only objects above the threshold."""
    image = detector.parent / 'images/2.png'
    truth = ['--truth', detector.parent / 'truth.json']
    for name, *options in [('none', '--score-thr', 1, *truth), ('all', '--score-thr', 0)]:
        finished = predict(detector, image, '--out', name, *options, cwd=tmp_path)
        assert finished.code == 0, finished.output
    picture = pixels(tmp_path / 'none/pictures/2.png').copy()
    original = pixels(image)
    assert picture.shape[1] == 128
    assert np.array_equal(picture[18:82, 64:], original)
    expected = original.astype(float)
    expected[20:44, 20:50] = np.rint(0.5 * expected[20:44, 20:50] + 0.5 * np.array([250, 0, 0]))
    expected[[20, 43], 20:50] = expected[20:44, [20, 49]] = [250, 0, 0]
    drawn = picture[18:82, :64]
    tag = (slice(6, 21), slice(20, 60))
    assert tuple(drawn[8, 21]) == (250, 0, 0)
    for image in (drawn, expected):
        image[tag] = 0
    assert np.array_equal(drawn, expected)
    assert legend_colours(picture, 82) == [(250, 0, 0)]  # the kite; 'other' is no class

    picture = pixels(tmp_path / 'all/pictures/2.png')
    assert (picture[:64, :64] != original).any()
    found = {entry['class'] for entry in content(tmp_path / 'all/results.json')[0]['objects']}
    colours = dict(cat=(0, 0, 250), kite=(250, 0, 0))
    assert legend_colours(picture, 64) == [colours[name] for name in sorted(found)]
    objects = [content(tmp_path / n / 'results.json')[0]['objects'] for n in ('none', 'all')]
    assert objects[0] == objects[1]


def test_detection_tta_and_frames(detector, tmp_path):
    write_video(tmp_path / 'clip.avi', [detector.parent / 'images/2.png'] * 2)
    finished = predict(detector, 'clip.avi', '--tta', '--out', 'out', cwd=tmp_path)
    assert finished.code == 0, finished.output
    out = tmp_path / 'out'
    assert 'pictures/clip.mp4' in files(out)
    assert [(i['id'], i['file_name']) for i in content(out / 'images.json')['images']] == [
        (1, 'clip.avi/000000.png'),
        (2, 'clip.avi/000001.png'),
    ]
    categories = content(out / 'images.json')['categories']
    assert categories == [dict(id=1, name='cat'), dict(id=2, name='kite')]
    first, second = content(out / 'results.json')
    assert first['objects'] == second['objects']
    flipped = [dict(bbox=o['bbox'], score=o['score']) for o in first['objects']]
    plain = expected_objects(detector, '2')
    assert len(flipped) > len(plain)  # of both views


# Classification


def test_classes_of_an_image(tmp_path):
    write_images(tmp_path / 'images', {'0': (64, 64), '1': (90, 70)})
    arch = Golden('nalaformer_micro').arch
    config = tmp_path / 'classifier.py'
    config.write_text(CLASSIFIER.replace('{arch}', repr(arch)))
    cfg = Config.fromfile(config)
    init_default_scope('mmpretrain')
    model = MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor)).eval()
    torch.save(dict(state_dict=model.state_dict()), config.with_suffix('.pth'))
    finished = predict(config, 'images', '--out', 'out', '--batch-size', 2, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert files(tmp_path / 'out') == {'results.json', 'pictures/0.png', 'pictures/1.png'}
    for record in content(tmp_path / 'out/results.json'):
        image = cv2.imread(str(tmp_path / record['input']))
        resized = torch.from_numpy(cv2.resize(image, (64, 64))[..., ::-1].copy())
        batch = (resized.permute(2, 0, 1)[None].float() - 90) / 60
        with torch.no_grad():
            scores = model.head.fc(model.extract_feat(batch)[0])[0].softmax(0)
        order = scores.argsort(descending=True)
        assert [c['class'] for c in record['classes']] == [('ant', 'bee', 'fly')[i] for i in order]
        found = torch.tensor([c['score'] for c in record['classes']])
        torch.testing.assert_close(found, scores[order], rtol=0, atol=1e-5)
        picture = pixels(tmp_path / 'out' / record['picture'])
        height, width = image.shape[:2]
        assert np.array_equal(picture[:height, :width], image[..., ::-1])


# Bad input


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['nothing/*.png'], "INPUT 'nothing/*.png': no such file, it matches no .bmp"),
        (['.'], "INPUT '.': this folder holds no .bmp"),
        (['{image}', '--batch-size', '0'], '--batch-size 0: expected a positive number'),
        (['{image}', '--opacity', '1.5'], '--opacity 1.5: expected a number from 0 to 1'),
        (['{image}', '--no-pictures', '--opacity', '1'], '--no-pictures leaves --opacity nothing'),
        (['{image}', '--score-thr', '0.5'], '--score-thr is for detectors'),
        (['{image}', '--device', 'cuda:99'], '--device cuda:99: '),
        (['{image}', '--device', 'gpu'], '--device gpu: '),
        (['{image}', '--truth', 'absent'], '--truth absent: expected a folder of label maps'),
        (['{image}', '--truth', '.'], '--truth .: it has none of the images (0.png'),
        (['{image}', '{second}', '--truth', '{truth}/a'], 'would share'),
        (['{image}', '--out', 'full'], '--out full: expected a new or empty folder; move what'),
        (['{image}', '--tta', '--cfg-options', 'tta_model=None'], 'the config has no tta_model'),
        (['{image}', '--cfg-options', 'default_scope=mmrotate'], "default_scope is 'mmrotate'"),
        (
            ['{image}', '--cfg-options', 'model.backbone.arch.depths=2,1,1,1'],
            'seg.pth lacks ',
        ),
    ],
)
def test_one_line_says_what_is_wrong(segmentor, tmp_path, arguments, message):
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full/results.txt').write_text('precious')
    folder = segmentor.parent
    names = dict(
        image=folder / 'images/a/0.png', second=folder / 'images/b/0.png', truth=folder / 'truth'
    )
    arguments = [argument.format(**names) for argument in arguments]
    if '--out' not in arguments:
        arguments += ['--out', 'out']
    finished = predict(segmentor, *arguments, cwd=tmp_path)
    assert finished.code == 1
    (line,) = [line for line in finished.output.splitlines() if line.startswith('error: ')]
    assert message in line
    assert finished.output.rstrip().endswith(line)
    assert files(tmp_path) == {'full/results.txt', 'output.log'}
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('[1, 2', 'is no JSON: '),
        ('[]', 'expected an object with images, annotations and categories, got []'),
        ('{"images": [{"id": 1}]}', 'categories must be a list, got None'),
    ],
)
def test_truth_that_is_no_coco_file(detector, tmp_path, text, reason):
    (tmp_path / 'truth.json').write_text(text)
    image = detector.parent / 'images/0.png'
    finished = predict(detector, image, '--truth', 'truth.json', '--out', 'out', cwd=tmp_path)
    assert finished.code == 1
    assert f'error: --truth truth.json: {reason}' in finished.output


def test_truth_of_another_size_is_reported_and_the_rest_done(segmentor, tmp_path):
    (tmp_path / 'truth').mkdir()
    Image.fromarray(np.ones((5, 7), np.uint8)).save(tmp_path / 'truth/0_map.png')
    image = segmentor.parent / 'images/a/0.png'
    (tmp_path / 'broken.png').touch()
    inputs = ['broken.png', image]
    finished = predict(segmentor, *inputs, '--truth', 'truth', '--out', 'out', cwd=tmp_path)
    assert finished.code == 1
    lines = finished.output[finished.output.index('--truth truth: ') :].splitlines()
    assert lines[:2] == [
        '--truth truth: none for 1 of 2 images',
        'error: 1 of 2 inputs could not be read:',
    ]
    assert lines[2].startswith('  broken.png: ')
    assert lines[3:] == [
        '1 of 2 inputs have a truth that could not be used:',
        f'  {image}: its truth truth/0_map.png has the shape (5, 7), the image (64, 64)',
    ]
    assert files(tmp_path / 'out') == {'results.json', 'labels/0.png', 'pictures/0.png'}


def test_classes_must_suffice(segmentor, tmp_path):
    checkpoint = torch.load(segmentor.with_suffix('.pth'), weights_only=False)
    checkpoint['meta']['dataset_meta'] = dict(classes=['sea'], palette=[[1, 2, 3]])
    torch.save(checkpoint, tmp_path / 'one.pth')
    image = segmentor.parent / 'images/a/0.png'
    finished = run_tool('predict.py', segmentor, 'one.pth', image, '--out', 'out', cwd=tmp_path)
    assert finished.code == 1
    assert 'the model knows a class 1, but checkpoint or config name 1 classes: sea' in (
        finished.output
    )
    assert files(tmp_path / 'out') == set()


# Parts


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ('inputs', 'names'),
    [
        (['a'], ['1', '2', 'deep/3']),
        (['a/2.PNG', 'a/1.jpg'], ['2', '1']),
        (['a', 'b'], ['a/1', 'a/2', 'a/deep/3', 'b/1']),
        (['b/1.png', 'a/*', 'b'], ['b/1', 'a/1', 'a/2', 'a/deep/3']),
        (['a/2.PNG', 'b'], ['2', '1']),
        (['*/d*', 'b/1.png'], ['a/deep/3', '1']),
        (['[ab]/**/[13].*'], ['a/1', 'a/deep/3', 'b/1']),
        (['c'], ['clip.mkv', 'clip.mp4']),
        (['c', 'a/1.jpg'], ['c/clip.mkv', 'c/clip.mp4', 'a/1']),
        (['g'], ['1', '2.jpg', '2', '2.png', '3']),  # only those that clash
        (['d'], ['x', 'x']),  # an image and a video never share a file
        (['e'], ['1.jpg', '1.jpg.png', '1.png']),
        (['f[1]'], ['1']),
        (['f[[]1]/*'], ['f[1]/1']),
    ],
)
def test_sources_and_their_names(tmp_path, monkeypatch, inputs, names):
    touch(tmp_path, 'a/1.jpg', 'a/2.PNG', 'a/deep/3.webp', 'a/notes.txt', 'a/._1.jpg', 'b/1.png')
    touch(tmp_path, 'c/clip.mp4', 'c/clip.mkv', 'd/x.png', 'd/x.avi')
    touch(tmp_path, 'e/1.jpg', 'e/1.png', 'e/1.jpg.png', 'f[1]/1.png')
    touch(tmp_path, 'g/1.jpg', 'g/2.jpg', 'g/2.png', 'g/3.webp', 'g/2.mp4')
    monkeypatch.chdir(tmp_path)
    assert [source.name for source in find_sources(inputs)] == names


def test_a_named_file_is_tried_whatever_its_ending(tmp_path):
    write_images(tmp_path, {'0': (8, 8)})
    (tmp_path / '0.png').rename(tmp_path / '0.dat')
    (source,) = find_sources([str(tmp_path / '0.dat')])
    assert read_image(source.path, dict(type='LoadImageFromFile')).shape == (8, 8, 3)


@pytest.mark.parametrize('kind', ['absent', 'empty', 'text', 'half', 'folder'])
@pytest.mark.parametrize('ending', ['.jpg', '.png', '.bmp', '.webp'])
def test_unreadable_images(tmp_path, ending, kind):
    path = tmp_path / f'image{ending}'
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    if kind == 'folder':
        path.mkdir()
    elif kind == 'half':
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind != 'absent':
        path.write_text('' if kind == 'empty' else 'text')
    with pytest.raises(ReadError):
        read_image(path, dict(type='LoadImageFromFile'))


@pytest.mark.parametrize('share', [0.5, 0.87])
def test_a_video_cut_short_yields_what_there_is_and_fails(tmp_path, share):
    write_images(tmp_path, {str(i): (64, 64) for i in range(20)})
    write_video(tmp_path / 'v.avi', [tmp_path / f'{i}.png' for i in range(20)])
    whole = (tmp_path / 'v.avi').read_bytes()
    (source,) = find_sources([str(tmp_path / 'v.avi')])
    assert len(list(read_video(source))) == 20
    (tmp_path / 'v.avi').write_bytes(whole[: int(share * len(whole))])
    frames = []
    with pytest.raises(ReadError) as error:
        frames.extend(_keep(read_video(source), frames))
    assert str(error.value) == f'it ends after {len(frames)} of 20 frames'
    assert abs(len(frames) - 20 * share) <= 3


@pytest.mark.parametrize(
    ('rate', 'announced', 'lacking', 'fails'),
    [
        (25, 20, 1, False),
        (25, 20, 2, True),
        (25, 200, 10, False),
        (25, 200, 11, True),
        (25, 10000, 25, False),
        (25, 10000, 26, True),
        (25, 0, -3, False),  # it announces none
    ],
)
def test_how_many_frames_a_video_may_lack(tmp_path, monkeypatch, rate, announced, lacking, fails):
    class Video:
        def __init__(self, path):
            self.left = announced - lacking

        def get(self, key):
            sides = {cv2.CAP_PROP_FRAME_WIDTH: 64, cv2.CAP_PROP_FRAME_HEIGHT: 48}
            return {cv2.CAP_PROP_FRAME_COUNT: announced, cv2.CAP_PROP_FPS: rate, **sides}[key]

        def read(self):
            self.left -= 1
            return self.left >= 0, None

    (tmp_path / 'v.mp4').touch()
    (source,) = find_sources([str(tmp_path / 'v.mp4')])
    monkeypatch.setattr(cv2, 'VideoCapture', Video)
    with pytest.raises(ReadError, match='it ends after') if fails else nullcontext():
        assert sum(1 for _ in read_video(source)) == announced - lacking


@pytest.mark.parametrize(('limit', 'readable'), [(64 * 64, True), (64 * 64 - 1, False)])
def test_frames_of_a_video_are_bounded(segmentor, limit, readable):
    (source,) = find_sources([str(segmentor.parent / 'clip.avi')])
    with nullcontext() if readable else pytest.raises(ReadError, match='claims 64x64 pixels'):
        assert len(list(read_video(source, limit))) == 3


def _keep(items, kept):
    for item in items:
        kept.append(item)
    return []


@pytest.mark.parametrize('opacity', [0, 0.3, 1])
def test_blend(opacity):
    image = np.array([[[0, 100, 200], [9, 9, 9], [50, 60, 70]]], np.uint8)
    labels = np.array([[0, 255, 1]])
    expected = image.astype(float)
    expected[0, 0] = (1 - opacity) * image[0, 0] + opacity * np.array(PALETTE[0])
    expected[0, 2] = (1 - opacity) * image[0, 2] + opacity * np.array(PALETTE[1])
    assert np.array_equal(blend(image, labels, PALETTE, opacity), np.rint(expected))


def test_pictures_of_a_video_have_one_even_size():
    panel = Panel('', np.full((33, 51, 3), 7, np.uint8))
    names = ['ground', 'Übergröße', 'дерево', 'x' * 30, *map(str, range(300))]
    entries = [Entry((i % 256, 0, 99), name) for i, name in enumerate(names)]
    sizes = set()
    for shown in ([], entries[:2], entries):
        picture = compose([panel], shown, names, fixed=True)
        assert np.array_equal(picture[:33, :51], panel.picture)
        sizes.add(picture.shape)
    ((height, width, _),) = sizes
    assert height % 2 == width % 2 == 0
    assert height < 33 + 4 * 18
    free = compose([panel], entries, names)
    assert len({tuple(c) for c in free[33:].reshape(-1, 3)} & {e.colour for e in entries}) == len(
        {e.colour for e in entries}
    )


def test_json_list_is_whole_or_not_there(tmp_path):
    with JsonList(tmp_path / 'empty.json'):
        assert files(tmp_path) == {'.empty.json.partial'}
    assert content(tmp_path / 'empty.json') == []
    with (
        pytest.raises(RuntimeError, match='stop'),
        JsonList(tmp_path / 'stopped.json') as entries,
    ):
        entries.append(1)
        raise RuntimeError('stop')
    assert files(tmp_path) == {'empty.json'}


# The toolboxes' own functions with our configs


@pytest.mark.parametrize('kind', ['mmseg', 'mmdet'])
def test_three_lines_of_python(tmp_path, kind):
    configs = Path(__file__).parents[1] / 'configs'
    name = dict(
        mmseg='shapes/upernet_nala-xt_shapes.py', mmdet='shapes/mask-rcnn_nala-xt_fpn_shapes.py'
    )[kind]
    cfg = Config.fromfile(configs / name)
    init_default_scope(kind)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model).eval()
    save_with_meta(model, tmp_path / 'model', **cfg.metainfo)
    write_images(tmp_path, {'image': (64, 96)})
    image, checkpoint = str(tmp_path / 'image.png'), str(tmp_path / 'model.pth')
    if kind == 'mmseg':
        loaded = init_model(str(configs / name), checkpoint, device='cpu')
        result = inference_model(loaded, image).pred_sem_seg.data
        assert result.shape == (1, 64, 96)
    else:
        loaded = init_detector(str(configs / name), checkpoint, device='cpu')
        result = inference_detector(loaded, image).pred_instances
        assert result.bboxes.shape == (len(result), 4)
    assert loaded.dataset_meta['classes'] == cfg.metainfo.classes
    batch = dict(inputs=[torch.from_numpy(cv2.imread(image)).permute(2, 0, 1)])
    with torch.no_grad():
        tensor = model.data_preprocessor(batch)['inputs'][0]
        stages = [m.backbone(tensor[None]) for m in (model, loaded)]
    for first, second in zip(*stages, strict=True):
        assert torch.equal(first, second)
