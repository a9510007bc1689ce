"""Files that mean harm: nothing in them runs, leads elsewhere or takes the machine's memory."""

import argparse
import io
import json
import os
import pickle
import re
import runpy
import shutil
import signal
import struct
import sys
import tarfile
import zipfile
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace

import mmengine
import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import BaseDataset
from mmengine.fileio.handlers import file_handlers
from mmengine.logging import HistoryBuffer
from mmengine.optim import OneCycleLR
from mmengine.registry import DefaultScope, init_default_scope
from mmengine.runner import CheckpointLoader, Runner
from PIL import Image
from soak_predict import compare, make_images, predict_all
from test_evaluation import build_with_weights
from toy import TOOLS, run_tool, write_detection_config, write_scenes, write_segmentation_config

from mmnala.checkpoint import read_checkpoint
from mmnala.checkpoint.files import CheckpointError
from mmnala.checkpoint.loading import distrust_files, load_from_untrusted
from mmnala.checkpoint.unpickling import unpickle
from mmnala.datasets.shapes import make_dataset
from mmnala.datasets.untrusted import (
    FileError,
    check_coco,
    check_inside,
    check_labels,
    read_header,
)
from mmnala.engine import tools
from mmnala.engine.data_guard import guard_data
from mmnala.engine.dumping import dump_whole, save_coco_whole
from mmnala.engine.errors import InputError


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.write_text, (self.target, 'executed')


@pytest.fixture
def distrusting(monkeypatch):
    """The tools' handling of files, in this process and for one test."""
    monkeypatch.setattr(CheckpointLoader, '_schemes', CheckpointLoader._schemes.copy())
    before = dict(file_handlers)
    distrust_files()
    yield
    file_handlers.update(before)


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('toy') / 'data'
    write_scenes(folder)
    return folder


@pytest.fixture(scope='module')
def segmentor(data) -> tuple[Path, dict]:
    """An mmseg config, and what a training's checkpoint of it holds."""
    config = write_segmentation_config(data.parent / 'seg.py', data)
    logs = HistoryBuffer([1.0, 2.0], [1, 1])
    content = dict(
        meta=dict(epoch=0, iter=0, dataset_meta=dict(classes=('sea', 'land'))),
        state_dict=build_with_weights(config).state_dict(),
        message_hub=dict(
            log_scalars=OrderedDict(loss=logs), runtime_info={}, resumed_keys=dict(loss=True)
        ),
    )
    return config, content


# Checkpoints


