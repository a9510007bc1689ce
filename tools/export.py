"""Export the model of an mmseg or mmpretrain config, or a backbone, and check the file.

OUT ends in .onnx (ONNX, opset 18), .pt2 (torch.export) or .pt or .ts (TorchScript). The file takes
a normalised image (B, C, H, W) and is compared with the model before it is kept.
"""

import argparse
import re
from pathlib import Path

from mmengine.registry import MODELS, init_default_scope

from mmnala.engine.model_check import check_model
from mmnala.engine.tools import CfgOptions, check_weights, fail, load_config, read_checkpoint, run
from mmnala.export import PARTS, check_request, export, kind_of, metadata


def size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', text)
    if match is None:
        fail(f'--static {text}: expected HEIGHTxWIDTH, such as 512x1024')
    return int(match[1]), int(match[2])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument(
        'checkpoint',
        help="checkpoint file or address of the whole model, or 'none': the weights that the "
        "config's init_cfg names",
    )
    parser.add_argument('out', help='the new file, ending in .onnx, .pt2, .pt or .ts')
    parser.add_argument(
        '--part',
        choices=PARTS,
        default='model',
        help='model (default): logits, of a segmentor at the size of the image; backbone: its '
        'stages, also of a detector',
    )
    parser.add_argument(
        '--static',
        type=size,
        metavar='HxW',
        help='images of this size alone (default: any from 33x33 up; TorchScript needs it)',
    )
    parser.add_argument(
        '--int8', action='store_true', help='quantise the linear layers of .onnx dynamically'
    )
    parser.add_argument('--cfg-options', nargs='+', action=CfgOptions, default={})
    parser.set_defaults(launcher='none', local_rank=0, work_dir=None)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    cfg = load_config(args)
    try:
        check_request(args.out, args.static, args.int8)
        check_model(cfg.model)
        init_default_scope(cfg.get('default_scope', 'mmengine'))
        if cfg.get('data_preprocessor') is not None:
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        model = MODELS.build(cfg.model)
        kind = kind_of(model, args.part)
        if args.checkpoint == 'none':
            model.init_weights()
        else:
            check_weights(model, read_checkpoint(args.checkpoint), args.checkpoint)
        difference = export(model, args.out, args.part, args.static, args.int8, metadata(cfg, kind))
    except OSError as error:
        fail(error)
    megabytes = Path(args.out).stat().st_size / 1e6
    print(f'{args.out}: {megabytes:.1f} MB, largest relative difference {difference:.1e}')


if __name__ == '__main__':
    run(main)
