"""Loading checkpoints: the release's layout and ours, strictly, without executing pickles."""

import hashlib
import http.server
import pickle
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import DATA
from mmengine.model import PretrainedInit
from mmengine.runner.checkpoint import load_checkpoint, save_checkpoint
from safetensors.torch import save_file

from mmnala import NaLaFormer
from mmnala.checkpoint import from_release, read_checkpoint
from mmnala.checkpoint.files import CheckpointError, pack_checkpoint


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
        with pytest.raises(RuntimeError, match='does not fit.*holds no NaLaFormer.* foreign$'):
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


def test_no_memory_for_more_than_the_file_holds(tmp_path):
    whole, damaged = tmp_path / 'whole.pth', tmp_path / 'damaged.pth'
    torch.save({'w': torch.zeros(1000)}, whole, _use_new_zipfile_serialization=False)
    content = whole.read_bytes()
    assert content.count(b'M\xe8\x03') == 2  # the storage's and the tensor's length, pickled
    damaged.write_bytes(content.replace(b'M\xe8\x03', b'J\xff\xff\xff\x7f'))
    with pytest.raises(RuntimeError, match='damaged.pth.*a tensor is larger than the file'):
        read_checkpoint(damaged)
    assert torch.equal(read_checkpoint(whole)['w'], torch.zeros(1000))


def test_one_changed_byte_in_an_archive(micro, micro_release):
    content = bytearray(micro_release.read_bytes())
    weights = micro['state.layers.0.blocks.0.attn.qkvg.weight'].numpy().tobytes()
    spot = content.index(weights) + 5
    content[spot] ^= 1
    micro_release.write_bytes(content)
    torch.load(micro_release, weights_only=False)  # which does not notice
    with pytest.raises(
        RuntimeError, match=r'is truncated or no .* its part \w+/data/\d+ is damaged \(wrong check'
    ):
        build(micro, micro_release)
    content[spot] ^= 1
    micro_release.write_bytes(content)
    build(micro, micro_release)


def test_metadata_of_safetensors(tmp_path):
    path, state = tmp_path / 'a.safetensors', {'w': torch.arange(3.0)}
    meta = dict(cfg='model = 1', dataset_meta=dict(classes=('a', 'b')))
    path.write_bytes(pack_checkpoint(state, path, 'state_dict', meta))
    content = read_checkpoint(path)
    assert content['meta'] == dict(cfg='model = 1', dataset_meta=dict(classes=['a', 'b']))
    assert content.keys() == {'state_dict', 'meta'} and content['state_dict'].keys() == {'w'}
    assert torch.equal(content['state_dict']['w'], state['w'])
    for other in (None, {'meta': 'text'}, {'meta': '[1]'}):
        save_file(state, path, metadata=other)
        assert read_checkpoint(path).keys() == {'w'}


def test_mmengine_loads_safetensors(tmp_path, server):
    state = torch.nn.Linear(2, 3).state_dict()
    model = torch.nn.Linear(2, 3)
    path = tmp_path / 'served' / 'a.safetensors'
    path.write_bytes(pack_checkpoint(state, path, 'state_dict', dict(epoch=3)))
    for name in (str(path), path.as_uri(), f'{server}a.safetensors'):
        torch.nn.init.zeros_(model.weight)
        assert load_checkpoint(model, name)['meta'] == dict(epoch=3)
        assert torch.equal(model.weight, state['weight'])


