"""A tiny training and the hooks that do it harm, for the tests of faults."""

import os
import signal
import time
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from torch import nn
from torch.utils.data import Dataset


@MODELS.register_module()
class TinyModel(BaseModel):
    """Has what a training can lose: weights, running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        remember_config_texts()
        self.register_buffer('ballast', torch.zeros(50_000))  # larger than a log
        self.norm = nn.BatchNorm1d(3)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        inputs = torch.stack(inputs)
        out = self.head(self.body(self.norm(inputs)))
        error = (out.squeeze(-1) - inputs.sum(-1)).square()
        return dict(loss=error.mean()) if mode == 'loss' else [dict(error=e.item()) for e in error]


@DATASETS.register_module()
class TinyData(Dataset):
    """Random points, with an augmentation; a checkpoint without an end is not among its samples."""

    metainfo = dict(name='tiny')

    def __init__(self, length: int, noise: float = 0.0) -> None:
        self.points = torch.randn(length, 3, generator=torch.Generator().manual_seed(0))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict:
        return dict(inputs=self.points[index] + self.noise * torch.randn(3))


@METRICS.register_module()
class TinyMetric(BaseMetric):
    """The negated mean error, ``score``."""

    def process(self, data_batch, data_samples) -> None:
        self.results += [sample['error'] for sample in data_samples]

    def compute_metrics(self, results: list) -> dict:
        return dict(score=-sum(results) / len(results))


def remember_config_texts() -> None:
    """Formatting the config, at each save, would take longer than the training."""
    form, texts = Config.pretty_text.fget, {}

    def text(cfg: Config) -> str:
        if id(cfg) not in texts:
            texts[id(cfg)] = form(cfg)
        return texts[id(cfg)]

    Config.pretty_text = property(text)


def on_disk_events(act) -> None:
    """Call ``act`` before everything that saving does to the disk."""
    for name in ('fsync', 'replace', 'remove'):
        original = getattr(os, name)

        def wrapped(*args, original=original, **kwargs):
            act()
            return original(*args, **kwargs)

        setattr(os, name, wrapped)


@HOOKS.register_module()
class KillAtEventHook(Hook):
    """Kills the training before its n-th event on the disk."""

    def __init__(self, event: int) -> None:
        self.left = event

    def before_train(self, runner) -> None:
        on_disk_events(self._count)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class KillBeforeValidationHook(Hook):
    """Kills the training between a checkpoint and the validation of the same iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_val(self, runner) -> None:
        if runner.iter == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class StockCheckpointHook(CheckpointHook):
    """mmengine's, by a name that the tool does not know."""


