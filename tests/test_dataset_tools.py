"""The commands of tools/dataset: every fault is planted in a small copy, and named."""

import json
import os
import re
import runpy
import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from mmengine import Config
from PIL import Image

from mmnala.datasets import check, official
from mmnala.datasets.shapes import make_dataset

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / 'tools' / 'dataset'
NAMES = ('ade20k', 'coco', 'cityscapes')
NUMBERS = (3, 4)
SIZE = 32


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp('originals')
    for name in NAMES:
        make_dataset(folder / name, *NUMBERS, SIZE, layout=name)
    return folder


@pytest.fixture
def copy(originals, tmp_path):
    """``copy('coco')`` is a fresh folder of that data set."""
    return lambda name: Path(shutil.copytree(originals / name, tmp_path / 'copy' / name))


@pytest.fixture
def run(monkeypatch, capsys):
    """``run('coco', root, options)`` gives the exit code and the lines of the report."""

    def run(name, *arguments):
        path = TOOLS / f'{name}.py'
        monkeypatch.setattr(sys, 'argv', [str(path), *map(str, arguments), '--workers', '2'])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(path), run_name='__main__')
        return stopped.value.code, capsys.readouterr().out.splitlines()

    return run


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob('*'))


@pytest.mark.parametrize('name', NAMES)
def test_a_clean_part_passes(copy, run, name):
    root = copy(name)
    before = files(root)
    code, lines = run(name, root, '--partial')
    assert (code, lines[-1]) == (0, 'OK: no problem found')
    assert files(root) == before
    first = {
        'ade20k': 'training images: 3 of 20210',
        'coco': 'train2017 images: 3 of 118287',
        'cityscapes': 'train images: 3 of 2975',
    }
    assert lines[0] == first[name]


@pytest.mark.parametrize(
    ('name', 'messages'),
    [
        (
            'ade20k',
            [
                'training images: 3 of 20210; missing ADE_train_00000004, ADE_train_00000005, '
                'ADE_train_00000006, ADE_train_00000007, ADE_train_00000008 and 20202 more',
                'validation images: 4 of 2000; missing ADE_val_00000005, ADE_val_00000006, '
                'ADE_val_00000007, ADE_val_00000008, ADE_val_00000009 and 1991 more',
            ],
        ),
        (
            'coco',
            [
                'train2017 images: 3 of 118287',
                'train2017 images with instances: 3 of 117266',
                'val2017 images: 4 of 5000',
                'val2017 images with instances: 4 of 4952',
            ],
        ),
        (
            'cityscapes',
            [
                'train images: 3 of 2975; no images of cologne, darmstadt, dusseldorf, erfurt, '
                'hamburg, hanover, jena, krefeld, monchengladbach, strasbourg, stuttgart, '
                'tubingen, ulm, weimar, zurich',
                'val images: 4 of 500',
            ],
        ),
    ],
)
def test_a_part_is_not_the_whole(copy, run, name, messages):
    code, lines = run(name, copy(name))
    assert code == 1
    problems = [f'wrong number ({len(messages)}):', *(f'  {line}' for line in messages)]
    assert lines[-len(messages) - 2 :] == [*problems, f'FAILED: {len(messages)} problems found']


@pytest.mark.parametrize('name', NAMES)
def test_the_whole_needs_no_option(copy, run, name, monkeypatch):
    for table in [f'{name.upper()}_COUNTS', *(['COCO_ANNOTATED_COUNTS'] * (name == 'coco'))]:
        counts = dict(zip(getattr(official, table), NUMBERS, strict=False))
        monkeypatch.setattr(official, table, counts)
    if name == 'cityscapes':
        cities = official.CITYSCAPES_CITIES | {'train': ('aachen', 'bochum', 'bremen')}
        monkeypatch.setattr(official, 'CITYSCAPES_CITIES', cities)
    assert run(name, copy(name))[0] == 0


@pytest.mark.parametrize(
    ('name', 'config'),
    [('ade20k', 'ade20k'), ('coco', 'coco_instance'), ('cityscapes', 'cityscapes')],
)
def test_the_default_folder_is_that_of_the_configs(copy, run, name, config, monkeypatch, tmp_path):
    config = Config.fromfile(ROOT / f'configs/_base_/datasets/{config}.py')
    data_root = config.train_dataloader.dataset.data_root
    monkeypatch.chdir(tmp_path)
    assert run(name) == (
        1,
        ['missing (1):', f'  {Path(data_root)}', 'FAILED: 1 problem found'],
    )
    shutil.copytree(copy(name), data_root)
    assert run(name, '--partial')[0] == 0


