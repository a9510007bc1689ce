"""The shapes data set: what is on disk, what both toolboxes read of it, and what it asks for."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine import Config
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from mmnala.datasets import official, shapes
from mmnala.datasets.layouts import OFFICIAL_LAYOUTS
from mmnala.datasets.shapes import CLASSES, PALETTE, draw_scene, make_dataset

TOOL = Path(__file__).parents[1] / 'tools' / 'make_demo_dataset.py'
NUM_TRAIN, NUM_VAL, SIZE = 40, 20, 96
SYNSETS = {
    'star': 'n02317335',
    'spotted ball': 'n04254680',
    'wall': 'n04326547',
    'striped ball': 'n04540053',
    'window': 'n04589890',
    'poster': 'n07248320',
}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'shapes'
    make_dataset(folder, NUM_TRAIN, NUM_VAL, SIZE)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def read_split(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All images (N, H, W, 3) and semantic maps (N, H, W), as stored."""
    images = sorted((root / 'images' / split).iterdir())
    maps = [root / 'annotations' / split / f'{image.stem}.png' for image in images]
    return (
        np.stack([cv2.imread(str(path)) for path in images]),
        np.stack([cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in maps]),
    )


def mean_iou(predicted: np.ndarray, truth: np.ndarray) -> float:
    ious = [
        ((predicted == label) & (truth == label)).sum()
        / ((predicted == label) | (truth == label)).sum()
        for label in range(len(CLASSES))
    ]
    return float(np.mean(ious))


def test_same_arguments_same_bytes(tmp_path, root):
    make_dataset(tmp_path / 'again', NUM_TRAIN, NUM_VAL, SIZE, workers=1)
    assert contents(tmp_path / 'again') == contents(root)


def test_an_image_depends_on_seed_split_and_index_alone(tmp_path, root):
    make_dataset(tmp_path / 'fewer', 3, 2, SIZE, workers=3)
    fewer, full = contents(tmp_path / 'fewer'), contents(root)
    images = [name for name in fewer if not name.endswith('.json')]
    assert len(images) == 2 * (3 + 2)
    assert all(fewer[name] == full[name] for name in images)

    scenes = [(0, 'training', 0), (0, 'training', 1), (0, 'validation', 0), (1, 'training', 0)]
    pictures = [draw_scene(*scene, SIZE).image.tobytes() for scene in scenes]
    assert len(set(pictures)) == len(scenes)


def test_layout(root):
    names = set(contents(root))
    expected = {'meta.json'}
    for split, prefix, number in (('training', 'train', 40), ('validation', 'val', 20)):
        expected.add(f'annotations/instances_{split}.json')
        for index in range(1, number + 1):
            expected.add(f'images/{split}/ADE_{prefix}_{index:08d}.jpg')
            expected.add(f'annotations/{split}/ADE_{prefix}_{index:08d}.png')
    assert names == expected
    assert json.loads((root / 'meta.json').read_text()) == {
        'num_train': NUM_TRAIN,
        'num_val': NUM_VAL,
        'size': SIZE,
        'seed': 0,
        'classes': list(CLASSES),
        'palette': [list(colour) for colour in PALETTE],
    }


@pytest.mark.parametrize('split', shapes.SPLITS)
def test_every_class_has_its_share_of_the_pixels(root, split):
    images, maps = read_split(root, split)
    assert images.dtype == maps.dtype == np.uint8
    assert images.shape == (*maps.shape, 3)
    shares = np.bincount(maps.ravel(), minlength=len(CLASSES) + 1) / maps.size
    assert shares.size == len(CLASSES) + 1
    assert shares[0] == 0
    assert 0.3 < shares[1] < 0.7
    assert ((shares[2:] > 0.02) & (shares[2:] < 0.25)).all(), shares


