"""What `pip install mmnala` brings along, and what importing mmnala needs."""

import csv
import email
import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
from mmengine.config import Config
from toy import ENVIRONMENT

import mmnala
from mmnala.datasets.shapes import make_dataset

ROOT = Path(__file__).parent.parent
CORE = {'torch', 'timm', 'numpy', 'safetensors', 'pillow', 'pyyaml'}
ONEDL = {'onedl-mmengine', 'onedl-mmcv', 'onedl-mmdetection', 'onedl-mmsegmentation'}
DEV = {'pytest', 'hypothesis', 'ruff', 'mypy', 'deptry'}
OPENMMLAB = {'mmengine', 'mmcv', 'mmdet', 'mmsegmentation'}


def run(*command, cwd, **env):
    """Run a Python command line and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=ENVIRONMENT | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source, target):
    options = ['--quiet', '--no-deps', '--no-build-isolation', '--wheel-dir', target]
    run('-m', 'pip', 'wheel', *options, source, cwd=target)
    (path,) = target.glob('*.whl')
    return path


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """A copy of the checkout, which itself stays free of build folders, with litter in it."""
    source = tmp_path_factory.mktemp('source')
    for path in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(path, source)
    for name in ('mmnala', 'tests', 'tools', 'configs'):
        shutil.copytree(ROOT / name, source / name)
    for name in (
        *('tools/__pycache__/train.cpython-311.pyc', 'configs/coco/notes.txt', 'configs/a.pth'),
        *('work_dirs/run/config.py', 'data/shapes/shapes.py', 'build/lib/mmnala/stale.py'),
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    return source


@pytest.fixture(scope='module')
def wheel_file(source, tmp_path_factory):
    return build_wheel(source, tmp_path_factory.mktemp('wheel'))


@pytest.fixture(scope='module')
def wheel(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


@pytest.fixture(scope='module')
def installed(wheel_file, tmp_path_factory):
    """A folder that the wheel is installed into, without what it requires."""
    target = tmp_path_factory.mktemp('site packages')
    run('-m', 'pip', 'install', '--quiet', '--no-deps', '--target', target, wheel_file, cwd=target)
    return target


@pytest.fixture(scope='module')
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    return email.message_from_bytes(wheel.read(name))


def requirements(metadata, extra=None):
    """Names of the distributions that the extra adds; None for those always required."""
    names = set()
    for line in metadata.get_all('Requires-Dist'):
        marker = re.search(r"""extra == ['"]([\w-]+)['"]""", line)
        if (marker and marker.group(1)) == extra:
            names.add(re.match(r'[\w.-]+', line).group())
    return names


def test_metadata(metadata):
    assert metadata['Name'] == 'mmnala'
    assert metadata['Version'] == mmnala.__version__
    assert metadata['Requires-Python'] == '>=3.10'
    assert 'Apache-2.0' in (metadata['License-Expression'], metadata['License'])


def test_core_requires_no_openmmlab_distribution(metadata):
    assert requirements(metadata) == CORE


def test_extras_hold_one_family_each(metadata):
    families = {'onedl', 'openmmlab', 'onedl-mmpretrain', 'mmpretrain'}
    tasks = {'analysis', 'cityscapes', 'export', 'dev'}
    assert set(metadata.get_all('Provides-Extra')) == families | tasks
    assert requirements(metadata, 'onedl') == ONEDL
    assert requirements(metadata, 'openmmlab') == OPENMMLAB
    for name in ('onedl-mmpretrain', 'mmpretrain'):
        assert requirements(metadata, name) == {name}
    assert requirements(metadata, 'export') == {'onnx', 'onnxruntime', 'onnxscript'}
    assert requirements(metadata, 'analysis') == {'jinja2', 'matplotlib', 'scipy'}
    assert requirements(metadata, 'cityscapes') == {'cityscapesscripts'}
    assert requirements(metadata, 'dev') == DEV


def test_imports_are_declared(metadata, tmp_path):
    """Whatever mmnala and its tools import is required, by one extra or another."""
    lines = [line.partition(';')[0] for line in metadata.get_all('Requires-Dist')]
    (tmp_path / 'requirements.txt').write_text('\n'.join(lines))
    options = ['--config', ROOT / 'pyproject.toml', '--known-first-party', 'mmnala']
    requirements = ['--requirements-files', tmp_path / 'requirements.txt']
    run('-m', 'deptry', 'mmnala', 'tools', *options, *requirements, cwd=ROOT)


