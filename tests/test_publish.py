"""tools/publish_model.py: what is published loads everywhere and is what was trained."""

import hashlib
import json
import re
import runpy
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Golden
from safetensors import safe_open
from safetensors.torch import load_file
from toy import TOOLS, run_tool, weights, write_scenes, write_segmentation_config

from mmnala import NaLaFormer, __version__
from mmnala.checkpoint import from_release

MICRO = Golden('nalaformer_micro')
RELEASE = MICRO.under('state.')


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> Path:
    """The checkpoint of a trained mmseg model, its config beside the data."""
    folder = tmp_path_factory.mktemp('toy')
    write_scenes(folder / 'data')
    config = write_segmentation_config(folder / 'seg.py', folder / 'data')
    finished = run_tool('train.py', config, cwd=folder)
    assert finished.code == 0, finished.output
    return folder / 'work_dirs' / 'seg' / 'iter_10.pth'


def publish(folder: Path, *args: object) -> tuple[Path, str]:
    """The published file and its card."""
    finished = run_tool('publish_model.py', *args, cwd=folder)
    assert finished.code == 0, finished.output
    file, card = finished.output.splitlines()[-2:]
    assert Path(card).stem == Path(file).stem and card.endswith('.md')
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    assert Path(file).stem.endswith(f'-{digest[:8]}')
    page = (folder / card).read_text()
    assert f'| sha256 | `{digest}` |' in page and '| licence | *to be filled in* |' in page
    return folder / file, page


def scores(config: Path, checkpoint: Path, cwd: Path) -> list[str]:
    finished = run_tool('test.py', config, checkpoint, '--work-dir', 'work', cwd=cwd)
    assert finished.code == 0, finished.output
    return re.findall(r'(?:aAcc|mIoU|mAcc): [\d.]+', finished.output)


def test_a_trained_segmentor(trained, tmp_path):
    file, page = publish(tmp_path, trained, 'seg.pth')
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        'output.log',
        f'{file.stem}.md',
        file.name,
    ]
    assert file.stat().st_size < 0.7 * trained.stat().st_size
    content = torch.load(file, weights_only=True)
    assert content.keys() == {'state_dict', 'meta'}
    before = weights(trained)
    assert content['state_dict'].keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in content['state_dict'].items())
    meta, old = content['meta'], torch.load(trained, weights_only=False)['meta']
    assert meta == {**old, 'mmnala_version': __version__}
    assert meta['iter'] == 10 and meta['dataset_meta']['classes'] == ('ground', 'box')

    config = trained.parents[2] / 'seg.py'
    measured = scores(config, trained, tmp_path)
    assert len(measured) == 3 and scores(config, file, tmp_path) == measured

    arch = dict(channels=[8, 16, 16, 24], depths=[1] * 4, num_heads=[1, 2, 2, 3], mlp_ratio=2)
    init_cfg = dict(type='Pretrained', checkpoint=str(file), prefix='backbone.')
    model = NaLaFormer(arch, init_cfg=init_cfg)
    model.init_weights()
    assert all(torch.equal(v, before[f'backbone.{k}']) for k, v in model.state_dict().items())

    # The card's metrics are those of the validation after the last iteration.
    log = next(trained.parent.glob('*/vis_data/scalars.json')).read_text().splitlines()[-1]
    for name in ('aAcc', 'mIoU', 'mAcc'):
        assert f'| {name} | {json.loads(log)[name]:g} |' in page
    assert '| loss' not in page and 'time |' not in page
    total = sum(v.numel() for k, v in before.items() if 'running' not in k and 'num_b' not in k)
    own = sum(p.numel() for p in model.parameters())
    assert f'| parameters | {total / 1e6:.2f} M, of them backbone {own / 1e6:.2f} M |' in page
    for text in (
        '# seg-',
        'NaLaFormer (arXiv 2506.21137), the backbone of `EncoderDecoder`',
        'channels [8, 16, 16, 24], depths [1, 1, 1, 1]',
        '| layout | model, the backbone under `backbone.` |',
        '| trained for | iter 10 |',
        f'mmnala {__version__} |',
        '`BaseSegDataset`, 2 classes: ground, box.',
        'backbone=dict(arch=dict(channels=[8, 16, 16, 24]',
        f"checkpoint='{file.name}', prefix='backbone.'))",
        f"load_from = '{file.name}'",
    ):
        assert text in page
    assert 'timm' not in page

    again = run_tool('publish_model.py', trained, 'seg.pth', cwd=tmp_path)
    assert again.code == 1
    assert re.search(rf'^error: {file.name} exists already', again.output, re.M)

    # As safetensors and back.
    safe, _ = publish(tmp_path, trained, 'seg.safetensors')
    assert scores(config, safe, tmp_path) == measured
    resumed = run_tool('train.py', config, '--resume', safe, cwd=tmp_path)
    assert resumed.code == 1
    assert f'error: --resume {safe}: not a checkpoint of an mmengine training' in resumed.output
    back, _ = publish(tmp_path, safe, 'back.pth')
    content = torch.load(back, weights_only=True)
    assert content['meta'] == json.loads(json.dumps(meta))
    assert all(torch.equal(v, before[k]) for k, v in content['state_dict'].items())


