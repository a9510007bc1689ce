"""Train a model from an mmseg, mmdet or mmpretrain config."""

import argparse
from functools import partial

from mmengine.config import Config
from mmengine.device import get_device

from mmnala.engine.faults import harden, named_faults
from mmnala.engine.resuming import RESUMABLE, check_same, find_resumable
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
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='continue from this checkpoint, or, without a value or with "auto", from the latest '
        'intact one in the work folder; where there is none yet, training starts anew',
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision (needs a GPU)')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    parser.add_argument(
        '--tensorboard',
        action='store_true',
        help='log for TensorBoard too, beside the local files (needs: pip install tensorboard)',
    )
    return parser.parse_args()


def enable_amp(cfg: Config) -> None:
    wrapper = cfg.optim_wrapper.get('type', 'OptimWrapper')
    name = wrapper.rsplit('.')[-1] if isinstance(wrapper, str) else wrapper.__name__
    if name not in ('OptimWrapper', 'AmpOptimWrapper'):
        fail(f'--amp: optim_wrapper.type is {name}, expected OptimWrapper or AmpOptimWrapper')
    if get_device() == 'cpu':
        fail("--amp: mmengine's AmpOptimWrapper needs a GPU, and there is none")
    if name == 'AmpOptimWrapper':
        return
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')


def enable_auto_scale_lr(cfg: Config) -> None:
    if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
        fail('--auto-scale-lr: the config has no auto_scale_lr.base_batch_size')
    cfg.auto_scale_lr.enable = True


def enable_tensorboard(cfg: Config) -> None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        fail(f'--tensorboard: {error}; it needs: pip install tensorboard')
    if cfg.get('visualizer') is None:
        cfg.visualizer = dict(type='Visualizer')
    backends = cfg.visualizer.get('vis_backends') or []
    for name in ('LocalVisBackend', 'TensorboardVisBackend'):
        if name not in [backend['type'] for backend in backends]:
            backends.append(dict(type=name))
    cfg.visualizer.vis_backends = backends


@named_faults()
def main() -> None:
    args = parse_args()
    cfg = load_config(args)
    harden(cfg)
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if args.tensorboard:
        enable_tensorboard(cfg)

    auto = args.resume == 'auto' or (
        args.resume is None and cfg.get('resume') and cfg.get('load_from') is None
    )
    filename, damaged = args.resume, []
    if auto:
        found = find_resumable(cfg, partial(read_checkpoint, strict=True))
        filename, checkpoint, damaged = found or (None, None, [])
    elif filename is not None:
        checkpoint = read_checkpoint(filename, strict=True)
        if not checkpoint.keys() >= RESUMABLE:
            fail(f'--resume {filename}: not a checkpoint of an mmengine training')
    if filename is not None:
        cfg.load_from = filename
    if auto or filename is not None:
        cfg.resume = filename is not None

    runner = build_runner(cfg, training=True, max_pixels=args.max_pixels)
    if auto:
        check_same(filename)
    for reason in damaged:
        runner.logger.warning(f'--resume auto: passed over a damaged checkpoint: {reason}')
    if filename is not None:
        check_weights(runner.model, checkpoint, filename)
        del checkpoint
    runner.train()


if __name__ == '__main__':
    run(main)