def test_wall_surrounds_windows_and_not_posters():
    wall_around: dict[str, list[float]] = {'window': [], 'poster': []}
    for index in range(60):
        scene = draw_scene(0, 'training', index, SIZE)
        wall = scene.semantic == CLASSES.index('wall')
        for instance in scene.instances:
            name = CLASSES[instance.label]
            if name in wall_around:
                mask = instance.mask.astype(np.uint8)
                rim = (cv2.dilate(mask, np.ones((5, 5))) > mask).astype(bool)
                wall_around[name].append(wall[rim].mean())
    assert min(map(len, wall_around.values())) >= 30
    assert np.mean(wall_around['window']) > 0.6
    assert np.mean(wall_around['poster']) < 0.05


def test_coco_masks_agree_with_the_semantic_maps(root):
    coco = COCO(root / 'annotations' / 'instances_training.json')
    names = {'polygons': 0, 'run lengths': 0, 'crowds': 0}
    ious = []
    _, maps = read_split(root, 'training')
    for image_id, semantic in zip(sorted(coco.imgs), maps, strict=True):
        rebuilt = np.ones_like(semantic)
        for annotation in coco.imgToAnns[image_id]:
            mask = coco.annToMask(annotation).astype(bool)
            label = annotation['category_id'] + 1
            is_polygon = isinstance(annotation['segmentation'], list)
            if is_polygon:
                assert all(len(piece) >= 6 for piece in annotation['segmentation'])
            else:
                assert (semantic[mask] == label).all()
                assert mask.sum() == annotation['area']
                x, y, w, h = coco_mask.toBbox(coco_mask.encode(np.asfortranarray(mask)))
                assert [x, y, w, h] == annotation['bbox']
            names['polygons' if is_polygon else 'run lengths'] += 1
            names['crowds'] += annotation['iscrowd']
            assert not (annotation['iscrowd'] and is_polygon)
            rebuilt[mask] = label
        for label in np.unique(semantic):
            ours, theirs = rebuilt == label, semantic == label
            ious.append((ours & theirs).sum() / (ours | theirs).sum())
    assert names['polygons'] > names['run lengths'] > names['crowds'] >= 3
    assert np.mean(ious) > 0.98
    assert np.min(ious) > 0.9


def test_colour_alone_does_not_give_the_class_away(root):
    """Nearest neighbours in colour, with the neighbourhood's mean for a hint of the context."""

    def features(images):
        blurred = np.stack([cv2.blur(image, (7, 7)) for image in images])
        return np.concatenate((images, blurred), -1).reshape(-1, 6).astype(np.float32)

    (train_images, train_maps), (val_images, val_maps) = (
        read_split(root, split) for split in shapes.SPLITS
    )
    rng = np.random.default_rng(0)
    train = rng.choice(train_maps.size, 20_000, replace=False)
    val = rng.choice(val_maps.size, 20_000, replace=False)
    classifier = cv2.ml.KNearest.create()
    labels = train_maps.ravel()[train].astype(np.float32)
    classifier.train(features(train_images)[train], cv2.ml.ROW_SAMPLE, labels)
    predicted = classifier.findNearest(features(val_images)[val], 9)[1][:, 0]
    assert mean_iou(predicted - 1, val_maps.ravel()[val] - 1) < 0.25


def test_mmseg_reads_it(root):
    from mmseg.datasets import BaseSegDataset
    from mmseg.utils import register_all_modules

    register_all_modules()
    dataset = BaseSegDataset(
        data_root=str(root),
        data_prefix={'img_path': 'images/validation', 'seg_map_path': 'annotations/validation'},
        metainfo={'classes': CLASSES, 'palette': PALETTE},
        reduce_zero_label=True,
        pipeline=[
            {'type': 'LoadImageFromFile'},
            {'type': 'LoadAnnotations', 'reduce_zero_label': True},
        ],
    )
    assert len(dataset) == NUM_VAL
    for index, item in enumerate(dataset):
        scene = draw_scene(0, 'validation', index, SIZE)
        assert (item['gt_seg_map'] == scene.semantic).all()
        assert np.abs(item['img'][..., ::-1] - scene.image.astype(float)).mean() < 12


