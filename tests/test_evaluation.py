"""What tools/test.py predicts, measures and exports, against computations of its own."""

import itertools
import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from PIL import Image
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from toy import Finished, run_tool, write_detection_config, write_segmentation_config

from mmnala.datasets.shapes import make_dataset
from mmnala.engine import InstanceTTAModel

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
SLIDE = ['model.test_cfg.mode=slide', 'model.test_cfg.crop_size=49,65']
SLIDE += ['model.test_cfg.stride=33,43']
DET_TTA = ['tta_model.type=DetTTAModel', 'tta_model.tta_cfg.max_per_img=9']
DET_TTA += ['tta_model.tta_cfg.nms.iou_threshold=0.5']

TTA_PIPELINE = f"""
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='Resize', scale_factor=ratio, keep_ratio=True) for ratio in {SCALES}],
        [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
        [dict(type='LoadAnnotations')], [dict(type='PackSegInputs')]])]
"""

MASK_RCNN = """
roi_layer = dict(
    type='SingleRoIExtractor', roi_layer=dict(type='RoIAlign', output_size=7, sampling_ratio=0),
    out_channels=16, featmap_strides=[8, 16, 32])
model = dict(
    type='MaskRCNN', data_preprocessor=model['data_preprocessor'], backbone=backbone,
    neck=model['neck'], train_cfg=None,
    rpn_head=dict(
        type='RPNHead', in_channels=16, feat_channels=16,
        anchor_generator=dict(
            type='AnchorGenerator', scales=[2], ratios=[1.0], strides=[8, 16, 32])),
    roi_head=dict(
        type='StandardRoIHead', bbox_roi_extractor=roi_layer,
        bbox_head=dict(
            type='Shared2FCBBoxHead', in_channels=16, fc_out_channels=16, roi_feat_size=7,
            num_classes=2),
        mask_roi_extractor=roi_layer,
        mask_head=dict(
            type='FCNMaskHead', num_convs=1, in_channels=16, conv_out_channels=16,
            num_classes=2)),
    test_cfg=dict(
        rpn=dict(nms_pre=100, max_per_img=50, nms=dict(type='nms', iou_threshold=0.7),
                 min_bbox_size=0),
        rcnn=dict(score_thr=0.0, nms=dict(type='nms', iou_threshold=0.5), max_per_img=40,
                  mask_thr_binary=0.5)))
test_dataloader['dataset'].update(
    ann_file='{ann_file}', data_prefix=dict(img='images'), data_root='{data}',
    metainfo=dict(classes=('cat', 'kite')))
test_pipeline[1] = dict(type='Resize', scale=(96, 96), keep_ratio=True)
test_pipeline[2] = dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
test_evaluator = dict(
    type='CocoMetric', metric=['bbox', 'segm'], ann_file='{data}/{ann_file}')
"""
CATEGORIES = [dict(id=17, name='cat'), dict(id=38, name='kite')]


def build_with_weights(config: Path) -> torch.nn.Module:
    """The config's model with weights that tell classes apart, saved beside the config."""
    from mmengine.registry import MODELS

    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and 'backbone' not in name:
            torch.nn.init.kaiming_normal_(weight)
    if hasattr(model, 'decode_head'):
        with torch.no_grad():  # no class may win everywhere
            logits = infer_whole(model, torch.randn(1, 3, 97, 97))
            model.decode_head.conv_seg.bias -= logits.mean((0, 2, 3))
    torch.save(dict(state_dict=model.state_dict()), config.with_suffix('.pth'))
    return model


def tool(config: Path, *arguments: object, cwd: Path) -> Finished:
    return run_tool(
        'test.py', config, config.with_suffix('.pth'), '--work-dir', 'work', *arguments, cwd=cwd
    )


def metric(finished: Finished, name: str) -> float:
    assert finished.code == 0, finished.output
    (value,) = re.findall(rf'{name}: (-?[\d.]+)', finished.output)
    return float(value)


def maps(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.asarray(Image.open(path)) for path in folder.iterdir()}


