"""tools/convert_checkpoint.py: between all layouts and formats, exactly, and never half."""

import os
import random
import resource
import runpy
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import Golden
from mmengine.model import ExponentialMovingAverage
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toy import TOOLS

from mmnala import NaLaFormer
from mmnala.backbones.nalaformer import ARCHS
from mmnala.checkpoint import from_release
from mmnala.checkpoint.files import write_new
from mmnala.checkpoint.layouts import find_state_dict, release_angle, sort_weights
from mmnala.conversion import convert, infer_arch, variants

HEADS = ['--num-heads', '1', '2', '3', '4']
MICRO = Golden('nalaformer_micro')
XT_HEADS = ARCHS['xt']['num_heads']


def classifier(state) -> dict[str, torch.Tensor]:
    """The release's weights by the names that mmpretrain and timm have for them."""
    named = {f'backbone.{k}': v for k, v in from_release(state).items()}
    named |= {f'neck.{k}': v for k, v in state.items() if k.startswith(('proj.', 'norm.'))}
    named['head.fc.weight'] = state['head.weight'].flatten(1)
    named['head.fc.bias'] = state['head.bias']
    return named


RELEASE = MICRO.under('state.')
CLASSIFIER = classifier(RELEASE)
BACKBONE = from_release(RELEASE)


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs the tool in this process and returns its exit status, output and errors."""

    def run(*args: object) -> Namespace:
        monkeypatch.setattr(sys, 'argv', ['convert_checkpoint.py', *map(str, args)])
        code, message = 0, ''
        try:
            runpy.run_path(str(TOOLS / 'convert_checkpoint.py'), run_name='__main__')
        except SystemExit as end:
            code, message = (1, str(end)) if isinstance(end.code, str) else (end.code, '')
        return Namespace(code=code, output=capsys.readouterr().out, error=message)

    return run


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == '.safetensors':
        return load_file(path)
    return find_state_dict(torch.load(path, weights_only=True))


def write(state, path: Path) -> Path:
    torch.save(state, path) if path.suffix == '.pth' else save_file(state, path)
    return path


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a
    )


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
@pytest.mark.parametrize(
    ('state', 'to', 'expected'),
    [
        (RELEASE, 'classifier', CLASSIFIER),
        (RELEASE, 'timm', CLASSIFIER),
        (RELEASE, 'mmpretrain', CLASSIFIER),
        (RELEASE, 'backbone', BACKBONE),
        (RELEASE, 'release', RELEASE),
        (CLASSIFIER, 'release', RELEASE),
        (CLASSIFIER, 'backbone', BACKBONE),
        (CLASSIFIER, 'timm', CLASSIFIER),
        (BACKBONE, 'backbone', BACKBONE),
    ],
)
def test_layouts(tool, tmp_path, state, to, expected, ending):
    other = {'.pth': '.safetensors', '.safetensors': '.pth'}[ending]
    source = write(state, tmp_path / f'in{ending}')
    heads = HEADS if to == 'release' else []
    finished = tool(source, tmp_path / f'out{other}', '--to', to, *heads)
    assert finished.code == 0, finished.error
    assert same(read(tmp_path / f'out{other}'), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, f'out{other}'])
    if other == '.safetensors':
        with safe_open(tmp_path / 'out.safetensors', 'pt') as file:
            assert file.metadata() == {'format': 'pt'}
    else:
        assert list(torch.load(tmp_path / 'out.pth')) == [
            'model' if to == 'release' else 'state_dict'
        ]


def test_mmpretrain_computes_the_releases_logits(tool, tmp_path):
    pytest.importorskip('mmpretrain')
    from mmengine.registry import init_default_scope
    from mmpretrain.models import ImageClassifier

    init_default_scope('mmpretrain')
    write(RELEASE, tmp_path / 'in.pth')
    assert tool(tmp_path / 'in.pth', tmp_path / 'out.pth', '--to', 'mmpretrain').code == 0
    width, channels = RELEASE['proj.weight'].shape
    backbone = dict(type='NaLaFormer', arch=MICRO.arch, out_indices=(3,), out_norm=False)
    neck = dict(type='NaLaFormerNeck', in_channels=channels, out_channels=width)
    head = dict(type='LinearClsHead', in_channels=width, num_classes=5)
    model = ImageClassifier(backbone=backbone, neck=neck, head=head).eval()
    model.load_state_dict(torch.load(tmp_path / 'out.pth')['state_dict'])
    with torch.no_grad():
        logits = model(MICRO['input'])
    expected = MICRO['eval.logits']
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('via', ['classifier', 'backbone'])
def test_round_trip_keeps_dtypes(dtype, via):
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in RELEASE.items()}
    if via == 'backbone':
        state = {k: v for k, v in state.items() if not k.startswith(('proj.', 'norm.', 'head.'))}
    there = convert(state, via).state
    assert same(convert(there, 'release', num_heads=[1, 2, 3, 4]).state, state)
    back = convert(convert(there, 'release', num_heads=[1, 2, 3, 4]).state, via).state
    assert same(back, there)


@pytest.mark.parametrize('name', ['xt', 't', 'l'])
def test_heads_come_from_the_table_of_variants(name):
    with torch.device('meta'):
        model = NaLaFormer(name, out_norm=False)
    state = {k: torch.empty(()).expand(v.shape) for k, v in model.state_dict().items()}
    release = convert(state, 'release').state
    assert len(release) == len(state) + 4
    for stage, layer in enumerate(model.layers):
        angle = release[f'layers.{stage}.RoPE.angle']
        assert torch.equal(angle, release_angle(layer.head_dim))
    # The first stages of a variant are enough.
    part = {k: v for k, v in state.items() if k.startswith(('patch_embed', 'layers.0.blocks'))}
    assert (
        len(convert(part, 'release').state['layers.0.RoPE.angle']) == model.layers[0].head_dim / 2
    )


@pytest.mark.parametrize('stage', range(4))
def test_recomputed_angle_is_the_releases_bit_by_bit(golden, stage):
    head_dim = golden.arch['channels'][stage] // golden.arch['num_heads'][stage]
    assert torch.equal(release_angle(head_dim), golden[f'state.layers.{stage}.RoPE.angle'])


def test_report_names_what_was_mapped_dropped_and_missing(tool, tmp_path):
    finished = tool(write(RELEASE, tmp_path / 'in.pth'), tmp_path / 'out.pth', '--to', 'backbone')
    lines = finished.output.splitlines()
    assert lines[0] == f'{tmp_path}/in.pth (release) -> {tmp_path}/out.pth (backbone)'
    assert lines[1] == f'mapped {len(BACKBONE)} tensors, renamed 20'
    assert '  layers.#.blocks.#.norm1.norm.* -> layers.#.blocks.#.norm1.* (10)' in lines
    left = [k for k in RELEASE if k.startswith(('proj.', 'norm.', 'head.')) or 'RoPE' in k]
    (dropped,) = (line for line in lines if line.startswith('dropped'))
    assert dropped.startswith(f'dropped {len(left)}: ')
    assert sorted(dropped.split(': ')[1].split(', ')) == sorted(left)
    assert lines[-1] == 'missing 0' and not any(line.startswith('weights:') for line in lines)

    finished = tool(tmp_path / 'out.pth', tmp_path / 'back.pth', '--to', 'release', *HEADS)
    lines = finished.output.splitlines()
    assert f'computed 4: {", ".join(f"layers.{i}.RoPE.angle" for i in range(4))}' in lines
    missing = 'proj.weight proj.bias norm.weight norm.bias norm.running_mean norm.running_var '
    missing += 'norm.num_batches_tracked head.weight head.bias'
    assert lines[-1] == f'missing 9: {", ".join(missing.split())}'


def ema_contents() -> dict[str, dict]:
    """Checkpoints of which the averaged and the trained weights differ by 1."""
    module = torch.nn.Module()
    for name, value in CLASSIFIER.items():
        module.register_buffer(name.replace('.', '/'), value)
    averaged = ExponentialMovingAverage(module, update_buffers=True).state_dict()
    assert 'steps' in averaged
    raw = {k.replace('/', '.'): v for k, v in averaged.items()}
    plus = {k: v + 1 for k, v in CLASSIFIER.items()}
    return {
        'release': dict(
            model=RELEASE, model_ema={f'module.{k}': v + 1 for k, v in RELEASE.items()}
        ),
        'timm': dict(state_dict=CLASSIFIER, state_dict_ema=plus),
        # mmengine's hook saves the averages as the model's and the others beside them.
        'mmengine': dict(state_dict=plus, ema_state_dict=raw, message_hub=Path('x'), meta={}),
    }


@pytest.mark.parametrize('kind', ['release', 'timm', 'mmengine'])
@pytest.mark.parametrize('option', ['--ema', '--no-ema', None])
def test_averaged_weights(tool, tmp_path, kind, option):
    content = ema_contents()[kind]
    averaged = option == '--ema' or (option is None and kind != 'release')
    if kind == 'release':  # its buffers stay what they are
        for name in RELEASE:
            if 'RoPE' in name:
                content['model_ema'][f'module.{name}'] = RELEASE[name]
    torch.save(content, tmp_path / 'in.pth')
    options = [option] if option else []
    finished = tool(tmp_path / 'in.pth', tmp_path / 'out.pth', '--to', 'timm', *options)
    assert finished.code == 0, finished.error
    which = 'averaged (EMA)' if averaged else 'trained, not averaged'
    assert f'weights: {which}' in finished.output.splitlines()
    expected = {k: v + 1 for k, v in CLASSIFIER.items()} if averaged else CLASSIFIER
    assert same(read(tmp_path / 'out.pth'), expected)


def test_whole_models_and_prefix(tool, tmp_path):
    state = {f'backbone.{k}': v for k, v in BACKBONE.items()}
    state |= {f'backbone.norm{i}.weight': torch.ones(MICRO.arch['channels'][i]) for i in range(4)}
    state |= {f'backbone.norm{i}.bias': torch.ones(MICRO.arch['channels'][i]) for i in range(4)}
    norms = {k.removeprefix('backbone.'): v for k, v in state.items() if '.norm' in k[:14]}
    assert len(norms) == 8
    head = {'decode_head.conv_seg.weight': torch.ones(2)}
    source = write(dict(state_dict=state | head, meta=dict(epoch=1)), tmp_path / 'seg.pth')

    for options in ([], ['--prefix', 'backbone'], ['--prefix', 'backbone.']):
        out = tmp_path / f'{len(list(tmp_path.iterdir()))}.pth'
        finished = tool(source, out, '--to', 'backbone', *options)
        assert same(read(out), BACKBONE | norms), finished.error
        assert 'dropped 1: decode_head.conv_seg.weight' in finished.output
        assert finished.output.splitlines()[-1] == 'dropped beside the weights: meta'
    finished = tool(source.as_uri(), tmp_path / 'timm.pth', '--to', 'timm')
    assert same(read(tmp_path / 'timm.pth'), {f'backbone.{k}': v for k, v in BACKBONE.items()})
    assert 'dropped 9: decode_head.conv_seg.weight, backbone.norm0.weight' in finished.output
    assert 'missing 9: neck.proj.weight' in finished.output

    features = {f'model.backbone.{k}': v for k, v in BACKBONE.items()}
    write(features, tmp_path / 'features.safetensors')
    tool(tmp_path / 'features.safetensors', tmp_path / 'own.pth', '--to', 'backbone')
    assert same(read(tmp_path / 'own.pth'), BACKBONE)


def changed(**changes) -> dict:
    state = {k: v for k, v in RELEASE.items() if changes.get(k, v) is not None}
    return state | {k: v for k, v in changes.items() if v is not None}


@pytest.mark.parametrize(
    ('state', 'name'),
    [
        (changed(extra=torch.ones(1)), 'extra'),
        (changed(**{'layers.0.RoPE.angle': torch.ones(8)}), 'layers.0.RoPE.angle'),
        (changed(**{'layers.0.RoPE.angle': torch.ones(0)}), 'layers.0.RoPE.angle'),
        (changed(**{'layers.7.RoPE.angle': release_angle(16)}), 'layers.7.RoPE.angle'),
        (CLASSIFIER | {'head.fv.bias': torch.ones(1)}, 'head.fv.bias'),
        (CLASSIFIER | {'backbone.norm3.weight': torch.ones(64)}, 'backbone.norm3.weight'),
    ],
)
def test_unknown_names_are_refused_or_dropped(tool, tmp_path, state, name):
    source, out = write(state, tmp_path / 'in.pth'), tmp_path / 'out.pth'
    finished = tool(source, out, '--to', 'classifier')
    assert finished.code == 1 and not out.exists()
    assert 'in.pth: unknown names or values (1)' in finished.error
    assert finished.error.endswith(f': {name}')
    finished = tool(source, out, '--to', 'classifier', '--allow-unknown')
    assert finished.code == 0 and same(read(out), CLASSIFIER)
    assert name in finished.output.split('dropped')[1]


@pytest.mark.parametrize(
    ('state', 'options', 'message'),
    [
        (changed(**{'norm.bias': None}), '--to timm', 'in.pth: missing (1): neck.norm.bias'),
        (
            changed(**{'layers.0.blocks.0.attn.ln.bias': None}),
            '--to timm',
            'in.pth: missing (1): backbone.layers.0.blocks.0.attn.ln.bias',
        ),
        (
            changed(**{'layers.0.blocks.0.gamma_1': torch.ones(1, 8, 1, 1)}),
            '--to timm',
            'shapes that do not fit (1): layers.0.blocks.0.gamma_1: (8,), expected (16,)',
        ),
        (
            changed(**{'head.weight': torch.ones(5, 32, 2, 2)}),
            '--to timm',
            'shapes that do not fit (1): head.weight: (5, 32, 2, 2), expected (5, 32)',
        ),
        (changed(**{'patch_embed.proj.0.weight': None}), '--to timm', 'it holds no NaLaFormer'),
        (changed(**{'head.bias': 'text'}), '--to timm', 'in.pth: head.bias is no tensor'),
        (
            RELEASE | {'layers.0.blocks.0.norm1.weight': torch.ones(16)},
            '--to timm',
            'name the same weight',
        ),
        (dict(model_ema=None, model=RELEASE), '--to timm --ema', 'no averaged weights'),
        (RELEASE, '--to timm --prefix encoder', None),
        (CLASSIFIER, '--to timm --prefix encoder', "prefix 'encoder.' fits no name"),
        (CLASSIFIER, '--to release', 'the number of heads is not in the file'),
        (CLASSIFIER, '--to release --num-heads 1 2 3', 'num_heads must be one number a stage'),
        (CLASSIFIER, '--to release --num-heads 1 2 3 5', 'num_heads must be one number a stage'),
        (RELEASE, '--to release --num-heads 1 1 3 4', 'num_heads must be 2 in stage 1'),
        (
            {k: v.clone() for k, v in NaLaFormer('xt', out_norm=False).state_dict().items()},
            f'--to release --num-heads {" ".join(map(str, XT_HEADS[:3]))} {XT_HEADS[3] // 2}',
            f'num_heads must be {XT_HEADS[3]} in stage 3, as of NaLaFormer XT, whose sizes',
        ),
        ({}, '--to timm', 'in.pth: empty state dict'),
        (RELEASE, '--to timm --num-heads 1 2 3 4', 'num_heads is for the release layout'),
    ],
)
def test_bad_input_is_one_line(tool, tmp_path, state, options, message):
    source, out = write(state, tmp_path / 'in.pth'), tmp_path / 'out.pth'
    finished = tool(source, out, *options.split())
    if message is None:  # plain names are the backbone's, whatever the prefix
        assert finished.code == 0, finished.error
        return
    assert finished.code == 1 and message in finished.error
    assert finished.error.startswith('error: ') and '\n' not in finished.error
    assert [path.name for path in tmp_path.iterdir()] == ['in.pth']


def test_targets_are_new_and_of_a_known_format(tool, tmp_path):
    source = write(RELEASE, tmp_path / 'in.pth')
    (tmp_path / 'there.pth').write_text('mine')
    (tmp_path / 'link.pth').symlink_to('nowhere')
    for name, message in (
        ('there.pth', 'exists already'),
        ('link.pth', 'exists already'),
        ('in.pth', 'exists already'),
        ('out.txt', 'expected a name ending in .pth or .safetensors'),
        ('no/out.pth', 'there is no such folder'),
    ):
        finished = tool(source, tmp_path / name, '--to', 'timm')
        assert finished.code == 1 and message in finished.error
    assert (tmp_path / 'there.pth').read_text() == 'mine'
    assert same(read(source), RELEASE)
    assert tool(tmp_path / 'no.pth', tmp_path / 'out.pth', '--to', 'timm').code == 1
    assert tool(source, tmp_path / 'out.pth', '--to', 'detectron').code == 2


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_nothing_stays_where_the_disk_is_full(tool, tmp_path, ending):
    source = write(RELEASE, tmp_path / 'in.pth')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # python ignores its signal
    try:
        finished = tool(source, tmp_path / f'out{ending}', '--to', 'timm')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert finished.code == 1 and 'File too large' in finished.error
    assert [path.name for path in tmp_path.iterdir()] == ['in.pth']


def test_nothing_stays_by_its_name_where_the_process_is_killed(tmp_path):
    process = os.fork()
    if process == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        write_new(tmp_path / 'out.pth', b'weights')
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / 'out.pth').exists()
    write_new(tmp_path / 'out.pth', b'weights')
    with pytest.raises(FileExistsError):
        write_new(tmp_path / 'out.pth', b'others')
    assert (tmp_path / 'out.pth').read_bytes() == b'weights'


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_views_and_shared_storages(tool, tmp_path, ending):
    pool = torch.arange(3000.0)
    state = dict(CLASSIFIER)
    shared = state['backbone.layers.0.blocks.0.norm1.weight'] = pool[:16]
    state['backbone.layers.0.blocks.0.norm2.weight'] = pool[:16]
    state['backbone.layers.0.blocks.0.attn.qkvg.weight'] = pool[: 64 * 16].view(16, 64).T
    torch.save(state, tmp_path / 'in.pth')
    assert tool(tmp_path / 'in.pth', tmp_path / f'out{ending}', '--to', 'timm').code == 0
    result = read(tmp_path / f'out{ending}')
    assert same(result, state) and all(v.is_contiguous() for v in result.values())
    assert torch.equal(result['backbone.layers.0.blocks.0.norm2.weight'], shared)
    assert (tmp_path / f'out{ending}').stat().st_size < 1.3 * sum(v.nbytes for v in state.values())


@pytest.mark.parametrize('form', ['torch', 'legacy', 'safetensors'])
@pytest.mark.parametrize('seed', range(3))
def test_damaged_files_are_one_line(tool, tmp_path, form, seed):
    generator = random.Random(seed)
    whole = tmp_path / ('whole.safetensors' if form == 'safetensors' else 'whole.pth')
    if form == 'safetensors':
        save_file(RELEASE, whole)
    else:
        torch.save(dict(model=RELEASE), whole, _use_new_zipfile_serialization=form == 'torch')
    content = whole.read_bytes()
    for trial in range(8):
        damaged = bytearray(content)
        if trial % 2:
            del damaged[generator.randrange(len(damaged)) :]
        else:  # most bytes are weights, so aim at the names and sizes as well
            for _ in range(20):
                spot = generator.choice([len(damaged), 20_000, 2_000])
                side = generator.choice([1, -1])
                damaged[side * generator.randrange(1, spot)] ^= 1 << generator.randrange(8)
        source, out = tmp_path / f'{trial}{whole.suffix}', tmp_path / f'out{trial}.pth'
        source.write_bytes(damaged)
        finished = tool(source, out, '--to', 'timm')
        assert finished.code == (0 if out.exists() else 1)
        if finished.code:
            assert finished.error.startswith('error: ') and '\n' not in finished.error
            assert source.name in finished.error
        else:
            assert read(out).keys() == CLASSIFIER.keys()
    assert not list(tmp_path.glob('.*'))


def test_sizes_are_inferred():
    for name in ('xt', 't', 's'):
        with torch.device('meta'):
            model = NaLaFormer(name, out_norm=False)
        arch = infer_arch(sort_weights(model.state_dict()))
        assert tuple(arch['channels']) == NaLaFormer.out_channels[name]
        assert variants(arch) == [name]