def test_mmdet_reads_it(root):
    from mmdet.datasets import CocoDataset
    from mmdet.utils import register_all_modules

    register_all_modules()
    dataset = CocoDataset(
        data_root=str(root),
        ann_file='annotations/instances_training.json',
        data_prefix={'img': 'images/training/'},
        metainfo={'classes': CLASSES[1:], 'palette': PALETTE[1:]},
        filter_cfg={'filter_empty_gt': True, 'min_size': 32},
        pipeline=[
            {'type': 'LoadImageFromFile'},
            {'type': 'LoadAnnotations', 'with_bbox': True, 'with_mask': True},
        ],
    )
    assert len(dataset) == NUM_TRAIN
    for index, item in enumerate(dataset):
        instances = draw_scene(0, 'training', index, SIZE).instances
        assert item['img'].shape == (SIZE, SIZE, 3)
        assert item['gt_bboxes_labels'].tolist() == [found.label - 1 for found in instances]
        assert item['gt_ignore_flags'].tolist() == [found.iscrowd for found in instances]
        boxes = item['gt_bboxes'].tensor.numpy()
        for box, mask, found in zip(boxes, item['gt_masks'].masks, instances, strict=True):
            rows, columns = np.nonzero(found.mask)
            expected = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert box.tolist() == expected
            assert (mask != found.mask).sum() <= max(2, 0.1 * found.mask.sum())


@pytest.fixture(scope='module', params=OFFICIAL_LAYOUTS)
def layout_root(request, tmp_path_factory):
    """A folder in one of the official layouts, named after it."""
    folder = tmp_path_factory.mktemp('layouts') / request.param
    make_dataset(folder, 20, 4, 64, layout=request.param)
    return folder


def toolbox_dataset(toolbox: str, name: str, root: Path, split: str):
    """A toolbox's own data set by its own config, cut after the loading of image and truth."""
    module = importlib.import_module(f'{toolbox}.utils')
    module.register_all_modules()
    configs = Path(importlib.util.find_spec(toolbox).origin).parent / '.mim/configs'
    config = Config.fromfile(configs / f'_base_/datasets/{name}.py')
    dataset = config[f'{split}_dataloader'].dataset
    # Testing pipelines resize in between, and load the truth after it.
    loading = [step for step in dataset.pipeline if step.type.startswith('Load')]
    dataset.update(data_root=str(root), pipeline=loading, _scope_=toolbox)
    return importlib.import_module(f'{toolbox}.registry').DATASETS.build(dataset)


def test_official_tables():
    from cityscapesscripts.helpers.labels import labels
    from mmdet.datasets import CocoDataset
    from mmpretrain.datasets.categories import IMAGENET_CATEGORIES
    from mmseg.datasets import ADE20KDataset, CityscapesDataset
    from timm.data import ImageNetInfo
    from torchvision.models._meta import _COCO_CATEGORIES

    def stripped(names):
        return tuple(name.strip() for name in names)  # mmseg has a 'bed '

    assert stripped(ADE20KDataset.METAINFO['classes']) == official.ADE20K_CLASSES
    names = {category['id']: category['name'] for category in official.COCO_CATEGORIES}
    assert tuple(names.values()) == CocoDataset.METAINFO['classes']
    assert all(_COCO_CATEGORIES[number] == name for number, name in names.items())
    assert (
        tuple(
            (label.name, label.id, label.trainId, label.hasInstances, label.color)
            for label in labels
            if label.id >= 0
        )
        == official.CITYSCAPES_LABELS
    )
    imagenet = ImageNetInfo()
    for name, (synset, label) in official.IMAGENET_SYNSETS.items():
        assert imagenet.index_to_label_name(label) == synset
        assert imagenet.index_to_description(label).startswith(name)
        assert IMAGENET_CATEGORIES[label].startswith(name)
    train_ids = {label.train_id: label.name for label in official.CITYSCAPES_LABELS}
    del train_ids[255]
    assert tuple(train_ids.values()) == CityscapesDataset.METAINFO['classes']