# Faults. Each plants one in a data set and is followed by what is said of it.


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_pixels(path, change):
    with Image.open(path) as image:
        pixels = np.array(image)
    change(pixels)
    Image.fromarray(pixels).save(path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def claim(path, side):
    """Write a PNG of a few bytes whose header tells ``side`` x ``side`` pixels."""

    def chunk(kind, data):
        return (
            struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        )

    header = struct.pack('>IIBBBBB', side, side, 8, 0, 0, 0, 0)
    data = chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(b'')) + chunk(b'IEND', b'')
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + data)


def large(path):
    claim(path, 6_000)


def giant(path):
    claim(path, 60_000)


def resize(path):
    with Image.open(path) as image:
        image.resize((SIZE, SIZE + 1), Image.Resampling.NEAREST).save(path)


def save_colours(path):
    Image.new('RGB', (SIZE, SIZE)).save(path)


def set_pixel(value):
    def change(pixels):
        pixels[0, 0] = value

    return lambda path: edit_pixels(path, change)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


IMAGES = {
    'ade20k': 'images/training/ADE_train_00000002.jpg',
    'coco': 'train2017/000000000003.jpg',
    'cityscapes': 'leftImg8bit/train/bochum/bochum_000000_000019_leftImg8bit.png',
}


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
    ('fault', 'message'),
    [
        (cut, r'truncated|Truncated'),
        (lambda path: path.write_bytes(b''), 'cannot identify image file .*'),
        (lambda path: path.write_text('<html>404</html>'), 'cannot identify image file .*'),
        (large, '^claims 6000x6000 pixels, more than 33554432$'),
        (giant, 'exceeds limit'),
        (pipe, '^is no file'),
    ],
    ids=['cut', 'empty', 'page', 'large', 'giant', 'pipe'],
)
def test_a_damaged_image(copy, run, name, fault, message):
    root = copy(name)
    fault(root / IMAGES[name])
    code, lines = run(name, root, '--partial')
    assert code == 1
    assert lines[-3] == 'unreadable (1):'
    file_name, _, said = lines[-2].partition(': ')
    assert file_name == f'  {IMAGES[name]}'
    assert re.search(message, said)


ADE_LABELS = 'annotations/validation/ADE_val_00000003.png'
TRAIN_IDS = 'gtFine/val/lindau/lindau_000000_000019_gtFine_labelTrainIds.png'
LABEL_IDS = TRAIN_IDS.replace('TrainIds', 'Ids')
INSTANCES = TRAIN_IDS.replace('labelTrainIds', 'instanceIds')
POLYGONS = TRAIN_IDS.replace('labelTrainIds.png', 'polygons.json')
VAL_IMAGE = 'leftImg8bit/val/lindau/lindau_000000_000019_leftImg8bit.png'
INSTANCES_JSON = 'annotations/instances_val2017.json'


def entry(kind, position=0, **values):
    """Change an entry of a list in the COCO file; ``...`` takes a value away."""

    def change(content):
        found = content[kind][position]
        found.update(values)
        for key in [key for key, value in values.items() if value is ...]:
            del found[key]

    return lambda path: edit_json(path, change)


def content(change):
    return lambda path: edit_json(path, change)


def to_polygon(polygon):
    return entry('annotations', segmentation=[polygon], iscrowd=0)


def polygon_object(**values):
    return lambda path: edit_json(path, lambda found: found['objects'][1].update(values))


def append_category(found):
    found['categories'].append({'id': 12, 'name': 'street sign', 'supercategory': 'outdoor'})


