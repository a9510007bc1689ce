"""What the tools that read configs and checkpoints share."""

import argparse
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from mmengine.config import Config, DictAction
from mmengine.config.utils import ConfigParsingError
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import FlexibleRunner, Runner
from PIL import Image
from torch import nn

from ..checkpoint.files import CheckpointError
from ..checkpoint.loading import distrust_files, load_from_untrusted
from ..datasets.check import LARGEST_LIMIT, printable
from ..datasets.untrusted import MAX_PIXELS
from .config_errors import alike, config_error
from .data_guard import guard_data
from .errors import InputError
from .model_check import check_model
from .runner import CPUDistributedRunner
from .strategies import build_flexible_runner, kind_name, uses_flexible_runner
from .unreadable_image import UnreadableImageHook


def fail(message: object) -> NoReturn:
    """End the program with status 1 and one line on stderr."""
    raise SystemExit(f'error: {message}')


_made: list[Path] = []  # the folders of claim, innermost first


def run(main: Callable[[], None]) -> None:
    """Run a script's main function; input that cannot work is a one-line error.

    mmengine reads checkpoints and data files as :func:`distrust_files` says.
    """
    distrust_files()
    try:
        main()
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        fail(_last_line(error))
    except (InputError, CheckpointError) as error:
        fail(_last_line(error) if 'Traceback' in str(error) else error)
    except (KeyError, TypeError, ValueError) as error:
        if (message := config_error(error)) is None:
            raise
        fail(message)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        sys.exit(128 + signal.SIGINT)  # as a shell has it
    finally:
        for folder in _made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _last_line(error: Exception) -> str:
    """What a data worker says after its traceback."""
    line = str(error).strip().splitlines()[-1]
    return re.sub(r'^([\w.]*Error): ', '', line)


class CfgOptions(DictAction):
    """mmengine's KEY=VALUE option that names a malformed item."""

    def __call__(self, parser, namespace, values, option_string=None):
        for item in values:
            if any(character.isspace() for character in item):
                fail(f'{option_string} {item!r}: a value with blanks must stand in the config')
            try:
                super().__call__(parser, namespace, [item], option_string)
            except (ValueError, AssertionError, RecursionError):  # the last of brackets as in )(
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
    add_max_pixels(parser)
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    return parser


def add_max_pixels(parser: argparse.ArgumentParser) -> None:
    """Add the option that bounds images by their headers."""
    parser.add_argument(
        '--max-pixels',
        type=int,
        default=MAX_PIXELS,
        help='refuse images whose headers claim more, before memory is taken for them '
        '(default: %(default)s)',
    )


def limit_pixels(max_pixels: int) -> None:
    """Check ``--max-pixels``, and let Pillow open images up to it."""
    if not 1 <= max_pixels <= LARGEST_LIMIT:
        fail(f'--max-pixels {max_pixels}: expected a number from 1 to {LARGEST_LIMIT}')
    Image.MAX_IMAGE_PIXELS = max_pixels


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config`` and apply the common options to it."""
    # Launchers older than torchrun pass the local rank as an option, mmengine reads the variable.
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    try:
        cfg = Config.fromfile(args.config)
    except (OSError, SyntaxError, ImportError, ConfigParsingError) as error:
        fail(f'config {args.config}: {error}')
    except Exception as error:  # of the config's own code, or of a damaged JSON or YAML file
        fail(printable(f'config {args.config}: {type(error).__name__}: {error}'))
    _check_sections(cfg)
    if 'data_root' in args.cfg_options:
        for old in _data_roots(cfg):
            _move_data(cfg, old, args.cfg_options['data_root'])
    _check_options(args.cfg_options, cfg)
    try:
        cfg.merge_from_dict(args.cfg_options)
    except (AttributeError, KeyError, TypeError) as error:
        fail(f'--cfg-options {args.cfg_options}: {error}')
    _check_sections(cfg)
    _check_keys(cfg)

    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


# What mmengine, the toolboxes' tools and ours look for in a config, beside the runner's arguments.
_OTHER_KEYS = {
    'activation_checkpointing',
    'compile',
    'custom_imports',
    'data_root',
    'efficient_conv_bn_eval',
    'find_unused_parameters',
    'model_wrapper_cfg',
    'runner_type',
    'strategy',
    'sync_bn',
    'tta_model',
    'tta_pipeline',
}


def _check_options(options: Mapping[str, Any], cfg: Config) -> None:
    """Fail for a name that the config has not and nothing reads."""
    known = {*cfg, *inspect.signature(Runner.__init__).parameters, *_OTHER_KEYS} - {'self', 'cfg'}
    for option in options:
        if (name := option.split('.')[0]) not in known:
            fail(
                printable(
                    f'--cfg-options {option}: the config has no {name}, and nothing reads one'
                    f'{alike(name, known)}'
                )
            )


def _check_sections(cfg: Config) -> None:
    """Fail unless the parts that are dicts in any config are dicts in this one."""
    loaders = [f'{kind}_dataloader' for kind in ('train', 'val', 'test')]
    for name in ('model', 'optim_wrapper', 'default_hooks', *loaders):
        section = cfg.get(name)
        if section is not None and not isinstance(section, Mapping):
            fail(printable(f'config: {name} must be a dict, got {section!r}'))
        dataset = section.get('dataset', {}) if name in loaders and section else {}
        if not isinstance(dataset, Mapping):
            fail(printable(f'config: {name}.dataset must be a dict, got {dataset!r}'))


# The keys of dicts that mmengine passes over what it does not know in.
_ENV_KEYS = {'cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit'}
_AUTO_SCALE_KEYS = {'enable', 'base_batch_size'}
_PARAMWISE_KEYS = {  # of its own constructor; ours checks its own
    'custom_keys',
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'flat_decay_mult',
    'dwconv_decay_mult',
    'dcn_offset_lr_mult',
    'bypass_duplicate',
}
_CUSTOM_KEYS = {'lr_mult', 'decay_mult'}


def _check_keys(cfg: Config) -> None:
    """Fail for a key that mmengine would pass over."""
    sections = {
        'env_cfg': (cfg.get('env_cfg'), _ENV_KEYS),
        'auto_scale_lr': (cfg.get('auto_scale_lr'), _AUTO_SCALE_KEYS),
    }
    optim_wrapper = cfg.get('optim_wrapper') or {}
    paramwise = optim_wrapper.get('paramwise_cfg')
    if isinstance(paramwise, Mapping) and 'constructor' not in optim_wrapper:
        name = 'optim_wrapper.paramwise_cfg'
        if 'layer_decay_rate' in paramwise:
            fail(
                f'{name}.layer_decay_rate needs '
                "optim_wrapper.constructor='LayerDecayOptimWrapperConstructor'"
            )
        sections[name] = (paramwise, _PARAMWISE_KEYS)
        custom = paramwise.get('custom_keys')
        for part, values in custom.items() if isinstance(custom, Mapping) else ():
            sections[f'{name}.custom_keys.{part}'] = (values, _CUSTOM_KEYS)
    for name, (section, known) in sections.items():
        for key in section if isinstance(section, Mapping) else ():
            if key not in known:
                fail(printable(f'config: nothing reads {name}.{key}{alike(str(key), known)}'))


def innermost_dataset(dataset: Any) -> Any:
    """A data set's config inside its wrappers."""
    while isinstance(dataset.get('dataset'), Mapping):
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