@pytest.mark.parametrize('layout', OFFICIAL_LAYOUTS.values(), ids=OFFICIAL_LAYOUTS)
def test_every_drawn_class_has_an_official_one(layout):
    assert tuple(layout.classes) == CLASSES
    assert len(set(layout.classes.values())) == len(CLASSES)


def test_layout_same_arguments_same_bytes(tmp_path, layout_root):
    make_dataset(tmp_path / 'again', 20, 4, 64, workers=1, layout=layout_root.name)
    assert contents(tmp_path / 'again') == contents(layout_root)


def test_official_names(layout_root):
    expected = {
        'ade20k': {
            'objectInfo150.txt',
            'sceneCategories.txt',
            *(f'images/training/ADE_train_{number:08d}.jpg' for number in range(1, 21)),
            *(f'annotations/training/ADE_train_{number:08d}.png' for number in range(1, 21)),
            *(f'images/validation/ADE_val_{number:08d}.jpg' for number in range(1, 5)),
            *(f'annotations/validation/ADE_val_{number:08d}.png' for number in range(1, 5)),
        },
        'coco': {
            'annotations/instances_train2017.json',
            'annotations/instances_val2017.json',
            *(f'train2017/{number:012d}.jpg' for number in range(1, 40, 2)),
            *(f'val2017/{number:012d}.jpg' for number in range(2, 9, 2)),
        },
        'cityscapes': set(),
        'imagenet': {'meta/train.txt', 'meta/val.txt'},
    }
    # 18 cities have training images, 3 validation images; every city has one before any has two.
    scenes = [f'train/{city}/{city}_000000' for city in official.CITYSCAPES_CITIES['train']]
    scenes += ['train/aachen/aachen_000001', 'train/bochum/bochum_000001']
    scenes += [f'val/{city}/{city}_000000' for city in ('frankfurt', 'lindau', 'munster')]
    scenes += ['val/frankfurt/frankfurt_000001']
    for scene in scenes:
        expected['cityscapes'].add(f'leftImg8bit/{scene}_000019_leftImg8bit.png')
        for kind in ('color', 'instanceIds', 'labelIds', 'labelTrainIds'):
            expected['cityscapes'].add(f'gtFine/{scene}_000019_gtFine_{kind}.png')
        expected['cityscapes'].add(f'gtFine/{scene}_000019_gtFine_polygons.json')
    for split, folder, number in (('training', 'train', 20), ('validation', 'val', 4)):
        for index in range(number):
            for count, found in enumerate(draw_scene(0, split, index, 64).instances):
                synset = SYNSETS[CLASSES[found.label]]
                stem = f'{synset}_{100 * index + count}'
                if split == 'validation':
                    stem = f'ILSVRC2012_val_{100 * index + count + 1:08d}'
                if not found.iscrowd:
                    expected['imagenet'].add(f'{folder}/{synset}/{stem}.JPEG')
    assert set(contents(layout_root)) == expected[layout_root.name] | {'meta.json'}
    meta = json.loads((layout_root / 'meta.json').read_text())
    assert meta['layout'] == layout_root.name


@pytest.mark.parametrize('layout_root', ['ade20k', 'cityscapes'], indirect=True)
@pytest.mark.parametrize('split', ['train', 'val'])
def test_mmseg_reads_the_layout(layout_root, split):
    dataset = toolbox_dataset('mmseg', layout_root.name, layout_root, split)
    layout = OFFICIAL_LAYOUTS[layout_root.name]
    drawn_split = {'train': 'training', 'val': 'validation'}[split]
    number = {'train': 20, 'val': 4}[split]
    indices = {
        str(layout_root / layout.scene_files(drawn_split, index)['image']): index
        for index in range(number)
    }
    classes = dataset.metainfo['classes']
    labels = np.array([classes.index(name) for name in layout.classes.values()])
    items = list(dataset)
    assert {item['img_path'] for item in items} == set(indices)
    for item in items:
        scene = draw_scene(0, drawn_split, indices[item['img_path']], 64)
        assert (item['gt_seg_map'] == labels[scene.semantic]).all()
        difference = np.abs(item['img'][..., ::-1] - scene.image.astype(float))
        assert difference.mean() < {'ade20k': 14, 'cityscapes': 1e-9}[layout_root.name]