FAULTS = [
    # data set, file, fault, kind, message
    ('ade20k', IMAGES['ade20k'], Path.unlink, 'annotation without image',
     'annotations/training/ADE_train_00000002.png'),
    ('ade20k', ADE_LABELS, Path.unlink, 'image without annotation',
     'images/validation/ADE_val_00000003.jpg'),
    ('ade20k', 'images/training/ADE_train_00020211.jpg', Path.touch, 'unexpected file', '.*{file}'),
    ('ade20k', 'images/training/ADE_train_3.jpg', Path.touch, 'unexpected file', '.*{file}'),
    ('ade20k', 'images/training/ADE_val_00000001.jpg', Path.touch, 'unexpected file', '.*{file}'),
    ('ade20k', 'annotations/training/a', Path.mkdir, 'unexpected file', '.*{file}'),
    ('ade20k', 'annotations/training/a\nb\x1b', Path.touch, 'unexpected file',
     r'.*annotations/training/a\\nb\\x1b'),
    ('ade20k', ADE_LABELS, set_pixel(151), 'labels outside the classes', '{file}: 151'),
    ('ade20k', ADE_LABELS, resize, 'sizes differ', '{file} has 32x33, the image 32x32'),
    ('ade20k', ADE_LABELS, save_colours, 'unreadable', '{file}: has mode RGB, and no 8-bit labels'),
    ('ade20k', ADE_LABELS, giant, 'unreadable', '{file}: .*'),
    ('ade20k', ADE_LABELS, cut, 'unreadable', '{file}: .*'),

    ('coco', 'val2017/000000000002.jpg', Path.unlink, 'missing file', '{file}'),
    ('coco', 'val2017/000000000001.jpg', Path.touch, 'image not listed', '{file}'),
    ('coco', 'val2017/cat.jpg', Path.touch, 'unexpected file', '{file}'),
    ('coco', 'val2017/000000000002.jpg', resize, 'sizes differ',
     '{file} has 32x33, the JSON 32x32'),
    ('coco', INSTANCES_JSON, Path.unlink, 'missing', '.*{file}'),
    ('coco', INSTANCES_JSON, cut, 'unreadable', '{file}: .*line 1 column.*'),
    ('coco', INSTANCES_JSON, lambda path: path.write_text('[' * 100_000), 'unreadable',
     '{file}: is nested too deeply'),
    ('coco', INSTANCES_JSON, lambda path: path.write_text('[NaN]'), 'unreadable',
     '{file}: NaN is not JSON'),
    ('coco', INSTANCES_JSON, lambda path: path.write_text('{"images": []}'), 'unreadable',
     "{file}: has no list 'annotations'"),
    ('coco', INSTANCES_JSON, lambda path: os.truncate(path, 2**30 + 1), 'unreadable',
     '{file}: has more than 1073741824 bytes'),
    ('coco', INSTANCES_JSON, content(lambda found: found['images'].append(7)), 'malformed',
     r'{file}: images\[4\] has no integer id'),
    ('coco', INSTANCES_JSON, entry('annotations', id='1'), 'malformed',
     r'{file}: annotations\[0\] has no integer id'),
    ('coco', INSTANCES_JSON, entry('annotations', id=2), 'id used twice',
     '{file}: annotations, id 2'),
    ('coco', INSTANCES_JSON, content(lambda found: found['images'].append(found['images'][0])),
     'id used twice', '{file}: images, id 2'),
    ('coco', INSTANCES_JSON, content(lambda found: found['categories'].pop()), 'missing category',
     "{file}: 90, 'toothbrush'"),
    ('coco', INSTANCES_JSON, content(append_category), 'category not official',
     "{file}: 12 is 'street sign'"),
    ('coco', INSTANCES_JSON, entry('categories', name='human'), 'category not official',
     "{file}: 1 is 'human', officially 'person'"),
    ('coco', INSTANCES_JSON, entry('annotations', category_id=12), 'category not official',
     '{file}: annotation 1: 12'),
    ('coco', INSTANCES_JSON, entry('annotations', image_id=1), 'image not listed',
     '{file}: annotation 1: image 1'),
    ('coco', INSTANCES_JSON, entry('images', file_name='../x/000000000002.jpg'),
     'path in file_name', "{file}: image 2: '../x/000000000002.jpg' is refused"),
    ('coco', INSTANCES_JSON, entry('images', file_name='/etc/passwd'),
     'path in file_name', "{file}: image 2: '/etc/passwd' is refused"),
    ('coco', INSTANCES_JSON, entry('images', file_name='..\\x.jpg'),
     'path in file_name', r"{file}: image 2: '..\\\\x.jpg' is refused"),
    ('coco', INSTANCES_JSON, entry('images', file_name='cat.jpg'),
     'unexpected file name', "{file}: image 2: 'cat.jpg'"),
    ('coco', INSTANCES_JSON, entry('images', file_name='000000000003.jpg'),
     'unexpected file name', "{file}: image 2: '000000000003.jpg' has another number"),
    ('coco', INSTANCES_JSON, entry('images', file_name=...), 'malformed',
     '{file}: image 2 has no file_name'),
    ('coco', INSTANCES_JSON, entry('images', width=0), 'malformed',
     '{file}: image 2 has no positive width and height'),
    ('coco', INSTANCES_JSON, entry('annotations', bbox=[3, 3, 0, 5]), 'box of no extent',
     r'{file}: annotation 1: \[3, 3, 0, 5\]'),
    ('coco', INSTANCES_JSON, entry('annotations', bbox=[3, 3, 5, -2]), 'box of no extent',
     r'{file}: annotation 1: \[3, 3, 5, -2\]'),
    ('coco', INSTANCES_JSON, entry('annotations', bbox=[20, 3, 15, 5]), 'box outside the image',
     r'{file}: annotation 1: \[20, 3, 15, 5\], image 2'),
    ('coco', INSTANCES_JSON, entry('annotations', bbox=[-2, 3, 9, 5]), 'box outside the image',
     r'{file}: annotation 1: \[-2, 3, 9, 5\], image 2'),
    ('coco', INSTANCES_JSON, entry('annotations', bbox=[0, 3, 9]), 'malformed',
     '{file}: annotation 1: bbox is not four numbers'),
    ('coco', INSTANCES_JSON, entry('annotations', bbox=[0, 3, 9, 10**400]), 'malformed',
     '{file}: annotation 1: bbox is not four numbers'),
    ('coco', INSTANCES_JSON, entry('annotations', iscrowd=2), 'malformed',
     '{file}: annotation 1: iscrowd is not 0 or 1'),
    ('coco', INSTANCES_JSON, entry('annotations', area=...), 'malformed',
     '{file}: annotation 1: area is no number from 0'),
    ('coco', INSTANCES_JSON, entry('annotations', segmentation=[]), 'segmentation',
     '{file}: annotation 1: no segmentation'),
    ('coco', INSTANCES_JSON, to_polygon([1, 2, 3, 4]), 'segmentation',
     '{file}: annotation 1: a polygon that is not at least three points'),
    ('coco', INSTANCES_JSON, to_polygon([1, 2, 3, 4, 5, 6, 7]), 'segmentation',
     '{file}: annotation 1: a polygon that is not at least three points'),
    ('coco', INSTANCES_JSON, entry('annotations', segmentation=[[1] * 6], iscrowd=1),
     'segmentation', '{file}: annotation 1: a crowd without run lengths'),
    ('coco', INSTANCES_JSON,
     entry('annotations', segmentation={'size': [32, 31], 'counts': [992]}, iscrowd=1),
     'segmentation', r'{file}: annotation 1: run lengths of size \[32, 31\] and not \[32, 32\]'),
    ('coco', INSTANCES_JSON,
     entry('annotations', segmentation={'size': [32, 32], 'counts': [992]}, iscrowd=1),
     'segmentation', '{file}: annotation 1: run lengths of 992 pixels and not 1024'),
    ('coco', INSTANCES_JSON,
     entry('annotations', segmentation={'size': [32, 32], 'counts': [-1, 1025]}, iscrowd=1),
     'segmentation', '{file}: annotation 1: run lengths that are no counts'),

    ('cityscapes', TRAIN_IDS, Path.unlink, 'image without annotation', '{file} is missing'),
    ('cityscapes', POLYGONS, Path.unlink, 'image without annotation', '{file} is missing'),
    ('cityscapes', 'leftImg8bit/val/paris', Path.mkdir, 'unexpected file',
     '.*{file} is no city of val'),
    ('cityscapes', 'leftImg8bit/val/aachen', Path.mkdir, 'unexpected file',
     '.*{file} is no city of val'),
    ('cityscapes', 'leftImg8bit/val/lindau/munster_000000_000019_leftImg8bit.png', Path.touch,
     'unexpected file', '.*{file}'),
    ('cityscapes', TRAIN_IDS, set_pixel(19), 'labels outside the classes', '{file}: 19'),
    ('cityscapes', LABEL_IDS, set_pixel(34), 'labels outside the classes', '{file}: 34'),
    ('cityscapes', INSTANCES, set_pixel(34), 'labels outside the classes', '{file}: 34'),
    ('cityscapes', INSTANCES, set_pixel(12001), 'labels outside the classes', '{file}: 12001'),
    ('cityscapes', INSTANCES, save_colours, 'unreadable',
     '{file}: has mode RGB, and no 16-bit labels'),
    ('cityscapes', TRAIN_IDS, resize, 'sizes differ', '{file} has 32x33, the image 32x32'),
    ('cityscapes', TRAIN_IDS, cut, 'unreadable', '{file}: .*'),
    ('cityscapes', TRAIN_IDS.replace('labelTrainIds', 'color'), cut, 'unreadable', '{file}: .*'),
    ('cityscapes', TRAIN_IDS, lambda path: Image.new('L', (SIZE, SIZE), 0).save(path),
     'labelTrainIds do not fit labelIds', '{file}'),
    ('cityscapes', POLYGONS, cut, 'unreadable', '{file}: .*'),
    ('cityscapes', POLYGONS, lambda path: path.write_text('[]'), 'polygons',
     '{file} has no list of objects'),
    ('cityscapes', POLYGONS, content(lambda found: found.update(imgWidth=10**9)), 'polygons',
     '{file} is for an image of 1000000000x32, not 32x32'),
    ('cityscapes', POLYGONS, polygon_object(label='dragon'), 'polygons',
     r"{file} objects\[1\] has the label 'dragon'"),
    ('cityscapes', POLYGONS, polygon_object(label='skygroup'), 'polygons',
     r"{file} objects\[1\] has the label 'skygroup'"),
    ('cityscapes', POLYGONS, polygon_object(polygon=[[1, 2], [3, 4]]), 'polygons',
     r'{file} objects\[1\] has no polygon of at least three points'),
    ('cityscapes', POLYGONS, polygon_object(polygon=[[1, 2], [3, 4], [5, 10**400]]), 'polygons',
     r'{file} objects\[1\] has no polygon of at least three points'),
]  # fmt: skip


