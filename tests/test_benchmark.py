"""The benchmark's own figures: what it compares, what it measures and what it writes."""

import csv
import os
import sys
from functools import partial

import pytest
import torch
from toy import TOOLS

from mmnala import NaLaFormer

sys.path.insert(0, str(TOOLS))
import benchmark
import measuring

TINY = dict(channels=[8, 16, 16, 24], depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 3], mlp_ratio=2)
FEW = ['--repeats', '1', '--threads', '1']


@pytest.fixture
def no_children(monkeypatch):
    """Peaks of memory without processes: the square root of the tokens, none for an image."""

    def peak(build, threads, device):
        size = build.args[2]
        return size**0.5 if isinstance(size, int) else None

    monkeypatch.setattr(benchmark, 'peak_memory', peak)
    monkeypatch.setattr(measuring, 'MIN_SECONDS', 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def read(path):
    lines = path.read_text().splitlines()
    about = dict(line[2:].split(': ', 1) for line in lines if line.startswith('# '))
    return about, list(csv.DictReader(line for line in lines if not line.startswith('# ')))


@pytest.mark.parametrize('training', [False, True])
def test_the_release_baseline_computes_the_same(training):
    torch.manual_seed(0)
    model = NaLaFormer(TINY, out_norm=False).train(training)
    released = benchmark.AsReleased(model)
    images = [torch.rand(2, 3, 40, 56, requires_grad=True) for _ in range(2)]
    images[1].data.copy_(images[0].data)
    gradients = []
    for compute, image in zip((model, released), images, strict=True):
        outputs = compute(image)
        loss = sum(x.square().mean() for x in outputs)
        gradients.append(torch.autograd.grad(loss, [image, *model.parameters()]))
        gradients[-1] += tuple(outputs)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=3e-4)


@pytest.mark.parametrize('name', ['softmax', 'sdpa'])
def test_softmax_paths_compute_one_attention(name):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    rotary = benchmark.rotary_table(3, 4, 8, dtype=torch.float64)
    q, k = (benchmark.apply_rotary(x, rotary) for x in (query, key))
    weights = torch.einsum('bhnd,bhmd->bhnm', q, k).div(8**0.5).exp()
    expected = weights @ value / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(benchmark.attend(name, query, key, value, rotary), expected)


@pytest.mark.parametrize('name', ['nala-xt', 'nala-xt-cp', 'released-xt', *benchmark.TIMM_MODELS])
def test_models_return_four_stages(name):
    model = benchmark.build_model(name, (64, 96)).eval()
    with torch.no_grad():
        outputs = model(torch.rand(1, 3, 64, 96))
    sides = [x.shape[1:3] if name == 'swin_tiny' else x.shape[2:] for x in outputs]  # swin: NHWC
    assert [tuple(x) for x in sides] == [(16, 24), (8, 12), (4, 6), (2, 3)]


@pytest.mark.parametrize('power', [0.0, 1.0, 1.05, 2.0])
def test_known_exponents(power):
    sizes = [4096, 16384, 70000]
    assert measuring.fit_exponent(sizes, [3 * n**power for n in sizes]) == pytest.approx(power)


def test_exponents_leave_small_and_missing_sizes_out():
    rows = [
        dict(mode='training', path='lean', tokens=n, seconds=n**2.0, peak_mib=peak)
        for n, peak in ((64, 1e9), (4096, 2.0), (8192, None), (16384, 4.0))
    ]
    rows.append(dict(mode='training', path='softmax', tokens=4096, seconds=1.0, peak_mib=1.0))
    rows.append(dict(mode='training', path='softmax', tokens=8192))
    time, memory = benchmark.exponents(rows)
    assert time == dict(
        mode='training',
        path='lean',
        quantity='seconds',
        exponent=pytest.approx(2.0),
        tokens='4096-16384',
    )
    assert (memory['quantity'], memory['exponent']) == ('peak_mib', pytest.approx(0.5))


