"""A hook that stops a training in good order when its scheduler asks for it."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner

from .agreement import highest
from .errors import InputError


@HOOKS.register_module(force=True)
class PreemptionHook(Hook):
    """Save a checkpoint and end when a signal asks to, such as Slurm's SIGTERM before it kills.

    The iteration under way is finished, its checkpoint saved by the run's ``CheckpointHook``, and
    the program ends with the status 128 + the signal's number, 143 for SIGTERM. One rank's signal
    suffices: all of them stop behind the same iteration. A validation is broken off; the resumed
    run repeats it (see :class:`~mmnala.engine.SafeCheckpointHook`). With gradient accumulation the
    next update is waited for. Within an epoch of an ``EpochBasedTrainLoop``, which mmengine resumes
    at its epochs only, nothing is saved: the run goes on from its last one.

    Data workers outlive the signals, which schedulers send to every process of a job, unless
    their training sends them.

    Args:
        signals: Names of the signals. Without any, nothing changes. Defaults to ``('SIGTERM',)``.
        interval: Iterations from one look to the next. A look is a reduction of one integer on the
            CPU, where there are several processes. Defaults to 1.

    Raises:
        InputError: If an argument has a value it does not allow.
    """

    priority = 'LOWEST'  # after the logs and the checkpoint of the iteration

    def __init__(self, signals: Sequence[str] = ('SIGTERM',), interval: int = 1) -> None:
        if isinstance(signals, str) or not all(_can_be_caught(name) for name in signals):
            raise InputError(
                "PreemptionHook: signals must be a list of names such as 'SIGTERM' and 'SIGUSR1', "
                f'of signals that can be caught, got {signals!r}'
            )
        if type(interval) is not int or interval < 1:
            raise InputError(
                f'PreemptionHook: interval must be a positive integer, got {interval!r}'
            )
        self.signals = [signal.Signals[name] for name in signals]
        self.interval = interval
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._val_iters = 0

    def before_train(self, runner: Runner) -> None:
        """Listen to the signals, in the workers too."""
        if not self.signals:
            return
        self._previous = {number: signal.signal(number, self._note) for number in self.signals}
        loops = [loop for loop in (runner.train_loop, runner.val_loop) if loop is not None]
        for loader in {id(loop.dataloader): loop.dataloader for loop in loops}.values():
            loader.worker_init_fn = partial(_outlive, self.signals, loader.worker_init_fn)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any | None = None,
        outputs: dict | None = None,
    ) -> None:
        if not self.every_n_train_iters(runner, self.interval):
            return
        epoch, iteration = runner.epoch, runner.iter + 1
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            if not self.end_of_epoch(runner.train_dataloader, batch_idx):
                self._look(runner, epoch, iteration, resumable=False)
        elif _has_updated(runner):
            self._look(runner, epoch, iteration)

    def after_train_epoch(self, runner: Runner) -> None:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):  # the others end here
            self._look(runner, runner.epoch + 1, runner.iter)

    def before_val_epoch(self, runner: Runner) -> None:
        self._val_iters = -highest(-len(runner.val_dataloader))  # what all ranks have

    def after_val_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any | None = None,
        outputs: Sequence | None = None,
    ) -> None:
        look = batch_idx < self._val_iters and self.every_n_inner_iters(batch_idx, self.interval)
        if look and (isinstance(runner.train_loop, EpochBasedTrainLoop) or _has_updated(runner)):
            self._look(runner, runner.epoch, runner.iter, validating=True)

    def after_train(self, runner: Runner) -> None:
        """Listen no longer."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self._received = number

    def _look(
        self,
        runner: Runner,
        epoch: int,
        iteration: int,
        resumable: bool = True,
        validating: bool = False,
    ) -> None:
        number = highest(self._received)
        if not number:
            return
        saver = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        if not resumable:
            found = 'nothing is saved within an epoch'
        elif saver is None:
            found = 'nothing is saved without a CheckpointHook'
        else:
            if validating:  # on averaged weights
                for hook in runner.hooks:
                    if isinstance(hook, EMAHook):
                        hook._swap_ema_parameters()
            found = f'saved {_save(saver, runner, epoch, iteration)}'
        highest(0)  # no rank leaves, and has the others ended, before the checkpoint is there
        runner.logger.warning(
            f'PreemptionHook: {signal.Signals(number).name}, after iteration {iteration}: '
            f'{found}; --resume auto continues'
        )
        runner.visualizer.close()
        raise SystemExit(128 + number)


def _has_updated(runner: Runner) -> bool:
    """Whether no gradients are accumulated that a checkpoint would lose."""
    wrapper = runner.optim_wrapper
    counts = getattr(wrapper, '_accumulative_counts', 1)
    return counts == 1 or wrapper.inner_count % counts == 0


def _save(saver: CheckpointHook, runner: Runner, epoch: int, iteration: int) -> str:
    step = epoch if saver.by_epoch else iteration
    path = saver.file_backend.join_path(saver.out_dir, saver.filename_tmpl.format(step))
    absent = is_main_process() and not saver.file_backend.exists(path)
    if saver.last_ckpt != path or highest(int(absent)):  # all ranks take part in saving
        saver._save_checkpoint_with_step(runner, step, dict(epoch=epoch, iter=iteration))
    return path


def _can_be_caught(name: Any) -> bool:
    names = signal.Signals.__members__
    return isinstance(name, str) and name in names and name not in ('SIGKILL', 'SIGSTOP')


def _outlive(signals: Sequence[int], init_fn: Callable | None, worker_id: int) -> None:
    """Start a data worker which these signals end only if its training sends them."""
    if init_fn is not None:
        init_fn(worker_id)
    if hasattr(signal, 'sigwaitinfo'):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=_wait, args=(signals, os.getppid()), daemon=True).start()


def _wait(signals: Sequence[int], parent: int) -> None:
    while signal.sigwaitinfo(signals).si_pid != parent:
        pass
    os._exit(0)