def test_foreign_files(micro, tmp_path):
    (tmp_path / 'image.pth').write_bytes(b'\x89PNG\r\n' * 100)
    torch.save([1, 2], tmp_path / 'list.pth')
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / 'script.pth')
    torch.save(torch.zeros(2), tmp_path / 'tensor.pth')
    for name in ('image.pth', 'script.pth'):
        with pytest.raises(RuntimeError, match=f'{name}.* is truncated or no checkpoint'):
            build(micro, tmp_path / name)
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / 'other.pth')
    for name, kind in (('list.pth', 'list'), ('tensor.pth', 'Tensor')):
        with pytest.raises(
            RuntimeError, match=f"{name}': expected a dict with weights, it holds a {kind}$"
        ):
            build(micro, tmp_path / name)
    with pytest.raises(
        RuntimeError, match=r'other.pth.*holds no NaLaFormer, its names are weight, bias$'
    ):
        build(micro, tmp_path / 'other.pth')
    for content in ({}, dict(state_dict={}), dict(state_dict={}, meta={})):
        torch.save(content, tmp_path / 'empty.pth')
        with pytest.raises(RuntimeError, match=r'empty.pth.*: empty state dict$'):
            build(micro, tmp_path / 'empty.pth')
    for init_cfg in (dict(type='Pretrained'), dict(type='Pretrained', checkpoint=None)):
        with pytest.raises(
            RuntimeError, match=r'^init_cfg\.checkpoint must be a file or URL, got None$'
        ):
            NaLaFormer(micro.arch, init_cfg=init_cfg).init_weights()
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


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a folder ``served``; files with ``cut`` in their names break off half-way."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    (tmp_path / 'served').mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / 'served'))

        def copyfile(self, source, outputfile):
            content = source.read()
            outputfile.write(content[: len(content) // 2] if 'cut' in self.path else content)

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_url(micro, tmp_path, server, ending):
    whole = tmp_path / f'whole{ending}'
    torch.save(micro.under('state.'), whole) if ending == '.pth' else save_file(
        micro.under('state.'), whole
    )
    digest = hashlib.sha256(whole.read_bytes()).hexdigest()[:8]
    good = f'micro-{digest}{ending}'
    for name in (good, f'plain{ending}', f'micro-00000000{ending}', f'cut{ending}'):
        shutil.copy(whole, tmp_path / 'served' / name)
    shutil.copy(whole, tmp_path / 'served' / f'cut-{digest}{ending}')

    for name, prefix in ((good, None), (f'plain{ending}', 'backbone.'), (good, None)):
        model = build(micro, server + name, prefix)
        assert torch.equal(stem(model), micro['state.patch_embed.proj.0.weight'])
    for name, message in (
        (f'micro-00000000{ending}', 'invalid hash value'),
        (f'cut{ending}', 'truncated or no checkpoint'),
        (f'cut-{digest}{ending}', 'invalid hash value'),
        (f'absent{ending}', '404'),
    ):
        with pytest.raises(RuntimeError, match=f"checkpoint '{server}{name}'.*{message}"):
            build(micro, server + name)
    with pytest.raises(RuntimeError, match='refused'):
        build(micro, 'http://127.0.0.1:9/weights.pth')
    kept = [path for path in (tmp_path / 'hub').rglob('*') if path.is_file()]
    assert sorted(path.name for path in kept) == sorted([good, f'plain{ending}'])
    assert not [path for path in (tmp_path / 'hub' / 'checkpoints').glob('*') if path.is_dir()]


def test_file_url(micro, micro_release, tmp_path):
    digest = hashlib.sha256(micro_release.read_bytes()).hexdigest()[:8]
    for name in ('a b.pth', f'micro-{digest}.pth', 'micro-00000000.pth'):
        shutil.copy(micro_release, tmp_path / name)
    for name in ('a b.pth', f'micro-{digest}.pth'):
        model = build(micro, (tmp_path / name).as_uri())
        assert torch.equal(stem(model), micro['state.patch_embed.proj.0.weight'])
    with pytest.raises(RuntimeError, match='micro-00000000.pth.*invalid hash value'):
        build(micro, (tmp_path / 'micro-00000000.pth').as_uri())
    with pytest.raises(FileNotFoundError, match='absent'):
        build(micro, (tmp_path / 'absent-12345678.pth').as_uri())


def test_the_hash_in_a_local_files_name(micro, micro_release, tmp_path):
    digest = hashlib.sha256(micro_release.read_bytes()).hexdigest()
    wrong = f'{digest[:7]}{"a" if digest[7] != "a" else "b"}'
    good = [f'm-{digest[:8]}.pth', f'm-{digest}.pth', 'm-20260131.pth', 'm-00000010.pth']
    good += [f'm-{wrong[:7]}.pth', f'm-{wrong}x.pth', f'm-{wrong.upper()}.pth', f'{wrong}.pth']
    for name in good:
        shutil.copy(micro_release, tmp_path / name)
        model = build(micro, tmp_path / name)
        assert torch.equal(stem(model), micro['state.patch_embed.proj.0.weight'])
    shutil.copy(micro_release, tmp_path / f'm-{wrong}.pth')
    with pytest.raises(
        CheckpointError, match=f'm-{wrong}.pth\': invalid hash value .*"{wrong}", got "{digest}"'
    ):
        build(micro, tmp_path / f'm-{wrong}.pth')


@pytest.mark.parametrize(
    ('keys', 'averaged'),
    [
        ('model model_ema', False),
        ('state_dict state_dict_ema', True),
        ('ema_state_dict state_dict', True),
        ('model', None),
    ],
)
def test_averages_are_not_mixed_in(micro, tmp_path, monkeypatch, keys, averaged):
    """The weights that the project's own loader takes, and which they are in the log."""
    lines = []
    monkeypatch.setattr('mmnala.checkpoint.loading.print_log', lambda line, **_: lines.append(line))
    state = micro.under('state.')
    other = {k: v if 'RoPE' in k else v + 1 for k, v in state.items()}
    torch.save(dict(zip(keys.split(), (state, other), strict=False)), tmp_path / 'a.pth')
    loaded = stem(build(micro, tmp_path / 'a.pth'))
    assert torch.equal(loaded, state['patch_embed.proj.0.weight'] + bool(averaged))
    which = {None: '', True: ' averaged (EMA)', False: ' trained, not averaged'}[averaged]
    assert re.match(rf'Loaded \d+{re.escape(which)} backbone tensors', lines[0])


def test_another_variants_file_is_named(tmp_path):
    torch.save(NaLaFormer('xt', out_norm=False).state_dict(), tmp_path / 'xt.pth')
    model = NaLaFormer('t', init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'xt.pth')))
    with pytest.raises(CheckpointError) as caught:
        model.init_weights()
    message = str(caught.value)
    start = f"checkpoint '{tmp_path}/xt.pth' does not fit the backbone: the file is NaLaFormer XT; "
    assert message.startswith(start) and '\n' not in message
    missing = re.search(r'missing \((\d+)\): (.*?) and (\d+) more; shapes', message)
    assert missing[2].count(',') == 5 and int(missing[1]) == int(missing[3]) + 6


