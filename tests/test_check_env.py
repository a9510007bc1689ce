"""The report on an environment, over distributions and modules that stand for the real ones."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / 'tools' / 'check_env.py'
sys.path.insert(0, str(SCRIPT.parent))

import bootstrap  # noqa: E402
import check_env  # noqa: E402

TORCH = """
__version__ = '{version}'
class version:
    cuda = {cuda!r}
class cuda:
    gpus = {gpus!r}
    is_available = staticmethod(lambda: bool(cuda.gpus))
    device_count = staticmethod(lambda: len(cuda.gpus))
    get_device_capability = staticmethod(lambda index: cuda.gpus[index])
"""
OPERATORS = """
import mmcv._ext
def get_compiling_cuda_version():
    return '{cuda}'
"""


# What mmnala itself requires.
OWN = check_env.requirements()['']


class Environment:
    """A virtual environment whose packages are ours."""

    def __init__(self, folder):
        self.python = folder / 'bin/python'
        (self.site,) = folder.glob('lib/python*/site-packages')
        self.programs = folder / 'programs'
        for path in (self.site, self.programs):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()

    def install(self, distribution, version, files):
        """Install a distribution of Python files."""
        info = self.site / f'{distribution.replace("-", "_")}-{version}.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Name: {distribution}\nVersion: {version}\n')
        for name, text in files.items():
            path = self.site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def uninstall(self, *distributions):
        """Take away what pip would list; the modules stay unless they are called alike."""
        for name in distributions:
            (info,) = self.site.glob(f'{name.replace("-", "_")}-*.dist-info')
            shutil.rmtree(info)
            shutil.rmtree(self.site / name, ignore_errors=True)

    def replace(self, distribution, version):
        """Another version of a distribution with the same modules."""
        (info,) = self.site.glob(f'{distribution.replace("-", "_")}-*.dist-info')
        shutil.rmtree(info)
        self.install(distribution, version, {})

    def torch(self, version='2.9.1', local='+cu128', cuda='12.8', gpus=(), nvcc=None):
        for info in self.site.glob('torch-*.dist-info'):
            shutil.rmtree(info)
        home = None
        if nvcc:
            home = str(self.programs)
            self.program('bin/nvcc', f'Cuda compilation tools, release {nvcc}, V{nvcc}.89')
        module = TORCH.format(version=version + local, cuda=cuda, gpus=list(gpus))
        files = {
            'torch/__init__.py': module,
            'torch/utils/__init__.py': '',
            'torch/utils/cpp_extension.py': f'CUDA_HOME = {home!r}',
        }
        self.install('torch', version, files)

    def operators(self, cuda):
        (self.site / 'mmcv/ops.py').write_text(OPERATORS.format(cuda=cuda))

    def program(self, name, output):
        path = self.programs / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{output}"\n')
        path.chmod(0o755)

    def check(self, script=SCRIPT, **env):
        """The exit status and the two parts of the report."""
        done = subprocess.run(
            [self.python, '-B', script],
            env=dict(PATH=str(self.programs), **env),
            capture_output=True,
            text=True,
        )
        assert done.stderr == ''
        rows, _, faults = done.stdout.rstrip('\n').partition('\n\n')
        return done.returncode, rows.splitlines(), faults.splitlines()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('venv')
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def empty(folder):
    return Environment(folder)


def install_core(environment):
    environment.torch()
    versions = dict(torchvision='0.24.1', numpy='2.2.6', timm='1.0.31', safetensors='0.8.0')
    others = dict.fromkeys(OWN, '99.0')
    del others['torch']
    for name, version in dict(others, **versions, mmnala='0.1.0').items():
        environment.install(name, version, {f'{name}/__init__.py': ''})


def install_family(environment, family, versions):
    """Install the family's modules in the versions given."""
    for module, version in versions.items():
        files = {f'{module}/__init__.py': ''}
        if module == 'mmcv':
            files['mmcv/_ext.py'] = ''
        environment.install(check_env.MODULES[module][family], version, files)
    environment.operators('not available')