def test_what_trainings_save_is_read_back(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    schedule = OneCycleLR(optimizer, eta_max=1.0, total_steps=9).state_dict()
    logs = HistoryBuffer([0.5, 0.25, np.float64(3)], [1, 2, 3])
    state = torch.nn.BatchNorm2d(2).state_dict()
    info = dict(best=np.float32(0.1), at=np.int64(7), palette=np.arange(6).reshape(2, 3).T)
    content = dict(
        state_dict=state,
        optimizer=optimizer.state_dict(),
        param_schedulers=[schedule, dict(milestones=Counter([3, 5, 5]))],
        message_hub=dict(log_scalars=OrderedDict(loss=logs), runtime_info=info),
        meta=dict(dataset_meta=ConfigDict(names=dict(a=1)), dtype=torch.bfloat16, raw=b'\xff\0'),
    )
    for zipped in (True, False):
        path = tmp_path / f'{zipped}.pth'
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        found = read_checkpoint(path, strict=True)
        assert found['state_dict']._metadata == state._metadata
        assert all(torch.equal(found['state_dict'][name], state[name]) for name in state)
        assert found['optimizer'] == content['optimizer']
        assert found['param_schedulers'] == content['param_schedulers']
        assert found['meta'] == content['meta']
        read = found['message_hub']['runtime_info']
        assert read['best'] == info['best'] and read['best'].dtype == np.float32
        assert read['at'] == 7 and np.array_equal(read['palette'], info['palette'])
        buffer = found['message_hub']['log_scalars']['loss']
        assert [x.tolist() for x in buffer.data] == [x.tolist() for x in logs.data]
        buffer.update(4.0)
        assert buffer.statistics('mean') == (0.5 + 0.25 + 3 + 4) / 7


def test_numpy_1_and_2():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    new = pickle.dumps([array, array[0, 1]], 2)
    old = re.sub(rb'numpy\._?core\.', b'numpy.core.', new)
    for data in (new, old, re.sub(rb'numpy\._?core\.', b'numpy._core.', new)):
        read, scalar = unpickle(io.BytesIO(data))
        assert np.array_equal(read, array) and scalar == 1 and scalar.dtype == np.float32


def test_other_types_are_inert_or_an_error(tmp_path):
    path = tmp_path / 'a.pth'
    words = np.array(['a', 'bc'])
    args = argparse.Namespace(lr=1)
    torch.save(dict(model={'w': torch.ones(2)}, args=args, words=words, kinds={1}), path)
    content = read_checkpoint(path)
    assert torch.equal(content['model']['w'], torch.ones(2)) and content['words'].size == 0
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        read_checkpoint(path, strict=True)
    unknown = "argparse.Namespace, builtins.set, numpy.dtype('U2')"
    assert str(caught.value).endswith(f'are not read from untrusted files: {unknown}')


@pytest.mark.parametrize('tool', ['test.py', 'predict.py', 'export.py', 'train.py'])
def test_no_tool_runs_what_a_checkpoint_holds(segmentor, tmp_path, tool):
    """As a pickled object, and as the config that mmengine's Runner.resume would execute."""
    config, content = segmentor
    target = tmp_path / 'target'
    code = f'from pathlib import Path\nPath({str(target)!r}).write_text("executed")\n'
    meta = dict(content['meta'], config=code, attack=Attack(target))
    if tool == 'train.py':
        del meta['attack']  # which is an error of its own, see below
    torch.save(dict(content, meta=meta), tmp_path / 'a.pth')
    image = config.parent / 'data/images/val/0.png'
    arguments = {
        'test.py': [config, 'a.pth'],
        'predict.py': [config, 'a.pth', image, '--out', 'out'],
        'export.py': [config, 'a.pth', 'a.ts', '--static=64x64'],
        'train.py': [config, '--resume', 'a.pth', '--cfg-options', 'train_cfg.max_iters=1'],
    }[tool]
    finished = run_tool(tool, *arguments, cwd=tmp_path)
    assert 'Traceback' not in finished.output
    if tool == 'train.py':  # without an optimizer's state, only the weights are resumed
        assert 'resumed epoch' in finished.output or "'optimizer'" in finished.output
    else:
        assert finished.code == 0, finished.output
    assert not target.exists()


def test_resuming_refuses_what_it_does_not_know(segmentor, tmp_path):
    config, content = segmentor
    torch.save(dict(content, attack=Attack(tmp_path / 'target')), tmp_path / 'a.pth')
    finished = run_tool('train.py', config, '--resume', 'a.pth', cwd=tmp_path)
    assert finished.code == 1 and finished.output.splitlines()[-1] == (
        "error: checkpoint 'a.pth' holds objects that are not read from untrusted files: "
        'Inert.write_text, pathlib.Path, pathlib.PosixPath'
    )
    assert not (tmp_path / 'target').exists()


def test_mmengine_reads_safely_in_our_tools(distrusting, tmp_path, monkeypatch):
    target, path = tmp_path / 'target', tmp_path / 'a.pth'
    torch.save(dict(state_dict={'w': torch.ones(1)}, attack=Attack(target)), path)
    home = tmp_path / 'home'
    home.mkdir()
    monkeypatch.setenv('MMENGINE_HOME', str(home))
    (home / 'open_mmlab.json').write_text(json.dumps({'mine': str(path)}))
    for name in (str(path), path.as_uri(), 'open-mmlab://mine', 'openmmlab://mine'):
        loaded = CheckpointLoader.load_checkpoint(name)
        assert torch.equal(loaded['state_dict']['w'], torch.ones(1))
    for name in ('s3://bucket/a.pth', 'pavi://a', 'torchvision://none', 'mmcls://none'):
        with pytest.raises(CheckpointError, match=f"^checkpoint '{name}': "):
            load_from_untrusted(name)
    for ending, data in (
        ('pkl', pickle.dumps(Attack(target))),
        ('pickle', pickle.dumps(Attack(target), 4)),
        ('yaml', f'!!python/object/apply:os.mkdir [{target}]'.encode()),
        ('yml', f'!!python/object/apply:os.mkdir [{target}]'.encode()),
    ):
        (tmp_path / f'a.{ending}').write_bytes(data)
        with pytest.raises(Exception, match='(?s)it holds pathlib|could not determine a const'):
            mmengine.load(tmp_path / f'a.{ending}')
    assert not target.exists()
    values = dict(a=[1, 2.5, None], b='x')
    mmengine.dump(values, tmp_path / 'b.pkl')
    (tmp_path / 'b.yaml').write_text('a: !!python/tuple [1, 2]\nb: x\n')
    assert mmengine.load(tmp_path / 'b.pkl') == values
    assert mmengine.load(tmp_path / 'b.yaml') == dict(a=(1, 2), b='x')


def nested(depth: int, wrap: bytes) -> bytes:
    return b'\x80\x02]' + wrap * depth + b'.'


def laughs(levels: int) -> bytes:
    """A list of ten lists of ten lists..., each in the file once."""
    level = b''.join(b'q%c](' % i + b'h%c' % i * 10 + b'e' for i in range(levels))
    return b'\x80\x02](K\x01e' + level + b'.'


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return f'c{module}\n{name}\n('.encode() + b''.join(arguments) + b'tR'


TEXT = b'X' + struct.pack('<I', 50_000) + b'a' * 50_000 + b'q\x01'
COPIES = b'0' + call('_codecs', 'encode', b'h\x01', b'X\x06\0\0\0latin1')


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (nested(100_000, b'\x85'), 'more than 64 deep'),
        (laughs(9), 'more than 10000000 entries'),
        (b'\x80\x02}]' + b'\x85' * 1_000_000 + b'K\x01s.', 'nested tuples as a key'),
        (b'\x80\x02' + TEXT + COPIES * 20 + b'.', 'its content is larger than the file'),
        (b'\x80\x05\x96' + struct.pack('<Q', 2**40) + b'.', 'a set or a buffer'),
        (b'\x80\x04\x8f(K\x01\x90.', 'a set or a buffer'),
        (b'\x80\x02X\xff\xff\xff\x7fa.', 'EOFError'),
        (b'\x80\x02r\xff\xff\xff\x7f.', 'IndexError'),
        (
            b'\x80\x02' + call('mmengine.logging.history_buffer', 'HistoryBuffer') + b'.',
            'a call of HistoryBuffer',
        ),
        (
            b'\x80\x02'
            + call('numpy._core.multiarray', '_reconstruct')
            + b'(K\x01J\0\0\0\x7f\x85'
            + call('numpy', 'dtype', b'X\x02\0\0\0f8')
            + b'\x89C\x01atb.',
            'whose size is not that of its data',
        ),
        (b'\x80\x02' + call('torch', 'device', b'X\x04\0\0\0none') + b'.', 'RuntimeError'),
    ],
)
def test_pickles_that_ask_for_more_than_they_hold(data, message):
    with pytest.raises(pickle.UnpicklingError, match=message):
        unpickle(io.BytesIO(data))


