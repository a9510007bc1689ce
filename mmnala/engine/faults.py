"""What makes a training with any config survive faults, or end with one line about them."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.config import Config
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import CheckpointHook

from .errors import InputError
from .preemption import PreemptionHook
from .safe_checkpoint import SafeCheckpointHook
from .unreadable_image import UnreadableImageHook

# How configs name mmengine's hook.
_STOCK = ('CheckpointHook', 'mmengine.CheckpointHook', CheckpointHook)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# What gloo, NCCL and the store that ranks meet at say of a rank that has gone or does not answer.
_LOST_RANK = re.compile(
    r'gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|clients joined'
    r'|socket (timeout|error)|recvvalue failed|sendbytes failed',
    re.IGNORECASE,
)


def harden(cfg: Config) -> None:
    """Give a config the hooks that guard a training, whichever toolbox it is from.

    mmengine's ``CheckpointHook`` becomes :class:`SafeCheckpointHook`; :class:`PreemptionHook` and
    :class:`UnreadableImageHook` are added unless the config has them.
    """
    cfg.default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1)) | dict(
        cfg.get('default_hooks') or {}
    )
    hooks = cfg.default_hooks
    custom = list(cfg.get('custom_hooks') or [])
    for hook in [*hooks.values(), *custom]:
        if hook and hook.get('type') in _STOCK:
            hook['type'] = SafeCheckpointHook.__name__
    there = [hook.get('type') for hook in custom if isinstance(hook, dict)]
    for added in (UnreadableImageHook, PreemptionHook):
        if added.__name__ not in there and added not in there:
            custom.append(dict(type=added.__name__))
    cfg.custom_hooks = custom
    # The config that a run leaves behind names these hooks.
    imports = (cfg.get('custom_imports') or {}).get('imports') or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    if 'mmnala' not in imports:
        cfg.custom_imports = dict(cfg.get('custom_imports') or {}, imports=[*imports, 'mmnala'])


@contextmanager
def named_faults() -> Iterator[None]:
    """Turn the errors of dead workers, lost ranks and full disks into one-line errors.

    Raises:
        InputError: Instead of them, and instead of a data worker's, whose message has many lines.
    """
    try:
        yield
    except InputError as error:
        raise InputError(_of_worker(str(error))) from error
    except OSError as error:
        if error.errno in _DISK:
            raise InputError(f'{_rank()}writing failed: {error}; {_INTACT}') from error
        if isinstance(error, ConnectionError):
            raise InputError(_lost_rank(error)) from error
        raise
    except RuntimeError as error:
        message = str(error)
        if message.startswith('DataLoader worker (pid'):
            line = ' '.join(message.split()).rstrip('.')
            found = f'{_rank()}a process that loads data died: {line}; {_INTACT}'
            raise InputError(found) from error
        distributed = get_world_size() > 1 or type(error).__name__.startswith('Dist')
        if distributed and _LOST_RANK.search(message):
            raise InputError(_lost_rank(error)) from error
        raise


_INTACT = 'the checkpoints before it are intact, and --resume auto continues from them'


def _of_worker(message: str) -> str:
    if not message.startswith('Caught '):
        return message
    return message.strip().splitlines()[-1].split(': ', 1)[-1]


def _lost_rank(error: Exception) -> str:
    line = str(error).strip().splitlines()[0]
    return (
        f'{_rank()}another rank ended or does not answer, its own output says why '
        f'({type(error).__name__}: {line}); {_INTACT}'
    )


def _rank() -> str:
    return f'rank {get_rank()}: ' if get_world_size() > 1 else ''
