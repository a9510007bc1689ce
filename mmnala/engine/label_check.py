"""A hook that stops a run at the first label that its model cannot have."""

from collections.abc import Mapping
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from .errors import InputError


class LabelError(InputError):
    """Labels, or their number, that do not fit the classes."""


@HOOKS.register_module(force=True)
class LabelCheckHook(Hook):
    """Refuse labels outside the dataset's classes, and a head with other classes.

    Such a label would end a GPU run in an opaque device assertion and drop out of an evaluation
    unseen. Checked are the semantic labels of mmseg and the image labels of mmpretrain; datasets
    without ``classes`` and samples without such labels (detection) pass.

    Args:
        ignore_index: Label of pixels that do not count. Defaults to 255.

    Raises:
        LabelError: Naming the file, its labels and those allowed, or the two numbers of classes.
    """

    priority = 'VERY_HIGH'

    def __init__(self, ignore_index: int = 255) -> None:
        self.ignore_index = ignore_index

    def before_train(self, runner: Runner) -> None:
        model = getattr(runner.model, 'module', runner.model)
        classes = getattr(runner.train_dataloader.dataset, 'metainfo', {}).get('classes')
        for head in ('decode_head', 'head'):
            num_classes = getattr(getattr(model, head, None), 'num_classes', None)
            if classes is not None and num_classes not in (None, len(classes)):
                raise LabelError(
                    f'{head}.num_classes must be {len(classes)}, the number of classes of the '
                    f'training set, got {num_classes}'
                )

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any | None = None
    ) -> None:
        self._check_labels(data_batch, runner.train_dataloader.dataset)

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self._check_labels(data_batch, runner.val_dataloader.dataset)

    def before_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self._check_labels(data_batch, runner.test_dataloader.dataset)

    def _check_labels(self, data_batch: Any, dataset: Any) -> None:
        classes = getattr(dataset, 'metainfo', {}).get('classes')
        samples = data_batch.get('data_samples', ()) if isinstance(data_batch, Mapping) else ()
        if classes is None:
            return
        for sample in samples:
            if 'gt_sem_seg' in sample:
                labels = sample.gt_sem_seg.data
                wrong = (labels >= len(classes)) & (labels != self.ignore_index) | (labels < 0)
                if wrong.any():
                    raise LabelError(self._describe(sample, labels[wrong], len(classes)))
            elif 'gt_label' in sample:
                labels = sample.gt_label
                wrong = (labels >= len(classes)) | (labels < 0)
                if wrong.any():
                    raise LabelError(
                        f'{sample.get("img_path")} has label {labels[wrong].tolist()}, allowed are '
                        f'0 to {len(classes) - 1}'
                    )

    def _describe(self, sample: Any, wrong: Tensor, num_classes: int) -> str:
        file = sample.get('seg_map_path', sample.get('img_path'))
        shift = ' after reduce_zero_label' if sample.get('reduce_zero_label') else ''
        return (
            f'{file} has labels {wrong.unique().tolist()}{shift}, allowed are 0 to '
            f'{num_classes - 1} and {self.ignore_index} (not labelled)'
        )
