"""The set-up script, without a download: its checks, its stamp and its cache of wheels."""

import ast
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / 'tools' / 'bootstrap.py'


sys.path.insert(0, str(SCRIPT.parent))


def load(path):
    spec = importlib.util.spec_from_file_location('bootstrap', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    """The files that the set-up reads, in a folder of their own and without a .venv."""
    folder = tmp_path / 'checkout'
    for path in (*load(SCRIPT).INPUTS, SCRIPT.with_name('check_env.py')):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


@pytest.fixture
def bootstrap(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return load(checkout / 'tools' / 'bootstrap.py')


@pytest.fixture
def no_commands(bootstrap, monkeypatch):
    """Fail on anything that would change the machine."""

    def refuse(command, *args, **kwargs):
        raise AssertionError(f'started {command}')

    monkeypatch.setattr(bootstrap, 'run', refuse)
    monkeypatch.setattr(bootstrap, 'create_venv', lambda: refuse('venv'))


def make_wheel(folder, name='onedl_mmcv-{version}-{python}-{python}-linux_x86_64.whl', **names):
    """A wheel that passes for a build's result; `member` names its one file."""
    folder.mkdir(parents=True, exist_ok=True)
    python = f'cp{sys.version_info.major}{sys.version_info.minor}'
    member = names.pop('member', f'mmcv/_ext.cpython-{python[2:]}-x86_64-linux-gnu.so')
    wheel = folder / name.format(**{'version': '2.3.6', 'python': python, **names})
    with zipfile.ZipFile(wheel, 'w') as archive:
        archive.writestr(member, b'operators' * 100)
    return wheel


def one_line(capsys):
    """The single line on standard error that a refused set-up leaves."""
    captured = capsys.readouterr()
    assert captured.err.count('\n') == 1, captured.err
    assert captured.err.startswith('set-up: ')
    return captured.err


# The checks before anything is downloaded.


@pytest.mark.parametrize('version', [(3, 9), (3, 13)])
def test_unsupported_python(bootstrap, no_commands, monkeypatch, capsys, version):
    monkeypatch.setattr(bootstrap.sys, 'version_info', (*version, 0, 'final', 0))
    assert bootstrap.main() == 1
    line = one_line(capsys)
    assert 'Python 3.10 to 3.12 is needed' in line
    assert 'this is {}.{}'.format(*version) in line


def test_missing_compiler_in_a_real_run(checkout, tmp_path):
    env = {'PATH': str(tmp_path), 'HOME': str(tmp_path)}
    done = subprocess.run(
        [sys.executable, 'tools/bootstrap.py'],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert done.stdout == ''
    assert done.stderr == (
        'set-up: a C++17 compiler is needed (tried c++, g++, clang++); '
        'on Debian and Ubuntu install g++, or name one with CXX=\n'
    )
    assert not (checkout / '.venv').exists()
    assert not (tmp_path / '.cache').exists()


def test_a_named_compiler_is_the_only_one_tried(bootstrap, monkeypatch):
    monkeypatch.setenv('CXX', 'no-such-compiler')
    with pytest.raises(bootstrap.SetupError, match=r'tried no-such-compiler\)'):
        bootstrap.find_compiler()


def test_missing_headers(bootstrap, no_commands, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bootstrap.sysconfig, 'get_path', lambda name: str(tmp_path))
    assert bootstrap.main() == 1
    assert f"Python's headers are missing ({tmp_path / 'Python.h'})" in one_line(capsys)


def test_too_little_disk(bootstrap, no_commands, monkeypatch, capsys):
    usage = shutil.disk_usage('/')._replace(free=int(0.5e9))
    monkeypatch.setattr(bootstrap.shutil, 'disk_usage', lambda path: usage)
    assert bootstrap.main() == 1
    line = one_line(capsys)
    assert 'too little free disk' in line
    assert '.venv 8.0 GB' in line
    assert '0.5 GB found' in line


def test_an_installed_venv_needs_no_second_share_of_the_disk(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, 'tree_size', lambda folder: bootstrap.VENV_SIZE)
    usage = shutil.disk_usage('/')._replace(free=int(1.1e9))
    monkeypatch.setattr(bootstrap.shutil, 'disk_usage', lambda path: usage)
    bootstrap.check_disk()


def test_syntax_is_that_of_python_3_6():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


# The stamp.


def finish(bootstrap, monkeypatch):
    """Run a set-up whose steps only leave their names; returns the list of them."""
    steps = []
    monkeypatch.setattr(bootstrap, 'find_compiler', lambda: 'c++')
    monkeypatch.setattr(bootstrap, 'check_disk', lambda: None)
    monkeypatch.setattr(bootstrap, 'works', lambda *args: True)
    monkeypatch.setattr(bootstrap, 'obtain_wheel', lambda compiler: Path('mmcv.whl'))

    def create_venv():
        steps.append('venv')
        bootstrap.VENV.mkdir(exist_ok=True)

    monkeypatch.setattr(bootstrap, 'create_venv', create_venv)
    monkeypatch.setattr(bootstrap, 'run', lambda command, **options: steps.append(command[-1]))
    assert bootstrap.main() == 0
    return steps


def test_second_call_does_nothing(bootstrap, monkeypatch, capsys):
    first = finish(bootstrap, monkeypatch)
    assert first == [
        'venv',
        str(bootstrap.REQUIREMENTS),
        'mmcv.whl',
        str(bootstrap.ROOT),
        'check',
        bootstrap.IMPORTS_PROBE,
    ]
    capsys.readouterr()
    assert finish(bootstrap, monkeypatch) == []
    assert capsys.readouterr().out == '.venv is ready\n'


@pytest.mark.parametrize(
    'name', ['requirements.txt', 'requirements/mmcv.txt', 'setup.cfg', 'tools/bootstrap.py']
)
def test_changed_input_sets_up_again(bootstrap, monkeypatch, name):
    finish(bootstrap, monkeypatch)
    with open(bootstrap.ROOT / name, 'a') as file:
        file.write('# changed\n')
    assert finish(bootstrap, monkeypatch)[0] == 'venv'


def test_broken_venv_sets_up_again(bootstrap, monkeypatch):
    finish(bootstrap, monkeypatch)
    assert bootstrap.STAMP.read_text() == bootstrap.fingerprint()
    monkeypatch.undo()
    assert not bootstrap.is_ready()


def test_failed_step_leaves_no_stamp(bootstrap, monkeypatch, capsys):
    finish(bootstrap, monkeypatch)
    (bootstrap.ROOT / 'setup.cfg').write_text('changed')

    def fail():
        raise bootstrap.SetupError('no network')

    monkeypatch.setattr(bootstrap, 'install_requirements', fail)
    assert bootstrap.main() == 1
    assert one_line(capsys) == 'set-up: no network\n'
    assert not bootstrap.STAMP.exists()


def test_failed_command_shows_the_end_of_its_log(bootstrap):
    bootstrap.VENV.mkdir()
    code = 'import sys; print(*range(100), sep="\\n"); sys.exit(3)'
    with pytest.raises(bootstrap.SetupError) as caught:
        bootstrap.run([sys.executable, '-c', code])
    lines = str(caught.value).splitlines()
    assert lines[:30] == [str(number) for number in range(70, 100)]
    assert lines[30].startswith('failed with exit code 3: ')
    assert lines[31] == f'The whole log: {bootstrap.LOG}'


# The cache of wheels.


def test_wheel_key_names_everything_a_wheel_depends_on(bootstrap, tmp_path):
    key = bootstrap.wheel_key('2.9.1+cu128', 'cuda12.8-sm9.0')
    python = f'cp{sys.version_info.major}{sys.version_info.minor}'
    assert key.startswith(f'onedl_mmcv2.3.6-torch2.9.1+cu128-{python}-')
    assert os.uname().machine in key
    assert key.endswith('-cuda12.8-sm9.0')
    assert bootstrap.wheel_cache() == tmp_path / 'cache' / 'mmnala' / 'wheels'


def test_wheel_cache_without_xdg(bootstrap, monkeypatch, tmp_path):
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert bootstrap.wheel_cache() == tmp_path / '.cache' / 'mmnala' / 'wheels'


@pytest.mark.parametrize(
    'release, expected, said',
    [
        ('release 12.4, V12.4.1', 'cuda12.4-sm8.0+9.0', ''),
        ('release 13.0, V13.0.88', 'cpu', 'nvcc is of CUDA 13.0, torch of CUDA 12.8'),
        (None, 'cpu', 'no CUDA compiler (nvcc) was found'),
    ],
)
def test_cuda_tag(bootstrap, monkeypatch, capsys, tmp_path, release, expected, said):
    facts = {'capabilities': ['8.0', '9.0'], 'cuda': '12.8', 'cuda_home': None}
    if release:
        facts['cuda_home'] = str(tmp_path)
        nvcc = tmp_path / 'bin' / 'nvcc'
        nvcc.parent.mkdir()
        nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, {release}"\n')
        nvcc.chmod(0o755)
    assert bootstrap.cuda_tag(facts) == expected
    assert said in capsys.readouterr().out


def test_no_gpu_builds_for_the_cpu(bootstrap, capsys):
    facts = {'capabilities': [], 'cuda': '12.8', 'cuda_home': '/usr/local/cuda'}
    assert bootstrap.cuda_tag(facts) == 'cpu'
    assert capsys.readouterr().out == ''


def test_good_wheel_is_stored_and_taken(bootstrap, tmp_path):
    wheel = make_wheel(tmp_path / 'build')
    folder = tmp_path / 'key'
    folder.mkdir()
    stored = bootstrap.store_wheel(wheel, folder)
    assert stored == folder / wheel.name
    assert not wheel.exists()
    assert bootstrap.cached_wheel(folder) == stored


@pytest.mark.parametrize(
    'names, fault',
    [
        ({'python': 'cp39'}, 'it is not onedl_mmcv-2.3.6-'),
        ({'version': '2.3.5'}, 'it is not onedl_mmcv-2.3.6-'),
        ({'member': 'mmcv/ops/nms.py'}, 'it holds no compiled operators'),
    ],
)
def test_mismatched_build_is_not_stored(bootstrap, tmp_path, names, fault):
    folder = tmp_path / 'key'
    folder.mkdir()
    with pytest.raises(bootstrap.SetupError, match=fault):
        bootstrap.store_wheel(make_wheel(tmp_path / 'build', **names), folder)
    assert list(folder.iterdir()) == []


def truncate(wheel):
    wheel.write_bytes(wheel.read_bytes()[:-50])


def drop_checksum(wheel):
    wheel.with_name(wheel.name + '.sha256').unlink()


@pytest.mark.parametrize(
    'damage, fault', [(truncate, 'its checksum differs'), (drop_checksum, 'it has no checksum')]
)
def test_damaged_wheel_is_removed(bootstrap, tmp_path, capsys, damage, fault):
    folder = tmp_path / 'key'
    folder.mkdir()
    stored = bootstrap.store_wheel(make_wheel(tmp_path / 'build'), folder)
    damage(stored)
    assert bootstrap.cached_wheel(folder) is None
    assert not stored.exists()
    assert capsys.readouterr().out == f'Removing {stored}: {fault}\n'


def test_damaged_archive_is_not_stored(bootstrap, tmp_path):
    wheel = make_wheel(tmp_path / 'build')
    truncate(wheel)
    with pytest.raises(bootstrap.SetupError, match='the archive is damaged'):
        bootstrap.store_wheel(wheel, tmp_path)


def test_a_second_set_up_waits_for_the_first(bootstrap, monkeypatch, tmp_path):
    lock = tmp_path / 'lock'
    first = lock.open('a')
    fcntl.flock(first, fcntl.LOCK_EX)
    said = []

    def end_the_first(text):
        said.append(text)
        first.close()

    monkeypatch.setattr(bootstrap, 'say', end_the_first)
    with bootstrap.locked(lock):
        assert said == [f'Waiting for another set-up that holds {lock}']


def test_a_command_keeps_the_lock_of_a_killed_set_up(bootstrap, tmp_path):
    bootstrap.VENV.mkdir()
    lock = tmp_path / 'lock'
    inherited = f'import os, sys; sys.exit({str(lock)!r} not in map(os.path.realpath, fds))'
    code = 'import glob; fds = glob.glob("/proc/self/fd/*"); ' + inherited
    with bootstrap.locked(lock):
        bootstrap.run([sys.executable, '-c', code])


@pytest.fixture
def fake_build(bootstrap, monkeypatch):
    """The build of a wheel with the compiler's and pip's part replaced; counts its calls."""
    bootstrap.VENV.mkdir()
    facts = {'torch': '2.9.1', 'cuda': None, 'cuda_home': None, 'capabilities': [], 'flags': []}
    monkeypatch.setattr(bootstrap, 'probe', lambda *args, **options: json.dumps(facts))
    monkeypatch.setattr(bootstrap, 'precompile_header', lambda *args: None)
    builds = []

    def pip(*arguments, env, watch):
        builds.append(env)
        make_wheel(Path(arguments[arguments.index('--wheel-dir') + 1]))

    monkeypatch.setattr(bootstrap, 'pip', pip)
    return builds


def test_wheel_is_built_once_and_again_when_damaged(bootstrap, fake_build):
    wheel = bootstrap.obtain_wheel('c++')
    assert bootstrap.obtain_wheel('c++') == wheel
    assert len(fake_build) == 1
    truncate(wheel)
    assert bootstrap.obtain_wheel('c++') == wheel
    assert len(fake_build) == 2
    assert bootstrap.cache_fault(wheel) is None


def test_build_leaves_only_the_wheel(bootstrap, fake_build):
    folder = bootstrap.wheel_cache() / bootstrap.wheel_key('2.9.1', 'cpu')
    (folder / 'build-killed').mkdir(parents=True)
    wheel = bootstrap.obtain_wheel('c++')
    assert {path.name for path in folder.iterdir()} == {
        'lock',
        wheel.name,
        wheel.name + '.sha256',
    }


def test_build_environment_ignores_what_the_key_does_not_name(bootstrap, fake_build, monkeypatch):
    monkeypatch.setenv('FORCE_CUDA', '1')
    monkeypatch.setenv('MMCV_WITH_DIOPI', '1')
    monkeypatch.setenv('CFLAGS', '-O0')
    bootstrap.obtain_wheel('c++')
    (env,) = fake_build
    assert 'FORCE_CUDA' not in env
    assert 'MMCV_WITH_DIOPI' not in env
    assert env['CFLAGS'] == bootstrap.CFLAGS
    assert env['CUDA_VISIBLE_DEVICES'] == ''
    assert int(env['MAX_JOBS']) >= 1


def test_progress_prints_a_line_for_every_tenth(bootstrap, capsys):
    progress = bootstrap.Progress('compiling')
    for done in range(79):
        progress.show(done, 78)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert '  0 %' in lines[0]
    assert 'about ? left' in lines[0]
    assert lines[-1].startswith('compiling [####################] 100 %')


def test_pins_are_exact_and_free_of_mmcv(bootstrap):
    pins = bootstrap.pins(bootstrap.REQUIREMENTS)
    assert 'torch==2.9.1' in pins
    assert all(pin.count('==') >= 1 for pin in pins)
    assert not any('mmcv' in pin for pin in pins)
    assert bootstrap.pins(bootstrap.MMCV_REQUIREMENT) == ['onedl-mmcv==2.3.6']