@pytest.fixture
def onedl(empty):
    """A sound environment with the onedl family."""
    install_core(empty)
    versions = dict(mmengine='0.10.12', mmcv='2.3.6', mmdet='3.5.1', mmseg='1.4.2')
    install_family(empty, 'onedl', versions)
    return empty


@pytest.fixture
def openmmlab(empty):
    """A sound environment with the original family."""
    install_core(empty)
    empty.torch('2.4.1', '+cu121', '12.1')
    empty.replace('torchvision', '0.19.1')
    empty.replace('numpy', '1.26.4')
    versions = dict(mmengine='0.10.7', mmcv='2.1.0', mmdet='3.3.0', mmseg='1.2.2')
    install_family(empty, 'openmmlab', dict(versions, mmpretrain='1.2.0'))
    return empty


def test_sound_environment(onedl):
    code, rows, faults = onedl.check()
    assert code == 0
    assert rows == [
        f'Python       {sys.version.split()[0]:14} {onedl.python}',
        'torch        2.9.1          for CUDA 12.8, sees no GPU',
        'torchvision  0.24.1',
        'numpy        2.2.6',
        'timm         1.0.31',
        'safetensors  0.8.0',
        'mmnala       0.1.0',
        'mmengine     0.10.12        onedl-mmengine',
        'mmcv         2.3.6          onedl-mmcv, operators for the CPU',
        'mmdet        3.5.1          onedl-mmdetection',
        'mmseg        1.4.2          onedl-mmsegmentation',
        'mmpretrain   -',
    ]
    assert faults == ['Nothing is wrong.']


def test_sound_environment_of_the_original_family(openmmlab):
    code, rows, faults = openmmlab.check()
    assert (code, faults) == (0, ['Nothing is wrong.'])
    assert rows[1] == 'torch        2.4.1          for CUDA 12.1, sees no GPU'
    assert rows[7:] == [
        'mmengine     0.10.7         mmengine',
        'mmcv         2.1.0          mmcv, operators for the CPU',
        'mmdet        3.3.0          mmdet',
        'mmseg        1.2.2          mmsegmentation',
        'mmpretrain   1.2.0          mmpretrain',
    ]


def test_real_environment():
    """Everything that the tests themselves run with; also the real torch's facts."""
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=dict(os.environ, CUDA_VISIBLE_DEVICES=''),
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith('\n\nNothing is wrong.\n'), done.stdout + done.stderr
    assert done.returncode == 0
    assert re.search(r'^torch .* for (CUDA [\d.]+|the CPU), sees no GPU$', done.stdout, re.M)
    assert re.search(r'^mmcv .* operators for (CUDA [\d.]+|the CPU)$', done.stdout, re.M)


# The faults, each with its command.

TOOLS = "pip install 'setuptools<81' wheel ninja"
RENEW_MMCV = (
    f'pip uninstall -y onedl-mmcv && {TOOLS} && '
    "pip install --no-build-isolation --no-cache-dir 'onedl-mmcv>=2.3'"
)
TORCH_COMMAND = "pip install 'torch>=2.4,<=2.9.1' torchvision"


def faults(*pairs):
    lines = ['Wrong, and what mends it:']
    for number, (text, command) in enumerate(pairs, 1):
        lines += [f'{number}. {text}', f'   {command}']
    return lines


def test_empty_environment(empty):
    code, rows, found = empty.check()
    assert code == 1
    assert [row.split()[1] for row in rows[1:]] == ['-'] * 11
    assert found == faults(
        ('torch is not installed', TORCH_COMMAND),
        *(
            (f'{name} is not installed', f'pip install {shlex.quote(name + specifier)}')
            for name, specifier in OWN.items()
            if name != 'torch'
        ),
        (
            'OpenMMLab is not installed',
            f"{TOOLS} && pip install --no-build-isolation --no-cache-dir 'onedl-mmcv>=2.3' && "
            "pip install 'onedl-mmengine>=0.10.8' 'onedl-mmdetection>=3.5' "
            "'onedl-mmsegmentation>=1.4' 'onedl-mmpretrain>=1.3'",
        ),
        ('mmnala is not installed', f'pip install {ROOT}'),
    )