def test_a_tensor_stretched_over_the_memory(tmp_path):
    torch.save(dict(a=torch.ones(1).expand(10**6, 10**6)), tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match='its content is larger than the file'):
        read_checkpoint(tmp_path / 'a.pth')


def compressed(source: Path, target: Path) -> None:
    with (
        zipfile.ZipFile(source) as archive,
        zipfile.ZipFile(target, 'w', zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))


def as_tar(source: Path, target: Path) -> None:
    with tarfile.open(target, 'w') as archive:
        link = tarfile.TarInfo('storages')
        link.type, link.linkname = tarfile.SYMTYPE, str(source)
        archive.addfile(link)


@pytest.mark.parametrize(
    ('change', 'message'),
    [(compressed, 'its parts are larger than the file'), (as_tar, 'the tar format')],
)
def test_archives_that_torch_would_unpack(tmp_path, change, message):
    torch.save(dict(a=torch.zeros(100_000)), tmp_path / 'a.pth')
    change(tmp_path / 'a.pth', tmp_path / 'b.pth')
    with pytest.raises(CheckpointError, match=f'b.pth.*{message}'):
        read_checkpoint(tmp_path / 'b.pth')


# Images


def write_claim(path: Path, side: int) -> None:
    """Write a PNG of a few bytes whose header tells ``side`` x ``side`` pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack('>I', zlib.crc32(kind + content))
        return struct.pack('>I', len(content)) + kind + content + checksum

    header = chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 0, 0, 0, 0))
    end = chunk(b'IDAT', zlib.compress(b'')) + chunk(b'IEND', b'')
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + header + end)


def save_label(path: Path, mode: str, value: int) -> None:
    kind = dict(I=np.int32, F=np.float32).get(mode[0], np.uint8)
    kind = np.uint16 if mode == 'I;16' else kind
    pixels = np.full((4, 6, 3) if mode == 'RGB' else (4, 6), value, kind)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ('mode', 'value', 'message'),
    [
        ('L', 255, None),
        ('I;16', 255, None),
        ('I;16', 256, 'has labels from 256 to 256, allowed are 0 to 255'),
        ('F', 3, None),
        ('F', -1, r'has labels from -1\.0 to -1\.0, allowed are 0 to 255'),
        ('RGB', 1, r'has mode RGB, expected one channel of labels \(L or P\)'),
    ],
)
def test_label_images(tmp_path, mode, value, message):
    path = tmp_path / 'a.tiff'
    save_label(path, mode, value)
    if message is None:
        check_labels(path)
    else:
        with pytest.raises(FileError, match=f'^{path}: {message}$'):
            check_labels(path)


def test_labels_have_their_images_size(tmp_path):
    image, labels = tmp_path / 'a.jpg', tmp_path / 'a.png'
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new('L', (6, 4)).save(labels)
    for size, data, fits in (((6, 4), b'', True), ((4, 6), exif, True), ((4, 6), b'', False)):
        Image.new('RGB', size).save(image, exif=data)
        if fits:
            check_labels(labels, read_header(image))
        else:
            with pytest.raises(FileError, match=r'a\.png: has 6x4 pixels, its image 4x6$'):
                check_labels(labels, read_header(image))


@pytest.mark.parametrize('side', [100, 12_000, 60_000])
def test_a_header_is_bounded_before_memory_is_taken(tmp_path, side):
    path = tmp_path / 'a.png'
    write_claim(path, side)
    claim = f'claims {side}x{side} pixels, more' if side < 60_000 else 'claims more'
    with pytest.raises(FileError, match=rf'^{path}: {claim} than 9999 '):
        read_header(path, 9999)
    if side == 100:
        assert read_header(path, 10_000).size == (100, 100)


def test_images_of_other_readers(tmp_path):
    tifffile = pytest.importorskip('tifffile')
    path = tmp_path / 'a.tif'
    pixels = np.zeros((20, 30, 9), np.float32)
    tifffile.imwrite(path, pixels, photometric='minisblack', planarconfig='contig')
    assert read_header(path, 1800).size == (30, 20)
    with pytest.raises(FileError, match='claims 30x20 pixels, more than 1799'):
        read_header(path, 1799)  # nine channels are those of three images
    for content, reason in ((b'', 'the file is empty'), (b'#?RADIANCE', 'cannot identify')):
        path.write_bytes(content)
        with pytest.raises(FileError, match=f'^{path}: {reason}'):
            read_header(path)


@pytest.mark.parametrize(
    ('name', 'inside'),
    [
        ('root/a/b.png', True),
        ('root/a/../b.png', True),
        ('root/../b.png', False),
        ('rooted/b.png', False),
        ('/etc/passwd', False),
    ],
)
def test_names_lead_out_of_no_folder(tmp_path, name, inside):
    path = os.path.join(tmp_path, name)
    if inside:
        check_inside(path, [str(tmp_path / 'other'), str(tmp_path / 'root')])
    else:
        with pytest.raises(FileError, match='an annotation names this file outside of .*/root$'):
            check_inside(path, [str(tmp_path / 'root')])


# Data sets in a runner


def edit(data: Path, folder: Path, change) -> Path:
    """A copy of the tiny data set whose validation annotations were changed."""
    root = Path(shutil.copytree(data, folder / 'data'))
    content = json.loads((root / 'val.json').read_text())
    text = change(content)
    (root / 'val.json').write_text(text if isinstance(text, str) else json.dumps(content))
    return root


def loader(write_config, root: Path, max_pixels: int = 10_000):
    """The guarded test loader of a config."""
    cfg = Config.fromfile(write_config(root.parent / 'config.py', root))
    init_default_scope(cfg.default_scope)
    runner = SimpleNamespace(
        build_dataloader=Runner.build_dataloader, build_evaluator=lambda cfg: None
    )
    guard_data(runner, max_pixels)
    runner.build_evaluator(cfg.test_evaluator)
    return runner.build_dataloader(cfg.test_dataloader)


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', Image.MAX_IMAGE_PIXELS)
    yield
    DefaultScope._instance_dict.clear()


def set_entry(kind: str, **values: object):
    def change(content: dict) -> None:
        content[kind][1].update(values)
        for name in [name for name, value in values.items() if value is ...]:
            del content[kind][1][name]

    return change


RUNS = dict(size=[64, 64], counts=[64 * 64])


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda c: json.dumps(c)[:-20], 'is no JSON: '),
        (lambda c: '[' * 200_000, 'is nested too deeply'),
        (lambda c: '', 'is no JSON: '),
        (lambda c: '[]', 'expected an object with images, annotations and categories'),
        (lambda c: c.pop('categories') and None, 'categories must be a list, got None'),
        (set_entry('images', id=...), r'images\[1\] must be an object with an id'),
        (set_entry('images', id=0), r'images\[1\] has the id 0, which another one has'),
        (set_entry('images', file_name=7), r'images\[1\].file_name must be a text, got 7'),
        (set_entry('images', width='64'), r"images\[1\] must have a positive width .*, got '64'"),
        (set_entry('images', width=10**400), r'images\[1\] must have a positive width'),
        (set_entry('images', width=10**6), r'images\[1\] claims 1000000x64 pixels'),
        (set_entry('annotations', bbox=[1, 2, 3]), r'annotations\[1\].bbox must be four numbers'),
        (set_entry('annotations', bbox=[1, 2, 3, float('nan')]), r'bbox must be four numbers'),
        (set_entry('annotations', area=...), r'annotations\[1\].area must be a number, got None'),
        (set_entry('annotations', image_id=[]), r'annotations\[1\].image_id must be an id'),
        (set_entry('annotations', segmentation=3), r'segmentation must be lists of coord'),
        (set_entry('annotations', segmentation=dict(RUNS, size=[9**9, 9**9])), 'of the size of'),
        (set_entry('annotations', segmentation=dict(RUNS, counts=[9**9])), 'for 4096 pixels'),
    ],
)
def test_malformed_coco_annotations(data, tmp_path, change, message):
    root = edit(data, tmp_path, change)
    with pytest.raises(InputError, match=rf'^{root}/val\.json: .*{message}'):
        loader(write_detection_config, root)


def test_good_coco_annotations(data, tmp_path):
    root = edit(data, tmp_path, set_entry('annotations', segmentation=RUNS, score=1.5))
    assert len(loader(write_detection_config, root).dataset) == 5
    edit(data, tmp_path / 'short', lambda c: c.pop('annotations') and None)
    check_coco(tmp_path / 'short/data/val.json')
    with pytest.raises(FileError, match=r'annotations\[1\].bbox'):
        check_coco(edit(data, tmp_path / 'bare', set_entry('annotations', bbox=...)) / 'val.json')
    check_coco(tmp_path / 'bare/data/val.json', complete=False)


@pytest.mark.parametrize('name', ['../../../secret.png', '{folder}/secret.png'])
def test_no_annotation_leads_out_of_the_data_set(data, tmp_path, name):
    name = name.format(folder=tmp_path)
    root = edit(data, tmp_path, set_entry('images', file_name=name))
    Image.new('RGB', (64, 64)).save(tmp_path / 'secret.png')
    found = loader(write_detection_config, root).dataset
    assert found[0]['inputs'].shape == (3, 64, 64)
    with pytest.raises(FileError, match='secret.png: an annotation names this file outside of '):
        found[1]


def test_a_list_of_names_leads_nowhere_else_either(data, tmp_path):
    root = Path(shutil.copytree(data, tmp_path / 'data'))
    (root / 'list.txt').write_text('0\n../../../secret\n')
    Image.new('RGB', (64, 64)).save(tmp_path / 'secret.png')

    def write_config(path: Path, root: Path) -> Path:
        extra = "test_dataloader['dataset'].update(ann_file='list.txt')\n"
        return write_segmentation_config(path, root, extra)

    found = loader(write_config, root).dataset
    assert found[0]['inputs'].shape == (3, 64, 64)
    with pytest.raises(FileError, match='secret.png: an annotation names this file outside of '):
        found[1]


@pytest.mark.parametrize(
    ('kind', 'change', 'message'),
    [
        ('images', lambda path: write_claim(path, 60_000), 'claims more than 10000 pixels'),
        ('images', lambda path: path.write_bytes(b''), 'the file is empty'),
        ('masks', lambda path: write_claim(path, 101), 'claims 101x101 pixels, more than 10000'),
        ('masks', lambda path: path.write_bytes(b''), 'the file is empty'),
        ('masks', lambda path: save_label(path, 'RGB', 0), 'has mode RGB, expected one channel'),
        ('masks', lambda path: save_label(path, 'L', 0), 'has 6x4 pixels, its image 64x64'),
    ],
)
def test_malformed_images_in_a_data_set(data, tmp_path, kind, change, message):
    root = Path(shutil.copytree(data, tmp_path / 'data'))
    path = root / kind / 'val' / '1.png'
    change(path)
    found = loader(write_segmentation_config, root).dataset
    with pytest.raises(FileError, match=f'^{path}: {message}'):
        found[1]


def test_other_annotations_that_cannot_be_read(data, tmp_path, distrusting):
    """Those in mmengine's own formats, a pickle among them."""
    root = Path(shutil.copytree(data, tmp_path / 'data'))
    target = tmp_path / 'target'
    (root / 'a.pkl').write_bytes(pickle.dumps(Attack(target)))
    (root / 'a.json').write_text('{"metainfo": 1}')
    for name, reason in (('a.pkl', 'UnpicklingError'), ('a.json', 'ValueError|TypeError')):
        cfg = dict(
            dataset=dict(type=BaseDataset, ann_file=name, data_root=str(root)),
            batch_size=1,
            sampler=dict(type='DefaultSampler'),
        )
        runner = SimpleNamespace(build_dataloader=Runner.build_dataloader, build_evaluator=None)
        guard_data(runner, 100)
        message = f'^the data set with the annotations {root}/{name}: ({reason})'
        with pytest.raises(InputError, match=message):
            runner.build_dataloader(cfg)
    assert not target.exists()


