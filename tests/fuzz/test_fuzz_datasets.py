"""Whatever the files of a data set hold, the checks end with a list of problems or one line."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import bounded, changed, damaged, run_script
from PIL import Image

from mmnala.datasets.shapes import make_dataset
from mmnala.datasets.untrusted import FileError, check_coco, check_labels, read_header


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('fuzz')
    for name in ('ade20k', 'coco', 'cityscapes'):
        make_dataset(folder / name, 1, 1, 32, layout=name)
    return folder


def check_dataset(name: str, root: Path) -> None:
    ended, output = run_script(f'dataset/{name}.py', root, '--partial', '--workers', 1)
    last = output.strip().splitlines()[-1]
    assert (ended, last.partition(':')[0]) in [(0, 'OK'), (1, 'FAILED')], output


@pytest.mark.parametrize(
    ('name', 'pattern'),
    [
        ('ade20k', 'images/validation/*.jpg'),
        ('ade20k', 'annotations/validation/*.png'),
        ('coco', 'annotations/instances_val2017.json'),
        ('cityscapes', 'gtFine/val/*/*_instanceIds.png'),
        ('cityscapes', 'gtFine/val/*/*_polygons.json'),
    ],
)
def test_damaged_bytes(folder, name, pattern):
    (path,) = (folder / name).glob(pattern)
    content = path.read_bytes()

    @given(damaged(content))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        check_dataset(name, folder / name)

    check()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ('name', 'pattern'),
    [
        ('coco', 'annotations/instances_val2017.json'),
        ('cityscapes', 'gtFine/val/*/*_polygons.json'),
    ],
)
def test_changed_trees(folder, name, pattern):
    (path,) = (folder / name).glob(pattern)
    content = path.read_bytes()
    tree = json.loads(content)
    tree.pop('categories', None)  # eighty, which are seldom changed and take long to copy

    @given(changed(tree))
    def check(changed_tree: object) -> None:
        path.write_text(json.dumps(changed_tree))
        check_dataset(name, folder / name)
        if name == 'coco':
            check_own(path)

    check()
    path.write_bytes(content)


def check_own(path: Path) -> None:
    for complete in (True, False):
        with bounded():
            try:
                check_coco(path, complete=complete)
            except FileError as error:
                assert str(error).startswith(f'{path}: ') and '\n' not in str(error)


@given(st.data())
def test_annotations_that_pass_are_those_that_pycocotools_and_mmdet_read(folder, data):
    """The check lets nothing through that the toolbox then fails at."""
    from mmdet.datasets import CocoDataset

    path = folder / 'coco' / 'annotations' / 'instances_val2017.json'
    original = path.read_bytes()
    tree = json.loads(original)
    used = {annotation['category_id'] for annotation in tree['annotations']}
    tree['categories'] = [c for c in tree['categories'] if c['id'] in used]
    names = tuple(category['name'] for category in tree['categories'])
    own = folder / 'own.json'
    own.write_text(json.dumps(data.draw(changed(tree))))
    try:
        check_coco(own)
    except FileError:
        return
    prefix = dict(img=str(folder / 'coco/val2017'))
    CocoDataset(str(own), metainfo=dict(classes=names), data_prefix=prefix)


MODES = dict(PNG='P', JPEG='RGB', TIFF='I;16', BMP='L', WEBP='RGB', GIF='P', PPM='L')


def images() -> dict[str, bytes]:
    draw = np.random.default_rng(0)
    found = {}
    for kind, mode in MODES.items():
        shape = (9, 7, 3) if mode == 'RGB' else (9, 7)
        pixels = draw.integers(0, 200, shape).astype(np.uint16 if mode == 'I;16' else np.uint8)
        image = Image.fromarray(pixels)
        buffer = io.BytesIO()
        (image.convert('P') if mode == 'P' else image).save(buffer, kind)
        found[kind.lower()] = buffer.getvalue()
    return found


@pytest.mark.parametrize(('kind', 'content'), images().items(), ids=lambda value: str(value)[:4])
def test_damaged_images(tmp_path, kind, content):
    path = tmp_path / f'a.{kind}'

    @given(damaged(content))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        for function in (read_header, check_labels):
            with bounded():
                try:
                    function(path, max_pixels=10**6)
                except FileError as error:
                    assert str(error).startswith(f'{path}: ') and '\n' not in str(error)

    check()
    shutil.rmtree(tmp_path)