@HOOKS.register_module()
class SlowDiskHook(Hook):
    """Makes saving slow, so that a kill at a random moment often hits it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        remember_config_texts()

    def before_train(self, runner) -> None:
        on_disk_events(lambda: time.sleep(self.seconds))


@HOOKS.register_module()
class SmallDiskHook(Hook):
    """From an iteration on, no file can grow beyond a size."""

    def __init__(self, iteration: int, size: int) -> None:
        self.iteration = iteration
        self.size = size

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        import resource

        if runner.iter == self.iteration and runner.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


@HOOKS.register_module()
class SignalHook(Hook):
    """Sends a signal in an iteration: to the workers, the training, or as a scheduler to both.

    Args:
        name: Of the signal.
        iteration: Counted from 0; ``None`` in training when ``val_iteration`` is given.
        to: ``'worker'`` (the first), ``'training'`` or ``'all'``, workers first.
        rank: The rank that it happens on.
        val_iteration: The iteration of the first validation.
    """

    def __init__(
        self,
        name: str = 'SIGTERM',
        iteration: int | None = None,
        to: str = 'training',
        rank: int = 0,
        val_iteration: int | None = None,
    ) -> None:
        self.number = signal.Signals[name]
        self.iteration = iteration
        self.to = to
        self.rank = rank
        self.val_iteration = val_iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if (runner.iter, runner.rank) == (self.iteration, self.rank):
            self._send()

    def before_val_iter(self, runner, batch_idx, data_batch=None) -> None:
        if (batch_idx, runner.rank) == (self.val_iteration, self.rank):
            self.val_iteration = None
            self._send()

    def _send(self) -> None:
        mine = os.getpid()
        workers = [
            int(pid) for pid in Path(f'/proc/{mine}/task/{mine}/children').read_text().split()
        ]
        for pid in dict(worker=workers[:1], training=[mine], all=[*workers, mine])[self.to]:
            os.kill(pid, self.number)
        if self.to != 'training':
            time.sleep(1)  # the workers have the time to die


@HOOKS.register_module()
class PoisonHook(Hook):
    """Lets the output of a module be NaN in some iterations, counted from 0."""

    def __init__(self, module: str, iterations: list[int], rank: int = 0) -> None:
        self.module = module
        self.iterations = iterations
        self.rank = rank

    def before_train(self, runner) -> None:
        model = getattr(runner.model, 'module', runner.model)

        def poison(module, args, output):
            if module.training and runner.iter in self.iterations and runner.rank == self.rank:
                return output * float('nan')

        model.get_submodule(self.module).register_forward_hook(poison)


@HOOKS.register_module()
class SaveStatesHook(Hook):
    """Saves a rank's weights, buffers and optimizer behind iterations, counted from 0."""

    def __init__(self, iterations: list[int]) -> None:
        self.iterations = iterations

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter in self.iterations:
            model = getattr(runner.model, 'module', runner.model)
            state = dict(state_dict=model.state_dict(), optimizer=runner.optim_wrapper.state_dict())
            path = Path(runner.work_dir) / f'state{runner.iter}_rank{runner.rank}.pth'
            torch.save(state, path)


_TINY = """
default_scope = 'mmengine'
custom_imports = dict(imports=['toy', 'faults', 'mmnala'])
randomness = dict(seed=3)
model = dict(type='TinyModel')
train_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='InfiniteSampler'),
    dataset=dict(type='TinyData', length=20, noise=0.1))
val_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='TinyData', length=12))
val_evaluator = dict(type='TinyMetric')
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.05))
param_scheduler = [
    dict(type='ReduceOnPlateauLR', monitor='score', rule='greater', patience=1)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=12, val_interval=4)
default_hooks = dict(
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2, max_keep_ckpts=2,
                    save_best='score', rule='greater'),
    logger=dict(type='LoggerHook', interval=1, log_metric_by_epoch=False))
log_processor = dict(by_epoch=False)
custom_hooks = [dict(type='IterationSeedHook')]
"""


def write_tiny_config(path: Path, extra: str = '') -> Path:
    """Write the config of 12 iterations, a checkpoint every 2, a validation every 4."""
    path.write_text(_TINY + extra)
    return path


def checkpoint(path: Path) -> dict:
    return torch.load(path, map_location='cpu', weights_only=False)


def differences(left, right, name: str = '') -> list[str]:
    """Where two nests of containers differ, tensors compared bit by bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and torch.equal(
            left.contiguous().view(torch.uint8) if left.dim() else left,
            right.contiguous().view(torch.uint8) if right.dim() else right,
        )
        return [] if same else [name]
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return [d for key in left for d in differences(left[key], right[key], f'{name}.{key}')]
    if isinstance(left, list | tuple) and type(left) is type(right):
        keys = [dict(enumerate(side)) for side in (left, right)]
        return differences(*keys, name) if len(left) == len(right) else [name]
    return [] if type(left) is type(right) and left == right else [name]


def training_state(path: Path) -> dict:
    """What of a checkpoint a resumed run has to reproduce; clocks and file names it has not."""
    content = checkpoint(path)
    state = {key: content[key] for key in ('state_dict', 'optimizer', 'param_schedulers')}
    info = content['message_hub']['runtime_info']
    meta = content['meta']
    state['meta'] = {key: meta[key] for key in ('epoch', 'iter', 'seed')}
    return state | dict(best_score=info.get('best_score'))
