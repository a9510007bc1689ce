"""What a validation shows beyond its metrics: confusion, best and worst images."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..engine.errors import InputError

SIDE = 480  # pixels of the longer side of a picture
VEIL = 0.65  # opacity of a label map over its image
MEAN_IOU = 'mean IoU (%)'
SCORE_THR = 0.3  # of the boxes that are drawn and counted, as in mmdet's visualizer
IOU_THR = 0.5  # of a box that found an object
NO_OBJECT = 'no object'


class Judged(NamedTuple):
    """An image, how well it was predicted, and pictures of it by their captions."""

    score: float
    path: str
    panels: dict[str, NDArray]


def count_confusion(
    truth: Tensor, prediction: Tensor, num_classes: int, ignore_index: int = 255
) -> NDArray:
    """How often a true class, the row, was predicted as one, the column.

    Args:
        truth: Labels of any shape; ``ignore_index`` does not count.
        prediction: Labels of the same shape, 0 to ``num_classes - 1``.
        num_classes: Number of classes C.
        ignore_index: Label of what does not count.

    Returns:
        ``(C, C)``, int64.
    """
    counted = truth != ignore_index
    pairs = truth[counted].long() * num_classes + prediction[counted].long()
    counts = torch.bincount(pairs, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).cpu().numpy()


def count_box_confusion(
    truth: InstanceData,
    found: InstanceData,
    num_classes: int,
    score_thr: float = SCORE_THR,
    iou_thr: float = IOU_THR,
) -> NDArray:
    """How often an object of a true class, the row, was found as one of a class, the column.

    As in COCO's evaluation, but of all classes at once, the boxes take turns by their score, and
    each finds the object of largest IoU that no other has found. So a row sums to the objects of
    its class. mmdet's ``confusion_matrix.py`` counts an object once for each box upon it.

    Args:
        truth: ``bboxes`` (G, 4) as corners in pixels, ``labels`` (G,) and ``ignored`` (G,), bool.
            A box that found no object is not counted when a share of ``iou_thr`` of its area lies
            in an ignored one.
        found: ``bboxes`` (D, 4), ``labels`` (D,) and ``scores`` (D,).
        num_classes: Number of classes C.
        score_thr: Least score of a box that counts.
        iou_thr: Least IoU of a box with the object that it found.

    Returns:
        ``(C + 1, C + 1)``, int64. The last row counts boxes without an object, the last column
        objects that were missed.
    """
    from mmdet.structures.bbox import bbox_overlaps

    found = found[found.scores >= score_thr]
    found = found[found.scores.argsort(descending=True, stable=True)]
    objects, ignored = truth[~truth.ignored], truth[truth.ignored]
    ious = bbox_overlaps(found.bboxes, objects.bboxes).numpy()
    shares = bbox_overlaps(found.bboxes, ignored.bboxes, mode='iof').numpy()
    confusion = np.zeros((num_classes + 1, num_classes + 1), np.int64)
    labels, missed = objects.labels.numpy(), np.ones(len(objects), bool)
    for label, overlaps, share in zip(found.labels.numpy(), ious, shares, strict=True):
        open_overlaps = np.where(missed, overlaps, 0)
        if open_overlaps.max(initial=0) >= iou_thr:
            best = open_overlaps.argmax()
            missed[best] = False
            confusion[labels[best], label] += 1
        elif share.max(initial=0) < iou_thr:
            confusion[-1, label] += 1
    np.add.at(confusion[:, -1], labels[missed], 1)
    return confusion


def class_ious(confusion: NDArray) -> NDArray:
    """``(C, C)`` to the intersection over union of each class; nan where neither side has it."""
    intersection = confusion.diagonal().astype(float)
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    return np.divide(intersection, union, out=np.full(len(union), np.nan), where=union > 0)


class CollectHook(Hook):
    """Keep the best and the worst images of a test loop, and count the confusion of classes.

    An image is judged by what its task has: the mean IoU of the classes in its truth or prediction
    (mmseg), the AP at IoU 0.5 of its boxes by mmdet's ``eval_map`` (images without objects are not
    judged), the score of its true class (mmpretrain). Images of other tasks are not judged. One
    process has to see them all.

    Args:
        number: Images to keep on either side.

    Attributes:
        measure: What an image was judged by; None if nothing was judged.
        confusion: Pixels, boxes or images, truth in rows; None where the task has none.
        classes, palette: Of the data set.
    """

    def __init__(self, number: int) -> None:
        if type(number) is not int or number < 1:
            raise InputError(f'number must be a positive integer, got {number!r}')
        self.number = number
        self.measure: str | None = None
        self.confusion: NDArray | None = None
        self.classes: Sequence[str] = ()
        self.palette: Sequence[Sequence[int]] = ()
        self._order = 0
        self._heaps: tuple[list, list] = ([], [])

    @property
    def names(self) -> list[str]:
        """Of the confusion's rows and columns."""
        number = 0 if self.confusion is None else len(self.confusion)
        names = [*self.classes] or [str(i) for i in range(number)]
        return [*names, NO_OBJECT] if len(names) < number else names

    @property
    def best(self) -> list[Judged]:
        """The best first, without those that are among the worst."""
        worst = {order for _, order, _ in self._heaps[1]}
        return [
            judged
            for _, order, judged in sorted(self._heaps[0], reverse=True)
            if order not in worst
        ]

    @property
    def worst(self) -> list[Judged]:
        """The worst first."""
        return [judged for *_, judged in sorted(self._heaps[1], reverse=True)]

    def before_test_epoch(self, runner: Runner) -> None:
        """Learn the classes and, for detection, the true boxes at the images' original size."""
        dataset = runner.test_dataloader.dataset
        self.classes = dataset.metainfo.get('classes') or ()
        self.palette = dataset.metainfo.get('palette') or ()
        self._bgr = _is_bgr(runner)
        metrics = runner.test_evaluator.metrics
        self._ignore_index = next(
            (m.ignore_index for m in metrics if hasattr(m, 'ignore_index')), 255
        )
        self._dataset = dataset
        self._instances: dict[Any, Any] = {}

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Judge the images of a batch."""
        for image, sample in zip(data_batch['inputs'], outputs, strict=True):
            sample = sample.cpu()
            if 'pred_sem_seg' in sample and 'gt_sem_seg' in sample:
                self._segmentation(image, sample)
            elif 'pred_instances' in sample:
                self._detection(image, sample)
            elif 'pred_score' in sample and sample.get('gt_label', torch.ones(2)).numel() == 1:
                self._classification(image, sample)

    def _segmentation(self, image: Tensor, sample: Any) -> None:
        truth, prediction = (sample.get(f'{s}_sem_seg').data.squeeze(0) for s in ('gt', 'pred'))
        confusion = count_confusion(truth, prediction, len(self.classes), self._ignore_index)
        self._count(confusion)

        def panels() -> dict[str, NDArray]:
            picture = self._picture(image, truth.shape)
            colours = np.zeros((256, 3))
            colours[: len(self.palette)] = self.palette
            maps = dict(truth=truth, prediction=prediction)
            veiled = {
                name: (1 - VEIL) * picture + VEIL * colours[labels.numpy().astype(np.uint8)]
                for name, labels in maps.items()
            }
            veiled['truth'][truth.numpy() == self._ignore_index] = 0
            return dict(image=picture) | {k: v.astype(np.uint8) for k, v in veiled.items()}

        if confusion.any():
            score = 100 * float(np.nanmean(class_ious(confusion)))
            self._keep(MEAN_IOU, score, sample, panels)

    def _detection(self, image: Tensor, sample: Any) -> None:
        from mmdet.evaluation import eval_map
        from mmdet.visualization import DetLocalVisualizer

        boxes, labels, ignored = self._true_boxes(sample.img_id)
        predicted = sample.pred_instances
        truth = InstanceData(
            bboxes=torch.from_numpy(boxes),
            labels=torch.from_numpy(labels),
            ignored=torch.from_numpy(ignored),
        )
        self._count(count_box_confusion(truth, predicted, len(self.classes)))
        if not len(labels[~ignored]):
            return
        scored = torch.cat((predicted.bboxes, predicted.scores[:, None]), 1).numpy()
        found = [scored[predicted.labels.numpy() == label] for label in range(len(self.classes))]
        annotation = dict(
            bboxes=boxes[~ignored],
            labels=labels[~ignored],
            bboxes_ignore=boxes[ignored],
            labels_ignore=labels[ignored],
        )
        score, _ = eval_map([found], [annotation], iou_thr=IOU_THR, logger='silent')

        def panels() -> dict[str, NDArray]:
            picture = self._picture(image, sample.ori_shape)
            visualizer = DetLocalVisualizer()
            visualizer.dataset_meta = dict(classes=self.classes, palette=self.palette or None)
            sample.gt_instances = InstanceData(bboxes=boxes, labels=labels)
            drawn = {}
            prediction = f'prediction, scores from {SCORE_THR}'
            for name, side in (('truth', 'draw_pred'), (prediction, 'draw_gt')):
                visualizer.add_datasample(
                    name, picture, sample, pred_score_thr=SCORE_THR, **{side: False}
                )
                drawn[name] = visualizer.get_image()
            return drawn

        self._keep('AP50', float(score), sample, panels)

    def _true_boxes(self, image_id: Any) -> tuple[NDArray, NDArray, NDArray]:
        # Not the data sample's, which are scaled where the pipeline loads them before Resize.
        if not self._instances:
            infos = map(self._dataset.get_data_info, range(len(self._dataset)))
            self._instances = {info['img_id']: info['instances'] for info in infos}
        instances = self._instances[image_id]
        return (
            np.array([i['bbox'] for i in instances], np.float32).reshape(-1, 4),
            np.array([i['bbox_label'] for i in instances], np.int64),
            np.array([i.get('ignore_flag', 0) for i in instances], bool),
        )

    def _classification(self, image: Tensor, sample: Any) -> None:
        truth, scores = int(sample.gt_label), sample.pred_score
        label = int(scores.argmax())
        self._count(count_confusion(sample.gt_label, scores.argmax()[None], len(scores), -1))
        names = self.classes or [str(i) for i in range(len(scores))]

        def panels() -> dict[str, NDArray]:
            caption = f'{names[truth]}, predicted {names[label]} ({float(scores[label]):.2f})'
            return {caption: self._picture(image, image.shape[1:])}

        self._keep('score of the true class', float(scores[truth]), sample, panels)

    def _count(self, confusion: NDArray) -> None:
        self.confusion = confusion if self.confusion is None else self.confusion + confusion

    def _keep(
        self, measure: str, score: float, sample: Any, panels: Callable[[], dict[str, NDArray]]
    ) -> None:
        """Draw the image if it is among the best or the worst so far."""
        self.measure = measure
        self._order -= 1  # of two alike, the one seen first
        drawn = None
        for heap, key in zip(self._heaps, (score, -score), strict=True):
            if len(heap) == self.number and (key, self._order) < heap[0][:2]:
                continue
            drawn = drawn or {name: _shrink(panel) for name, panel in panels().items()}
            judged = Judged(score, str(sample.get('img_path', '')), drawn)
            push = heapq.heappush if len(heap) < self.number else heapq.heapreplace
            push(heap, (key, self._order, judged))

    def _picture(self, image: Tensor, shape: Sequence[int]) -> NDArray:
        """The network's input ``(C, h, w)`` as RGB of the given size; any channels and dtype."""
        array = image[:3].float().cpu()
        if len(array) < 3:
            array = array[:1].expand(3, -1, -1)
        elif self._bgr:
            array = array.flip(0)
        if image.dtype != torch.uint8:
            low, high = array.min(), array.max()
            array = (array - low) * (255 / (high - low).clamp_min(1e-6))
        picture = Image.fromarray(array.permute(1, 2, 0).byte().numpy())
        return np.array(picture.resize((int(shape[1]), int(shape[0])), Image.Resampling.BILINEAR))


def _is_bgr(runner: Runner) -> bool:
    """Whether images are loaded as BGR, which the preprocessor then turns."""
    preprocessor = runner.cfg.model.get('data_preprocessor') or runner.cfg.get('data_preprocessor')
    preprocessor = preprocessor or {}
    return bool(preprocessor.get('bgr_to_rgb') or preprocessor.get('to_rgb'))


def _shrink(panel: NDArray) -> NDArray:
    picture = Image.fromarray(panel)
    picture.thumbnail((SIDE, SIDE))
    return np.array(picture)
