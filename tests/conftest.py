import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors import safe_open

# Triton reads this when it defines the kernels: without a GPU it interprets them.
if not torch.cuda.is_available():
    os.environ['TRITON_INTERPRET'] = '1'

# The suite draws the same examples each time, on a machine of any speed; `pytest
# --hypothesis-profile=thorough` draws new ones, and many.
settings.register_profile(
    'suite',
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    'thorough', settings.get_profile('suite'), derandomize=False, max_examples=2000, print_blob=True
)
settings.load_profile('suite')

DATA = Path(__file__).parent / 'data'


class Golden:
    """One golden-tensor file: ``golden['train.loss']``, or all tensors under a prefix."""

    def __init__(self, name: str) -> None:
        self.path = DATA / f'{name}.safetensors'
        with safe_open(self.path, 'pt') as file:
            self.metadata = file.metadata() or {}
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}

    @property
    def arch(self) -> dict:
        config = json.loads(self.metadata['config'])
        return dict(
            channels=config['embed_dims'],
            depths=config['depths'],
            num_heads=config['num_heads'],
            mlp_ratios=config['mlp_ratios'],
            layer_scale_init=config['layer_init_values'],
        )


@pytest.fixture(params=['nalaformer_micro', 'nalaformer_micro_linear'])
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture
def micro() -> Golden:
    return Golden('nalaformer_micro')


@pytest.fixture
def micro_release(micro, tmp_path) -> Path:
    """The micro model as a training checkpoint in the release's layout."""
    import argparse

    path = tmp_path / 'checkpoint.pth'
    content = dict(
        model=micro.under('state.'),
        optimizer={'state': {}, 'param_groups': [{'lr': 1e-3}]},
        epoch=3,
        args=argparse.Namespace(lr=1e-3, data=Path('imagenet')),
    )
    torch.save(content, path)
    return path
