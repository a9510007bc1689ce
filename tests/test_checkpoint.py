"""Loading checkpoints: the release's layout and ours, strictly, without executing pickles."""

import pickle
from pathlib import Path

import pytest
import torch
from conftest import DATA
from mmengine.model import PretrainedInit
from mmengine.runner.checkpoint import save_checkpoint
from safetensors.torch import save_file

from mmnala import NaLaFormer
from mmnala.checkpoint import from_release, read_checkpoint


def build(golden, checkpoint=None, prefix=None, **kwargs) -> NaLaFormer:
    init_cfg = None
    if checkpoint is not None:
        init_cfg = dict(type='Pretrained', checkpoint=str(checkpoint))
        if prefix:
            init_cfg['prefix'] = prefix
    torch.manual_seed(0)
    model = NaLaFormer(golden.arch, init_cfg=init_cfg, **kwargs)
    model.init_weights()
    return model


def stem(model) -> torch.Tensor:
    return model.state_dict()['patch_embed.proj.0.weight']


def test_every_backbone_weight_of_the_release_is_consumed(micro, micro_release):
    own = build(micro, micro_release).state_dict()
    release = micro.under('state.')
    matched = set()
    for name, value in own.items():
        if name.startswith(('norm0', 'norm1', 'norm2', 'norm3')):
            assert torch.equal(value, torch.full_like(value, float(name.endswith('weight'))))
            continue
        for norm in ('norm1', 'norm2'):
            name = name.replace(f'.{norm}.', f'.{norm}.norm.')
        assert torch.equal(value, release[name].reshape(value.shape)), name
        matched.add(name)
    left = {k for k in release if k not in matched}
    assert left == {f'layers.{i}.RoPE.angle' for i in range(4)} | {
        k for k in release if k.startswith(('proj.', 'norm.', 'head.'))
    }


@pytest.mark.parametrize('form', ['plain', 'wrapped', 'safetensors', 'legacy', 'mmengine'])
def test_file_forms(micro, tmp_path, form):
    state = micro.under('state.')
    path, prefix = tmp_path / 'weights.pth', None
    if form == 'plain':
        torch.save(state, path)
    elif form == 'wrapped':
        torch.save({'model': {f'module.{k}': v for k, v in state.items()}}, path)
    elif form == 'safetensors':
        path = tmp_path / 'weights.safetensors'
        save_file(state, path)
    elif form == 'legacy':
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        prefix = 'backbone.'
        trained = {f'backbone.{k}': v for k, v in build(micro).state_dict().items()}
        trained |= {'decode_head.conv_seg.weight': torch.zeros(2)}
        trained['backbone.patch_embed.proj.0.weight'] = state['patch_embed.proj.0.weight']
        save_checkpoint({'state_dict': trained, 'message_hub': {'path': Path('x')}}, str(path))
    assert torch.equal(stem(build(micro, path, prefix)), state['patch_embed.proj.0.weight'])


def test_our_own_checkpoint_round_trip_with_output_norms(micro, tmp_path):
    model = build(micro)
    torch.nn.init.normal_(model.norm2.weight)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'own.pth')
    again = build(micro, tmp_path / 'own.pth').state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_stages_and_norms_not_built_are_left_out(micro, tmp_path):
    whole = build(micro)
    torch.nn.init.normal_(whole.layers[1].blocks[0].gamma_1)
    torch.save(whole.state_dict(), tmp_path / 'own.pth')
    part = build(micro, tmp_path / 'own.pth', out_indices=(1,), out_norm=False)
    assert torch.equal(part.layers[1].blocks[0].gamma_1, whole.layers[1].blocks[0].gamma_1)
    assert len(part.layers) == 2 and part.layers[1].downsample is None


def test_init_weights_twice_keeps_what_was_trained(micro, micro_release):
    model = build(micro, micro_release)
    stem(model).zero_()
    model.init_weights()
    assert (stem(model) == 0).all()


@pytest.mark.parametrize('kind', ['mmengine.Pretrained', PretrainedInit])
def test_other_spellings_are_as_strict(micro, tmp_path, kind):
    torch.save({'foreign': torch.zeros(2)}, tmp_path / 'foreign.pth')
    init_cfg = dict(type=kind, checkpoint=str(tmp_path / 'foreign.pth'))
    model = NaLaFormer(micro.arch, init_cfg=init_cfg)
    for _ in range(2):  # a second call does not pass over the failure
        with pytest.raises(RuntimeError, match=r'does not fit.*\n.*missing'):
            model.init_weights()