def raising(module, error):
    """A change of an environment that makes a module's import fail."""

    def change(environment):
        (environment.site / module).write_text(error)

    return change


def remove_operators(environment):
    (environment.site / 'mmcv/_ext.py').unlink()


def add_original_mmcv(environment):
    environment.install('mmcv', '2.1.0', {})


def change_mmseg_to_original(environment):
    environment.uninstall('onedl-mmsegmentation')
    environment.install('mmsegmentation', '1.2.2', {})


def change_mmcv_to_lite(environment):
    environment.uninstall('onedl-mmcv')
    environment.install('mmcv-lite', '2.1.0', {})
    remove_operators(environment)


def remove_mmcv(environment):
    environment.uninstall('onedl-mmcv')
    shutil.rmtree(environment.site / 'mmcv')


def remove_mmcv_for_a_new_torch(environment):
    remove_mmcv(environment)
    environment.torch('99.1.0')


MISSING_OPERATORS = 'mmcv has no compiled operators (mmcv._ext): it was built without torch or them'


@pytest.mark.parametrize(
    'change, expected',
    [
        (remove_operators, [(MISSING_OPERATORS, RENEW_MMCV)]),
        (
            raising('mmcv/_ext.py', 'raise ImportError("_ext.so: undefined symbol: _ZN3c106")'),
            [
                (
                    "mmcv's operators were compiled for another torch: "
                    'ImportError: _ext.so: undefined symbol: _ZN3c106',
                    RENEW_MMCV,
                )
            ],
        ),
        (
            add_original_mmcv,
            [
                (
                    'mmcv is installed several times, one over the other: onedl-mmcv 2.3.6, '
                    'mmcv 2.1.0',
                    RENEW_MMCV.replace('-y onedl-mmcv', '-y onedl-mmcv mmcv'),
                )
            ],
        ),
        (
            change_mmseg_to_original,
            [
                (
                    'mmseg is from mmsegmentation 1.2.2, expected onedl-mmsegmentation, which is '
                    'of the same family as the rest',
                    "pip uninstall -y mmsegmentation && pip install 'onedl-mmsegmentation>=1.4'",
                )
            ],
        ),
        (
            change_mmcv_to_lite,
            [
                (
                    'mmcv is from mmcv-lite 2.1.0, expected onedl-mmcv, which is of the same '
                    'family as the rest',
                    RENEW_MMCV.replace('-y onedl-mmcv', '-y mmcv-lite'),
                )
            ],
        ),
        (
            remove_mmcv,
            [('mmcv is not installed', RENEW_MMCV.partition(' && ')[2])],
        ),
        (
            remove_mmcv_for_a_new_torch,
            [
                (
                    'torch is 99.1.0, too new for onedl-mmcv: it compiles with torch up to 2.9.1',
                    TORCH_COMMAND,
                ),
                ('mmcv is not installed', RENEW_MMCV.partition(' && ')[2]),
            ],
        ),
        (
            lambda environment: environment.torch('2.3.1'),
            [('torch is 2.3.1, expected torch>=2.4', TORCH_COMMAND)],
        ),
        (
            lambda environment: environment.replace('timm', '0.9.16'),
            [('timm is 0.9.16, expected timm>=1.0.9', "pip install 'timm>=1.0.9'")],
        ),
        (
            lambda environment: environment.replace('onedl-mmdetection', '3.4.0'),
            [
                (
                    'onedl-mmdetection is 3.4.0, expected onedl-mmdetection>=3.5',
                    "pip uninstall -y onedl-mmdetection && pip install 'onedl-mmdetection>=3.5'",
                )
            ],
        ),
        (
            lambda environment: environment.uninstall('safetensors', 'mmnala'),
            [
                ('safetensors is not installed', 'pip install safetensors'),
                ('mmnala is not installed', f'pip install {ROOT}'),
            ],
        ),
        (
            raising('mmseg/__init__.py', 'import ftfy'),
            [('mmseg needs ftfy, which is not installed', 'pip install ftfy')],
        ),
        (
            lambda environment: shutil.rmtree(environment.site / 'mmcv'),
            [
                (
                    "mmcv cannot be imported: ModuleNotFoundError: No module named 'mmcv'",
                    RENEW_MMCV,
                )
            ],
        ),
        (
            raising('timm/__init__.py', 'import torch._six'),
            [
                (
                    "timm cannot be imported: ModuleNotFoundError: No module named 'torch._six'",
                    'pip install --force-reinstall --no-deps timm==1.0.31',
                )
            ],
        ),
        (
            lambda environment: environment.uninstall('numpy', 'timm', 'onedl-mmengine'),
            [
                ('numpy is not installed', 'pip install numpy'),
                ('timm is not installed', "pip install 'timm>=1.0.9'"),
                ('mmengine is not installed', "pip install 'onedl-mmengine>=0.10.8'"),
            ],
        ),
        (
            lambda environment: environment.uninstall('onedl-mmengine'),
            [('mmengine is not installed', "pip install 'onedl-mmengine>=0.10.8'")],
        ),
        (
            raising('mmdet/__init__.py', 'import cv2.dnn'),
            [('mmdet needs cv2, which is not installed', 'pip install opencv-python')],
        ),
        (
            raising('mmdet/__init__.py', 'raise AssertionError("mmcv is too new\\nreally")'),
            [
                (
                    'mmdet cannot be imported: AssertionError: mmcv is too new',
                    "pip uninstall -y onedl-mmdetection && pip install 'onedl-mmdetection>=3.5'",
                )
            ],
        ),
        (
            raising('torchvision/__init__.py', 'raise RuntimeError("torchvision::nms")'),
            [
                (
                    'torchvision 0.24.1 does not fit torch 2.9.1: RuntimeError: torchvision::nms',
                    'pip uninstall -y torchvision && pip install torch==2.9.1 torchvision',
                )
            ],
        ),
        (
            raising('timm/__init__.py', 'raise OSError("disk")'),
            [
                (
                    'timm cannot be imported: OSError: disk',
                    'pip install --force-reinstall --no-deps timm==1.0.31',
                )
            ],
        ),
        (
            raising('mmnala/__init__.py', 'raise NameError("x")'),
            [
                (
                    'mmnala cannot be imported: NameError: x',
                    f'pip install --force-reinstall --no-deps {ROOT}',
                )
            ],
        ),
        (
            raising('mmseg/__init__.py', 'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)'),
            [
                (
                    'mmseg cannot be imported: exit status -11: Python ended',
                    'pip uninstall -y onedl-mmsegmentation && '
                    "pip install 'onedl-mmsegmentation>=1.4'",
                )
            ],
        ),
    ],
)
def test_fault(onedl, change, expected):
    change(onedl)
    code, _, found = onedl.check()
    assert found == faults(*expected)
    assert code == 1