@pytest.mark.parametrize(
    ('name', 'file', 'fault', 'kind', 'message'),
    FAULTS,
    ids=[
        f'{name}-{kind}-{number}'.replace(' ', '_')
        for number, (name, _, _, kind, _) in enumerate(FAULTS)
    ],
)
def test_a_fault_is_named(copy, run, name, file, fault, kind, message):
    root = copy(name)
    fault(root / file)
    code, lines = run(name, root, '--partial')
    assert code == 1
    assert lines[-1].startswith('FAILED: ')
    heading = lines.index(f'{kind} (1):')
    pattern = '  ' + message.replace('{file}', re.escape(file))
    assert re.fullmatch(pattern, lines[heading + 1]), lines


@pytest.mark.parametrize(
    ('values', 'name'),
    [
        (dict(bbox=[-0.5, 3, 33, 5]), 'rounding'),
        (dict(segmentation={'size': [32, 32], 'counts': [0, 1024]}, iscrowd=1), 'crowd'),
    ],
)
def test_what_is_right_in_coco(copy, run, values, name):
    root = copy('coco')
    entry('annotations', **values)(root / INSTANCES_JSON)
    assert run('coco', root, '--partial')[0] == 0


def test_right_label_maps(copy, run):
    """Unlabelled pixels, palettes and hidden files are no faults."""
    root = copy('ade20k')
    set_pixel(0)(root / ADE_LABELS)
    with Image.open(root / ADE_LABELS) as image:
        grey = image.copy()
    palette = Image.frombytes('P', grey.size, grey.tobytes())
    palette.putpalette(list(range(256)) * 3)
    palette.save(root / ADE_LABELS)
    (root / 'images/training/.DS_Store').touch()
    assert run('ade20k', root, '--partial')[0] == 0