@pytest.mark.parametrize(
    'part',
    [
        dict(type='mmdet.OpenImagesChallengeDataset'),
        dict(type='A', pipeline=[[dict(type='B', decode_backend='pickle')]]),
    ],
)
def test_what_would_unpickle_by_itself(part):
    runner = SimpleNamespace(build_dataloader=Runner.build_dataloader, build_evaluator=None)
    guard_data(runner, 100)
    with pytest.raises(
        InputError, match=r"'(mmdet\.OpenI\w+|pickle)' would run pickles of the data"
    ):
        runner.build_dataloader(dict(dataset=dict(type='C', dataset=part), batch_size=1))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--max-pixels', '4095'], r'/data/images/val/\d.png: claims 64x64 pixels, more than 4095'),
        (['--max-pixels', '0'], r'--max-pixels 0: expected a number from 1 to 1073741824'),
    ],
)
def test_a_tools_limit(segmentor, tmp_path, arguments, message):
    """Also in the processes that load data, whose errors have a traceback in them."""
    config, content = segmentor
    torch.save(content, tmp_path / 'a.pth')
    options = ['--cfg-options', 'test_dataloader.num_workers=1']
    finished = run_tool('test.py', config, 'a.pth', *arguments, *options, cwd=tmp_path)
    assert finished.code == 1
    last = finished.output.splitlines()[-1]
    assert re.fullmatch(rf'error: .*{message}.*', last), finished.output
    assert 'Traceback' not in finished.output


