"""What the tools that read configs and checkpoints share."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mmengine.config import Config, DictAction
from mmengine.config.utils import ConfigParsingError
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import CheckpointLoader, Runner
from torch import nn

from ..checkpoint.files import CheckpointError, check_archive
from .errors import InputError
from .model_check import check_model
from .runner import CPUDistributedRunner


def fail(message: object) -> NoReturn:
    """End the program with status 1 and one line on stderr."""
    raise SystemExit(f'error: {message}')


def run(main: Callable[[], None]) -> None:
    """Run a script's main function; input that cannot work is a one-line error."""
    try:
        main()
    except FileNotFoundError as error:
        fail(str(error).strip().splitlines()[-1])  # a data worker's begins with its traceback
    except (InputError, CheckpointError) as error:
        fail(error)
    except ValueError as error:
        # mmengine packs the list of images and does not expect an empty one.
        if str(error) != 'need at least one array to concatenate':
            raise
        fail('a dataset of the config is empty: check its data_root, prefixes, suffixes, ann_file')


class CfgOptions(DictAction):
    """mmengine's KEY=VALUE option that names a malformed item."""

    def __call__(self, parser, namespace, values, option_string=None):
        for item in values:
            if any(character.isspace() for character in item):
                fail(f'{option_string} {item!r}: a value with blanks must stand in the config')
            try:
                super().__call__(parser, namespace, [item], option_string)
            except (ValueError, AssertionError):
                fail(f'{option_string} {item!r}: expected KEY=VALUE with balanced brackets')


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Parser with the options common to training and testing."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--work-dir',
        help="folder for logs and results (default: the config's work_dir, "
        'else ./work_dirs/ and the name of the config file)',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        default={},
        metavar='KEY=VALUE',
        help="override entries of the config: model.backbone.arch=s, a list as key='[a,b]' or "
        "key=a,b, a nested one as key='[(a,b),(c,d)]'; no blanks",
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config`` and apply the common options to it."""
    # Launchers older than torchrun pass the local rank as an option, mmengine reads the variable.
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    try:
        cfg = Config.fromfile(args.config)
    except (OSError, SyntaxError, ImportError, ConfigParsingError) as error:
        fail(f'config {args.config}: {error}')
    if 'data_root' in args.cfg_options:
        for old in _data_roots(cfg):
            _move_data(cfg, old, args.cfg_options['data_root'])
    try:
        cfg.merge_from_dict(args.cfg_options)
    except (AttributeError, KeyError, TypeError) as error:
        fail(f'--cfg-options {args.cfg_options}: {error}')

    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def innermost_dataset(dataset: Any) -> Any:
    """A data set's config inside its wrappers."""
    while 'dataset' in dataset:
        dataset = dataset['dataset']
    return dataset


def _data_roots(cfg: Config) -> set[str]:
    """The folders that the loaders name, which a config's own ``data_root`` need not be."""
    roots = set()
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset = (cfg.get(loader) or {}).get('dataset', {})
        roots.add(innermost_dataset(dataset).get('data_root'))
    return {root for root in roots if root}


def _move_data(part: Any, old: str, new: str) -> None:
    """Replace the data folder wherever a config repeats it, in loaders and evaluators."""
    for key, value in enumerate(part) if isinstance(part, list) else part.items():
        if isinstance(value, (Mapping, list)):
            _move_data(value, old, new)
        elif isinstance(value, str) and f'{value}/'.startswith(f'{old.rstrip("/")}/'):
            part[key] = new.rstrip('/') + value[len(old.rstrip('/')) :]


def build_runner(cfg: Config) -> Runner:
    """Build the config's runner, or CPUDistributedRunner for several processes without a GPU."""
    check_model(cfg.get('model') or {})
    optim_wrapper = cfg.get('optim_wrapper') or {}
    decays = 'layer_decay_rate' in (optim_wrapper.get('paramwise_cfg') or {})
    if decays and 'constructor' not in optim_wrapper:  # mmengine's own would pass over it
        fail(
            'optim_wrapper.paramwise_cfg.layer_decay_rate needs '
            "optim_wrapper.constructor='LayerDecayOptimWrapperConstructor'"
        )
    if cfg.launcher != 'none' and get_device() == 'cpu':
        name = CPUDistributedRunner.__name__
        if cfg.get('runner_type', name) != name:
            fail(f'runner_type={cfg.runner_type!r}: without a GPU, only {name} runs distributed')
        cfg.runner_type = name
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def read_checkpoint(filename: str) -> Mapping[str, Any]:
    """Read a checkpoint from anywhere mmengine can read it."""
    try:
        if os.path.isfile(filename):
            check_archive(filename)
        checkpoint = CheckpointLoader.load_checkpoint(filename, map_location='cpu')
    except Exception as error:  # torch.load raises nearly anything on a file it does not know
        fail(f'checkpoint {filename}: {type(error).__name__}: {error}')
    if not isinstance(checkpoint, Mapping):
        fail(f'checkpoint {filename}: expected a dict, got {type(checkpoint).__name__}')
    return checkpoint


def check_weights(model: nn.Module, checkpoint: Mapping[str, Any], filename: str) -> None:
    """Fail unless the checkpoint holds every parameter and buffer of the model, in its shape.

    mmengine only warns, and a model evaluated with some weights left at random is no result.
    """
    while isinstance(inner := getattr(model, 'module', None), nn.Module):
        model = inner  # out of the distributed and the test-time augmentation wrapper
    weights = checkpoint.get('state_dict', checkpoint)
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        fail(f'checkpoint {filename}: its state_dict is no dict of named weights')
    if not weights:
        fail(f'checkpoint {filename}: empty state dict')
    weights = {name.removeprefix('module.'): value for name, value in weights.items()}
    try:
        missing = model.load_state_dict(weights, strict=False).missing_keys
    except RuntimeError as error:
        fail(f'checkpoint {filename} does not fit the model: {error}')
    # A counter that no forward pass reads is all that may be absent.
    missing = [name for name in missing if not name.endswith('num_batches_tracked')]
    if missing:
        names = ', '.join(missing[:5]) + (', ...' if len(missing) > 5 else '')
        fail(f'checkpoint {filename} lacks {len(missing)} weights of the model: {names}')