@pytest.mark.parametrize('layout_root', ['imagenet'], indirect=True)
@pytest.mark.parametrize('split', ['train', 'val'])
def test_mmpretrain_reads_the_layout(layout_root, split):
    """By its own ImageNet config the listed labels, by folders the same classes from 0."""
    from mmpretrain.datasets import CustomDataset

    dataset = toolbox_dataset('mmpretrain', 'imagenet_bs32', layout_root, split)
    classes = sorted(SYNSETS.values())
    folders = CustomDataset(data_root=str(layout_root), data_prefix=split)
    assert list(folders.metainfo['classes']) == classes
    drawn = {}
    for index in range({'train': 20, 'val': 4}[split]):
        scene = draw_scene(0, {'train': 'training', 'val': 'validation'}[split], index, 64)
        for count, found in enumerate(scene.instances):
            drawn[100 * index + count] = scene, found
    items = list(dataset)
    assert len(items) == len(folders) == sum(not found.iscrowd for _, found in drawn.values())
    assert {item['img_path'] for item in items} == {
        item['img_path'] for item in folders.load_data_list()
    }
    for item in items:
        count = int(Path(item['img_path']).stem.rpartition('_')[2]) - (split == 'val')
        scene, found = drawn[count]
        synset = SYNSETS[CLASSES[found.label]]
        assert Path(item['img_path']).parent.name == synset
        assert dataset.metainfo['classes'][item['gt_label']].startswith(
            OFFICIAL_LAYOUTS['imagenet'].classes[CLASSES[found.label]]
        )
        rows, columns = np.nonzero(found.mask)
        height, width = item['img'].shape[:2]
        side = max(np.ptp(rows), np.ptp(columns)) + 1
        assert max(height, width) <= 1.5 * side + 1
        # The object is in it whole, and where the centre is expected.
        top = max(round((rows.min() + rows.max() + 1) / 2 - 0.75 * side), 0)
        left = max(round((columns.min() + columns.max() + 1) / 2 - 0.75 * side), 0)
        assert top <= rows.min() and rows.max() < top + height
        assert left <= columns.min() and columns.max() < left + width
        crop = scene.image[top : top + height, left : left + width]
        assert np.abs(item['img'][..., ::-1] - crop.astype(float)).mean() < 18


@pytest.mark.parametrize('layout_root', ['coco'], indirect=True)
@pytest.mark.parametrize('split', ['train', 'val'])
def test_mmdet_reads_the_layout(layout_root, split):
    dataset = toolbox_dataset('mmdet', 'coco_instance', layout_root, split)
    number, first = {'train': (20, 1), 'val': (4, 2)}[split]
    assert len(dataset) == number
    classes, names = dataset.metainfo['classes'], list(OFFICIAL_LAYOUTS['coco'].classes.values())
    for index, item in enumerate(dataset):
        assert item['img_id'] == first + 2 * index
        scene = draw_scene(0, {'train': 'training', 'val': 'validation'}[split], index, 64)
        instances = scene.instances
        labels = [classes.index(names[found.label]) for found in instances]
        assert item['gt_bboxes_labels'].tolist() == labels
        assert item['gt_ignore_flags'].tolist() == [found.iscrowd for found in instances]
        boxes = item['gt_bboxes'].tensor.numpy()
        for box, mask, found in zip(boxes, item['gt_masks'].masks, instances, strict=True):
            rows, columns = np.nonzero(found.mask)
            expected = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert box.tolist() == expected
            allowed = 0 if found.iscrowd else max(2, 0.1 * found.mask.sum())
            assert (mask != found.mask).sum() <= allowed