def test_the_original_family_is_mended_by_itself(openmmlab):
    remove_operators(openmmlab)
    openmmlab.torch('2.9.1')
    _, _, found = openmmlab.check()
    assert found == faults(
        (
            'torch is 2.9.1, too new for mmcv: it compiles with torch up to 2.4.1',
            "pip install 'torch>=2.4,<=2.4.1' torchvision",
        ),
        (
            MISSING_OPERATORS,
            f'pip uninstall -y mmcv && {TOOLS} && '
            "pip install --no-build-isolation --no-cache-dir 'mmcv>=2.1,<2.2'",
        ),
    )


def test_a_cause_is_told_once(onedl):
    """OpenCV without libGL fails in all that imports it."""
    onedl.install('opencv-python', '4.12.0.88', {'cv2.py': 'raise ImportError("libGL.so.1: no")'})
    for module in ('mmcv', 'mmdet', 'mmseg'):
        raising(f'{module}/__init__.py', 'import cv2')(onedl)
    _, _, found = onedl.check()
    assert found == faults(
        (
            'mmcv cannot be imported: OpenCV finds no libGL on this machine',
            'pip install --force-reinstall --no-deps opencv-python-headless==4.12.0.88',
        )
    )


def test_installed_with_the_package(onedl):
    """Without setup.cfg, the versions are those of mmnala's metadata."""
    script = onedl.site / 'mmnala/.mim/tools/check_env.py'
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    (metadata,) = onedl.site.glob('mmnala-*/METADATA')
    lines = []
    for extra, specifiers in check_env.requirements().items():
        marker = f'; extra == "{extra}"' if extra else ''
        lines += [f'Requires-Dist: {n}{s}{marker}\n' for n, s in specifiers.items()]
    metadata.write_text(metadata.read_text() + ''.join(lines))
    assert onedl.check(script)[::2] == (0, ['Nothing is wrong.'])
    onedl.replace('timm', '0.9.16')
    onedl.replace('onedl-mmdetection', '3.4.0')
    raising('mmnala/__init__.py', 'raise NameError("x")')(onedl)
    assert onedl.check(script)[2] == faults(
        ('timm is 0.9.16, expected timm>=1.0.9', "pip install 'timm>=1.0.9'"),
        (
            'onedl-mmdetection is 3.4.0, expected onedl-mmdetection>=3.5',
            "pip uninstall -y onedl-mmdetection && pip install 'onedl-mmdetection>=3.5'",
        ),
        (
            'mmnala cannot be imported: NameError: x',
            'pip install --force-reinstall --no-deps mmnala',
        ),
    )