def test_no_log_no_metrics(trained, tmp_path):
    shutil.copy(trained, tmp_path / 'moved.pth')
    _, page = publish(tmp_path, 'moved.pth', 'seg.pth')
    assert '## Metrics\n\nNot measured.\n' in page
    _, page = publish(tmp_path, trained.with_name('iter_4.pth'), 'early.pth')
    assert '## Metrics\n\nNot measured.\n' in page  # validated at 5 and 10


def test_a_variant_as_classifier(tmp_path):
    torch.manual_seed(0)
    backbone = NaLaFormer('xt', out_norm=False).state_dict()
    state = {f'backbone.{k}': v for k, v in backbone.items()}
    state |= {'neck.proj.weight': torch.ones(1024, 384), 'neck.proj.bias': torch.ones(1024)}
    state |= {'head.fc.weight': torch.ones(7, 1024), 'head.fc.bias': torch.ones(7)}
    torch.save(dict(state_dict=state, state_dict_ema=state, epoch=3), tmp_path / 'in.pth')
    file, page = publish(tmp_path, 'in.pth', 'xt.safetensors', '--ema')
    published = load_file(file)
    assert published.keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in published.items())
    with safe_open(file, 'pt') as opened:
        metadata = opened.metadata()
    assert metadata['format'] == 'pt'
    assert json.loads(metadata['meta']) == {'mmnala_version': __version__}
    for text in (
        'NaLaFormer-XT: channels [32, 64, 128, 384], depths [2, 2, 2, 2]',
        '| layout | classifier, the backbone under `backbone.` |',
        '| weights | averaged (EMA) |',
        "    arch='xt',",
        "timm.create_model(\n    'nalaformer_xtiny', num_classes=7, "
        f"checkpoint_path='{file.name}')",
        '## Data set\n\nNot in the checkpoint.',
        '## Config\n\nNot in the checkpoint.',
    ):
        assert text in page
    assert f"load_from = '{file.name}'" in page


@pytest.mark.parametrize(
    ('version', 'shown'),
    [
        ('0.10.12' + '1a2b3c4d5e' * 4, '0.10.12'),
        ('0.10.12' + '0123456789' * 4, '0.10.12'),
        ('0.10.12unknown', '0.10.12'),
        ('0.10.12', '0.10.12'),
        ('2.0.0rc1', '2.0.0rc1'),
    ],
)
def test_versions_without_git_hash(version, shown):
    card = runpy.run_path(str(TOOLS / 'publish_model.py'))['model_card']
    page = card(Path('a.pth'), RELEASE, dict(mmengine_version=version), {}, '', '')
    assert f'| versions | mmengine {shown} |' in page.splitlines()


