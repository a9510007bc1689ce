"""Say what this Python holds of what mmnala needs, what is wrong and which commands mend it.

    python tools/check_env.py

One screen of text; the exit status is 1 if something is wrong. Nothing is changed. Which versions
are allowed stands in setup.cfg, or in the metadata of an installed mmnala.

Standard library only, in syntax that Python 3.6 parses, as in the set-up script, which takes the
facts about Python and CUDA from here.
"""

import collections
import configparser
import contextlib
import json
import operator
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / 'setup.cfg'
# What pip installs mmnala from: an installed package brings this file, but not what it is built of.
SOURCE = str(ROOT) if SETUP.is_file() else 'mmnala'

SUPPORTED = ((3, 10), (3, 12))

# The newest torch that the mmcv of each family was compiled with and works with.
NEWEST_TORCH = {'onedl': '2.9.1', 'openmmlab': '2.4.1'}
# mmcv's setup.py imports pkg_resources, which setuptools 81 no longer has.
BUILD_TOOLS = ('setuptools<81', 'wheel', 'ninja')

# The modules of OpenMMLab and the distribution that holds each in either family.
MODULES = {
    'mmengine': {'onedl': 'onedl-mmengine', 'openmmlab': 'mmengine'},
    'mmcv': {'onedl': 'onedl-mmcv', 'openmmlab': 'mmcv'},
    'mmdet': {'onedl': 'onedl-mmdetection', 'openmmlab': 'mmdet'},
    'mmseg': {'onedl': 'onedl-mmsegmentation', 'openmmlab': 'mmsegmentation'},
    'mmpretrain': {'onedl': 'onedl-mmpretrain', 'openmmlab': 'mmpretrain'},
}
# Distributions that hold the same modules and are none of a family.
OTHERS = {'mmengine': ['mmengine-lite'], 'mmcv': ['mmcv-lite', 'mmcv-full']}
# Distributions that are not called like the module they hold.
DISTRIBUTIONS = {
    'PIL': 'pillow',
    'cv2': 'opencv-python',
    'pkg_resources': 'setuptools<81',
    'yaml': 'pyyaml',
}

COMPARISONS = {'>=': operator.ge, '<=': operator.le, '<': operator.lt, '==': operator.eq}

# Python code that leaves in `facts` what torch can run on.
TORCH_FACTS = """
import torch
try:
    from torch.utils.cpp_extension import CUDA_HOME
except ImportError:
    CUDA_HOME = None
devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
facts = {
    'torch': torch.__version__,
    'cuda': torch.version.cuda,
    'cuda_home': CUDA_HOME,
    'capabilities': sorted({'%d.%d' % torch.cuda.get_device_capability(i) for i in devices}),
}
"""

# Imports the modules that its arguments name and prints a line of JSON after each, then the facts.
# In a process of its own: a broken binary can end it, and modules print what they like.
PROBE = """
import importlib, json, os, sys
answers = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)
sys.path[:] = filter(None, sys.path)  # what is installed counts, not the folder
def tell(name, answer):
    print(json.dumps([name, answer]), file=answers, flush=True)
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except BaseException as error:
        text = (str(error).strip().splitlines() or [''])[0]
        tell(module, [type(error).__name__, text, getattr(error, 'name', None)])
    else:
        tell(module, None)
{TORCH_FACTS}
tell('facts', facts)
from mmcv.ops import get_compiling_cuda_version
tell('operators', get_compiling_cuda_version())
""".replace('{TORCH_FACTS}', TORCH_FACTS)


def python_is_supported():
    return SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]


def python_range():
    return 'Python {}.{} to {}.{}'.format(*SUPPORTED[0], *SUPPORTED[1])


def python_fault():
    return (
        'Python is {}.{}, expected {}'.format(*sys.version_info[:2], python_range()),
        'python{}.{} -m venv ENV && . ENV/bin/activate'.format(*SUPPORTED[1]),
    )


def find_nvcc(facts):
    """The version of the CUDA compiler that torch would call, and why it cannot be used, or None.

    Args:
        facts (dict): What ``TORCH_FACTS`` finds.
    """
    version = None
    if facts['cuda_home']:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            nvcc = os.path.join(facts['cuda_home'], 'bin', 'nvcc')
            text = subprocess.check_output([nvcc, '--version'], universal_newlines=True)
            version = first_match(r'release (\d+\.\d+)', text)
    if version is None:
        return None, 'no CUDA compiler (nvcc) was found'
    if not same_major(version, facts['cuda']):
        return version, 'nvcc is of CUDA {}, torch of CUDA {}'.format(version, facts['cuda'])
    return version, None