def test_long_and_odd_text_is_one_line(copy, run):
    root = copy('coco')
    entry('images', file_name='/' + 'x' * 10_000)(root / INSTANCES_JSON)
    os.close(os.open(os.fsencode(root / 'val2017') + b'/\xff', os.O_CREAT))
    code, lines = run('coco', root, '--partial')
    assert code == 1
    assert lines[lines.index('path in file_name (1):') + 1].endswith('xxx...')
    assert max(map(len, lines)) < 410
    assert lines[lines.index('unexpected file (1):') + 1] == r'  val2017/\udcff'


def test_no_more_than_some_problems_of_a_kind_are_listed(copy, run):
    root = copy('ade20k')
    for number in range(100, 100 + check.MAX_LISTED + 2):
        (root / f'images/training/x{number}').touch()
    (root / ADE_LABELS).unlink()
    code, lines = run('ade20k', root, '--partial')
    assert code == 1
    start = lines.index(f'unexpected file ({check.MAX_LISTED + 2}):')
    assert lines[start + 1].endswith('/x100')
    assert lines[start + check.MAX_LISTED].endswith(f'/x{99 + check.MAX_LISTED}')
    assert lines[start + check.MAX_LISTED + 1 :] == [
        '  ... and 2 more',
        'image without annotation (1):',
        '  images/validation/ADE_val_00000003.jpg',
        f'FAILED: {check.MAX_LISTED + 3} problems found',
    ]