@pytest.fixture(scope='module')
def segmentation(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp('segmentation')
    draw = np.random.default_rng(0)
    for kind in ('images', 'masks'):
        (folder / kind / 'val').mkdir(parents=True)
    for index, (height, width) in enumerate([(97, 97), (65, 110)]):
        image = draw.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC)
        mask = draw.choice([0, 1, 255], (height, width), p=[0.5, 0.4, 0.1]).astype(np.uint8)
        Image.fromarray(image).save(folder / f'images/val/{index}.png')
        Image.fromarray(mask).save(folder / f'masks/val/{index}.png')
    config = write_segmentation_config(folder / 'seg.py', folder, TTA_PIPELINE)
    return config, build_with_weights(config)


def infer_whole(model: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    logits = model.decode_head(model.backbone(image))
    return torch.nn.functional.interpolate(logits, image.shape[2:], mode='bilinear')


def infer_slide(model, image, crop=(49, 65), stride=(33, 43)) -> torch.Tensor:
    starts = [
        sorted({min(start, max(side - c, 0)) for start in range(0, max(side - c, 0) + s, s)})
        for side, c, s in zip(image.shape[2:], crop, stride, strict=True)
    ]
    total, count = 0.0, 0.0
    for top, left in itertools.product(*starts):
        window = (..., slice(top, top + crop[0]), slice(left, left + crop[1]))
        logits = torch.zeros(1, model.out_channels, *image.shape[2:])
        logits[window] = infer_whole(model, image[window])
        inside = torch.zeros(image.shape[2:])
        inside[window] = 1
        total, count = total + logits, count + inside
    return total / count


@torch.no_grad()
def predict(model, image: np.ndarray, infer=infer_whole, tta: bool = False) -> np.ndarray:
    """Label map of an RGB image by the mean of the softmax of all scales and flips."""
    height, width = image.shape[:2]
    views = itertools.product(SCALES, (False, True)) if tta else [(1, False)]
    means = []
    for scale, flip in views:
        # mmcv rounds half up.
        size = (int(width * scale + 0.5), int(height * scale + 0.5))
        scaled = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        scaled = scaled[:, ::-1] if flip else scaled
        batch = torch.from_numpy(scaled.transpose(2, 0, 1).astype(np.float32))[None]
        logits = infer(model, (batch - 90) / 60)
        logits = logits.flip(3) if flip else logits
        logits = torch.nn.functional.interpolate(logits, (height, width), mode='bilinear')
        means.append(logits.softmax(1))
    return torch.stack(means).mean(0)[0].argmax(0).numpy()


@pytest.mark.parametrize('tta', [False, True], ids=['plain', 'tta'])
@pytest.mark.parametrize('mode', ['whole', 'slide'])
def test_label_maps_and_miou(segmentation, tmp_path, mode, tta):
    config, model = segmentation
    options = ['--cfg-options', *SLIDE] if mode == 'slide' else []
    options += ['--tta'] * tta
    finished = tool(config, '--out', 'maps', *options, cwd=tmp_path)

    infer = infer_slide if mode == 'slide' else infer_whole
    confusion = np.zeros((2, 2), int)
    predicted = maps(tmp_path / 'maps')
    assert predicted.keys() == {'0', '1'}
    for name, found in predicted.items():
        image = np.asarray(Image.open(config.parent / f'images/val/{name}.png'))
        expected = predict(model, image, infer, tta)
        assert (found != expected).mean() < 1e-3  # ties
        truth = np.asarray(Image.open(config.parent / f'masks/val/{name}.png'))
        valid = truth != 255
        np.add.at(confusion, (truth[valid], found[valid]), 1)
    assert confusion.min() > 0
    hits = confusion.diagonal()
    ious = hits / (confusion.sum(0) + confusion.sum(1) - hits)
    assert metric(finished, 'mIoU') == pytest.approx(100 * ious.mean(), abs=0.006)


@pytest.mark.parametrize('crop', [(97, 97), (200, 120)])
def test_one_window_is_the_whole_image(segmentation, crop):
    _, model = segmentation
    image = torch.randn(1, 3, 97, 97)
    model.test_cfg.update(crop_size=crop, stride=(33, 33))
    with torch.no_grad():
        slid = model.slide_inference(image, [dict(img_shape=(97, 97))])
        whole = model.whole_inference(image, [dict(img_shape=(97, 97))])
    assert torch.equal(slid, whole)


def test_windows_are_averaged(segmentation):
    _, model = segmentation
    image = torch.randn(1, 3, 97, 97)
    model.test_cfg.update(crop_size=(49, 49), stride=(33, 33))
    with torch.no_grad():
        slid = model.slide_inference(image, [dict(img_shape=(97, 97))])
        expected = infer_slide(model, image, (49, 49), (33, 33))
        assert (slid - model.whole_inference(image, [dict(img_shape=(97, 97))])).abs().max() > 1e-2
    torch.testing.assert_close(slid, expected)


def server_config(folder: Path, dataset: str, classes: int, images: str) -> Path:
    lines = f"""
model['decode_head']['num_classes'] = {classes}
test_dataloader['dataset'] = dict(
    type='{dataset}', data_root='{folder}/data', data_prefix=dict(img_path='{images}'),
    pipeline=test_pipeline)
{TTA_PIPELINE}"""
    return write_segmentation_config(folder / 'server.py', folder, lines)


def test_ade20k_server_format(tmp_path):
    make_dataset(tmp_path / 'data', num_train=1, num_val=2, size=48, layout='ade20k')
    shutil.rmtree(tmp_path / 'data/annotations')
    config = server_config(tmp_path, 'ADE20KDataset', 150, 'images/validation')
    model = build_with_weights(config)
    finished = tool(config, '--format-only', '--out', 'maps', cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert 'mIoU' not in finished.output

    predicted = maps(tmp_path / 'maps')
    assert predicted.keys() == {'ADE_val_00000001', 'ADE_val_00000002'}
    for name, found in predicted.items():
        image = cv2.imread(str(tmp_path / f'data/images/validation/{name}.jpg'))[..., ::-1]
        expected = predict(model, np.ascontiguousarray(image)) + 1
        assert len(np.unique(expected)) > 3
        assert found.dtype == np.uint8
        assert (found != expected).mean() < 1e-3


@pytest.mark.parametrize('labelled', [False, True])
def test_cityscapes_server_format(tmp_path, labelled):
    # road to bicycle, from Cityscapes' table of labels
    ids = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    make_dataset(tmp_path / 'data', num_train=1, num_val=2, size=48, layout='cityscapes')
    config = server_config(tmp_path, 'CityscapesDataset', 19, 'leftImg8bit/val')
    model = build_with_weights(config)
    if labelled:
        prefix = 'test_dataloader.dataset.data_prefix.seg_map_path=gtFine/val'
        options = ['--cfg-options', prefix]
    else:
        shutil.rmtree(tmp_path / 'data/gtFine')
        options = ['--tta', '--format-only']
    finished = tool(config, '--out', 'maps', *options, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert ('mIoU' in finished.output) == labelled

    predicted = maps(tmp_path / 'maps')
    images = {path.stem: path for path in (tmp_path / 'data/leftImg8bit/val').rglob('*.png')}
    assert predicted.keys() == images.keys()
    for name, found in predicted.items():
        assert re.fullmatch(r'[a-z]+_\d{6}_\d{6}_leftImg8bit', name)
        image = np.asarray(Image.open(images[name]))
        expected = np.take(ids, predict(model, image, tta=not labelled))
        assert len(np.unique(expected)) > 3
        assert (found != expected).mean() < 1e-3


@pytest.fixture(scope='module')
def instances(tmp_path_factory) -> Path:
    """A Mask R-CNN config on images without annotations, as COCO's test-dev has them."""
    folder = tmp_path_factory.mktemp('instances')
    (folder / 'images').mkdir()
    draw = np.random.default_rng(0)
    images = []
    for image_id, (height, width) in ((139, (64, 80)), (285, (75, 50)), (632, (64, 64))):
        pixels = draw.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        name = f'{image_id:012d}.jpg'
        Image.fromarray(pixels).resize((width, height)).save(folder / 'images' / name)
        images.append(dict(id=image_id, file_name=name, height=height, width=width))
    content = dict(info={}, licenses=[], images=images, categories=CATEGORIES)
    (folder / 'image_info.json').write_text(json.dumps(content))
    config = instances_config(folder / 'instances.py', 'image_info.json')
    build_with_weights(config)
    return config


def instances_config(path: Path, ann_file: str) -> Path:
    lines = MASK_RCNN.replace('{ann_file}', ann_file).replace('{data}', str(path.parent))
    return write_detection_config(path, path.parent, lines)


@pytest.fixture(scope='module')
def exported(instances, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('exported')
    finished = tool(instances, '--format-only', '--out', 'coco', cwd=folder)
    assert finished.code == 0, finished.output
    assert 'mAP' not in finished.output
    return folder / 'coco'


def test_coco_server_format(instances, exported):
    assert {path.name for path in exported.iterdir()} == {'results.bbox.json', 'results.segm.json'}
    coco = COCO(instances.parent / 'image_info.json')
    sizes = {image['id']: (image['height'], image['width']) for image in coco.dataset['images']}
    boxes = json.loads((exported / 'results.bbox.json').read_text())
    assert {box['image_id'] for box in boxes} == sizes.keys()
    assert {box['category_id'] for box in boxes} == {17, 38}
    for box in boxes:
        height, width = sizes[box['image_id']]
        left, top, right, bottom = np.cumsum(np.reshape(box['bbox'], (2, 2)), 0).ravel()
        assert 0 <= left <= right <= width + 1e-3
        assert 0 <= top <= bottom <= height + 1e-3
    masks = json.loads((exported / 'results.segm.json').read_text())
    assert [mask['score'] for mask in masks] == [box['score'] for box in boxes]
    for mask in masks:
        assert tuple(mask['segmentation']['size']) == sizes[mask['image_id']]
    coco.dataset['annotations'] = []
    coco.createIndex()
    assert len(coco.loadRes(str(exported / 'results.segm.json')).anns) == len(masks)


@pytest.fixture(scope='module')
def labelled(instances, exported) -> Path:
    """The same config, with some shifted predictions of the model as the truth."""
    folder = instances.parent
    content = json.loads((folder / 'image_info.json').read_text())
    content['annotations'] = []
    for index, mask in enumerate(json.loads((exported / 'results.segm.json').read_text())):
        binary = rle.decode(mask['segmentation'])
        if index % 3 == 0 or not binary.any():
            continue
        binary = np.asfortranarray(np.roll(binary, index % 4, axis=1))
        coded = rle.encode(binary)
        annotation = dict(
            id=index + 1,
            image_id=mask['image_id'],
            category_id=mask['category_id'],
            iscrowd=0,
            bbox=rle.toBbox(coded).tolist(),
            area=int(binary.sum()),
            segmentation=dict(coded, counts=coded['counts'].decode()),
        )
        content['annotations'].append(annotation)
    (folder / 'instances.json').write_text(json.dumps(content))
    shutil.copy(instances.with_suffix('.pth'), folder / 'labelled.pth')
    return instances_config(folder / 'labelled.py', 'instances.json')


def average_precision(truth: COCO, results: Path, kind: str) -> float:
    found = json.loads(results.read_text())
    for result in found if kind == 'segm' else []:
        del result['bbox']  # pycocotools takes the areas of boxes otherwise
    evaluation = COCOeval(truth, truth.loadRes(found), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[0]


@pytest.mark.parametrize('tta', [False, True], ids=['plain', 'tta'])
def test_box_and_mask_ap(labelled, tmp_path, tta):
    options = ['--tta'] if tta else ['--show-dir', 'drawn']
    finished = tool(labelled, '--out', 'coco', *options, cwd=tmp_path)
    truth = COCO(labelled.parent / 'instances.json')
    for kind in ('bbox', 'segm'):
        expected = average_precision(truth, tmp_path / f'coco/results.{kind}.json', kind)
        assert 0.02 < expected < 0.98
        assert metric(finished, f'coco/{kind}_mAP') == pytest.approx(expected, abs=6e-4)
    if not tta:
        names = {path.name for path in (tmp_path / 'drawn').iterdir()}
        assert names == {path.name for path in (labelled.parent / 'images').iterdir()}
        assert list((tmp_path / 'work').glob('*/*.json'))


def views(size: tuple[int, int], flips: list) -> list:
    """Data samples of one image, whose masks are their boxes filled."""
    from mmdet.structures import DetDataSample

    draw = np.random.default_rng(0)
    samples = []
    for direction in flips:
        corners = np.sort(draw.integers(0, min(size), (6, 2, 2)), axis=1)
        boxes = torch.from_numpy(corners.reshape(6, 4)).float()
        boxes[:, 2:] += 4
        instances = InstanceData(
            bboxes=boxes,
            scores=torch.from_numpy(draw.random(6)).float(),
            labels=torch.from_numpy(draw.integers(0, 2, 6)),
            masks=filled(boxes, size),
        )
        meta = dict(ori_shape=size, flip=direction is not None, flip_direction=direction)
        samples.append(DetDataSample(pred_instances=instances, metainfo=meta))
    return samples


def filled(boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[max(top, 0) : bottom, max(left, 0) : right] = True
    return masks


@pytest.mark.parametrize(
    'flips',
    [[None], [None, 'horizontal'], ['vertical', 'diagonal', None]],
    ids=lambda flips: ','.join(map(str, flips)),
)
def test_masks_follow_their_boxes_through_tta(flips):
    from mmdet.models.test_time_augs import DetTTAModel

    size = (40, 60)
    cfg = Config(dict(nms=dict(type='nms', iou_threshold=0.3), max_per_img=9))
    module = torch.nn.Module()
    module.test_step = None
    (merged,) = InstanceTTAModel(cfg, module=module).merge_preds([views(size, flips)])
    found = merged.pred_instances

    boxes_only = views(size, flips)
    for sample in boxes_only:
        del sample.pred_instances.masks
    (expected,) = DetTTAModel(cfg, module=module).merge_preds([boxes_only])
    for name in ('bboxes', 'scores', 'labels'):
        assert torch.equal(found[name], expected.pred_instances[name])
    assert 1 < len(found) <= 9
    assert torch.equal(found.masks, filled(found.bboxes, size))


def test_tta_without_instances():
    samples = views((40, 60), [None, 'horizontal'])
    for sample in samples:
        sample.pred_instances = sample.pred_instances[:0]
    module = torch.nn.Module()
    module.test_step = None
    cfg = dict(nms=dict(type='nms', iou_threshold=0.3), max_per_img=9)
    (merged,) = InstanceTTAModel(cfg, module=module).merge_preds([samples])
    assert merged.pred_instances.masks.shape == (0, 40, 60)


@pytest.mark.parametrize(
    ('task', 'arguments', 'message'),
    [
        ('segmentation', ['--format-only'], '--format-only needs --out'),
        ('segmentation', ['--out', 'full'], '--out full: expected a new or empty folder'),
        ('segmentation', ['--out', 'old.pkl'], '--out old.pkl: exists already; move it'),
        (
            'segmentation',
            ['--out', 'new', '--cfg-options', 'test_evaluator.type=DepthMetric'],
            "--out new: expected a name ending in .pkl .*the config's is DepthMetric",
        ),
        (
            'segmentation',
            ['--cfg-options', 'model.test_cfg.mode=slide'],
            'model.test_cfg with mode=slide: .*got crop_size=None and stride=None',
        ),
        (
            'segmentation',
            ['--cfg-options', *SLIDE[:2], 'model.test_cfg.stride=60,43'],
            r'got crop_size=\[49, 65\] and stride=\[60, 43\]',
        ),
        ('instances', ['--out', 'all.json'], '--out all.json: expected a name ending in .pkl'),
        (
            'instances',
            ['--format-only', '--out', 'new', '--cfg-options', 'test_evaluator.ann_file=None'],
            '--format-only: CocoMetric needs an ann_file',
        ),
        (
            'instances',
            ['--tta', '--cfg-options', *DET_TTA],
            '--tta: tta_model.type is DetTTAModel, which has no masks',
        ),
    ],
)
def test_bad_options_are_named(request, tmp_path, task, arguments, message):
    config = request.getfixturevalue(task)
    config = config[0] if isinstance(config, tuple) else config
    (tmp_path / 'full').mkdir()
    for name in ('full/0.png', 'old.pkl'):
        (tmp_path / name).write_text('earlier results')
    finished = tool(config, *arguments, cwd=tmp_path)
    assert finished.code == 1
    assert re.search(f'^error: .*{message}', finished.output, re.M), finished.output
    assert 'Traceback' not in finished.output
    for name in ('full/0.png', 'old.pkl'):
        assert (tmp_path / name).read_text() == 'earlier results'