# What distributions call the licence in their metadata, where they don't by its name.
CALLED = {
    'BSD-3-Clause': r'BSD|Redistribution and use|Enthought|NumPy Developers',
    'Apache-2.0': r'Apache|VBTI',
    'MIT-CMU': r'MIT-CMU|HPND',
    'PSF': r'Python Software Foundation|matplotlib',
    'its own': r'(?i:license)',
}


def test_licences_are_listed(metadata):
    page = (ROOT / 'docs/licences.md').read_text()
    listed = {}
    for names, licence in re.findall(r'^\| (`.*?) \| (.*?) \|', page, re.MULTILINE):
        listed |= dict.fromkeys(re.findall(r'`([^`]+)`', names), licence)
    lines = metadata.get_all('Requires-Dist')
    assert set(listed) == {re.match(r'[\w.-]+', line).group() for line in lines}
    compared = 0
    for name, licence in listed.items():
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of the other family
        classifiers = [c for c in found.get_all('Classifier') or [] if c.startswith('License')]
        fields = ('License-Expression', 'License')
        texts = [*classifiers, *(text for field in fields for text in found.get_all(field) or [])]
        known = CALLED.get(licence.partition(',')[0], re.escape(licence))
        assert re.search(known, ' '.join(texts)), (name, texts)
        compared += 1
    assert compared >= 15


def files_under(folder, *patterns):
    return {path.relative_to(ROOT).as_posix() for p in patterns for path in folder.rglob(p)}


def test_wheel_holds_the_package_alone(wheel):
    names = wheel.namelist()
    assert {name.split('/')[0] for name in names} == {
        'mmnala',
        f'mmnala-{mmnala.__version__}.dist-info',
    }
    packaged = {name for name in names if name.startswith('mmnala/')}
    mim = {name.removeprefix('mmnala/.mim/') for name in packaged if '/.mim/' in name}
    assert packaged - {f'mmnala/.mim/{name}' for name in mim} == (
        files_under(ROOT / 'mmnala', '*.py') | {'mmnala/py.typed'}
    )
    assert mim == (
        files_under(ROOT / 'configs', '*.py', 'metafile.yml', 'README.md')
        | files_under(ROOT / 'tools', '*.py', '*.sh') - {'tools/bootstrap.py'}
        | {'model-index.yml', 'README.md'}
    )


def test_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    build = 'import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])'
    run('-c', build, tmp_path, cwd=source)
    (sdist,) = tmp_path.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert {'LICENSE', 'CITATION.cff', 'CHANGELOG.md', 'setup.py'} <= names
    assert not any(name.startswith(('tests', 'data', 'work_dirs', 'docs')) for name in names)
    with zipfile.ZipFile(build_wheel(sdist, tmp_path)) as rebuilt:
        assert set(rebuilt.namelist()) == set(wheel.namelist())
        for name in rebuilt.namelist():
            assert rebuilt.read(name) == wheel.read(name), name


