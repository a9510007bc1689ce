"""Files that are whole at any moment, for mmengine's file backends."""

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

_PARTIAL = re.compile(r'\.[0-9a-f]{32}\.partial')


@register_backend('whole', force=True)
class WholeFileBackend(LocalBackend):
    """mmengine's local files, each of them written whole or not at all, and flushed to disk."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        os.makedirs(os.path.dirname(filepath) or '.', exist_ok=True)
        write_whole(filepath, obj)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        self.put(obj.encode(encoding), filepath)


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file, in place of one that is there, and flush it and its name to disk.

    Raises:
        OSError: If it cannot be written; the one that was there stays. It names ``path``.
    """
    folder = os.path.dirname(path) or '.'
    part = os.path.join(folder, f'.{uuid.uuid4().hex}.partial')
    try:
        with open(part, 'xb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
    with suppress(OSError):  # not every file system can do it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_partial(folder: str | Path) -> None:
    """Remove what killed programs were writing into a folder that no other one writes into."""
    for path in Path(folder).glob('.*.partial'):
        if _PARTIAL.fullmatch(path.name):
            path.unlink()