@pytest.mark.parametrize('layout_root', ['coco'], indirect=True)
@pytest.mark.parametrize('split', ['train2017', 'val2017'])
def test_coco_files_are_official(layout_root, split):
    content = json.loads((layout_root / f'annotations/instances_{split}.json').read_text())
    assert list(content) == ['info', 'licenses', 'images', 'annotations', 'categories']
    assert content['categories'] == list(official.COCO_CATEGORIES)
    assert len(content['categories']) == 80
    assert content['categories'][-1] == {
        'supercategory': 'indoor',
        'id': 90,
        'name': 'toothbrush',
    }
    for image in content['images']:
        assert image['file_name'] == f'{image["id"]:012d}.jpg'
        assert (image['width'], image['height']) == (64, 64)
    numbers = [annotation['id'] for annotation in content['annotations']]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {found['category_id'] for found in content['annotations']} <= {63, 72, 84, 37, 55, 38}


@pytest.mark.parametrize('layout_root', ['cityscapes'], indirect=True)
def test_cityscapes_polygons_give_the_label_maps(layout_root):
    from cityscapesscripts.helpers.annotation import Annotation
    from cityscapesscripts.preparation.json2instanceImg import createInstanceImage
    from cityscapesscripts.preparation.json2labelImg import createLabelImage

    groups = 0
    for path in layout_root.rglob('*_polygons.json'):
        annotation = Annotation()
        annotation.fromJsonFile(str(path))
        groups += sum(found.label.endswith('group') for found in annotation.objects)
        drawn = {
            'labelIds': createLabelImage(annotation, 'ids'),
            'labelTrainIds': createLabelImage(annotation, 'trainIds'),
            'color': createLabelImage(annotation, 'color'),
            'instanceIds': createInstanceImage(annotation, 'ids'),
        }
        for kind, image in drawn.items():
            written = Image.open(str(path).replace('polygons.json', f'{kind}.png'))
            assert written.mode == {'instanceIds': 'I;16', 'color': 'RGBA'}.get(kind, 'L')
            assert (np.array(written) == np.array(image)).all(), (path.name, kind)
    assert groups


@pytest.mark.parametrize('layout_root', ['ade20k'], indirect=True)
def test_ade20k_tables(layout_root):
    lines = (layout_root / 'objectInfo150.txt').read_text().splitlines()
    assert lines[0].split('\t') == ['Idx', 'Ratio', 'Train', 'Val', 'Name']
    rows = [line.split('\t') for line in lines[1:]]
    assert [(int(row[0]), row[4]) for row in rows] == list(enumerate(official.ADE20K_CLASSES, 1))
    assert sum(float(row[1]) for row in rows) == pytest.approx(1, abs=1e-3)
    sky = np.concatenate([read_split(layout_root, split)[1] == 3 for split in shapes.SPLITS])
    present = sky.any((1, 2))
    assert float(rows[2][1]) == pytest.approx(sky.mean(), abs=1e-4)
    assert rows[2][2:4] == [str(present[:20].sum()), str(present[20:].sum())]
    scenes = (layout_root / 'sceneCategories.txt').read_text().splitlines()
    assert (len(scenes), scenes[0], scenes[-1]) == (
        24,
        'ADE_train_00000001 misc',
        'ADE_val_00000004 misc',
    )


@pytest.mark.parametrize('layout', OFFICIAL_LAYOUTS)
def test_an_official_layout_is_replaced_and_protected_like_the_own(tmp_path, layout):
    out = tmp_path / 'out'
    make_dataset(out, 1, 1, 32, layout=layout)
    make_dataset(out, 2, 1, 32, overwrite=True, layout=layout)
    make_dataset(tmp_path / 'fresh', 2, 1, 32, layout=layout)
    assert contents(out) == contents(tmp_path / 'fresh')
    make_dataset(out, 1, 1, 32, overwrite=True)
    make_dataset(out, 1, 1, 32, overwrite=True, layout=layout)
    ending = {'cityscapes': 'png', 'imagenet': 'JPEG'}.get(layout, 'jpg')
    next(out.rglob(f'*.{ending}')).with_name('mine').touch()
    before = contents(out)
    with pytest.raises(FileExistsError, match='holds files of others.*/mine'):
        make_dataset(out, 1, 1, 32, overwrite=True, layout=layout)
    assert contents(out) == before