def build_runner(
    cfg: Config, training: bool = False, max_pixels: int = MAX_PIXELS
) -> Runner | FlexibleRunner:
    """Build the config's runner, or CPUDistributedRunner for several processes without a GPU.

    FlexibleRunner is for training alone: the checkpoints of its strategies are whole.
    ``max_pixels`` bounds the images of its data sets.
    """
    limit_pixels(max_pixels)
    runner = _build_runner(cfg, training)
    if not training:  # a training has it in its config
        runner.register_hook(UnreadableImageHook())
    guard_data(runner, max_pixels)
    return runner


def _build_runner(cfg: Config, training: bool) -> Runner | FlexibleRunner:
    check_model(cfg.get('model') or {})
    optim_wrapper = cfg.get('optim_wrapper') or {}
    if uses_flexible_runner(cfg):
        if training:
            return build_flexible_runner(cfg)
        cfg.pop('runner_type')
    optimizer = kind_name((optim_wrapper.get('optimizer') or {}).get('type'))
    if training and optimizer == 'ZeroRedundancyOptimizer':
        fail(
            "optim_wrapper.optimizer.type='ZeroRedundancyOptimizer' needs "
            "runner_type='FlexibleRunner': mmengine's Runner saves on the first process alone, and "
            'waits there for the parts of the others for ever'
        )
    if cfg.launcher != 'none' and get_device() == 'cpu':
        name = CPUDistributedRunner.__name__
        if cfg.get('runner_type', name) != name:
            fail(f'runner_type={cfg.runner_type!r}: without a GPU, only {name} runs distributed')
        cfg.runner_type = name
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def read_checkpoint(filename: str, strict: bool = False) -> Mapping[str, Any]:
    """Read a checkpoint from anywhere mmengine can read it, or end the program.

    ``strict`` is that of :func:`mmnala.checkpoint.read_checkpoint`.
    """
    try:
        return load_from_untrusted(filename, 'cpu', strict)
    except CheckpointError as error:
        fail(error)
    except OSError as error:
        fail(f'checkpoint {filename}: {type(error).__name__}: {error}')


def claim(out: str | Path, make: bool = True) -> None:
    """Fail unless a folder for results is new or empty; make it, or leave that for later.

    :func:`run` takes away what was made and stayed empty.

    Raises:
        InputError: If there are files in it, or it cannot be made.
    """
    folder = Path(out)
    try:
        if make:
            _made.extend(f.absolute() for f in (folder, *folder.parents) if not f.exists())
            folder.mkdir(parents=True, exist_ok=True)
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise InputError(f'--out {out}: {error}') from error
    if taken:
        raise InputError(
            f'--out {out}: expected a new or empty folder; move what is in it, or choose another'
        )


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