def test_other_init_cfg_still_works(micro):
    model = build(micro)
    model = NaLaFormer(micro.arch, init_cfg=dict(type='Constant', layer='Linear', val=0.5))
    model.init_weights()
    assert (model.layers[0].blocks[0].attn.qkvg.weight == 0.5).all()


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (
            lambda s: s.pop('layers.1.blocks.1.ffn.fc1.bias'),
            r'missing \(1\): layers.1.blocks.1.ffn',
        ),
        (lambda s: s.update(extra=torch.zeros(2)), r'unexpected \(1\): extra'),
        (
            lambda s: s.update({'layers.0.blocks.0.gamma_1': torch.ones(1, 8, 1, 1)}),
            r'shapes \(1\): layers.0.blocks.0.gamma_1: \(8,\) in the file, \(16,\) here',
        ),
        (lambda s: s.update({'patch_embed.proj.0.weight': None}), r'shapes \(1\): patch_embed'),
    ],
)
def test_what_does_not_fit_is_listed_and_nothing_is_loaded(micro, tmp_path, change, words):
    state = micro.under('state.')
    change(state)
    torch.save(state, tmp_path / 'bad.pth')
    fresh = build(micro).state_dict()
    model = NaLaFormer(
        micro.arch, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'bad.pth'))
    )
    model.load_state_dict(fresh)
    with pytest.raises(RuntimeError, match=words) as error:
        model.init_weights()
    assert 'bad.pth' in str(error.value)
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize('prefix', [None, 'backbone', 'backbone.'])
@pytest.mark.parametrize(
    ('start', 'others'),
    [
        ('', []),
        ('backbone.', ['decode_head.conv_seg.weight']),
        ('backbone.', ['neck.proj.weight', 'head.fc.weight']),
        ('model.backbone.', []),
        ('module.backbone.', ['module.bbox_head.weight']),
        ('_orig_mod.module.backbone.', []),
        ('backbone.timm_model.model.backbone.', ['decode_head.conv_seg.weight']),
    ],
)
@pytest.mark.parametrize('release', [False, True])
def test_the_backbone_is_found_in_every_larger_model(
    micro, tmp_path, release, start, others, prefix
):
    state = micro.under('state.')
    weights = state if release else from_release(state)
    if others:
        weights = {
            k: v for k, v in weights.items() if not k.startswith(('proj.', 'norm.', 'head.'))
        }
    content = {f'{start}{k}': v for k, v in weights.items()} | dict.fromkeys(others, torch.ones(2))
    torch.save(dict(state_dict=content), tmp_path / 'whole.pth')
    loaded = build(micro, tmp_path / 'whole.pth', prefix, out_norm=False).state_dict()
    expected = from_release(state)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_prefix_chooses_and_a_wrong_one_is_an_error(micro, tmp_path):
    state = from_release(micro.under('state.'))
    content = {f'teacher.{k}': v for k, v in state.items()}
    content |= {f'student.{k}': v + 1 for k, v in state.items()}
    torch.save(content, tmp_path / 'two.pth')
    model = build(micro, tmp_path / 'two.pth', 'student')
    assert torch.equal(stem(model), state['patch_embed.proj.0.weight'] + 1)
    with pytest.raises(RuntimeError, match=r"several backbones.*\['student\.', 'teacher\.'\]"):
        build(micro, tmp_path / 'two.pth')
    with pytest.raises(RuntimeError, match=r"prefix 'backbone\.' fits no name"):
        build(micro, tmp_path / 'two.pth', 'backbone')


@pytest.mark.parametrize('kept', [0, 10, 1000, 0.5, -1])
@pytest.mark.parametrize('ending', ['pth', 'safetensors'])
def test_truncated_file(micro, tmp_path, kept, ending):
    whole = tmp_path / f'whole.{ending}'
    (torch.save if ending == 'pth' else save_file)(micro.under('state.'), whole)
    content = whole.read_bytes()
    cut = tmp_path / f'cut.{ending}'
    cut.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(RuntimeError, match=f'cut.{ending}.* is truncated or no checkpoint'):
        build(micro, cut)


def test_foreign_files(micro, tmp_path):
    (tmp_path / 'image.pth').write_bytes(b'\x89PNG\r\n' * 100)
    torch.save([1, 2], tmp_path / 'list.pth')
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / 'script.pth')
    for name in ('image.pth', 'list.pth', 'script.pth'):
        with pytest.raises(RuntimeError, match=f'{name}.* is truncated or no checkpoint'):
            build(micro, tmp_path / name)
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / 'other.pth')
    with pytest.raises(RuntimeError, match=r'other.pth.*does not fit.*\n.*missing'):
        build(micro, tmp_path / 'other.pth')
    torch.save({1: torch.zeros(2)}, tmp_path / 'keys.pth')
    with pytest.raises(RuntimeError, match='names that are no strings'):
        build(micro, tmp_path / 'keys.pth')
    with pytest.raises(FileNotFoundError, match='nowhere.pth'):
        build(micro, tmp_path / 'nowhere.pth')


class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.write_text, (self.target, 'executed')


@pytest.mark.parametrize('form', ['torch', 'legacy', 'pickle'])
def test_pickled_code_is_not_executed(micro, tmp_path, form):
    target = tmp_path / 'target'
    content = dict(model=micro.under('state.'), args=Attack(target))
    path = tmp_path / 'attack.pth'
    if form == 'pickle':
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(RuntimeError, match='attack.pth'):
            build(micro, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == 'torch')
        assert torch.equal(stem(build(micro, path)), micro['state.patch_embed.proj.0.weight'])
    assert not target.exists()
    assert list(read_checkpoint(DATA / 'nala_attention_op.safetensors'))


def test_url(micro, micro_release, tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    import hashlib
    import http.server
    import threading
    from functools import partial

    digest = hashlib.sha256(micro_release.read_bytes()).hexdigest()[:8]
    good, bad = f'micro-{digest}.pth', 'micro-00000000.pth'
    for name in (good, bad):
        (tmp_path / name).write_bytes(micro_release.read_bytes())
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{server.server_port}/'
        model = build(micro, url + good)
        assert torch.equal(stem(model), micro['state.patch_embed.proj.0.weight'])
        with pytest.raises(RuntimeError, match='invalid hash value'):
            build(micro, url + bad)
        server.shutdown()
    assert [path.name for path in (tmp_path / 'hub').rglob('*.pth')] == [good]