def test_unknown_layout(tmp_path):
    message = "^layout='voc' must be one of shapes, ade20k, coco, cityscapes, imagenet$"
    with pytest.raises(ValueError, match=message):
        make_dataset(tmp_path / 'new', layout='voc')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('size', [32, 257])
def test_small_and_odd_sizes(size):
    for index in range(5):
        scene = draw_scene(3, 'training', index, size)
        assert scene.image.shape == (size, size, 3)
        assert scene.semantic.shape == (size, size)
        assert all(instance.mask.any() for instance in scene.instances)


@pytest.mark.parametrize(
    ('name', 'value', 'lowest'),
    [('num_train', 0, 1), ('num_val', -2, 1), ('size', 31, 32), ('seed', -1, 0), ('workers', 0, 1)],
)
def test_bad_arguments(tmp_path, name, value, lowest):
    with pytest.raises(ValueError, match=f'^{name}={value} must be at least {lowest}$'):
        make_dataset(tmp_path / 'new', **{name: value})
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_replaced_on_request_only(tmp_path):
    out = tmp_path / 'shapes'
    make_dataset(out, 1, 1, 32)
    before = contents(out)
    with pytest.raises(FileExistsError, match='already exists'):
        make_dataset(out, 2, 1, 32)
    assert contents(out) == before
    make_dataset(out, 2, 1, 32, overwrite=True)
    assert len(list((out / 'images' / 'training').iterdir())) == 2
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize('stranger', ['alone', 'added', 'deep', 'foreign meta', 'file'])
def test_nothing_but_a_shapes_data_set_is_overwritten(tmp_path, stranger):
    out = tmp_path / 'out'
    if stranger == 'file':
        out.write_text('mine')
    elif stranger == 'alone':
        out.mkdir()
    elif stranger == 'foreign meta':
        (out / 'images').mkdir(parents=True)
        (out / 'annotations').mkdir()
        (out / 'meta.json').write_text('{}')
    else:
        make_dataset(out, 1, 1, 32)
    if stranger != 'file':
        folder = out / 'images/training' if stranger == 'deep' else out
        (folder / 'thesis.txt').write_text('mine')
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match='so it is not overwritten'):
        make_dataset(out, 1, 1, 32, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize('error', [OSError('disk full'), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_folder_and_no_other(tmp_path, monkeypatch, error):
    out = tmp_path / 'shapes'
    make_dataset(out, 1, 1, 32)
    before = contents(tmp_path)

    def fail_at_second(seed, split, index, size):
        if index == 1:
            raise error
        return draw_scene(seed, split, index, size)

    monkeypatch.setattr(shapes, 'draw_scene', fail_at_second)
    for target in (out, tmp_path / 'other'):
        with pytest.raises(type(error)):
            make_dataset(target, 4, 1, 32, overwrite=True)
        assert contents(tmp_path) == before
        assert list(tmp_path.iterdir()) == [out]


def test_command(tmp_path, monkeypatch, capsys):
    def run(*options):
        monkeypatch.setattr(sys, 'argv', [TOOL.name, '--out', 'deep/set', *options])
        runpy.run_path(str(TOOL), run_name='__main__')

    monkeypatch.chdir(tmp_path)
    small = ('--num-train', '2', '--num-val', '1', '--size', '40', '--seed', '5')
    run(*small)
    make_dataset('same', 2, 1, 40, 5)
    assert contents(tmp_path / 'deep' / 'set') == contents(tmp_path / 'same')
    run(*small, '--overwrite')
    run(*small, '--overwrite', '--layout', 'coco')
    assert (tmp_path / 'deep/set/val2017/000000000002.jpg').is_file()

    capsys.readouterr()
    for options, message in ((small, 'already exists'), (('--size', '8'), 'size=8 must be')):
        with pytest.raises(SystemExit) as stopped:
            run(*options)
        assert stopped.value.code == 1
        error = capsys.readouterr().err
        assert error.count('\n') == 1
        assert message in error