@pytest.mark.parametrize('family', check_env.NEWEST_TORCH)
def test_mmengine_alone_is_enough(empty, family):
    install_core(empty)
    name = check_env.MODULES['mmengine'][family]
    empty.install(name, '0.10.12', {'mmengine/__init__.py': ''})
    empty.torch('99.1.0')
    assert empty.check()[::2] == (0, ['Nothing is wrong.'])


def test_rocm_is_no_other_cuda(onedl):
    onedl.torch(local='+rocm6.4', cuda=None, gpus=[(9, 0)])
    assert onedl.check()[::2] == (0, ['Nothing is wrong.'])


def test_a_new_torch_with_working_operators_is_not_wrong(onedl):
    onedl.torch('99.1.0')
    assert onedl.check()[::2] == (0, ['Nothing is wrong.'])


def test_modules_may_print_what_they_like(onedl):
    raising('mmdet/__init__.py', 'import os; print("[1, 2]"); os.system("echo 3")')(onedl)
    assert onedl.check()[::2] == (0, ['Nothing is wrong.'])


# CUDA.

NEED = 'detection needs them'


@pytest.mark.parametrize(
    'compiled, nvcc, text, toolkit',
    [
        ('not available', '12.4', f'for the CPU, torch and the GPU run CUDA 12.8; {NEED}', ''),
        ('11.8', '12.4', f'for CUDA 11.8, torch and the GPU run CUDA 12.8; {NEED}', ''),
        (
            'not available',
            None,
            f'for the CPU, torch and the GPU run CUDA 12.8; {NEED} '
            '(no CUDA compiler (nvcc) was found)',
            'apt install cuda-toolkit-12-8 && ',
        ),
        (
            'not available',
            '13.0',
            f'for the CPU, torch and the GPU run CUDA 12.8; {NEED} '
            '(nvcc is of CUDA 13.0, torch of CUDA 12.8)',
            'apt install cuda-toolkit-12-8 && ',
        ),
    ],
)
def test_operators_of_another_cuda(onedl, compiled, nvcc, text, toolkit):
    onedl.torch(gpus=[(9, 0)], nvcc=nvcc)
    onedl.operators(compiled)
    _, rows, found = onedl.check()
    assert rows[1] == 'torch        2.9.1          for CUDA 12.8, GPU sm_90'
    assert found == faults((f"mmcv's operators are {text}", toolkit + RENEW_MMCV))


