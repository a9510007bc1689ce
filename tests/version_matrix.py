"""Run the tests with other versions of Python, torch, timm, numpy and OpenMMLab.

    python tests/version_matrix.py FOLDER [CELL ...]

Each cell gets a virtual environment and a clone of this checkout's last commit in FOLDER/CELL,
installs mmnala from the clone as a user would, and runs its tests there, all output going to
FOLDER/CELL.log. Prints, and adds to FOLDER/results.md, a row of the README's table for each cell.
The interpreters (python3.10 to python3.12) must be on the PATH. A cell takes up to 8 GB of disk,
which are freed when it has passed; mmcv is compiled in each that holds it.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What either mmcv is compiled with, against the torch that is there. mmnala itself asks for 77.
TOOLS = "'setuptools>=77,<81' wheel ninja"
COMPILE = '--no-build-isolation --no-cache-dir'
CHECKS = 'pytest==9.2.0 hypothesis deptry'
BACKBONE = 'tests/test_operator.py tests/test_parity.py tests/test_neck.py'

# Of each cell: the Python, what pip is called with, and the tests, where not all.
CELLS = {
    'onedl': (
        'python3.11',
        ['-r requirements.txt', f'{COMPILE} -r requirements/mmcv.txt'],
        '',
    ),
    'openmmlab': (
        'python3.10',
        [
            f'torch==2.4.1 torchvision==0.19.1 numpy==1.26.4 timm==1.0.9 {TOOLS}',
            f"{COMPILE} mmcv==2.1.0 'opencv-python<4.12' numpy==1.26.4",
            'mmengine==0.10.7 mmdet==3.3.0 mmsegmentation==1.2.2 mmpretrain==1.2.0 ftfy regex '
            'cityscapesscripts==1.5.0 jinja2 scipy onnx onnxruntime onnxscript numpy==1.26.4 '
            f"'opencv-python<4.12' 'setuptools>=77,<81' {CHECKS}",
        ],
        '',
    ),
    'newest-mmcv': (
        'python3.12',
        [
            f'torch==2.13.0 torchvision==0.28.0 numpy==2.2.6 timm==1.0.31 {TOOLS}',
            f'{COMPILE} onedl-mmcv==2.3.6',
            'onedl-mmengine==0.10.12 onedl-mmdetection==3.5.1 onedl-mmsegmentation==1.4.2 '
            f'onedl-mmpretrain==1.3.6 onnx onnxruntime onnxscript {CHECKS}',
        ],
        f'{BACKBONE} tests/test_export.py tests/test_predict.py',
    ),
    'newest': (
        'python3.12',
        [
            'torch==2.15.0 torchvision==0.29.2 timm==1.0.31 numpy==2.5.5 onedl-mmengine==0.10.12 '
            f'opencv-python {CHECKS}'
        ],
        BACKBONE,
    ),
}

VERSIONS = """
import re
from importlib.metadata import distributions
from platform import python_version
names = 'torch timm numpy (onedl-)?mm(engine|cv|det(ection)?|segmentation|pretrain)'.split()
held = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in distributions()}
found = [
    f'{name} {held[name]}' for want in names for name in sorted(held) if re.fullmatch(want, name)
]
print(python_version(), *found[:3], ', '.join(found[3:]), sep=' | ')
"""


def run_cell(name, folder):
    """The cell's row of the table: its versions and what pytest counted."""
    python, installs, tests = CELLS[name]
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    clone, binaries = place / 'mmnala', place / 'venv/bin'
    with (folder / f'{name}.log').open('w') as log:

        def run(*command):
            log.write(f'$ {shlex.join(map(str, command))}\n')
            log.flush()
            subprocess.run(command, cwd=clone, stdout=log, stderr=log, check=True)

        clone.mkdir(parents=True)
        run('git', 'clone', '--quiet', ROOT, '.')
        run(python, '-m', 'venv', place / 'venv')
        for arguments in installs:
            run(binaries / 'pip', 'install', *shlex.split(arguments))
        run(binaries / 'pip', 'install', '.')
        versions = subprocess.check_output([binaries / 'python', '-c', VERSIONS], text=True)
        # pytest itself and not `python -m pytest`, which would find mmnala in the clone.
        command = [binaries / 'pytest', '-q', '--color=no', *tests.split()]
        log.write(f'$ {shlex.join(map(str, command))}\n')
        done = subprocess.run(command, cwd=clone, text=True, stdout=subprocess.PIPE, stderr=log)
        log.write(done.stdout)
    if done.returncode == 0:
        shutil.rmtree(place)
    counts = re.sub(r'=| in .*', '', done.stdout.splitlines()[-1]).strip()
    return f'| {name} | {versions.strip()} | {tests or "all"} | {counts} |'


def main():
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or CELLS:
        row = run_cell(name, folder)
        print(row, flush=True)
        with (folder / 'results.md').open('a') as file:
            file.write(row + '\n')


if __name__ == '__main__':
    main()
