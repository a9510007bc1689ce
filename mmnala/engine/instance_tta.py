"""Test-time augmentation of detectors, masks included."""

from typing import Any

from mmengine.model import BaseTTAModel
from mmengine.registry import MODELS
from mmengine.structures import InstanceData


@MODELS.register_module(force=True)
class InstanceTTAModel(BaseTTAModel):
    """Merge the instances found in several views of an image by non-maximum suppression.

    Boxes, scores and labels are those of mmdet's ``DetTTAModel``, which refuses masks. Here, a box
    that is kept keeps its own mask, turned back if its view was flipped.

    Args:
        tta_cfg: ``nms``, options of ``mmcv.ops.batched_nms``, and ``max_per_img``, the largest
            number of instances that remain.
        **kwargs: ``module``, the detector, and optionally its ``data_preprocessor``.
    """

    def __init__(self, tta_cfg: dict, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tta_cfg = tta_cfg

    def merge_preds(self, data_samples_list: list) -> list:
        """Merge the views, the inner sequences, of each image into its first data sample."""
        return [self._merge(data_samples) for data_samples in data_samples_list]

    def _merge(self, data_samples: list) -> Any:
        from mmcv.ops import batched_nms

        merged = data_samples[0]
        instances = InstanceData.cat([_unflip(sample) for sample in data_samples])
        if len(instances):  # mmcv looks for the largest coordinate
            boxes, keep = batched_nms(
                instances.bboxes, instances.scores, instances.labels, self.tta_cfg['nms']
            )
            instances = instances[keep]
            instances.scores = boxes[:, -1]  # soft-NMS changes them
        merged.pred_instances = instances[: self.tta_cfg['max_per_img']]
        return merged


def _unflip(data_sample: Any) -> InstanceData:
    from mmdet.structures.bbox import bbox_flip

    instances = data_sample.pred_instances
    if data_sample.flip:
        direction = data_sample.flip_direction
        instances.bboxes = bbox_flip(instances.bboxes, data_sample.ori_shape, direction)
        if 'masks' in instances:
            sides = dict(horizontal=[-1], vertical=[-2], diagonal=[-2, -1])
            instances.masks = instances.masks.flip(sides[direction])
    return instances
