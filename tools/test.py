"""Evaluate a checkpoint of an mmseg, mmdet or mmpretrain config."""

import argparse
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import METRICS
from mmengine.runner import Runner

from mmnala.engine.dumping import dump_whole, save_coco_whole
from mmnala.engine.label_maps import DumpLabelMaps
from mmnala.engine.testing import (
    annotation_labels,
    check_slide,
    enable_tta,
    test_dataset,
    without_annotations,
)
from mmnala.engine.tools import (
    argument_parser,
    build_runner,
    check_weights,
    claim,
    fail,
    load_config,
    read_checkpoint,
    run,
)
from mmnala.export import compute_by_onnx


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        'checkpoint', help='checkpoint file or address, or an .onnx file of tools/export.py'
    )
    parser.add_argument(
        '--out',
        metavar='PATH',
        help='save the predictions where nothing is yet: a name ending in .pkl or .pickle is a '
        'file of all data samples, any other a folder. mmseg: label maps (PNG) that bear the '
        "images' names and the annotations' labels (ADE20K: 1 to 150, Cityscapes: labelIds). "
        'mmdet: COCO results, results.bbox.json and, of masks, results.segm.json',
    )
    parser.add_argument(
        '--format-only',
        action='store_true',
        help='save by --out what a test server wants and evaluate nothing, so that the test set '
        'needs no annotations',
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
    if scope != 'mmdet':  # nor does every mmseg draw each image by itself
        hook.interval = 1
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


def is_pickle(out: str) -> bool:
    return out.endswith(('.pkl', '.pickle'))


def check_out(out: str, scope: str | None) -> None:
    """Fail unless --out can be written without losing or mixing results."""
    path = Path(out)
    if not is_pickle(out) and (scope not in ('mmseg', 'mmdet') or path.suffix == '.json'):
        fail(
            f'--out {out}: expected a name ending in .pkl or .pickle; a folder, not .json, is for '
            f"mmseg and mmdet, the config's default_scope is {scope}"
        )
    if not is_pickle(out):
        claim(out, make=False)
    elif path.exists():
        fail(f'--out {out}: exists already; move it or choose another name')


def save_predictions(runner: Runner, cfg: Config, args: argparse.Namespace) -> None:
    """Let one metric write --out, beside those that evaluate or, with --format-only, alone."""
    evaluator = runner.test_evaluator
    scope = cfg.get('default_scope')
    writer = None
    if is_pickle(args.out):
        # mmdet's own metric compresses instance masks.
        name = 'mmdet.DumpDetResults' if scope == 'mmdet' else 'DumpResults'
        writer = METRICS.build(dict(type=name, out_file_path=args.out))
        dump_whole(writer)
    elif scope == 'mmseg':
        writer = label_map_writer(evaluator.metrics, cfg, runner, args.out)
    elif scope == 'mmdet':
        writer = coco_writer(evaluator.metrics, args)
    if writer is None:
        names = ', '.join(type(metric).__name__ for metric in evaluator.metrics)
        fail(
            f'--out {args.out}: expected a name ending in .pkl or .pickle; a folder is for mmseg '
            f"with IoUMetric or CityscapesMetric and mmdet with CocoMetric, the config's is {names}"
        )
    folder = Path(args.out).parent if is_pickle(args.out) else Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f'--out {args.out}: {error}')
    others = [] if args.format_only else [m for m in evaluator.metrics if m is not writer]
    evaluator.metrics = [*others, writer]


def label_map_writer(metrics: list, cfg: Config, runner: Runner, out: str) -> DumpLabelMaps | None:
    from mmseg.evaluation import CityscapesMetric, IoUMetric

    if not any(isinstance(metric, CityscapesMetric | IoUMetric) for metric in metrics):
        return None
    for metric in metrics:
        metric.keep_results = True  # CityscapesMetric deletes its folder otherwise, maybe this one
    dataset = runner.test_dataloader.dataset
    images: dict[str, str] = {}
    for index in range(len(dataset)):
        path = dataset.get_data_info(index)['img_path']
        other = images.setdefault(Path(path).stem, path)
        if other != path:
            fail(f'--out {out}: two images would have the same map: {other}, {path}')

    return DumpLabelMaps(out, annotation_labels(cfg, dataset.metainfo))


def coco_writer(metrics: list, args: argparse.Namespace):
    from mmdet.evaluation import CocoMetric

    metric = next((metric for metric in metrics if isinstance(metric, CocoMetric)), None)
    if metric is not None:
        if args.format_only and metric._coco_api is None:
            fail('--format-only: CocoMetric needs an ann_file (of images and categories)')
        metric.outfile_prefix = str(Path(args.out) / 'results')
        metric.format_only = args.format_only
        save_coco_whole(metric)
    return metric


def main() -> None:
    args = parse_args()
    if args.format_only and not args.out:
        fail('--format-only needs --out')
    cfg = load_config(args)
    exported = args.checkpoint.endswith('.onnx')
    checkpoint = {} if exported else read_checkpoint(args.checkpoint)
    cfg.load_from = None if exported else args.checkpoint
    cfg.resume = False
    check_slide(cfg.model.get('test_cfg') or {})
    if args.show or args.show_dir:
        enable_drawing(cfg, args)
    if args.tta:
        enable_tta(cfg)
    if args.format_only:
        dataset = test_dataset(cfg)
        dataset.pipeline = without_annotations(dataset.pipeline)
    if args.out:
        check_out(args.out, cfg.get('default_scope'))

    runner = build_runner(cfg, max_pixels=args.max_pixels)
    if exported:
        compute_by_onnx(runner.model, args.checkpoint, cfg)
    else:
        check_weights(runner.model, checkpoint, args.checkpoint)
    del checkpoint
    if args.out:
        save_predictions(runner, cfg, args)
    try:
        runner.test()
    except AssertionError as error:
        if 'TTA of instance segmentation' not in str(error):
            raise
        fail('--tta: tta_model.type is DetTTAModel, which has no masks; InstanceTTAModel has')


if __name__ == '__main__':
    run(main)