def first_match(pattern, text):
    match = re.search(pattern, text)
    return match and match.group(1)


def same_major(left, right):
    return str(left).split('.')[0] == str(right).split('.')[0]


def release(version):
    """(2, 9, 1) for '2.9.1+cu128', (2,) for '2.0': zeros at the end do not count."""
    numbers = [int(number) for number in re.match(r'\d+(\.\d+)*', version).group().split('.')]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def allows(specifier, version):
    """Whether a specifier such as '>=2.4,<3' (or none at all) allows the version."""
    parts = re.findall(r'([=<>]=?)([^,]+)', specifier)
    return all(COMPARISONS[sign](release(version), release(bound)) for sign, bound in parts)


def requirement_lines():
    """Pairs of an extra, '' for what mmnala itself requires, and a line such as 'timm>=1.0.9'."""
    if SETUP.is_file():
        config = configparser.ConfigParser()
        config.read(str(SETUP))
        texts = dict(
            config['options.extras_require'], **{'': config['options']['install_requires']}
        )
        return [(extra, line) for extra, text in texts.items() for line in text.split()]
    from importlib import metadata  # not in Python 3.6

    pattern = r"""([^; ]+)(?:; extra == ['"](.+)['"])?"""
    matches = [re.match(pattern, line) for line in metadata.requires('mmnala')]
    return [(match.group(2) or '', match.group(1)) for match in matches]


def requirements():
    """The specifiers by extra, '' for mmnala's own requirements, and distribution."""
    specifiers = collections.defaultdict(dict)
    for extra, line in requirement_lines():
        name, specifier = re.match(r'([\w-]+)(.*)', line).groups()
        specifiers[extra][name] = specifier
    return specifiers


def installed_distributions():
    """The version of each installed distribution."""
    from importlib import metadata  # not in Python 3.6

    versions = {}
    for distribution in metadata.distributions():
        name = re.sub(r'[-_.]+', '-', distribution.metadata['Name'] or '').lower()
        versions.setdefault(name, distribution.version)  # the first on the path is imported
    return versions