# Configs


def build(data: Path, tmp_path: Path, *options: str) -> None:
    parser = tools.argument_parser('')
    config = write_segmentation_config(tmp_path / 'seg.py', data)
    work_dir = ['--work-dir', str(tmp_path / 'work')]
    cfg = tools.load_config(parser.parse_args([str(config), *work_dir, '--cfg-options', *options]))
    runner = tools.build_runner(cfg, training=True)
    runner.build_train_loop(cfg.train_cfg)
    runner.build_optim_wrapper(cfg.optim_wrapper)


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        (
            'modell.backbone.arch=s',
            '--cfg-options modell.backbone.arch: the config has no modell, and nothing reads one; '
            'did you mean model',
        ),
        (
            'model.type=EncoderDecodr',
            "config: type='EncoderDecodr' is not in the registry mmseg::model; did you mean "
            'EncoderDecoder',
        ),
        (
            'train_cfg.type=IterLoop',
            "config: type='IterLoop' is not in the registry mmseg::loop",
        ),
        (
            'train_cfg.max_itres=3',
            "config: IterBasedTrainLoop.__init__() got an unexpected keyword argument 'max_itres'; "
            'did you mean max_iters?',
        ),
        (
            'optim_wrapper.optimizer.lrr=3',
            "config: SGD.__init__() got an unexpected keyword argument 'lrr'; did you mean lr?",
        ),
        (
            'model.decode_head.num_clases=3',
            "got an unexpected keyword argument 'num_clases'; did you mean num_classes",
        ),
        (
            'train_dataloader.batchsize=3',
            "DataLoader.__init__() got an unexpected keyword argument 'batchsize'",
        ),
        (
            'train_dataloader.dataset.data_rot=3',
            "got an unexpected keyword argument 'data_rot'; did you mean data_root",
        ),
        (
            'env_cfg.cudnn_benchmrk=True',
            'config: nothing reads env_cfg.cudnn_benchmrk; did you mean cudnn_benchmark?',
        ),
        ('auto_scale_lr.enabled=True', 'reads auto_scale_lr.enabled; did you mean enable?'),
        (
            'optim_wrapper.paramwise_cfg.norm_decay_mul=0',
            'config: nothing reads optim_wrapper.paramwise_cfg.norm_decay_mul; did you mean '
            'norm_decay_mult',
        ),
        (
            'optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mul=0',
            'nothing reads optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mul; did you mean '
            'lr_mult?',
        ),
        (
            'optim_wrapper.paramwise_cfg.layer_decay_rate=0.9',
            "needs optim_wrapper.constructor='LayerDecayOptimWrapperConstructor'",
        ),
        ('randomness.sed=1', "got an unexpected keyword argument 'sed'"),
        ('optim_wrapper.optimizer.type=3', 'config: '),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(data, tmp_path, distrusting, option, message):
    with pytest.raises(SystemExit) as ended:
        tools.run(lambda: build(data, tmp_path, option))
    assert message in str(ended.value) and '\n' not in str(ended.value)
    assert str(ended.value).startswith('error: ')


