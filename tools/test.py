"""Evaluate a checkpoint of an mmseg, mmdet or mmpretrain config."""

import argparse
from copy import deepcopy
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.evaluator import Evaluator
from mmengine.registry import METRICS

from mmnala.engine.tools import (
    argument_parser,
    build_runner,
    check_weights,
    fail,
    load_config,
    read_checkpoint,
    run,
)


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument(
        '--out',
        metavar='PATH',
        help='save the predictions: a name ending in .pkl or .pickle is a file of all data '
        'samples, any other a folder of segmentation maps (PNG, mmseg only)',
    )
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', help='save pictures of the predictions under this folder')
    parser.add_argument(
        '--wait-time', type=float, default=2, help='seconds that --show shows each (default: 2)'
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help="test-time augmentation by the config's tta_model and tta_pipeline "
        '(mmdet configs without them: horizontal flip)',
    )
    return parser.parse_args()


def enable_drawing(cfg: Config, args: argparse.Namespace) -> None:
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        fail('--show and --show-dir: the config has no default_hooks.visualization')
    scope = cfg.get('default_scope')
    hook['enable' if scope == 'mmpretrain' else 'draw'] = True
    if args.show:
        hook.show = True
        hook.wait_time = args.wait_time
    if args.show_dir:
        # mmdet puts a relative folder under the work folder, the others under the current one.
        folder = str(Path(args.show_dir).absolute())
        if scope == 'mmdet':
            hook.test_out_dir = folder
        elif scope == 'mmpretrain':
            hook.out_dir = folder
        else:
            cfg.visualizer.save_dir = folder


def enable_tta(cfg: Config) -> None:
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if cfg.get('default_scope') == 'mmdet':
        set_default_detection_tta(cfg, dataset.pipeline)
    missing = [name for name in ('tta_model', 'tta_pipeline') if cfg.get(name) is None]
    if missing:
        fail(f'--tta: the config has no {" and no ".join(missing)}')
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(cfg.tta_model, module=cfg.model)


def set_default_detection_tta(cfg: Config, pipeline: list) -> None:
    # The same defaults as mmdet's own test script.
    cfg.setdefault(
        'tta_model',
        dict(
            type='DetTTAModel',
            tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100),
        ),
    )
    meta_keys = ['img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor']
    meta_keys += ['flip', 'flip_direction']
    flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
    pack = dict(type='PackDetInputs', meta_keys=meta_keys)
    augment = dict(type='TestTimeAug', transforms=[flips, [pack]])
    cfg.setdefault('tta_pipeline', [*deepcopy(pipeline[:-1]), augment])


def save_predictions(evaluator: Evaluator, scope: str | None, out: str) -> None:
    if out.endswith(('.pkl', '.pickle')):
        # mmdet's own metric compresses instance masks.
        name = 'mmdet.DumpDetResults' if scope == 'mmdet' else 'DumpResults'
        evaluator.metrics.append(METRICS.build(dict(type=name, out_file_path=out)))
        return
    metrics = [metric for metric in evaluator.metrics if hasattr(metric, 'output_dir')]
    if not metrics:
        fail(
            f'--out {out}: expected a name ending in .pkl or .pickle, no metric of this config '
            'writes segmentation maps'
        )
    Path(out).mkdir(parents=True, exist_ok=True)
    for metric in metrics:
        metric.output_dir = out
        metric.keep_results = True  # CityscapesMetric deletes its folder otherwise


def main() -> None:
    args = parse_args()
    cfg = load_config(args)
    checkpoint = read_checkpoint(args.checkpoint)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    if args.show or args.show_dir:
        enable_drawing(cfg, args)
    if args.tta:
        enable_tta(cfg)

    runner = build_runner(cfg)
    check_weights(runner.model, checkpoint, args.checkpoint)
    del checkpoint
    if args.out:
        save_predictions(runner.test_evaluator, cfg.get('default_scope'), args.out)
    runner.test()


if __name__ == '__main__':
    run(main)