@pytest.mark.parametrize(
    ('name', 'given', 'found'),
    [
        ('ade20k', '..', ''),
        ('ade20k', 'images', ''),
        ('ade20k', 'images/training', ''),
        ('coco', '..', ''),
        ('coco', '../..', ''),
        ('coco', 'annotations', ''),
        ('cityscapes', 'gtFine', ''),
    ],
)
def test_a_folder_too_high_or_too_deep(copy, run, name, given, found):
    root = copy(name)
    code, lines = run(name, root / given, '--partial')
    assert code == 1
    hints = [line for line in lines if line.startswith('hint: the data set is in ')]
    assert [Path(hint.rpartition(' ')[2]).resolve() for hint in hints] == [root]


def rename(source, target):
    def change(root):
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / source).rename(root / target)

    return change


def nest_annotations(root):
    rename('annotations', 'x/annotations')(root)
    rename('x', 'annotations')(root)


def only(*names):
    """Leave nothing but empty files of these names, or folders where the name ends in /."""

    def change(root):
        shutil.rmtree(root)
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if name.endswith('/') else path.touch()

    return change


@pytest.mark.parametrize(
    ('name', 'change', 'hint'),
    [
        ('ade20k', only('ADEChallengeData2016.zip'), 'ADEChallengeData2016.zip has to be unpacked'),
        ('ade20k', only('ADE20K_2021_17_01/'), 'this looks like the full ADE20K'),
        ('ade20k', only('images/ADE/training/'), 'this looks like the full ADE20K'),
        ('ade20k', only('images/training/a/abbey/'), 'this looks like the full ADE20K'),
        ('coco', only('train2017/', 'val2017/', 'annotations_trainval2017.zip'),
         'annotations_trainval2017.zip has to be unpacked'),
        ('coco', rename('train2017', 'images/train2017'), 'belong directly under ROOT'),
        ('coco', nest_annotations, 'annotations/annotations is one folder too many'),
        ('coco', rename('val2017', 'val'), None),
        ('coco', only('train2014/', 'annotations/'), 'this is COCO 2014'),
        ('cityscapes', only('leftImg8bit_trainvaltest.zip'), 'zip has to be unpacked'),
        ('cityscapes', rename('gtFine', 'gtCoarse'), 'gtCoarse is no substitute for gtFine'),
        ('cityscapes', rename('gtFine', 'gtFine_trainvaltest/gtFine'), 'move leftImg8bit and'),
    ],
)  # fmt: skip
def test_hints(copy, run, name, change, hint):
    root = copy(name)
    change(root)
    code, lines = run(name, root, '--partial')
    assert code == 1
    assert any(line.startswith('missing (') for line in lines)
    hints = [line for line in lines if line.startswith('hint: ')]
    assert len(hints) == (hint is not None)
    assert all(hint in line for line in hints)


@pytest.mark.parametrize('options', [['--workers', '0'], ['--quick'], ['a', 'b']])
def test_bad_options(run, options, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['coco.py', *options])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(TOOLS / 'coco.py'), run_name='__main__')
    assert stopped.value.code == 2
    assert options[-1] in capsys.readouterr().err