def test_an_interrupted_tool_ends_without_a_traceback(distrusting, tmp_path, capsys, request):
    # A shell has its background jobs ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def main():
        tools.claim(tmp_path / 'out')
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        tools.run(main)
    assert ended.value.code == 130
    assert capsys.readouterr().err == 'interrupted\n'
    assert not (tmp_path / 'out').exists()


def test_options_that_only_the_runner_knows(data, tmp_path):
    build(data, tmp_path, 'find_unused_parameters=True', 'log_level=ERROR', 'experiment_name=a')


# Results


def test_dumps_are_whole_or_not_there(tmp_path):
    path = tmp_path / 'a.pkl'
    metric = SimpleNamespace(out_file_path=str(path))
    dump_whole(metric)
    with pytest.raises(AttributeError):
        metric.compute_metrics([1, lambda: None])
    assert not list(tmp_path.iterdir())
    assert metric.compute_metrics([dict(a=1)]) == {}
    assert path.read_bytes() == pickle.dumps([dict(a=1)], 2)
    assert [p.name for p in tmp_path.iterdir()] == ['a.pkl']

    def write(results: list, prefix: str) -> dict[str, str]:
        for kind in ('bbox', 'segm'):
            Path(f'{prefix}.{kind}.json').write_text(json.dumps(results))
            if results == ['stop']:
                raise KeyboardInterrupt
        return dict(bbox=f'{prefix}.bbox.json', proposal=f'{prefix}.bbox.json',
                    segm=f'{prefix}.segm.json')  # fmt: skip

    metric = SimpleNamespace(results2json=write)
    save_coco_whole(metric)
    folder = tmp_path / 'out'
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        metric.results2json(['stop'], str(folder / 'results'))
    assert not list(folder.iterdir())
    files = metric.results2json([1], str(folder / 'results'))
    assert files['proposal'] == files['bbox'] == str(folder / 'results.bbox.json')
    assert sorted(p.name for p in folder.iterdir()) == ['results.bbox.json', 'results.segm.json']


