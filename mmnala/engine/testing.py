"""What evaluation and prediction share: a config's test set and its test-time augmentation."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from mmengine.config import Config, ConfigDict

from ..datasets.official import CITYSCAPES_LABELS
from .tools import fail, innermost_dataset


def type_name(cfg: Mapping[str, Any]) -> str:
    """The name, without a scope, of the class that a part of a config asks for."""
    kind = cfg.get('type', '')
    return kind.rsplit('.')[-1] if isinstance(kind, str) else kind.__name__


def test_dataset(cfg: Config) -> ConfigDict:
    """The test set's config inside its wrappers."""
    return innermost_dataset(cfg.test_dataloader.dataset)


def annotation_labels(cfg: Config, metainfo: Mapping[str, Any]) -> list[int]:
    """For each class of a segmentation test set, the value of its pixels in a test server's maps.

    Args:
        cfg: The config.
        metainfo: That of the test set built from it.
    """
    # Not its subclasses, whose servers want trainIds.
    if type_name(test_dataset(cfg)) == 'CityscapesDataset':
        return [label.id for label in CITYSCAPES_LABELS if label.train_id != 255]
    first = int(metainfo.get('reduce_zero_label') or False)
    return list(range(first, first + len(metainfo['classes'])))


def enable_tta(cfg: Config) -> None:
    """Let the config test with its ``tta_model`` and ``tta_pipeline``, or end the program.

    mmdet configs without them get a horizontal flip.
    """
    dataset = test_dataset(cfg)
    if cfg.get('default_scope') == 'mmdet':
        _set_default_detection_tta(cfg, dataset.pipeline)
    missing = [name for name in ('tta_model', 'tta_pipeline') if cfg.get(name) is None]
    if missing:
        fail(f'--tta: the config has no {" and no ".join(missing)}')
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(cfg.tta_model, module=cfg.model)


def _set_default_detection_tta(cfg: Config, pipeline: list) -> None:
    # The same defaults as mmdet's own test script, with masks.
    cfg.setdefault(
        'tta_model',
        dict(
            type='InstanceTTAModel',
            tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100),
        ),
    )
    meta_keys = ['img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor']
    meta_keys += ['flip', 'flip_direction']
    flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
    pack = dict(type='PackDetInputs', meta_keys=meta_keys)
    augment = dict(type='TestTimeAug', transforms=[flips, [pack]])
    cfg.setdefault('tta_pipeline', [*deepcopy(pipeline[:-1]), augment])


def without_annotations(transforms: list) -> list:
    """The transforms, or the groups of them in TestTimeAug, that do not load annotations."""
    kept = []
    for transform in transforms:
        if isinstance(transform, list):
            transform = without_annotations(transform)
        elif re.fullmatch(r'Load\w*Annotations', type_name(transform)):
            continue
        elif 'transforms' in transform:
            inner = without_annotations(transform.transforms)
            transform = ConfigDict(transform, transforms=inner)
        if transform:  # TestTimeAug multiplies its groups
            kept.append(transform)
    return kept


def check_slide(test_cfg: Mapping[str, Any]) -> None:
    """End the program unless mmseg's sliding window, if used, is given and leaves no gaps."""
    if test_cfg.get('mode') != 'slide':
        return
    windows = [test_cfg.get(name) for name in ('crop_size', 'stride')]
    pairs = [w for w in windows if isinstance(w, list | tuple) and len(w) == 2]
    positive = all(isinstance(side, int) and side > 0 for pair in pairs for side in pair)
    if len(pairs) < 2 or not positive or any(s > c for c, s in zip(*pairs, strict=True)):
        fail(
            'model.test_cfg with mode=slide: expected crop_size=HEIGHT,WIDTH and a stride=DOWN,'
            f'RIGHT that is no larger, got crop_size={windows[0]} and stride={windows[1]}'
        )
