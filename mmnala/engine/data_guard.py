"""A runner whose data sets are checked before and while they are read."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.registry import DATASETS, METRICS, Registry
from mmengine.runner import FlexibleRunner, Runner

from ..datasets.untrusted import check_coco, watch_files
from .config_errors import config_error
from .errors import InputError


def guard_data(runner: Runner | FlexibleRunner, max_pixels: int) -> None:
    """Let a runner build data sets whose files are checked first: mmnala.datasets.untrusted."""
    build_dataloader, build_evaluator = runner.build_dataloader, runner.build_evaluator
    checked: set[str] = set()

    def check_annotations(cfg: Any, registry: Registry) -> None:
        for part, path in _annotation_files(cfg):
            if path not in checked and _is_coco(part, registry):
                check_coco(path, max_pixels)
                checked.add(path)

    def build_guarded_dataloader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        cfg = dataloader.get('dataset') if isinstance(dataloader, Mapping) else None
        _refuse_pickles(cfg)
        check_annotations(cfg, DATASETS)
        try:
            loader = build_dataloader(dataloader, *args, **kwargs)
        except Exception as error:  # of as many kinds as there are readers
            files = ', '.join(path for _, path in _annotation_files(cfg))
            if not files or isinstance(error, InputError | OSError) or config_error(error):
                raise
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())
            raise InputError(f'the data set with the annotations {files}: {reason}') from error
        watch_files(loader.dataset, max_pixels)
        return loader

    def build_guarded_evaluator(evaluator: Any) -> Any:
        check_annotations(evaluator, METRICS)
        return build_evaluator(evaluator)

    runner.build_dataloader = build_guarded_dataloader
    runner.build_evaluator = build_guarded_evaluator


def _refuse_pickles(cfg: Any) -> None:
    """Fail for what unpickles by itself, and not by mmengine's functions."""
    for key, value in cfg.items() if isinstance(cfg, Mapping) else enumerate(cfg or ()):
        if (key, value) == ('decode_backend', 'pickle') or (
            key == 'type' and str(value).endswith('OpenImagesChallengeDataset')
        ):
            raise InputError(f'dataset: {key}={value!r} would run pickles of the data set')
        if isinstance(value, Mapping | list | tuple):
            _refuse_pickles(value)


def _is_coco(part: Mapping[str, Any], registry: Registry) -> bool:
    """Whether mmdet reads the annotations of a data set or metric as COCO's plain format."""
    kind = part.get('type')
    if isinstance(kind, str):
        with registry.switch_scope_and_registry(None) as own:  # the default scope's
            kind = own.get(kind)
    # Not its subclasses with formats of their own.
    reads = getattr(kind, 'parse_data_info', getattr(kind, 'results2json', None))
    return getattr(reads, '__qualname__', '').split('.')[0] in ('CocoDataset', 'CocoMetric')


def _annotation_files(cfg: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The parts of a data set's config that name a local file of annotations, and that file."""
    if isinstance(cfg, list | tuple):
        for part in cfg:
            yield from _annotation_files(part)
    elif isinstance(cfg, Mapping):
        for inner in ('dataset', 'datasets'):
            yield from _annotation_files(cfg.get(inner))
        if cfg.get('ann_file') and isinstance(cfg['ann_file'], str):
            path = os.path.join(cfg.get('data_root') or '', cfg['ann_file'])
            if os.path.isfile(path):
                yield cfg, path