def test_no_folder_is_left_where_nothing_can_be_saved(segmentor, tmp_path):
    config, content = segmentor
    torch.save(content, tmp_path / 'a.pth')
    options = ['--cfg-options', 'test_evaluator.type=DepthMetric']
    finished = run_tool('test.py', config, 'a.pth', '--out', 'a/b', *options, cwd=tmp_path)
    assert finished.code == 1
    assert 'a folder is for mmseg with IoUMetric or CityscapesMetric' in finished.output
    assert not (tmp_path / 'a').exists()


# Checking a data set


@pytest.mark.parametrize('options', [[], ['--allow-links'], ['--max-pixels', '1023']])
def test_links_and_limits_of_the_dataset_check(tmp_path, monkeypatch, capsys, options):
    root = tmp_path / 'coco'
    make_dataset(root, 3, 4, 32, layout='coco')
    images = root / 'train2017'
    images.rename(tmp_path / 'elsewhere')  # whole folders may lie on another disk
    images.symlink_to(tmp_path / 'elsewhere')
    image = images / '000000000003.jpg'
    image.rename(tmp_path / 'a.jpg')
    image.symlink_to(tmp_path / 'a.jpg')
    script = str(TOOLS / 'dataset' / 'coco.py')
    monkeypatch.setattr(sys, 'argv', [script, str(root), '--partial', *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name='__main__')
    output = capsys.readouterr().out
    if options == ['--allow-links']:
        assert ended.value.code == 0 and output.endswith('OK: no problem found\n')
        return
    assert ended.value.code == 1
    assert f'link out of the data set (1):\n  {image} leads to {tmp_path / "a.jpg"}\n' in output
    assert ('claims 32x32 pixels, more than 1023' in output) == bool(options)


# Load


def test_predictions_of_many_sizes_are_those_of_single_runs(segmentor, tmp_path, distrusting):
    config, content = segmentor
    torch.save(content, tmp_path / 'a.pth')
    images = make_images(tmp_path / 'images', 12, low=32, high=400)
    sizes = {Image.open(path).size for path in images}
    assert len(sizes) == 12 and max(max(size) / min(size) for size in sizes) > 4
    trace = predict_all(config, tmp_path / 'a.pth', images, tmp_path / 'out')
    assert trace[-1].number == 12
    assert compare(config, tmp_path / 'a.pth', images, tmp_path / 'out', sample=3) == 3
