import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from mmnala import NaLaFormer, NaLaFormerNeck
from mmnala.checkpoint import from_release


def micro_classifier(golden) -> nn.Sequential:
    """The golden model, classifier included."""
    stages = golden.arch['channels']
    attention = (
        ('nala',) * 4 if 'linear' in golden.path.name else ('nala', 'nala', 'softmax', 'softmax')
    )
    backbone = NaLaFormer(golden.arch, out_indices=(3,), stage_attention=attention, out_norm=False)
    state = golden.under('state.')
    backbone.load_state_dict(from_release(state))
    classes, width = state['head.weight'].shape[:2]
    neck = NaLaFormerNeck(stages[-1], width)
    neck.load_state_dict({k: v for k, v in state.items() if k.startswith(('proj.', 'norm.'))})
    fc = nn.Linear(width, classes)
    fc.load_state_dict(dict(weight=state['head.weight'][..., 0, 0], bias=state['head.bias']))
    return nn.Sequential(backbone, neck, fc).eval()


def test_logits(golden):
    backbone, neck, fc = micro_classifier(golden)
    with torch.no_grad():
        (features,) = neck(backbone(golden['input']))
        logits = fc(features)
    assert features.shape == (2, golden['state.proj.weight'].shape[0])
    expected = golden['eval.logits']
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_takes_a_tensor_or_the_last_of_several():
    neck = NaLaFormerNeck(4, 8).eval()
    stages = [torch.randn(2, 3, 6, 6), torch.randn(2, 4, 3, 5)]
    torch.testing.assert_close(neck(stages), neck(stages[-1]), rtol=0, atol=0)
    torch.testing.assert_close(
        neck(stages)[0], neck.project(stages[-1]).flatten(2).mean(2), rtol=1e-6, atol=1e-6
    )


def test_is_registered():
    neck = MODELS.build(dict(type='NaLaFormerNeck', in_channels=4))
    assert neck.proj.out_features == 1024


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(in_channels=0), 'in_channels must be a positive integer, got 0'),
        (dict(in_channels=4, out_channels=2.5), 'out_channels must be a positive integer, got 2.5'),
        (dict(in_channels=4, norm_cfg=dict(type='XN')), 'norm_cfg must have a type'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NaLaFormerNeck(**options)