def test_the_test_split_of_cityscapes_is_checked_if_it_is_there(copy, run):
    root = copy('cityscapes')
    for file in root.rglob('lindau_*'):
        target = str(file).replace('/val/', '/test/').replace('lindau', 'berlin')
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    code, lines = run('cityscapes', root, '--partial')
    assert (code, lines[2]) == (0, 'test images: 1 of 1525')
    shutil.rmtree(root / 'gtFine/test')
    code, lines = run('cityscapes', root, '--partial')
    assert (code, lines[3]) == (1, 'image without annotation (5):')
    shutil.rmtree(root / 'leftImg8bit/test')
    code, lines = run('cityscapes', root, '--partial')
    assert (code, lines[2]) == (0, 'test images: 0 of 1525, which no config here needs')


# labelTrainIds


def train_ids(root):
    return {path.name: np.array(Image.open(path)) for path in root.rglob('*_labelTrainIds.png')}


def test_train_ids_are_made_where_they_are_missing(copy, run, originals):
    root = copy('cityscapes')
    for path in root.rglob('*_labelTrainIds.png'):
        path.unlink()
    code, lines = run('cityscapes', root, '--partial')
    assert code == 1
    assert lines[-2:] == [
        'hint: --make-train-ids makes the labelTrainIds that are missing',
        'FAILED: 7 problems found',
    ]
    assert not train_ids(root)
    assert run('cityscapes', root, '--partial', '--make-train-ids')[0] == 0
    assert files(root) == files(originals / 'cityscapes')
    made, expected = train_ids(root), train_ids(originals / 'cityscapes')
    for name, labels in expected.items():
        assert labels.dtype == made[name].dtype == np.uint8
        assert (labels == made[name]).all()


def test_train_ids_that_exist_are_left_alone(copy, run):
    root = copy('cityscapes')
    (root / TRAIN_IDS).write_text('mine')
    assert run('cityscapes', root, '--partial', '--make-train-ids')[0] == 1
    assert (root / TRAIN_IDS).read_text() == 'mine'


@pytest.mark.parametrize(
    'fault',
    [
        (POLYGONS, cut),
        (POLYGONS, polygon_object(label='dragon')),
        (POLYGONS, content(lambda found: found.update(imgWidth=10**9))),
        (VAL_IMAGE, cut),
    ],
)
def test_no_train_ids_are_made_of_a_faulty_file(copy, run, fault):
    root = copy('cityscapes')
    (root / TRAIN_IDS).unlink()
    file, change = fault
    change(root / file)
    before = files(root)
    code, lines = run('cityscapes', root, '--partial', '--make-train-ids')
    assert code == 1
    assert files(root) == before
    assert f'  {TRAIN_IDS} is missing' in lines
    assert any(line.startswith(f'  {file}') for line in lines)


def test_train_ids_are_never_half_written(copy, run, monkeypatch, capsys):
    from cityscapesscripts.preparation import json2labelImg

    def fill_the_disk(source, target, encoding):
        Path(target).write_bytes(b'half')
        raise OSError('No space left on device')

    root = copy('cityscapes')
    (root / TRAIN_IDS).unlink()
    before = files(root)
    monkeypatch.setattr(json2labelImg, 'json2labelImg', fill_the_disk)
    with pytest.raises(SystemExit) as stopped:
        monkeypatch.setattr(sys, 'argv', ['cityscapes.py', str(root), '--make-train-ids'])
        runpy.run_path(str(TOOLS / 'cityscapes.py'), run_name='__main__')
    assert stopped.value.code == 1
    assert 'cityscapes.py: error: No space left on device\n' in capsys.readouterr().err
    assert files(root) == before


def test_without_cityscapesscripts(copy, run, monkeypatch):
    root = copy('cityscapes')
    assert run('cityscapes', root, '--partial')[0] == 0
    monkeypatch.setitem(sys.modules, 'cityscapesscripts.preparation.json2labelImg', None)
    message, lines = run('cityscapes', root, '--partial', '--make-train-ids')
    assert lines == []
    assert '\n' not in message
    assert message.endswith("pip install 'cityscapesscripts<2'")
    assert run('cityscapes', root, '--partial')[0] == 0