@pytest.mark.parametrize(
    ('option', 'averaged'), [('--ema', True), ('--no-ema', False), (None, True)]
)
def test_averages_of_mmengine(tmp_path, option, averaged):
    state = {f'backbone.{k}': v for k, v in from_release(RELEASE).items()}
    content = dict(
        state_dict={k: v + 1 for k, v in state.items()},
        ema_state_dict={f'module.{k}': v for k, v in state.items()} | {'steps': torch.tensor(1)},
        # numpy's arrays are rebuilt by code, which is not run.
        meta=dict(epoch=1, experiment_name='x_20260101_000000', hook=np.ones(2), classes=('a',)),
        optimizer=dict(state={}),
    )
    torch.save(content, tmp_path / 'in.pth')
    log = tmp_path / '20260101_000000' / 'vis_data' / 'scalars.json'
    log.parent.mkdir(parents=True)
    log.write_text('{"lr": 1, "loss": 2, "step": 1}\n{"acc": 50.5, "step": 1}\n{"acc": 1, "st')
    file, page = publish(tmp_path, 'in.pth', 'out.pth', *([option] if option else []))
    content = torch.load(file, weights_only=True)
    assert content.keys() == {'state_dict', 'meta'}
    for name, value in content['state_dict'].items():
        assert torch.equal(value, state[name] + 1 if averaged else state[name])
    assert content['meta'].keys() == {'epoch', 'experiment_name', 'classes', 'mmnala_version'}
    assert ('| acc | 50.5 |' in page) == averaged  # the averages were validated
    assert f'| weights | {"averaged (EMA)" if averaged else "not averaged"} |' in page


def test_release_and_image_channels(tmp_path):
    state = OrderedDict(RELEASE)
    state['patch_embed.proj.0.weight'] = torch.ones(8, 4, 3, 3)
    torch.save(dict(model=state, args=Path('x')), tmp_path / 'in.pth')
    file, page = publish(tmp_path, 'in.pth', 'a.b.pth')
    assert file.name.startswith('a.b-')
    assert "    type='NaLaFormer',\n    in_channels=4,\n    arch=..." in page
    assert '| layout | release |' in page and "checkpoint='a.b-" in page and 'prefix' not in page
    model = NaLaFormer(MICRO.arch, in_channels=4, init_cfg=dict(type='Pretrained',
                       checkpoint=file.as_uri()))  # fmt: skip
    model.init_weights()
    assert torch.equal(
        model.state_dict()['patch_embed.proj.0.weight'], state['patch_embed.proj.0.weight']
    )


@pytest.mark.parametrize(
    ('content', 'output', 'message'),
    [
        (dict(model=RELEASE), 'out.bin', 'out.bin: expected a name ending in .pth or .safeten'),
        (dict(model=RELEASE), 'no/out.pth', 'no/out.pth: there is no such folder'),
        (dict(model=RELEASE), 'there.pth', 'there.pth exists already'),
        (dict(model=RELEASE), 'v-0.1.pth', "v-0.1.pth: choose a name without '-0.'"),
        (dict(state_dict={'fc.weight': torch.ones(1)}), 'out.pth', 'in.pth: it holds no NaLaF'),
        (dict(state_dict={}), 'out.pth', 'in.pth: empty state dict'),
        (dict(model={**RELEASE, 'extra': 'text'}), 'out.pth', 'in.pth: no tensors: extra'),
        (b'PK\x03\x04 damaged', 'out.pth', "checkpoint 'in.pth' is truncated or no checkpoint"),
    ],
)
def test_bad_input_is_one_line(tmp_path, content, output, message):
    if isinstance(content, bytes):
        (tmp_path / 'in.pth').write_bytes(content)
    else:
        torch.save(content, tmp_path / 'in.pth')
    (tmp_path / 'there.pth').write_text('mine')
    finished = run_tool('publish_model.py', 'in.pth', output, cwd=tmp_path)
    assert finished.code == 1
    lines = [line for line in finished.output.splitlines() if line]
    assert [line for line in lines if line.startswith('error: ')] == lines[-1:]
    assert message in lines[-1] and 'Traceback' not in finished.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {'in.pth', 'there.pth', 'output.log'}
    assert (tmp_path / 'there.pth').read_text() == 'mine'


def test_the_config_is_parsed_and_not_run(tmp_path):
    target = tmp_path / 'target'
    config = f'open({str(target)!r}, "w")\nmodel = dict(type="M", backbone=dict(arch="t"))\n'
    meta = dict(cfg=config, dataset_meta=dict(classes=3))
    torch.save(dict(state_dict=RELEASE, meta=meta), tmp_path / 'in.pth')
    _, page = publish(tmp_path, 'in.pth', 'out.pth')
    assert not target.exists()
    assert 'the backbone of `M`' in page and "backbone=dict(arch='t')" in page
    torch.save(dict(state_dict=RELEASE, meta=dict(cfg='model = (')), tmp_path / 'in.pth')
    _, page = publish(tmp_path, 'in.pth', 'other.pth')
    assert '2506.21137), published' in page