def test_installed_configs_load_from_anywhere(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mim = installed / 'mmnala/.mim'
    leaves = {path for path in (mim / 'configs').rglob('*.py') if '_base_' not in path.parts}
    assert {path.relative_to(mim) for path in leaves} == {
        path.relative_to(ROOT)
        for path in (ROOT / 'configs').rglob('*.py')
        if '_base_' not in path.parts
    }
    for path in leaves:
        cfg = Config.fromfile(path)
        assert {'model', 'train_dataloader', 'test_evaluator', 'optim_wrapper'} <= cfg.keys(), path


def test_installed_tools_train_and_leave_the_package_as_it_was(installed, tmp_path):
    """dist_train.sh of the installed package, and what an uninstallation would leave behind."""
    make_dataset(tmp_path / 'data/shapes', num_train=2, num_val=1, size=64)
    config = installed / 'mmnala/.mim/configs/shapes/upernet_nala-xt_shapes.py'
    options = ['train_cfg.max_iters=1', 'train_dataloader.batch_size=2']
    options += ['train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False']
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    env = ENVIRONMENT | dict(PYTHON=sys.executable, PYTHONPATH=str(installed), PORT=port)
    find = 'import importlib.util as util; print(util.find_spec("mmnala").origin)'
    assert run('-c', find, cwd=tmp_path, **env).startswith(str(installed))
    script = installed / 'mmnala/.mim/tools/dist_train.sh'
    done = subprocess.run(
        ['bash', script, config, '1', '--cfg-options', *options],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / 'work_dirs/upernet_nala-xt_shapes/iter_1.pth').is_file()

    (record,) = installed.glob('mmnala-*.dist-info/RECORD')
    recorded = {row[0] for row in csv.reader(record.read_text().splitlines())}
    files = {path.relative_to(installed) for path in installed.rglob('*') if path.is_file()}
    assert {path.as_posix() for path in files} == recorded


def tree(folder):
    names = {path.relative_to(folder).as_posix() for path in folder.rglob('*')}
    return {name for name in names if '__pycache__' not in name}


SHOW = """
import pathlib, mmnala
print(mmnala.__version__, pathlib.Path(mmnala.__file__).parent)
"""


@pytest.mark.parametrize('kind', ['folder', 'editable', 'wheel', 'sdist'])
def test_installing_and_uninstalling_in_a_bare_environment(kind, source, wheel_file, tmp_path):
    environment = tmp_path / 'bare'
    run('-m', 'venv', '--without-pip', environment, cwd=tmp_path)
    site = next(environment.glob('lib/python*/site-packages'))
    for pattern in ('setuptools', 'setuptools-*', '_distutils_hack'):
        (path,) = Path(setuptools.__file__).parents[1].glob(pattern)
        (site / path.name).symlink_to(path)
    (site / 'other.txt').touch()  # pip removes a folder without files of others, links or not
    before = tree(environment)
    what = [source]
    if kind == 'editable':
        what = ['--editable', source]
    elif kind == 'wheel':
        what = [wheel_file]
    elif kind == 'sdist':
        build = 'import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])'
        run('-c', build, tmp_path, cwd=source)
        what = list(tmp_path.glob('*.tar.gz'))
    pip = ['-m', 'pip', '--python', environment / 'bin/python']
    options = ['--quiet', '--no-deps', '--no-build-isolation', '--no-compile']
    run(*pip, 'install', *options, *what, cwd=tmp_path)

    package = source / 'mmnala' if kind == 'editable' else site / 'mmnala'
    requirements = tmp_path / 'requirements'
    requirements.mkdir()
    for path in Path(setuptools.__file__).parents[1].iterdir():
        if not path.name.startswith(('mmnala', '__editable__')):
            (requirements / path.name).symlink_to(path)
    (site / 'requirements.pth').write_text(str(requirements))
    done = subprocess.run(
        [environment / 'bin/python', '-B', '-c', SHOW],
        cwd=tmp_path,
        env=ENVIRONMENT | dict(PYTHONPATH=''),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [mmnala.__version__, str(package)], done.stderr
    assert (package / 'py.typed').is_file()
    assert (package / '.mim/configs/upernet_nala_ade20k.py').is_file() == (kind != 'editable')

    (site / 'requirements.pth').unlink()
    run(*pip, 'uninstall', '--quiet', '--yes', 'mmnala', cwd=tmp_path)
    assert tree(environment) == before


def run_without(blocked, code):
    """Run code in a Python of its own in which the modules cannot be imported."""
    block = f'import sys; sys.modules.update(dict.fromkeys({sorted(blocked)!r}))\n'
    return subprocess.run(
        [sys.executable, '-c', block + code], cwd=ROOT, capture_output=True, text=True
    )


BUILD = """
import torch
from mmengine.registry import MODELS
import mmnala
backbone = MODELS.build(dict(type='NaLaFormer', arch='xt')).eval()
with torch.no_grad():
    outputs = backbone(torch.zeros(1, 3, 64, 64))
print([tuple(output.shape[2:]) for output in outputs])
"""


@pytest.mark.parametrize(
    'blocked',
    [
        {'mmcv', 'mmdet', 'mmseg', 'mmpretrain'},
        {'mmdet', 'mmpretrain'},
        {'mmseg', 'mmpretrain'},
    ],
    ids=['mmengine alone', 'without mmdet', 'without mmseg'],
)
def test_backbone_builds(blocked):
    done = run_without(blocked, BUILD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == '[(16, 16), (8, 8), (4, 4), (2, 2)]'


def test_import_loads_no_toolbox():
    toolboxes = {'mmcv', 'mmdet', 'mmseg', 'mmpretrain'}
    done = run_without(
        set(), f'import mmnala, sys; print(sorted({toolboxes!r} & set(sys.modules)))'
    )
    assert done.stdout.splitlines()[-1] == '[]', done.stderr


def test_missing_mmengine_names_both_extras():
    done = run_without({'mmengine'}, 'import mmnala')
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(('ModuleNotFoundError: ', 'ImportError: '))
    assert 'mmnala[onedl]' in error
    assert 'mmnala[openmmlab]' in error
