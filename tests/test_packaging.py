"""What `pip install mmnala` brings along, and what importing mmnala needs."""

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mmnala

ROOT = Path(__file__).parent.parent
ONEDL = {'onedl-mmengine', 'onedl-mmcv', 'onedl-mmdetection', 'onedl-mmsegmentation'}
OPENMMLAB = {'mmengine', 'mmcv', 'mmdet', 'mmsegmentation'}


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the checkout stays free of build folders."""
    source = tmp_path_factory.mktemp('source')
    for name in ('setup.cfg', 'pyproject.toml', 'MANIFEST.in', 'LICENSE', 'README.md'):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ('mmnala', 'tests', 'tools', 'configs'):
        shutil.copytree(ROOT / name, source / name)
    target = tmp_path_factory.mktemp('wheel')
    command = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation']
    done = subprocess.run(
        [*command, '--wheel-dir', str(target), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob('*.whl')
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope='module')
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    return email.message_from_bytes(wheel.read(name))


def requirements(metadata, extra=None):
    """Names of the distributions that the extra adds; None for those always required."""
    names = set()
    for line in metadata.get_all('Requires-Dist'):
        marker = re.search(r"""extra == ['"](\w+)['"]""", line)
        if (marker and marker.group(1)) == extra:
            names.add(re.match(r'[\w.-]+', line).group())
    return names


def test_metadata(metadata):
    assert metadata['Name'] == 'mmnala'
    assert metadata['Version'] == mmnala.__version__
    assert metadata['Requires-Python'] == '>=3.10'
    assert 'Apache-2.0' in (metadata['License-Expression'], metadata['License'])


def test_core_requires_no_openmmlab_distribution(metadata):
    assert requirements(metadata) == {'torch', 'timm', 'numpy', 'safetensors'}


def test_extras_hold_one_family_each(metadata):
    assert set(metadata.get_all('Provides-Extra')) == {'onedl', 'openmmlab', 'dev'}
    assert requirements(metadata, 'onedl') == ONEDL
    assert requirements(metadata, 'openmmlab') == OPENMMLAB
    assert requirements(metadata, 'dev') == {'pytest', 'ruff', 'mypy'}


def test_wheel_holds_the_package_alone(wheel):
    names = wheel.namelist()
    assert {name.split('/')[0] for name in names} == {
        'mmnala',
        f'mmnala-{mmnala.__version__}.dist-info',
    }
    packaged = {name for name in names if name.startswith('mmnala/')}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / 'mmnala').rglob('*.py')}
    assert packaged == sources | {'mmnala/py.typed'}


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