def test_operators_of_the_same_major_cuda(onedl):
    onedl.torch(gpus=[(9, 0)])
    onedl.operators('12.4')
    code, rows, _ = onedl.check()
    assert code == 0
    assert rows[8] == 'mmcv         2.3.6          onedl-mmcv, operators for CUDA 12.4'


DRIVER = '| NVIDIA-SMI 535.1  Driver Version: 535.1  CUDA Version: {} |'


def test_torch_for_the_cpu_beside_a_gpu(onedl):
    onedl.program('nvidia-smi', DRIVER.format('12.2'))
    onedl.torch(local='+cpu', cuda=None)
    _, rows, found = onedl.check()
    assert rows[1] == 'torch        2.9.1          for the CPU, sees no GPU'
    assert found == faults(
        (
            'torch 2.9.1+cpu is a build for the CPU, and a GPU is there',
            f'pip uninstall -y torch torchvision && {TORCH_COMMAND}',
        )
    )
    assert onedl.check(CUDA_VISIBLE_DEVICES='')[0] == 0


@pytest.mark.parametrize('driver, code', [('11.4', 1), ('12.2', 0), ('13.0', 0)])
def test_driver_of_an_older_cuda(onedl, driver, code):
    onedl.program('nvidia-smi', DRIVER.format(driver))
    status, _, found = onedl.check()
    assert status == code
    if code:
        assert found == faults(
            (
                "torch 2.9.1+cu128 is for CUDA 12.8, the GPU's driver runs CUDA up to 11.4",
                'apt install --only-upgrade nvidia-driver',
            )
        )


# Python, versions, and the facts of the other files.


@pytest.mark.parametrize('version', [(3, 9), (3, 13)])
def test_unsupported_python(monkeypatch, capsys, version):
    monkeypatch.setattr(check_env.sys, 'version_info', (*version, 0, 'final', 0))
    monkeypatch.setattr(check_env, 'probe', lambda modules: {})
    assert check_env.main() == 1
    lines = capsys.readouterr().out.splitlines()
    start = lines.index('Wrong, and what mends it:')
    assert lines[start + 1 : start + 3] == [
        '1. Python is {}.{}, expected Python 3.10 to 3.12'.format(*version),
        '   python3.12 -m venv ENV && . ENV/bin/activate',
    ]
    assert (len(lines) == 5) is (version == (3, 9))


def test_syntax_is_that_of_python_3_6():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize('specifier', ['', '>=2.4', '<2.2', '>=2,<2.2.0', '==2.4.0', '<=2.9.1'])
@pytest.mark.parametrize('version', ['2', '2.1.9', '2.2', '2.4.0', '2.9.1+cu128', '2.10.0', '10'])
def test_versions_compare_as_pip_compares_them(specifier, version):
    expected = SpecifierSet(specifier).contains(version.partition('+')[0])
    assert check_env.allows(specifier, version) is expected


def test_requirements_of_setup_cfg():
    extras = check_env.requirements()
    own = extras.pop('')
    assert {'torch', 'timm', 'numpy', 'safetensors'} <= own.keys()
    for name, specifier in [*own.items(), *(item for e in extras.values() for item in e.items())]:
        requirement = Requirement(name + specifier)
        assert (requirement.name, requirement.specifier) == (name, SpecifierSet(specifier))
    for family in check_env.NEWEST_TORCH:
        held = {names[family] for names in check_env.MODULES.values()}
        pretrain = check_env.MODULES['mmpretrain'][family]
        assert held <= extras[family].keys() | extras[pretrain].keys()


def test_pinned_versions_are_allowed():
    extras = check_env.requirements()
    own = extras.pop('')
    allowed = dict(own, **extras['onedl'])
    pins = bootstrap.pins(bootstrap.REQUIREMENTS) + bootstrap.pins(bootstrap.MMCV_REQUIREMENT)
    versions = dict(pin.split('==')[:2] for pin in pins if ';' not in pin)
    for name, specifier in allowed.items():
        assert check_env.allows(specifier, versions[name]), name
    assert check_env.allows('<=' + check_env.NEWEST_TORCH['onedl'], versions['torch'])