def allocate(mib):
    """Build a step that allocates twice, first half as much and never both at once."""

    def step():
        for size in (mib // 2, mib):
            torch.ones(size, 2**18)

    return step


def test_memory_of_a_child_process():
    assert measuring.peak_memory(partial(allocate, 40), 1, 'cpu') == pytest.approx(40, abs=2)


def test_a_child_process_that_dies_has_no_peak():
    assert measuring.peak_memory(partial(os._exit, 1), 1, 'cpu') is None


def test_flops_of_a_forward_pass():
    linear = torch.nn.Linear(8, 16, device='meta')
    x = torch.zeros(4, 8, device='meta')
    assert measuring.count_flops(lambda: linear(x)) == 2 * 4 * 8 * 16


def test_shares_of_the_limits():
    limits = measuring.Limits(flops=100e9, traffic=10e9)
    assert limits.shares(seconds=2.0, flops=20e9, traffic=10e9) == dict(
        gflop_per_s=10.0,
        compute_share=pytest.approx(0.1),
        traffic_share=pytest.approx(0.5),
        roofline='traffic',
        roofline_seconds=1.0,
    )


def test_steps_take_turns(monkeypatch):
    monkeypatch.setattr(measuring, 'MIN_SECONDS', 0.0)
    order = []
    steps = {name: partial(order.append, name) for name in 'ab'}
    measured = measuring.take_turns(steps, 3, 'cpu')
    assert ''.join(order) == 'aabb' + 'ab' * 3
    assert list(measured) == ['a', 'b']
    assert all(row['seconds'] > 0 and row['first_seconds'] > 0 for row in measured.values())


def test_operator_section(tmp_path, no_children, monkeypatch):
    monkeypatch.setattr(benchmark, 'FIT_FROM', 16)
    command = ['operator', '--tokens', '64', '16', '--head-dim', '8', '--out', str(tmp_path)]
    benchmark.main([*command, *FEW])
    about, rows = read(tmp_path / 'operator.csv')
    assert {'date', 'machine', 'versions', 'commit', 'command', 'settings', 'limits'} == set(about)
    assert f' 1 of {os.cpu_count()} threads' in about['machine']
    assert tuple(rows[0]) == benchmark.COLUMNS['operator']
    paths = [path for path in benchmark.PATHS if path != 'triton']
    assert [(row['mode'], row['tokens'], row['path']) for row in rows] == [
        (mode, tokens, path)
        for mode in benchmark.MODES
        for tokens in ('16', '64')
        for path in paths
    ]
    for row in rows:
        assert float(row['seconds']) > 0
        assert (float(row['ratio']) == 1) == (row['path'] == 'lean')
        assert float(row['peak_mib']) == int(row['tokens']) ** 0.5
        assert (row['softmax_source'], float(row['percent_below_softmax'])) == ('measured', 0)
    _, fits = read(tmp_path / 'exponents.csv')
    assert [float(fit['exponent']) for fit in fits if fit['quantity'] == 'peak_mib'] == [
        pytest.approx(0.5)
    ] * 2 * len(paths)
    assert (tmp_path / 'operator.png').read_bytes().startswith(b'\x89PNG')
    assert '| inference | 16 | plain |' in (tmp_path / 'operator.md').read_text()


def test_what_would_not_fit_or_end_is_left_out(tmp_path, no_children, monkeypatch):
    monkeypatch.setattr(benchmark, 'free_bytes', lambda device: 2**14)
    command = ['operator', '--tokens', '64', '256', '--modes', 'inference', '--paths', 'softmax']
    benchmark.main([*command, 'lean', '--out', str(tmp_path), *FEW])
    _, rows = read(tmp_path / 'operator.csv')
    for row in rows:
        assert row['softmax_source'] == 'computed: one N x N of float32'
        assert float(row['softmax_mib']) == int(row['tokens']) ** 2 * 4 / 2**20
        if row['path'] == 'softmax':
            assert '1.53e-05 GiB free' in row['note'] and row['seconds'] == ''
        else:
            saved = 100 * (1 - float(row['peak_mib']) / float(row['softmax_mib']))
            assert float(row['percent_below_softmax']) == pytest.approx(saved)


def test_sizes_that_would_take_too_long(tmp_path):
    args = benchmark.parse_args(['operator', '--max-seconds', '5', '--out', str(tmp_path)])
    reason = benchmark._too_much
    assert reason('lean', 'inference', 400, {'lean': (100, 1.0)}, args) == ''
    assert reason('lean', 'inference', 800, {'lean': (100, 1.0)}, args) == 'about 8 s expected'
    assert reason('sdpa', 'inference', 400, {'sdpa': (100, 1.0)}, args) == 'about 16 s expected'


@pytest.mark.parametrize('mode', benchmark.MODES)
def test_options_reach_the_attention(tmp_path, monkeypatch, mode):
    seen = []

    def attend(path, query, key, value, rotary):
        seen.append((path, tuple(query.shape), query.dtype, value.requires_grad))
        return query * key * value * rotary[0].to(value.dtype)

    monkeypatch.setattr(benchmark, 'attend', attend)
    options = ['--dtype', 'bfloat16', '--batch', '2', '--heads', '3', '--head-dim', '12', '--out']
    args = benchmark.parse_args(['operator', *options, str(tmp_path)])
    benchmark.operator_step('sdpa', mode, 10, args)()
    assert seen == [('sdpa', (2, 3, 10, 12), torch.bfloat16, mode == 'training')]


@pytest.mark.parametrize('mode', benchmark.MODES)
def test_options_reach_the_backbone(tmp_path, monkeypatch, mode):
    class Spy(torch.nn.Conv2d):
        def forward(self, x):
            output = super().forward(x)
            seen.append((tuple(x.shape), output.dtype, self.training, output.requires_grad))
            return [output]

    seen = []
    monkeypatch.setattr(benchmark, 'build_model', lambda name, size: Spy(3, 4, 1))
    options = ['--dtype', 'bfloat16', '--batch', '2', '--out']
    args = benchmark.parse_args(['backbone', *options, str(tmp_path)])
    benchmark.backbone_step('any', mode, (32, 48), args)()
    training = mode == 'training'
    assert seen == [((2, 3, 32, 48), torch.bfloat16, training, training)]


def test_compiled_models_are_rows_of_their_own(tmp_path, no_children, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, 'compile', lambda model: compiled.append(model) or model)
    command = ['backbone', '--sizes', '32x32', '--models', 'nala-xt', '--modes', 'inference']
    benchmark.main([*command, '--compile', '--out', str(tmp_path), *FEW])
    _, rows = read(tmp_path / 'backbone.csv')
    assert [row['model'] for row in rows] == ['nala-xt', 'nala-xt-compiled']
    assert [type(model) for model in compiled] == [NaLaFormer]


def test_backbone_section(tmp_path, no_children):
    models = ['nala-xt', 'released-xt', 'resnet50']
    command = ['backbone', '--sizes', '32x64', '--models', *models, '--out', str(tmp_path)]
    benchmark.main([*command, *FEW])
    _, rows = read(tmp_path / 'backbone.csv')
    assert tuple(rows[0]) == benchmark.COLUMNS['backbone']
    assert [(row['size'], row['mode'], row['model']) for row in rows] == [
        *(('32x64', 'inference', name) for name in models),
        *(('32x64', 'training', name) for name in [*models, 'nala-xt-cp']),
    ]
    for row in rows:
        assert (row['ratio'] == '') == (row['model'] == 'resnet50')  # nala-t is not there
        assert float(row['seconds']) > 0 and 'process died' in row['note']
        work = float(row['gflop_per_s']) * float(row['seconds'])
        others = [x for x in rows if x['mode'] == row['mode'] and x['model'] == 'nala-xt']
        same = float(others[0]['gflop_per_s']) * float(others[0]['seconds'])
        assert (work == pytest.approx(same)) == (row['model'] != 'resnet50')
    assert (tmp_path / 'backbone.png').read_bytes().startswith(b'\x89PNG')

    _, profiles = read(tmp_path / 'profile.csv')
    assert tuple(profiles[0]) == benchmark.COLUMNS['profile']
    assert [(row['mode'], row['model']) for row in profiles] == [
        ('inference', 'nala-xt'),
        ('training', 'nala-xt'),
    ]
    for profile in profiles:
        shares = [float(profile[kind]) for kind in (*benchmark.KERNELS, 'rest')]
        assert min(shares) > 0 and sum(shares) == pytest.approx(1)
        ratio = next(
            float(row['ratio'])
            for row in rows
            if (row['mode'], row['model']) == (profile['mode'], 'released-xt')
        )
        assert float(profile['ratio_without_rest']) == pytest.approx(ratio / sum(shares[:-1]))


def test_shares_of_kernels():
    x = torch.rand(256, 256)
    image, weight = torch.rand(1, 8, 64, 64), torch.rand(8, 8, 3, 3)
    heads = torch.rand(1, 1, 256, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    steps = {
        'linear_layers': lambda: torch.nn.functional.linear(x, x, x[0]),
        'convolution': lambda: torch.nn.functional.conv2d(image, weight),
        'softmax_attention': lambda: attend(heads, heads, heads),
        'batched_products': lambda: x[None] @ x[None],
        'rest': lambda: x.erf(),
    }
    for kind, step in steps.items():
        shares = measuring.kernel_shares(step, 'cpu')
        assert sum(shares.values()) == pytest.approx(1)
        assert {name for name, share in shares.items() if share} == {kind, 'rest'}


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        ('limits', "argument section: invalid choice: 'limits'"),
        ('operator --paths leen', "argument --paths: invalid choice: 'leen'"),
        ('operator --paths triton', 'argument --paths: triton needs --device cuda'),
        ('operator --tokens 0', "argument --tokens: must be a positive integer, got '0'"),
        ('operator --head-dim 6', "argument --head-dim: must be a positive multiple of 4, got '6'"),
        ('operator --models nala-t', 'unrecognized arguments: --models nala-t'),
        ('backbone --models nala-q', "argument --models: invalid choice: 'nala-q'"),
        ('backbone --sizes 512', 'argument --sizes: must be HEIGHTxWIDTH, 32x32 at least, such as'),
        ('backbone --sizes 16x64', "512x512, got '16x64'"),
        ('backbone --dtype int8', "argument --dtype: invalid choice: 'int8'"),
        ('all --repeats -1', "argument --repeats: must be a positive integer, got '-1'"),
        ('all --out {file}', 'argument --out: [Errno 17] File exists'),
    ],
)
def test_bad_options_are_one_line(command, message, tmp_path, capsys):
    file = tmp_path / 'file'
    file.touch()
    with pytest.raises(SystemExit) as error:
        benchmark.main(command.format(file=file).split())
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine without a GPU')
def test_a_missing_gpu_is_one_line(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(['operator', '--device', 'cuda'])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('argument --device: cuda is not available, choose cpu')
