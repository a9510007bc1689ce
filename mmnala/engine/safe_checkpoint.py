"""Checkpoints of which an intact one is on disk at any moment."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from .whole_files import remove_partial, write_whole

# In a work folder, the file that names the latest checkpoint; mmengine's find_latest_checkpoint
# reads it.
LAST_CHECKPOINT = 'last_checkpoint'


@HOOKS.register_module(force=True)
class SafeCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, of which a kill, a full disk or a power cut takes nothing.

    Arguments and file names are mmengine's. What differs:

    - A file appears under its name when it is whole and flushed to disk, ``last_checkpoint``
      included.
    - The order is: the new checkpoint, then ``last_checkpoint``, then the removal of those that
      ``max_keep_ckpts`` and ``save_best`` replace. mmengine removes first.
    - What a killed run left half-written or did not come to remove is removed by the next one.
    - A run that goes on from another folder's checkpoint removes nothing in that folder.
    - A run resumed from a checkpoint that was saved before the validation of its iteration makes up
      for that validation, so that the best checkpoint, and schedules and hooks that follow a
      metric, are those of an uninterrupted run.

    Object stores (``backend_args``) are written by their own backend; the order holds for them too.
    """

    backend_args: dict | None
    file_client_args: dict | None
    file_backend: Any
    best_ckpt_path: str | None
    _reached: dict[str, int] = {}

    def before_train(self, runner: Runner) -> None:
        """Prepare the folder and, in a resumed run, validate what was not validated."""
        backend = (self.backend_args or self.file_client_args or {}).get('backend', 'local')
        local = backend in ('local', 'disk') and '://' not in str(self.out_dir or runner.work_dir)
        if local:
            self.backend_args, self.file_client_args = dict(backend='whole'), None
        super().before_train(runner)
        if is_main_process():
            for folder in {runner.work_dir, self.out_dir} if local else {runner.work_dir}:
                remove_partial(folder)
        self.file_backend = _LateRemoval(self.file_backend)
        info = runner.message_hub.runtime_info
        self.last_ckpt = self._own(info.get('last_ckpt'))
        if getattr(self, 'best_ckpt_path', None):
            self.best_ckpt_path = self._own(self.best_ckpt_path)
        for metric, path in (getattr(self, 'best_ckpt_path_dict', None) or {}).items():
            self.best_ckpt_path_dict[metric] = self._own(path)
        if is_main_process():  # what the checkpoint replaced, if a kill prevented the removal
            for name in info.get('replaced', ()):
                self._remove_later(self.file_backend.join_path(self.out_dir, name))
            self._remove_replaced()
        if _validation_is_missing(runner):
            runner.logger.info('The checkpoint was saved before its validation, which follows now.')
            runner.val_loop.run()

    def _own(self, path: str | None) -> str | None:
        """The file of this name in this run's folder: the path may be that of another run.

        A folder may have been moved or copied, or its checkpoint continued in another one.
        """
        own = path and self.file_backend.join_path(self.out_dir, os.path.basename(path))
        return own if own and self.file_backend.exists(own) else None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # mmengine's FlexibleRunner counts one epoch or iteration too many behind a validation.
        checkpoint['meta'].update(self._reached)

    def after_val_epoch(self, runner: Runner, metrics: dict) -> None:
        """Save the best checkpoint."""
        runner.message_hub.update_info('last_validation', _progress(runner))
        super().after_val_epoch(runner, metrics)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        super()._save_best_checkpoint(runner, metrics)
        self._remove_replaced()

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                name = self.filename_tmpl.format(self.keep_ckpt_ids.popleft())
                if is_main_process():
                    self._remove_later(self.file_backend.join_path(self.out_dir, name))
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
        name = self.filename_tmpl.format(step)
        self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
        runner.message_hub.update_info('last_ckpt', self.last_ckpt)
        replaced = [os.path.basename(path) for path in self.file_backend.removals]
        runner.message_hub.update_info('replaced', replaced)
        self._reached = dict(meta)
        runner.save_checkpoint(
            self.out_dir,
            name,
            file_client_args=self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        self._reached = {}
        if is_main_process():
            write_whole(Path(runner.work_dir) / LAST_CHECKPOINT, str(self.last_ckpt).encode())
            self._remove_replaced()

    def _remove_later(self, path: str) -> None:
        if self.file_backend.isfile(path):
            self.file_backend.remove(path)
        elif self.file_backend.isdir(path):  # deepspeed's
            self.file_backend.rmtree(path)

    def _remove_replaced(self) -> None:
        best = getattr(self, 'best_ckpt_path_dict', None) or {}
        # A filename_tmpl without a number gives the new file the old one's name.
        kept = {self.last_ckpt, getattr(self, 'best_ckpt_path', None), *best.values()}
        self.file_backend.remove_now(kept)


class _LateRemoval:
    """A file backend that removes when it is told to, and not before."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.removals: dict[str, Callable[[str], None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self.removals[path] = self._backend.remove

    def rmtree(self, path: str) -> None:
        self.removals[path] = self._backend.rmtree

    def remove_now(self, kept: set[str | None]) -> None:
        while self.removals:
            path, remove = self.removals.popitem()
            if path not in kept:
                remove(path)


def _progress(runner: Runner) -> int:
    """What the training loop counts validations by."""
    loop = runner.train_loop
    return loop.epoch if isinstance(loop, EpochBasedTrainLoop) else loop.iter


def _validation_is_missing(runner: Runner) -> bool:
    loop, done = runner.train_loop, _progress(runner)
    if runner.val_loop is None or done == 0:
        return False
    if not isinstance(loop, EpochBasedTrainLoop | IterBasedTrainLoop):
        return False
    loop._decide_current_val_interval()
    last = loop.max_epochs if isinstance(loop, EpochBasedTrainLoop) else loop.max_iters
    due = done >= loop.val_begin and (done % loop.val_interval == 0 or done == last)
    return due and runner.message_hub.runtime_info.get('last_validation') != done
