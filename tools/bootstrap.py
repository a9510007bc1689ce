"""Set up this checkout: `.venv`, the pinned requirements, mmcv's operators and mmnala itself.

`make setup` runs it; `make demo` and `make test` imply it. Everything a fresh machine may lack is
checked before anything is downloaded. A finished set-up leaves a stamp in `.venv`, and a second
call does nothing; an interrupted one is simply repeated.

mmcv's operators are compiled once for each combination of mmcv, torch, Python, platform and CUDA
version. The wheel is kept in `${XDG_CACHE_HOME:-~/.cache}/mmnala/wheels/` for the next checkout.

Standard library only, in syntax that Python 3.6 parses, so that an unsupported interpreter gets a
sentence and not a SyntaxError.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

import check_env
from check_env import find_nvcc, python_is_supported

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / '.venv'
PYTHON = VENV / 'bin' / 'python'
STAMP = VENV / 'setup.stamp'
LOG = VENV / 'setup.log'
TEMPORARY = VENV / 'tmp'
REQUIREMENTS = ROOT / 'requirements.txt'
MMCV_REQUIREMENT = ROOT / 'requirements' / 'mmcv.txt'
# What the set-up depends on: a change in one of these and it is done again.
INPUTS = (
    REQUIREMENTS,
    MMCV_REQUIREMENT,
    ROOT / 'setup.cfg',
    ROOT / 'mmnala' / 'version.py',
    Path(__file__).resolve(),
)

# Measured with the CUDA build of torch, the largest. Bytes.
VENV_SIZE = 8.0e9
DOWNLOAD_SIZE = 3.5e9
BUILD_SIZE = 1.0e9
JOB_MEMORY = 1.5e9

# gcc's -O2 without debug information costs a half of Python's own -O3 -g, and the operators' inner
# loops gain nothing from the rest. CFLAGS replaces Python's flags; -DNDEBUG -fwrapv repeat the two
# that change meaning.
CFLAGS = '-O2 -g0 -fwrapv -DNDEBUG'

CXX17_PROGRAM = """#include <optional>
int main() { if (std::optional<int> zero{0}; zero) return *zero; return 1; }
"""

# Run by the venv's Python; prints one line of JSON.
INSTALLED_PROBE = """
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
for requirement in map(Requirement, sys.argv[1:]):
    if requirement.marker is None or requirement.marker.evaluate():
        found = version(requirement.name)
        if not requirement.specifier.contains(found, prereleases=True):
            sys.exit('%s, found %s' % (requirement, found))
"""
TORCH_PROBE = """
import json, sysconfig
import setuptools
from distutils.ccompiler import new_compiler
from distutils.sysconfig import customize_compiler
{TORCH_FACTS}
from torch.utils import cpp_extension
compiler = new_compiler()
customize_compiler(compiler)
facts['flags'] = (
    compiler.compiler_so[1:]
    + ['-I' + path for path in cpp_extension.include_paths()]
    + ['-I' + sysconfig.get_path('include')]
    + ['-std=c++17', '-DTORCH_API_INCLUDE_EXTENSION_H', '-DTORCH_EXTENSION_NAME=_ext']
)
print(json.dumps(facts))
""".replace('{TORCH_FACTS}', check_env.TORCH_FACTS)
IMPORTS_PROBE = 'import cv2, mmcv.ops, mmengine, mmdet, mmpretrain, mmseg, mmnala'


class SetupError(Exception):
    """A set-up that cannot go on; the message is what the user reads."""


def say(text):
    print(text, flush=True)


def gigabytes(size):
    return '{:.1f} GB'.format(size / 1e9)


# Checks, before anything is downloaded.


def check_python():
    if not python_is_supported():
        raise SetupError(
            '{} is needed, this is {}.{} ({}); name another one with PYTHON=python3.11'.format(
                check_env.python_range(), *sys.version_info[:2], sys.executable
            )
        )
    version = 'python{}.{}'.format(*sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise SetupError(
            '{} has no venv module; on Debian and Ubuntu install {}-venv'.format(
                sys.executable, version
            )
        )
    header = Path(sysconfig.get_path('include')) / 'Python.h'
    if not header.is_file():
        raise SetupError(
            "Python's headers are missing ({}); on Debian and Ubuntu install {}-dev".format(
                header, version
            )
        )


def find_compiler():
    """The command of a C++17 compiler that compiles and links: $CXX, or the first that works."""
    named = os.environ.get('CXX')
    candidates = [named] if named else ['c++', 'g++', 'clang++']
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / 'probe.cpp'
        source.write_text(CXX17_PROGRAM)
        for candidate in candidates:
            command = [*shlex.split(candidate), '-std=c++17', str(source), '-o', folder + '/probe']
            with contextlib.suppress(OSError):
                if not subprocess.call(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ):
                    return candidate
    raise SetupError(
        'a C++17 compiler is needed (tried {}); on Debian and Ubuntu install g++, or name one '
        'with CXX='.format(', '.join(candidates))
    )


def existing_parent(path):
    while not path.exists():
        path = path.parent
    return path


def tree_size(folder):
    """Bytes that the folder's files take on disk."""
    size = 0
    for parent, _, names in os.walk(str(folder)):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return size


