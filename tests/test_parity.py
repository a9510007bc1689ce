"""The model and its attention against tensors that the release computed."""

import re

import pytest
import torch
from conftest import Golden

from mmnala import NaLaFormer
from mmnala.ops import nala_attention, rotary_table

ATTN_IMPLS = ['plain', 'lean']
COUNTED_WITH_HEAD = {'xt': 6.14, 't': 15.91, 's': 25.65, 'b': 52.00, 'l': 95.43}


def micro_model(golden: Golden, tmp_path, **kwargs) -> NaLaFormer:
    path = tmp_path / 'release.pth'
    torch.save(golden.under('state.'), path)
    attention = (
        ('nala',) * 4 if 'linear' in golden.path.name else ('nala', 'nala', 'softmax', 'softmax')
    )
    model = NaLaFormer(
        golden.arch,
        stage_attention=attention,
        out_norm=False,
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
        **kwargs,
    )
    model.init_weights()
    return model


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize('attn_impl', ['auto', *ATTN_IMPLS])
def test_stage_outputs(golden, tmp_path, attn_impl):
    model = micro_model(golden, tmp_path, attn_impl=attn_impl).eval()
    with torch.no_grad():
        outputs = model(golden['input'])
    errors = [relative(out, golden[f'eval.stage{i}']) for i, out in enumerate(outputs)]
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize('attn_impl', ATTN_IMPLS)
@pytest.mark.parametrize('with_cp', [False, True])
def test_training_loss_and_gradients(golden, tmp_path, with_cp, attn_impl):
    model = micro_model(golden, tmp_path, with_cp=with_cp, attn_impl=attn_impl).train()
    image = golden['input'].requires_grad_()
    loss = sum(out.square().mean() for out in model(image))
    loss.backward()
    assert relative(loss, golden['train.loss']) < 1e-4

    expected = golden.under('train.grad.')
    actual = {'input': image.grad} | {k: p.grad for k, p in model.named_parameters()}
    errors = {}
    for name, gradient in expected.items():
        own = actual[re.sub(r'\.(norm[12])\.norm\.', r'.\1.', name)]
        errors[name] = relative(own, gradient.reshape(own.shape))
    assert len(errors) == 7
    assert max(errors.values()) < 1e-4, {k: v for k, v in errors.items() if v >= 1e-4}


@pytest.mark.parametrize('feature_map', ['signed', 'cosine'])
@pytest.mark.parametrize('position', ['plain', 'rotary'])
@pytest.mark.parametrize(('case', 'grid'), [('small', (3, 5)), ('wide', (9, 7))])
@pytest.mark.parametrize('attn_impl', ATTN_IMPLS)
def test_operator(case, grid, position, feature_map, attn_impl):
    golden = Golden('nala_attention_op')
    query, key, value = (golden[f'{case}.{name}'] for name in 'qkv')
    cos, sin = rotary_table(*grid, query.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(cos, golden[f'{case}.cos'], atol=1e-12, rtol=0)
    torch.testing.assert_close(sin, golden[f'{case}.sin'], atol=1e-12, rtol=0)
    rotary = (golden[f'{case}.cos'], golden[f'{case}.sin']) if position == 'rotary' else None
    output = nala_attention(query, key, value, rotary, feature_map, attn_impl)
    assert output.dtype == torch.float64
    assert relative(output, golden[f'{case}.{feature_map}.{position}.out']) < 1e-10


@pytest.mark.parametrize('arch', COUNTED_WITH_HEAD)
def test_parameter_counts(arch):
    """The table counts the classifier too: linear to 1024, batch norm, linear to 1000 classes."""
    with torch.device('meta'):
        model = NaLaFormer(arch, out_norm=False)
    head = model.out_channels[-1] * 1024 + 1024 + 2 * 1024 + 1024 * 1000 + 1000
    count = sum(parameter.numel() for parameter in model.parameters()) + head
    assert round(count / 1e6, 2) == COUNTED_WITH_HEAD[arch]
