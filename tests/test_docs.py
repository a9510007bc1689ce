"""The pages under docs: what they tell a reader to write and to type works."""

import re
import shlex
from pathlib import Path

import pytest
from toy import run_tool

ROOT = Path(__file__).parents[1]
# Makes every training of the page short, whatever it counts.
SHORT = [
    *('train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False'),
    *('val_dataloader.num_workers=0', 'val_dataloader.persistent_workers=False'),
    *('test_dataloader.num_workers=0', 'test_dataloader.persistent_workers=False'),
    'train_dataloader.batch_size=2',
]
ITERATIONS = [
    'train_cfg.max_iters=2',
    'train_cfg.val_interval=2',
    'default_hooks.checkpoint.interval=1',
]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    """A folder like the checkout with the drawn data of the page, but smaller."""
    folder = tmp_path_factory.mktemp('checkout')
    (folder / 'configs').symlink_to(ROOT / 'configs')
    page = (ROOT / 'docs/custom_dataset.md').read_text()
    for command in blocks(page, 'bash')[0].splitlines():
        script, *arguments = shlex.split(command)[1:]
        sizes = ['--num-train', '6', '--num-val', '4', '--size', '64']
        assert run_tool(Path(script).relative_to('tools'), *arguments, *sizes, cwd=folder).code == 0
    return folder


@pytest.mark.parametrize('section', ['Segmentation', 'Detection', 'Classification'])
def test_custom_dataset(checkout, section):
    page = (ROOT / 'docs/custom_dataset.md').read_text()
    text = re.search(rf'^## {section}$(.*?)(?=^## )', page, re.MULTILINE | re.DOTALL)[1]
    (config,) = blocks(text, 'python')
    (checkout / re.match(r'# (\w+\.py)', config)[1]).write_text(config)
    (commands,) = blocks(text, 'bash')
    # An untrained detector is sure of nothing.
    score = ['model.test_cfg.score_thr=0'] if section == 'Detection' else []
    for command in commands.splitlines():
        # The short training ends earlier, and its last checkpoint is called after that.
        command = re.sub(r'iter_\d+', 'iter_2', re.sub(r'epoch_\d+', 'epoch_1', command))
        python, script, *arguments = shlex.split(command)
        assert python == 'python'
        if script != 'tools/predict.py':
            length = ['train_cfg.max_epochs=1'] if section == 'Classification' else ITERATIONS
            arguments += ['--cfg-options', *SHORT, *length, *score]
        finished = run_tool(Path(script).relative_to('tools'), *arguments, cwd=checkout)
        assert finished.code == 0, finished.output
    metric = dict(Segmentation='mIoU', Detection='coco/bbox_mAP', Classification='accuracy/top1')
    results = checkout / 'work_dirs' / re.match(r'# (\w+)', config)[1]
    logs = ''.join(path.read_text() for path in results.rglob('*.log'))
    assert len(re.findall(rf'{metric[section]}: +-?[\d.]+', logs)) >= 2
    if section != 'Classification':
        assert (
            len(
                [
                    path
                    for path in (results / 'pictures').rglob('*')
                    if path.suffix in ('.jpg', '.png')
                ]
            )
            == 4
        )