def check_disk():
    missing = max(0.0, VENV_SIZE - tree_size(VENV))
    downloads = DOWNLOAD_SIZE * missing / VENV_SIZE
    needs = [
        ('.venv', VENV, missing),
        ('downloads', VENV, downloads),
        ("pip's cache", cache_home() / 'pip', downloads),
        ("the operators' build", wheel_cache(), BUILD_SIZE),
    ]
    disks = {}
    for what, path, size in needs:
        path = existing_parent(path)
        disks.setdefault(os.stat(str(path)).st_dev, []).append((what, path, size))
    for shares in disks.values():
        path = shares[0][1]
        needed = sum(size for _, _, size in shares)
        free = shutil.disk_usage(str(path)).free
        if free < needed:
            raise SetupError(
                'too little free disk at {}: {} needed ({}), {} found'.format(
                    path,
                    gigabytes(needed),
                    ', '.join('{} {}'.format(what, gigabytes(size)) for what, _, size in shares),
                    gigabytes(free),
                )
            )


# Commands, their output in the log.


@contextlib.contextmanager
def locked(path):
    """Hold the file's lock; the system gives it back when the last process that has it ends.

    The commands that `run` starts have it too: if this process is killed, the next set-up waits for
    the one still running.
    """
    with open(str(path), 'a') as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say('Waiting for another set-up that holds {}'.format(path))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command, env=None, visible=False, watch=None):
    """Run a command and raise SetupError if it fails.

    Args:
        command (list[str]): The command, run in the repository's root with no standard input.
        env (dict, optional): Its environment; by default ours with the set-up's temporary folder.
        visible (bool): Whether the output goes to our own; to the log by default.
        watch (callable, optional): Called without arguments twice a second while it runs.
    """
    if env is None:
        env = dict(os.environ, TMPDIR=str(TEMPORARY))
    with open(str(LOG), 'ab') as log:
        log.write('\n$ {}\n'.format(' '.join(map(shlex.quote, command))).encode())
        log.flush()
        # A session of its own, so that nothing it started survives an interrupted set-up.
        process = subprocess.Popen(
            command,
            cwd=str(ROOT),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if visible else log,
            stderr=None if visible else subprocess.STDOUT,
            close_fds=False,
            start_new_session=True,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=0.5)
                    break
                if watch is not None:
                    watch()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if code:
        tail = [] if visible else LOG.read_text(errors='replace').splitlines()[-30:]
        failed = 'failed with exit code {}: {}'.format(code, ' '.join(command))
        raise SetupError('\n'.join([*tail, failed, 'The whole log: {}'.format(LOG)]))


