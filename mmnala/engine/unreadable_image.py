"""A hook that names the image or annotation file that cannot be read."""

import io
import logging
from collections.abc import Iterator
from typing import Any

from mmengine.fileio import get
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from PIL import Image
from torch.utils.data import Dataset

from ..datasets.untrusted import FileError
from .errors import InputError

ACTIONS = ('stop', 'skip')
FILES = ('img_path', 'seg_map_path')  # of a sample, by the names that the toolboxes give them


class UnreadableImageError(InputError):
    """An image or a map of labels that is missing or damaged."""


@HOOKS.register_module(force=True)
class UnreadableImageHook(Hook):
    """Stop at an image or label map that cannot be read, and name it; or go on without it.

    The toolboxes' own errors leave out the file's name or hide it in a traceback of a data worker.
    Files are looked at only when loading a sample has failed; failures of readable files stay what
    they are. It covers OpenMMLab's datasets, wrapped or not, in training and validation.

    Args:
        action: ``'stop'``, or ``'skip'``: warn and train on another sample, drawn as
            the toolboxes do where a pipeline returns None. Validation always stops. Defaults to
            ``'stop'``.

    Raises:
        InputError: If ``action`` is another.
        UnreadableImageError: From the dataset, when it stops.
    """

    def __init__(self, action: str = 'stop') -> None:
        if action not in ACTIONS:
            raise InputError(
                f"UnreadableImageHook: action must be 'stop' or 'skip', got {action!r}"
            )
        self.action = action

    def before_train(self, runner: Runner) -> None:
        _watch(runner.train_dataloader.dataset, skips=self.action == 'skip')

    def before_val(self, runner: Runner) -> None:
        _watch(runner.val_dataloader.dataset)

    def before_test(self, runner: Runner) -> None:
        _watch(runner.test_dataloader.dataset)


def _watch(dataset: Dataset, skips: bool = False) -> None:
    for inner in _innermost(dataset):
        if hasattr(type(inner), 'prepare_data'):
            inner.prepare_data = _Loading(inner, skips)


class _Loading:
    """A dataset's ``prepare_data`` that says which file failed."""

    def __init__(self, dataset: Any, skips: bool) -> None:
        self.dataset = dataset
        self.skips = skips

    def __call__(self, index: int) -> Any:
        try:
            return type(self.dataset).prepare_data(self.dataset, index)
        except Exception as error:
            if isinstance(error, FileError):
                message: str | None = str(error)
            else:
                message = unreadable_file(self.dataset.get_data_info(index))
            if message is None:
                raise
            if not self.skips:
                raise UnreadableImageError(message) from error
            print_log(f'UnreadableImageHook: {message}: left out', 'current', logging.WARNING)
            return None  # the dataset draws another sample


def unreadable_file(sample: dict) -> str | None:
    """Name the first file of a sample that is missing or no image, and say why it fails."""
    for key in FILES:
        path = sample.get(key)
        if not isinstance(path, str) or '://' in path:
            continue
        try:
            content = get(path)
        except Exception as error:
            return f'{path}: {_one_line(error)}'
        try:
            with Image.open(io.BytesIO(content)) as image:
                image.load()
        except Exception as error:
            try:
                import mmcv  # reads what Pillow does not

                readable = mmcv.imfrombytes(content, 'unchanged', backend='cv2') is not None
            except Exception:
                readable = False
            if not readable:
                reason = _one_line(error) if content else 'the file is empty'
                return f'{path}: {reason}'
    return None


def _one_line(error: Exception) -> str:
    reason = getattr(error, 'strerror', None) or str(error).replace('\n', ' ')
    return f'{type(error).__name__}: {reason}'


def _innermost(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, 'datasets'):
        for part in dataset.datasets:
            yield from _innermost(part)
    elif isinstance(getattr(dataset, 'dataset', None), Dataset):
        yield from _innermost(dataset.dataset)
    else:
        yield dataset
