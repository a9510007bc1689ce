"""Which checkpoint an interrupted training goes on from."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmengine.config import Config
from mmengine.dist import all_gather_object, get_world_size

from .errors import InputError
from .safe_checkpoint import LAST_CHECKPOINT

RESUMABLE = {'meta', 'message_hub', 'state_dict'}  # in a checkpoint of an mmengine training


class Resumable(NamedTuple):
    """What :func:`find_resumable` finds."""

    path: str
    checkpoint: Mapping[str, Any]
    damaged: list[str]
    """What is wrong with the newer ones that it had to pass over."""


def find_resumable(cfg: Config, read: Callable[[str], Mapping[str, Any]]) -> Resumable | None:
    """The newest intact checkpoint of a training in ``cfg.work_dir``.

    The file that ``last_checkpoint`` names comes first; where it is damaged or missing, the others
    of its folder and of the work folder that bear the names which the config's checkpoint hook
    gives, by age.

    Args:
        cfg: The config of the training.
        read: Reads a checkpoint, and shows by an OSError, RuntimeError, ValueError or SystemExit
            that it is damaged.

    Returns:
        None where no checkpoint was saved yet.

    Raises:
        InputError: If checkpoints were saved and none of them is intact.
    """
    pointer = Path(cfg.work_dir) / LAST_CHECKPOINT
    named = pointer.read_text(errors='replace').strip() if pointer.is_file() else ''
    # It holds a whole path; in a folder that was copied or moved, the file beside it is meant.
    if named and (beside := pointer.with_name(Path(named).name)).is_file():
        named = str(beside)
    damaged = []
    for path in _candidates(cfg, named):
        try:
            checkpoint = read(path)
            if not checkpoint.keys() >= RESUMABLE:
                raise InputError(f'checkpoint {path}: not one to resume a training from')
        except (OSError, RuntimeError, ValueError, SystemExit) as error:
            damaged.append(' '.join(str(error).removeprefix('error: ').split()))
        else:
            return Resumable(path, checkpoint, damaged)
    if damaged or pointer.is_file():
        found = '; '.join(damaged) or f'{pointer} is empty'
        raise InputError(
            f'--resume auto: no intact checkpoint in {cfg.work_dir}: {found}. '
            f'To train anew, choose another --work-dir or move this one'
        )
    return None


def _candidates(cfg: Config, named: str) -> list[str]:
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    default = 'epoch_{}.pth' if hook.get('by_epoch', True) else 'iter_{}.pth'
    parts = re.split(r'\{[^}]*\}', hook.get('filename_tmpl') or default, maxsplit=1)
    name = re.compile(r'(\d+)'.join(map(re.escape, parts)))
    folders = [Path(cfg.work_dir), *([Path(named).parent] if named else [])]
    if hook.get('out_dir'):
        folders.append(Path(hook['out_dir']) / Path(cfg.work_dir).name)
    files = {}
    for folder in folders:
        for path in folder.glob('*') if folder.is_dir() else ():
            if (match := name.fullmatch(path.name)) and path.is_file():
                files[path.resolve()] = (
                    path.stat().st_mtime_ns,
                    int(match[1]) if name.groups else 0,
                    str(path),
                )
    others = [path for _, _, path in sorted(files.values(), reverse=True)]
    if not named:
        return others
    return [named, *(path for path in others if Path(path).resolve() != Path(named).resolve())]


def check_same(path: str | None) -> None:
    """Fail on every rank unless all ranks found the same checkpoint, or all of them none."""
    if get_world_size() == 1:
        return
    found = all_gather_object(None if path is None else Path(path).name)
    if len(set(found)) > 1:
        ranks = ', '.join(f'rank {rank}: {name}' for rank, name in enumerate(found))
        raise InputError(
            f'--resume auto: the ranks found different checkpoints ({ranks}); '
            'work_dir must be a folder that all machines share'
        )