def test_other_heads_than_the_releases_are_an_error(micro, micro_release):
    arch = dict(micro.arch, num_heads=[2, 2, 3, 4])
    with pytest.raises(RuntimeError, match=r'layers.0.RoPE.angle are not .* 8 channels a head'):
        build(SimpleNamespace(arch=arch), micro_release)
    first = dict(micro.arch, num_heads=[1, 2, 3, 2])
    build(SimpleNamespace(arch=first), micro_release, out_indices=(2,))  # the last is not built


def outputs(model, image) -> list[torch.Tensor]:
    with torch.no_grad():
        return model.eval()(image)


@pytest.mark.parametrize(
    ('channels', 'spread'),
    [
        # What the adapted stem sees for an image of 3 channels, and what shows it the same.
        (1, lambda gray: gray),
        (6, lambda gray: torch.cat((gray, 2 * gray, -gray) * 2, 1)),
    ],
)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_stem_is_adapted_to_other_image_channels(micro, tmp_path, channels, spread, dtype):
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in
             micro.under('state.').items()}  # fmt: skip
    torch.save(dict(model=state), tmp_path / 'a.pth')
    gray = torch.randn(2, 1, 32, 48, generator=torch.Generator().manual_seed(0))
    colour = gray.expand(-1, 3, -1, -1) if channels == 1 else spread(gray)[:, :3]
    expected = outputs(build(micro, tmp_path / 'a.pth'), colour)
    model = build(micro, tmp_path / 'a.pth', in_channels=channels)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for stage, value in zip(outputs(model, spread(gray)), expected, strict=True):
        assert (stage - value).abs().max() < tolerance * value.abs().max()

    torch.save(model.state_dict(), tmp_path / 'own.pth')
    again = build(micro, tmp_path / 'own.pth', in_channels=channels)
    assert torch.equal(stem(again), stem(model))
    with pytest.raises(RuntimeError, match=f'{channels} channels and in_channels is 4: only'):
        build(micro, tmp_path / 'own.pth', in_channels=4)


def test_stem_of_four_channels_repeats_and_scales(micro, micro_release, monkeypatch):
    lines = []
    monkeypatch.setattr('mmnala.checkpoint.loading.print_log', lambda line, **_: lines.append(line))
    weight = micro['state.patch_embed.proj.0.weight']
    expected = torch.cat((weight, weight[:, :1]), 1) * 0.75
    assert torch.equal(stem(build(micro, micro_release, in_channels=4)), expected)
    assert 'patch_embed.proj.0.weight adapted from 3 to 4 image channels' in lines[0]


def test_no_weight_depends_on_the_image_size(micro, micro_release):
    model = build(micro, micro_release)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for height, width in ((64, 96), (33, 70), (1, 1), (128, 32)):
        sizes = [tuple(x.shape[2:]) for x in outputs(model, torch.zeros(1, 3, height, width))]
        assert sizes == [(-(-height // s), -(-width // s)) for s in (4, 8, 16, 32)]
    after = model.state_dict()
    assert before.keys() == after.keys() == build(micro).state_dict().keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
