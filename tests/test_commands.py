"""Every command of the README and of the pages under docs and configs does what it says it does.

A shell runs the pages' blocks with stand-ins for python, pip and the like, which write down what
they are asked for. So loops, quotes and scripts such as dist_train.sh are the shell's to
understand. Each command is then run on data that is drawn in the real layouts, with its config
made small: short, of small images, in few samples. What costs the same anyway runs as it stands.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from PIL import Image
from test_multinode import free_port
from test_zoo import shrink
from toy import ENVIRONMENT, run_tool, write_scenes
from version_matrix import CELLS

import mmnala
from mmnala.datasets import shapes
from mmnala.export import EXPORTS_SIZES

ROOT = Path(__file__).parents[1]
PAGES = ['README.md', 'configs/README.md']
# test_docs.py follows the page on custom data sets from its first line to its last.
PAGES += sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md'))
PAGES.remove('docs/custom_dataset.md')

PINNED = [line for _, installs, _ in CELLS.values() for line in installs]
DEMO = 'configs/shapes/upernet_nala-xt_shapes.py'
IMAGE = 'data/shapes/images/validation/ADE_val_00000003.jpg'
SIDE = 64
# What stands for something of the reader's own.
WORDS = {
    'CONFIG': DEMO,
    'IN': 'work_dirs/demo/iter_1000.pth',
    'OUT': 'out.pth',
    'NAME.pth': 'name.pth',
    'DIR': 'out',
    'WORK_DIR': 'work_dirs/demo',
    'INPUT...': 'data/shapes/images/validation',
    'FILE': IMAGE,
    'X,Y': '40,40',
}
ROOTS = {'ade20k': 'data/ade/ADEChallengeData2016'}  # elsewhere data and the layout's name
# Scripts that measure or try for long, and what makes them short.
SHORT = {
    'tools/benchmark.py operator': '--tokens 64 --paths lean --modes inference',
    'tools/benchmark.py backbone': '--models nala-xt --sizes 64x64 --modes inference',
    'tools/analysis/scaling.py': '--size 64',
    'tests/kill_training.py': '--kills 1',
    'tests/soak_predict.py': '--images 10 --sample 1',
    # The drawn data sets are not whole.
    'tools/dataset/': '--partial',
}
# Not run, and why.
LEFT_OUT = {
    'mim': 'openmim is not among the requirements; test_packaging.py installs what it looks for',
    'scontrol': 'needs Slurm',
}


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r'^```bash\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def is_synopsis(line: str) -> bool:
    return ' [-' in line or ' [options]' in line


def recorded(page: str, folder: Path) -> list[list[str]]:
    """The commands of a page's blocks as a shell understands them, the synopses left out."""
    record, programs = folder / 'record', folder / 'programs'
    record.touch()
    programs.mkdir()
    for name in ('python', 'pip', 'pytest', 'make', 'torchrun', 'srun', *LEFT_OUT):
        # The package's folder is asked for in order to name files in it.
        real = f'[ "$1" = -c ] && exec {shlex.quote(sys.executable)} "$@"\n'
        write = f'printf \'%s\\0\' {name} "$@" >>{shlex.quote(str(record))}\n'
        path = programs / name
        path.write_text(
            '#!/usr/bin/env bash\n' + real * (name == 'python') + write + f'echo >>{record}\n'
        )
        path.chmod(0o755)
    lines = [line for block in blocks(page) for line in block.splitlines()]
    script = '\n'.join(line for line in lines if not is_synopsis(line))
    env = ENVIRONMENT | dict(PATH=f'{programs}:{os.environ["PATH"]}')
    done = subprocess.run(
        ['bash', '-euc', script], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # What lies there in an installed package is the checkout's.
    text = record.read_text().replace(f'{Path(mmnala.__file__).parent}/.mim/', '')
    return [line.split('\0')[:-1] for line in text.splitlines()]


@cache
def options_of(script: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, script, '--help'],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(re.findall(r'--[a-z][\w-]*', done.stdout))


def test_synopses_name_options_that_there_are():
    count = 0
    for page in PAGES:
        for line in filter(is_synopsis, '\n'.join(blocks(page)).splitlines()):
            script = re.search(r'tools/\S+', line)[0]
            assert (ROOT / script).is_file()
            python = script.replace('dist_', '').replace('.sh', '.py')
            assert set(re.findall(r'--[a-z][\w-]*', line)) <= options_of(python)
            count += 1
    assert count >= 4


@pytest.fixture(scope='module')
def checkout(tmp_path_factory) -> Path:
    """A folder like the checkout with every data set, and the demo trained for an iteration."""
    folder = tmp_path_factory.mktemp('checkout')
    for name in ('configs', 'tools', 'tests'):
        (folder / name).symlink_to(ROOT / name)
    for layout in ('ade20k', 'coco', 'cityscapes', 'imagenet'):
        root = folder / ROOTS.get(layout, f'data/{layout}')
        shapes.make_dataset(root, num_train=2, num_val=2, size=SIDE, layout=layout)
    # The test sets whose truth is not public.
    annotations = folder / 'data/coco/annotations'
    shutil.copy(
        annotations / 'instances_val2017.json', annotations / 'image_info_test-dev2017.json'
    )
    shutil.copytree(folder / 'data/coco/val2017', folder / 'data/coco/test2017')
    for part in ('leftImg8bit', 'gtFine'):
        for city in ('berlin', 'bielefeld', 'bonn', 'leverkusen', 'mainz', 'munich'):
            (target := folder / 'data/cityscapes' / part / 'test' / city).mkdir(parents=True)
            for path in (folder / 'data/cityscapes' / part / 'val').rglob('*_000000_*'):
                shutil.copy(path, target / re.sub(r'^[a-z]+', city, path.name))
    small_data(folder / 'data')
    shapes.make_dataset(folder / 'data/shapes', num_train=4, num_val=8)
    finished = run_tool('train.py', small(DEMO, folder), '--work-dir', 'work_dirs/demo', cwd=folder)
    assert finished.code == 0, finished.output
    (folder / 'work_dirs/demo/iter_1.pth').rename(folder / 'work_dirs/demo/iter_1000.pth')
    return folder


def small_data(data: Path) -> None:
    """CamVid and BCCD in the layouts of their configs."""
    scenes = data / 'scenes'
    write_scenes(scenes)
    for split in ('train', 'val'):
        for kind, source, suffix in (
            *(('images', 'images', '.jpg'), ('annotations', 'masks', '.png')),
        ):
            folder = data / 'camvid_small' / kind / split
            folder.mkdir(parents=True)
            for path in (scenes / source / split).iterdir():
                Image.open(path).save(folder / (path.stem + suffix))
        for folder in ('images', 'annotations'):
            (data / 'bccd' / folder).mkdir(parents=True, exist_ok=True)
        coco = json.loads((scenes / f'{split}.json').read_text())
        for image in coco['images']:
            name = f'{split}_{Path(image["file_name"]).stem}.jpg'
            shutil.copy(
                data / f'camvid_small/images/{split}/{Path(image["file_name"]).stem}.jpg',
                data / 'bccd/images' / name,
            )
            image['file_name'] = name
        names = ('RBC', 'WBC', 'Platelets')
        coco['categories'] = [dict(id=i, name=name) for i, name in enumerate(names, 1)]
        (data / f'bccd/annotations/{split}.json').write_text(json.dumps(coco))


def clamp(part: object) -> object:
    """The part with every size of images and crops at most ``SIDE``."""
    if isinstance(part, dict):
        for key, value in part.items():
            sizes = key in ('size', 'crop_size', 'scale', 'img_scale', 'image_size', 'scales')
            part[key] = _at_most(value) if sizes else clamp(value)
    elif isinstance(part, (list, tuple)):
        return type(part)(clamp(item) for item in part)
    return part


def _at_most(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return type(value)(_at_most(item) for item in value)
    return min(value, SIDE) if isinstance(value, int) else value


def small(config: str, folder: Path) -> str:
    """The name of a config that is the given one but for its length and sizes."""
    target = folder / f'small_{Path(config).name}'
    if target.exists():
        return target.name
    cfg = Config.fromfile(folder / config)
    clamp(cfg.get('tta_pipeline'))
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        cfg[loader] = clamp(cfg[loader])
        cfg[loader].update(num_workers=0, persistent_workers=False, batch_size=2)
    if 'data_preprocessor' in cfg.model:
        clamp(cfg.model.data_preprocessor)
    shrink(cfg, SIDE)
    if 'max_iters' in cfg.train_cfg:
        cfg.train_cfg.update(max_iters=1, val_interval=1)
    else:
        cfg.train_cfg.update(max_epochs=1, val_interval=1)
    cfg.default_hooks.checkpoint.interval = 1
    cfg.dump(target)
    return target.name


def untrained(config: str, folder: Path) -> str:
    """A checkpoint of the config's model with random weights."""
    path = folder / f'{Path(config).stem}.pth'
    if not path.exists():
        cfg = Config.fromfile(folder / config)
        init_default_scope(cfg.default_scope)
        if cfg.default_scope == 'mmpretrain':
            cfg.model.data_preprocessor = dict(cfg.data_preprocessor, type='ClsDataPreprocessor')
        model = MODELS.build(cfg.model)
        torch.save(dict(meta={}, state_dict=model.state_dict()), path)
    return path.name


def python_script(command: list[str]) -> list[str] | None:
    """The script and arguments that a recorded command has a Python run, one process of it."""
    program, *rest = command
    if program == 'srun':
        program, *rest = rest[rest.index('python') :]
    if program not in ('python', 'torchrun'):
        return None
    arguments = [argument for argument in rest if argument != '-u']
    if 'torch.distributed.run' in arguments:
        script = next(i for i, argument in enumerate(arguments) if argument.endswith('.py'))
        arguments = arguments[script:]
    if program == 'torchrun':
        arguments = arguments[arguments.index('-m') :]
    return arguments


def check_pip(arguments: list[str]) -> None:
    """What the page has pip install is what is installed here, by pip's own understanding.

    Pins of other versions are those that the tests run with elsewhere.
    """
    pins = [argument for argument in arguments if '==' in argument]
    for name, _, wanted in (pin.partition('==') for pin in pins):
        try:
            if distribution(name).version.partition('+')[0] == wanted:
                continue
        except PackageNotFoundError:
            pass
        files = [ROOT / 'requirements.txt', ROOT / 'requirements/mmcv.txt']
        known = ' '.join([path.read_text() for path in files] + PINNED)
        assert all(re.search(rf'(?<!\S){re.escape(pin)}(?!\S)', known) for pin in pins), pins
        return
    families = {'onedl': 'onedl-mmengine', 'openmmlab': 'mmengine'}
    families |= {name: name for name in ('onedl-mmpretrain', 'mmpretrain')}
    extras = re.findall(r'\.\[([\w-]+)\]', ' '.join(arguments))
    try:
        for extra in families.keys() & set(extras):
            distribution(families[extra])
    except PackageNotFoundError:
        return  # of the family that is not here
    options = ['--dry-run', '--no-index', '--no-build-isolation', '--quiet']
    command = [sys.executable, '-m', 'pip', *arguments[:1], *options, *arguments[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def prepare(script: str, arguments: list[str], folder: Path) -> list[str]:
    """The arguments with what is the reader's own filled in, and a small config."""
    if script.endswith('make_demo_dataset.py'):
        sizes = ['--num-train', '2', '--num-val', '2', '--size', str(SIDE)]
        return [*arguments, *sizes]
    arguments = [WORDS.get(argument, argument) for argument in arguments]
    if arguments and arguments[0] == '[ROOT]':
        return [ROOTS.get(Path(script).stem, f'data/{Path(script).stem}')]
    config = next((a for a in arguments if re.search(r'\.py$', a)), DEMO)
    for index, argument in enumerate(arguments):
        name, equals, value = argument.rpartition('=')
        if value in ('CHECKPOINT', 'FILE_OR_URL') or (
            re.search(r'(iter|epoch)_\d+\.pth$', value) and not (folder / value).exists()
        ):
            arguments[index] = name + equals + untrained(config, folder)
        if argument == config and Path(script).name in ('train.py', 'test.py', 'predict.py'):
            arguments[index] = small(config, folder)
    return [a for a in arguments if a != '--amp']  # which needs a GPU


def run_script(arguments: list[str], folder: Path) -> None:
    """Run a script as the page says, in one process without a GPU."""
    if arguments[0] == '-m':
        # timm's own script is not part of its package.
        (folder / 'train.py').write_text(
            'import sys, timm\nprint(timm.create_model(sys.argv[2]).pretrained_cfg["architecture"])'
        )
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.strip()) == (0, 'nalaformer_tiny'), done.stderr
        return
    script, *rest = arguments
    rest = prepare(script, rest, folder)
    for prefix, options in SHORT.items():
        if ' '.join([script, *rest]).startswith(prefix):
            rest += options.split()
    env = {}
    if '--launcher' in rest:
        rest[rest.index('--launcher') + 1] = 'pytorch'  # Slurm, too, only starts the ranks
        env = dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1')
        env['MASTER_PORT'] = str(free_port())
    if '--out' in rest:  # a command of another page may have written there
        shutil.rmtree(folder / rest[rest.index('--out') + 1], ignore_errors=True)
    base = Path(script)
    finished = run_tool(
        ROOT / base if base.parts[0] == 'tests' else base.relative_to('tools'),
        *rest,
        cwd=folder,
        env=env,
    )
    assert finished.code == 0, (script, rest, finished.output[-3000:])


def commands(page: str, folder: Path) -> Iterator[list[str]]:
    seen = set()
    for command in recorded(page, folder):
        key = re.sub(r'\d+', '', shlex.join(command))  # seeds and ranks
        if key not in seen:
            seen.add(key)
            yield command


@pytest.mark.parametrize('page', PAGES)
def test_commands(page, checkout, tmp_path, request):
    for name in ('configs', 'tools', 'tests', 'data'):
        (tmp_path / name).symlink_to(checkout / name)
    shutil.copytree(checkout / 'work_dirs', tmp_path / 'work_dirs')
    config = re.compile(r'^```python\n# (\w+\.py)[^\n]*\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    for name, text in config.findall((ROOT / page).read_text()):
        (tmp_path / name).write_text(text)
    for command in commands(page, tmp_path):
        program, *rest = command
        if not EXPORTS_SIZES and any(word.endswith(('.onnx', '.pt2')) for word in rest):
            continue
        if program == 'make':
            subprocess.run(['make', '-n', *rest], cwd=ROOT, check=True, capture_output=True)
        elif program == 'pytest':  # which the suite does anyway
            command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', *rest]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        elif program == 'pip':
            check_pip(rest)
        elif (script := python_script(command)) is not None:
            run_script(script, tmp_path)
        else:
            assert program in LEFT_OUT