def probe(modules):
    """The answers of ``PROBE``: of each module None or its error's type, message and name."""
    done = subprocess.run(
        [sys.executable, '-c', PROBE, *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    answers = dict(map(json.loads, done.stdout.splitlines()))
    for module in modules:
        if module not in answers:  # it ended the process: nothing is known of those that follow
            answers[module] = [f'exit status {done.returncode}', 'Python ended', None]
            break
    return answers


def driver_cuda():
    """The newest CUDA version that the GPU's driver runs, or None without a driver."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        text = subprocess.check_output(['nvidia-smi'], universal_newlines=True)
        return first_match(r'CUDA Version: (\d+\.\d+)', text)
    return None


def pip_install(*arguments):
    return 'pip install ' + ' '.join(map(shlex.quote, arguments))


def join(*commands):
    return ' && '.join(filter(None, commands))


class Environment:
    """What this interpreter can import.

    Attributes:
        faults: Pairs of a sentence and the command that mends it, in the order to go by.
    """

    def __init__(self):
        self.faults = []
        self.installed = installed_distributions()
        # The installed distributions of each module.
        self.holders = {
            module: [n for n in [*names.values(), *OTHERS.get(module, [])] if n in self.installed]
            for module, names in MODULES.items()
        }
        # The family that there is more of; without any, the one that is maintained.
        counts = {
            family: sum(names[family] in self.installed for names in MODULES.values())
            for family in NEWEST_TORCH
        }
        self.family = max(counts, key=counts.get)
        extras = requirements()
        self.own = extras.pop('')
        self.specifiers = dict(self.own)
        for extra, specifiers in extras.items():
            if extra == self.family or extra not in NEWEST_TORCH:
                self.specifiers.update(specifiers)
        # What mmnala and the toolboxes cannot do without.
        self.missing = {name for name in self.own if name not in self.installed}
        self.missing.update(m for m in ('mmengine', 'mmcv') if not self.holders[m])
        self.answers = probe(self.modules())
        self.find_faults()

    def modules(self):
        """What there is to import, ordered so that the first failure is the cause of others."""
        libraries = ['numpy', 'torch', 'torchvision', 'timm']
        modules = [name for name in libraries if name in self.installed]
        for module, names in self.holders.items():
            if names:
                modules += [module, 'mmcv._ext', 'mmcv.ops'] if module == 'mmcv' else [module]
        return modules + ['mmnala'] * ('mmnala' in self.installed)

    def fault(self, text, command):
        if command not in [known for _, known in self.faults]:
            self.faults.append((text, command))

    def find_faults(self):
        if not python_is_supported():
            self.fault(*python_fault())
        self.check_torch()
        self.check_versions()
        self.check_families()
        self.check_imports()
        self.check_gpu()

    # The commands.

    def requirement(self, name):
        return name + self.specifiers[name]

    def torch_command(self):
        """Installs a torch that the family's mmcv compiles with, and the torchvision for it."""
        newest = ',<=' + NEWEST_TORCH[self.family]
        return pip_install(self.requirement('torch') + newest, 'torchvision')

    def renew(self, *modules):
        """Puts the family's distributions in the place of whatever holds the modules."""
        old = [name for module in modules for name in self.holders[module]]
        new = {module: self.requirement(MODULES[module][self.family]) for module in modules}
        mmcv = new.pop('mmcv', None)
        return join(
            old and 'pip uninstall -y ' + ' '.join(old),
            # Compiled against the torch that is there; pip's cache may hold it for another one.
            mmcv and pip_install(*BUILD_TOOLS),
            mmcv and pip_install('--no-build-isolation', '--no-cache-dir', mmcv),
            new and pip_install(*new.values()),
        )

    # The checks.

    def check_torch(self):
        version = self.installed.get('torch')
        newest = NEWEST_TORCH[self.family]
        if version is None:
            self.fault('torch is not installed', self.torch_command())
        elif not allows(self.own['torch'], version):
            text = 'torch is {}, expected {}'.format(version, self.requirement('torch'))
            self.fault(text, self.torch_command())
        elif self.mmcv_is_to_compile() and not allows('<=' + newest, version):
            mmcv = MODULES['mmcv'][self.family]
            text = 'torch is {}, too new for {}: it compiles with torch up to {}'
            self.fault(text.format(version, mmcv, newest), self.torch_command())

    def mmcv_is_to_compile(self):
        if self.holders['mmcv']:
            reason = self.answers.get('mmcv._ext')
            return reason is not None and reason != self.answers['mmcv']
        return not self.is_backbone_alone()

    def is_backbone_alone(self):
        """Whether mmengine is there and nothing that needs mmcv, which is enough for mmnala."""
        return [module for module, names in self.holders.items() if names] == ['mmengine']

    def check_versions(self):
        for name, specifier in self.specifiers.items():
            version = self.installed.get(name)
            modules = [m for m, names in MODULES.items() if name in names.values()]
            command = self.renew(*modules) if modules else pip_install(name + specifier)
            if name == 'torch':
                continue
            if name in self.own and version is None:
                self.fault(f'{name} is not installed', command)
            elif version is not None and not allows(specifier, version):
                text = f'{name} is {version}, expected {name + specifier}'
                self.fault(text, command)

    def check_families(self):
        """One family, and of each module one distribution."""
        if not any(self.holders.values()):
            modules = [m for m, names in MODULES.items() if names[self.family] in self.specifiers]
            self.fault('OpenMMLab is not installed', self.renew(*modules))
            return
        for module, names in self.holders.items():
            expected = MODULES[module][self.family]
            found = ', '.join(f'{name} {self.installed[name]}' for name in names)
            if len(names) > 1:
                text = '{} is installed several times, one over the other: {}'
                self.fault(text.format(module, found), self.renew(module))
            elif names and names != [expected]:
                text = '{} is from {}, expected {}, which is of the same family as the rest'
                self.fault(text.format(module, found, expected), self.renew(module))
        for module in ('mmengine', 'mmcv'):
            if module in self.missing and not self.is_backbone_alone():
                self.fault(f'{module} is not installed', self.renew(module))

    def check_imports(self):
        if 'mmnala' not in self.installed:
            self.fault('mmnala is not installed', pip_install(SOURCE))
        told = set()
        for module in self.modules():
            error = self.answers.get(module)
            if error and error[1] not in told:
                told.add(error[1])
                self.check_import(module, *error)

    def check_import(self, module, kind, text, name):
        lacking = DISTRIBUTIONS.get(name, name) if kind == 'ModuleNotFoundError' else None
        version = self.installed.get(module)
        reason = f'{kind}: {text}'
        if name == 'mmcv._ext':
            self.fault(
                'mmcv has no compiled operators (mmcv._ext): it was built without torch or them',
                self.renew('mmcv'),
            )
        elif module == 'mmcv._ext':
            text = "mmcv's operators were compiled for another torch: " + reason
            self.fault(text, self.renew('mmcv'))
        elif lacking in self.missing:
            pass  # among the faults already
        elif lacking and '.' not in lacking and lacking != module:
            text = f'{module} needs {name}, which is not installed'
            self.fault(text, pip_install(lacking))
        elif 'libGL' in text:
            text = f'{module} cannot be imported: OpenCV finds no libGL on this machine'
            version = self.installed.get('opencv-python')
            headless = 'opencv-python-headless' + ('==' + version if version else '')
            self.fault(text, pip_install('--force-reinstall', '--no-deps', headless))
        elif module == 'torchvision':
            torch = 'torch==' + self.installed['torch']
            text = 'torchvision {} does not fit torch {}: {}'
            self.fault(
                text.format(version, self.installed['torch'], reason),
                join('pip uninstall -y torchvision', pip_install(torch, 'torchvision')),
            )
        elif module.split('.')[0] in MODULES:
            text = f'{module} cannot be imported: {reason}'
            self.fault(text, self.renew(module.split('.')[0]))
        else:
            text = f'{module} cannot be imported: {reason}'
            new = SOURCE if module == 'mmnala' else f'{module}=={version}'
            self.fault(text, pip_install('--force-reinstall', '--no-deps', new))

    def check_gpu(self):
        facts = self.answers.get('facts')
        if facts is None or 'CUDA_VISIBLE_DEVICES' in os.environ:
            return  # without torch nothing is known; GPUs that are hidden are not missed
        if facts['capabilities']:
            if facts['cuda']:  # ROCm has none
                self.check_operators_cuda(facts)
            return
        driver = driver_cuda()
        if driver is None:
            return
        if facts['cuda'] is None:
            text = 'torch {} is a build for the CPU, and a GPU is there'.format(facts['torch'])
            command = join('pip uninstall -y torch torchvision', self.torch_command())
            self.fault(text, command)
        elif release(facts['cuda'])[0] > release(driver)[0]:
            text = "torch {} is for CUDA {}, the GPU's driver runs CUDA up to {}"
            text = text.format(facts['torch'], facts['cuda'], driver)
            self.fault(text, 'apt install --only-upgrade nvidia-driver')

    def check_operators_cuda(self, facts):
        cuda = self.answers.get('operators')
        if cuda is None or same_major(cuda, facts['cuda']):
            return
        found = 'the CPU' if cuda == 'not available' else 'CUDA ' + cuda
        text = "mmcv's operators are for {}, torch and the GPU run CUDA {}; detection needs them"
        _, reason = find_nvcc(facts)
        toolkit = reason and 'apt install cuda-toolkit-' + facts['cuda'].replace('.', '-')
        text = text.format(found, facts['cuda']) + ((reason and ' (' + reason + ')') or '')
        self.fault(text, join(toolkit, self.renew('mmcv')))

    # The report.

    def rows(self):
        facts = self.answers.get('facts')
        operators = self.answers.get('operators')
        notes = {}
        if facts:
            gpus = ', '.join('sm_' + name.replace('.', '') for name in facts['capabilities'])
            cuda = 'CUDA ' + facts['cuda'] if facts['cuda'] else 'the CPU'
            notes['torch'] = 'for {}, {}'.format(cuda, 'GPU ' + gpus if gpus else 'sees no GPU')
        if operators:
            cuda = 'the CPU' if operators == 'not available' else 'CUDA ' + operators
            notes['mmcv'] = 'operators for ' + cuda
        for name in ('torch', 'torchvision', 'numpy', 'timm', 'safetensors', 'mmnala'):
            yield name, self.installed.get(name, '-'), notes.get(name, '')
        for module, names in self.holders.items():
            versions = ', '.join(self.installed[name] for name in names)
            yield module, versions or '-', ', '.join([*names, *filter(None, [notes.get(module)])])


def report(rows, faults):
    for name, version, note in rows:
        print(f'{name:12} {version:14} {note}'.rstrip())
    print('\nWrong, and what mends it:' if faults else '\nNothing is wrong.')
    for number, (text, command) in enumerate(faults, 1):
        print(f'{number}. {text}\n   {command}')


def main():
    python = ('Python', platform.python_version(), sys.executable)
    if sys.version_info[:2] < SUPPORTED[0]:  # nothing that follows can be installed here
        report([python], [python_fault()])
        return 1
    environment = Environment()
    report([python, *environment.rows()], environment.faults)
    return 1 if environment.faults else 0


if __name__ == '__main__':
    sys.exit(main())
