"""A hook that makes an interrupted training end as an uninterrupted one would have."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop, Runner
from torch.utils.data import Dataset, get_worker_info

_LOADING, _TRAINING = 0, 1


@HOOKS.register_module(force=True)
class IterationSeedHook(Hook):
    """Seed Python, NumPy and torch anew for every training iteration.

    What is drawn in iteration ``i`` (augmentations, drop path, dropout) then depends on the run's
    seed, the rank and ``i`` alone, whichever process loads the batch and whatever was drawn before.
    Nothing has to be kept in the checkpoint: a run resumed at iteration ``i`` draws what the
    uninterrupted run drew there, with any ``num_workers``.

    The order of the samples is mmengine's to restore. So ``randomness.seed`` has to be set, and
    resuming is exact from the epoch boundaries of an ``EpochBasedTrainLoop`` and from any iteration
    of an ``IterBasedTrainLoop`` whose ``fast_forward_on_resume`` (newer mmengine) is left at False.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner: Runner) -> None:
        """Let the training set seed each batch before loading it, in whichever process it does."""
        loop = runner.train_loop
        restart = _advances_by_loading(loop) and loop.dataloader.num_workers > 0
        if restart:
            # Its loading processes have started, and drawn samples, before they could be told: new
            # ones, with a new sampler.
            loader = dict(runner.cfg.train_dataloader, dataset=loop.dataloader.dataset)
            by_rank = runner.cfg.get('randomness', {}).get('diff_rank_seed', False)
            loop.dataloader = runner.build_dataloader(loader, runner.seed, by_rank)
        dataset = loop.dataloader.dataset
        self._batches = _SeededBatches(dataset, runner.seed, runner.rank)
        # torch's loaders fetch a batch by this method of the dataset where there is one.
        dataset.__getitems__ = self._batches
        if restart:
            loop.dataloader_iterator = type(loop.dataloader_iterator)(loop.dataloader)

    def before_train_epoch(self, runner: Runner) -> None:
        """Tell the loading processes the number of the first batch they will be asked for."""
        self._batches.first.fill_(_first_batch(runner))

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any | None = None
    ) -> None:
        """Seed the training step."""
        _set_seed(runner.seed, runner.rank, runner.iter, _TRAINING)


class _SeededBatches:
    """Loads the batches of one process, each after seeding it with the batch's number.

    A DataLoader hands its batches to its workers in turn, so a worker knows the numbers of its own
    by counting. ``first`` lives in shared memory because persistent workers outlive an epoch.
    """

    def __init__(self, dataset: Dataset, seed: int, rank: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.first = torch.zeros((), dtype=torch.int64).share_memory_()
        self.counted_from = self.count = 0

    def __call__(self, indices: Sequence[int]) -> list:
        first = int(self.first)
        if first != self.counted_from:
            self.counted_from, self.count = first, 0
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        _set_seed(self.seed, self.rank, first + self.count * num_workers + worker_id, _LOADING)
        self.count += 1
        return [self.dataset[index] for index in indices]


def _advances_by_loading(loop: Any) -> bool:
    """Whether it is mmengine's iteration-based loop of versions before 0.10.12.

    It starts its loading processes when it is built, and has them load all batches to resume.
    """
    return isinstance(loop, IterBasedTrainLoop) and not hasattr(
        loop.dataloader_iterator, 'skip_iter'
    )


def _first_batch(runner: Runner) -> int:
    # To resume, an iteration-based loop moves the sampler on or, where the sampler has no `skip`,
    # has the workers load all the batches again.
    loader = runner.train_dataloader
    reloads = loader.num_workers > 0 and not hasattr(loader.sampler, 'skip')
    reloads = reloads and isinstance(runner.train_loop, IterBasedTrainLoop)
    return 0 if reloads or _advances_by_loading(runner.train_loop) else runner.iter


def _set_seed(*key: int) -> None:
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