def pip(*arguments, **options):
    run([str(PYTHON), '-m', 'pip', '--no-input', *arguments], **options)


def probe(code, *arguments, **options):
    """The last line that the venv's Python prints for the code."""
    done = subprocess.run(
        [str(PYTHON), '-c', code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        universal_newlines=True,
        **options,
    )
    if done.returncode:
        raise SetupError(done.stderr.strip() or 'exit code {}'.format(done.returncode))
    return (done.stdout.strip().splitlines() or [''])[-1]


def works(code, *arguments):
    try:
        probe(code, *arguments)
    except (OSError, SetupError):
        return False
    return True


class Progress:
    """One line that is redrawn on a terminal; elsewhere a new line for every tenth."""

    def __init__(self, label):
        self.label = label
        self.start = time.monotonic()
        self.next_tenth = 0

    def show(self, done, total):
        elapsed = time.monotonic() - self.start
        tenth = 10 * done // total
        terminal = sys.stdout.isatty()
        if not terminal and tenth < self.next_tenth:
            return
        self.next_tenth = tenth + 1
        left = self.clock(elapsed * (total - done) / done) if done else '?'
        line = '{} [{:20}] {:3d} %, {} elapsed, about {} left'.format(
            self.label, '#' * (20 * done // total), 100 * done // total, self.clock(elapsed), left
        )
        if terminal:
            sys.stdout.write('\r' + line + '\033[K' + ('\n' if done == total else ''))
            sys.stdout.flush()
        else:
            say(line)

    @staticmethod
    def clock(seconds):
        return '{}:{:02d}'.format(*divmod(round(seconds), 60))


# mmcv's operators.


def cache_home():
    return Path(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'))


def wheel_cache():
    return cache_home() / 'mmnala' / 'wheels'


def pins(path):
    """The requirement lines of a pip requirements file, without options and comments."""
    lines = (line.split(' #')[0].strip() for line in path.read_text().splitlines())
    return [line.split(' --hash')[0] for line in lines if line and line[0] not in '#-']


def mmcv_version():
    (pin,) = pins(MMCV_REQUIREMENT)
    return pin.split('==')[1]


def cuda_tag(facts):
    """What the operators are compiled for, 'cpu' or CUDA's version and the GPUs' architectures.

    A GPU without a matching CUDA compiler is no error: NaLaFormer itself uses no mmcv operator.
    """
    if not facts['capabilities']:
        return 'cpu'
    nvcc, reason = find_nvcc(facts)
    if reason is None:
        return 'cuda{}-sm{}'.format(nvcc, '+'.join(facts['capabilities']))
    say(
        "A GPU is there, but {}: mmcv's operators will run on the CPU only. NaLaFormer needs none "
        'of them; torch uses the GPU as usual.'.format(reason)
    )
    return 'cpu'


def python_tag():
    return 'cp{}{}'.format(*sys.version_info[:2])


def wheel_key(torch_version, cuda):
    """The name of the cache's folder: everything that a compiled wheel depends on."""
    return '-'.join(
        [
            'onedl_mmcv' + mmcv_version(),
            'torch' + torch_version,
            python_tag(),
            sysconfig.get_platform().replace('-', '_'),
            ''.join(platform.libc_ver()),
            cuda,
        ]
    )


def digest(path):
    sha256 = hashlib.sha256()
    with open(str(path), 'rb') as file:
        for block in iter(lambda: file.read(1 << 20), b''):
            sha256.update(block)
    return sha256.hexdigest()


def checksum_file(wheel):
    return wheel.with_name(wheel.name + '.sha256')


def content_fault(wheel):
    """Why the wheel cannot be right, or None: its name, the archive, the compiled operators."""
    expected = 'onedl_mmcv-{}-{}-'.format(mmcv_version(), python_tag())
    if not wheel.name.startswith(expected):
        return 'it is not {}*'.format(expected)
    try:
        with zipfile.ZipFile(str(wheel)) as archive:
            if archive.testzip() is not None:
                return 'the archive is damaged'
            if not any(re.match(r'mmcv/_ext\..*so$', name) for name in archive.namelist()):
                return 'it holds no compiled operators'
    except zipfile.BadZipFile:
        return 'the archive is damaged'
    return None


def cache_fault(wheel):
    """Why a wheel found in the cache must not be used, or None."""
    checksum = checksum_file(wheel)
    if not checksum.is_file():
        return 'it has no checksum'
    if checksum.read_text().split()[:1] != [digest(wheel)]:
        return 'its checksum differs'
    return content_fault(wheel)


def cached_wheel(folder):
    """The folder's wheel if it is sound, else None; an unsound one is removed."""
    for wheel in sorted(folder.glob('*.whl')):
        fault = cache_fault(wheel)
        if fault is None:
            return wheel
        say('Removing {}: {}'.format(wheel, fault))
        wheel.unlink()
    return None


def store_wheel(wheel, folder):
    """Move a freshly built wheel into the cache; it is complete there or not there at all."""
    fault = content_fault(wheel)
    if fault is not None:
        raise SetupError('the build of {} is unusable: {}'.format(wheel.name, fault))
    checksum = checksum_file(wheel)
    checksum.write_text('{}  {}\n'.format(digest(wheel), wheel.name))
    for path in (checksum, wheel):
        os.replace(str(path), str(folder / path.name))
    return folder / wheel.name


def build_environment(compiler, cuda, facts, folder):
    """Our environment less what would compile anything that the wheel's key does not name."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(('FORCE_', 'MMCV_WITH_', 'CXXFLAGS', 'CPPFLAGS'))
    }
    env.update(CXX=compiler, CFLAGS=CFLAGS, TMPDIR=str(folder))
    if cuda == 'cpu':
        env['CUDA_VISIBLE_DEVICES'] = ''
    else:
        env['TORCH_CUDA_ARCH_LIST'] = ';'.join(facts['capabilities'])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    env.setdefault('MAX_JOBS', str(max(1, min(cores, int(memory / JOB_MEMORY)))))
    return env


def is_gcc(compiler):
    command = [*shlex.split(compiler), '-dM', '-E', '-x', 'c++', os.devnull]
    return '__clang__' not in subprocess.check_output(command, universal_newlines=True)


def precompile_header(folder, env, flags):
    """Compile torch's headers once for all operators, which takes 3/4 off each; gcc only.

    gcc ignores the result, silently, unless the flags are those that torch compiles with.
    """
    header = folder / 'torch_types.hpp'
    header.write_text('#include <torch/types.h>\n')
    command = [*shlex.split(env['CXX']), '-x', 'c++-header', *flags, str(header)]
    run([*command, '-o', str(header) + '.gch'], env=env)
    env['CFLAGS'] += ' -include ' + str(header)


def count_objects(folder):
    """How many of the build's object files are there, and how many there will be."""
    for plan in folder.glob('pip-*/onedl-mmcv*/build/temp*/build.ninja'):
        objects = re.findall(r'^build (\S+\.o):', plan.read_text(), re.MULTILINE)
        return sum(map(os.path.exists, objects)), len(objects)
    return 0, 0


def build_wheel(folder, compiler, cuda, facts):
    """Compile the operators in a folder of this call's own and return the cached wheel."""
    for leftover in folder.glob('build-*'):
        shutil.rmtree(str(leftover), ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix='build-', dir=str(folder)) as name:
        build = Path(name)
        env = build_environment(compiler, cuda, facts, build)
        say(
            "Building mmcv's operators for {} in {} jobs, once for this torch, Python and "
            'CUDA'.format(cuda, env['MAX_JOBS'])
        )
        if is_gcc(compiler):
            say("  precompiling torch's headers")
            precompile_header(build, env, facts['flags'])
        progress = Progress('  compiling')

        def watch():
            done, total = count_objects(build)
            if total:
                progress.show(done, total)

        # pip's cache could hold a wheel built without torch: one without operators.
        pip(
            *('wheel', '--no-cache-dir', '--no-deps', '--no-build-isolation'),
            *('--wheel-dir', name, '-r', str(MMCV_REQUIREMENT)),
            env=env,
            watch=watch,
        )
        (wheel,) = build.glob('*.whl')
        return store_wheel(wheel, folder)


def obtain_wheel(compiler):
    facts = json.loads(probe(TORCH_PROBE, env=dict(os.environ, CFLAGS=CFLAGS)))
    cuda = cuda_tag(facts)
    folder = wheel_cache() / wheel_key(facts['torch'], cuda)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / 'lock'):
        wheel = cached_wheel(folder)
        if wheel is not None:
            say("Taking mmcv's operators from {}".format(wheel))
            return wheel
        return build_wheel(folder, compiler, cuda, facts)


# The set-up itself.


def fingerprint():
    """Changes whenever the set-up has to be done again; the venv holds absolute paths."""
    parts = [str(ROOT), python_tag()] + [digest(path) for path in INPUTS]
    return hashlib.sha256('\n'.join(parts).encode()).hexdigest()


def is_ready():
    """Whether the set-up was finished with these inputs and every pinned package is still there."""
    if not STAMP.is_file() or STAMP.read_text() != fingerprint():
        return False
    return works(INSTALLED_PROBE, 'mmnala', *pins(REQUIREMENTS), *pins(MMCV_REQUIREMENT))


@contextlib.contextmanager
def temporary_folder():
    """Where `run` sends temporary files, pip's downloads above all: the disk that was checked."""
    shutil.rmtree(str(TEMPORARY), ignore_errors=True)
    TEMPORARY.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(str(TEMPORARY), ignore_errors=True)


def create_venv():
    same_python = 'import pip, sys; assert sys.version_info[:2] == {}'.format(sys.version_info[:2])
    if works(same_python):
        return
    say('Creating .venv with Python {}'.format(platform.python_version()))
    # Inside an activated .venv the interpreter must not delete itself.
    interpreter = getattr(sys, '_base_executable', sys.executable)
    if subprocess.call([interpreter, '-m', 'venv', '--clear', str(VENV)]):
        raise SetupError('{} -m venv failed'.format(interpreter))


def install_requirements():
    say('Installing the pinned requirements (up to {})'.format(gigabytes(DOWNLOAD_SIZE)))
    terminal = sys.stdout.isatty()
    log = ['--log', str(LOG)] if terminal else []
    pip('install', *log, '-r', str(REQUIREMENTS), visible=terminal)
    if not works('import cv2'):
        say('OpenCV does not load here (no libGL?): putting its headless build over it')
        (headless,) = [pin for pin in pins(REQUIREMENTS) if 'opencv-python-headless' in pin]
        pip('install', '--force-reinstall', '--no-deps', headless)


def verify():
    say('Checking the installation')
    pip('check')
    run([str(PYTHON), '-c', IMPORTS_PROBE])


def set_up():
    check_python()
    with locked(Path(__file__).resolve()):
        if is_ready():
            say('.venv is ready')
            return
        compiler = find_compiler()
        check_disk()
        with contextlib.suppress(FileNotFoundError):
            STAMP.unlink()
        create_venv()
        with temporary_folder():
            install_requirements()
            pip('install', '--force-reinstall', '--no-deps', str(obtain_wheel(compiler)))
            say('Installing mmnala')
            pip('install', '--no-deps', '--no-build-isolation', '--editable', str(ROOT))
            verify()
        partial = STAMP.with_suffix('.partial')
        partial.write_text(fingerprint())
        os.replace(str(partial), str(STAMP))
        say('.venv is ready')


def main():
    # A terminated set-up unwinds like an interrupted one: its commands stop, its folders go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        set_up()
    except SetupError as error:
        print('set-up: {}'.format(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('\nset-up: interrupted; call it again to go on', file=sys.stderr)
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
