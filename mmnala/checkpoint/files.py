"""Reading checkpoints as untrusted files, from disk or the net, and writing them whole."""

import hashlib
import io
import json
import os
import pickle
import re
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any, BinaryIO
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.hub import HASH_REGEX, download_url_to_file, get_dir

from .unpickling import check_nesting, pickle_module

ENDINGS = ('.pth', '.safetensors')
# Digits alone may be a date or a counter: of a name that nobody served, they are no hash.
_LOCAL_HASH = re.compile(r'-(?=[0-9]*[a-f])([0-9a-f]{8,})\.')


class CheckpointError(RuntimeError):
    """A file that is no checkpoint, or none of this model; the message is one line."""


def read_checkpoint(
    path: str | os.PathLike, map_location: Any = 'cpu', strict: bool = False
) -> dict[str, Any]:
    """Read a ``.safetensors`` or a torch checkpoint without executing pickled code.

    Args:
        path: A local file, whatever its name; safetensors are recognised by their ending.
        map_location: As in :func:`torch.load`.
        strict: Whether objects of other types than those of :mod:`mmnala.checkpoint.unpickling` are
            an error. Resuming a training needs all that is in the file, using its weights does not.

    Returns:
        The file's top-level dict. Objects of other types are replaced by inert stand-ins. Of
        safetensors it is the tensors by name or, if :func:`pack_checkpoint` wrote ``meta`` with
        them, the dict of ``state_dict`` and ``meta``.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: A RuntimeError: the file is truncated, damaged or no checkpoint, or has
            what ``strict`` excludes.
    """
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'checkpoint must be an existing file, got {path!r}')
    module = pickle_module(os.path.getsize(path))
    try:
        if path.endswith('.safetensors'):
            return _read_safetensors(path, str(map_location or 'cpu'))
        _check_archive(path)
        content = torch.load(
            path, map_location=map_location, pickle_module=module, weights_only=False
        )
        check_nesting(content)
    # Damaged bytes surface as almost any exception, depending on where the damage lies.
    except (Exception, SafetensorError) as error:
        message = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise CheckpointError(
            f'checkpoint {path!r} is truncated or no checkpoint: {message}'
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f'checkpoint {path!r}: expected a dict with weights, it holds a '
            f'{type(content).__name__}'
        )
    if strict and module.unknown:
        raise CheckpointError(
            f'checkpoint {path!r} holds objects that are not read from untrusted files: '
            f'{", ".join(sorted(module.unknown))}'
        )
    return content


def _check_archive(path: str) -> None:
    """Fail for what :func:`torch.load` passes over, or would need memory or a folder for."""
    with open(path, 'rb') as file:
        is_zip = file.read(4) == b'PK\x03\x04'  # as torch tells it, which reads no other as one
    if not is_zip:
        if tarfile.is_tarfile(path):
            raise pickle.UnpicklingError('the tar format of torch before 0.1.10 is not read')
        return
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if any(part.filename.endswith('/constants.pkl') for part in parts):
            raise pickle.UnpicklingError('a TorchScript archive holds code, not only weights')
        if sum(part.file_size for part in parts) > os.path.getsize(path):
            raise pickle.UnpicklingError('its parts are larger than the file')
        if damaged := archive.testzip():
            raise pickle.UnpicklingError(f'its part {damaged} is damaged (wrong checksum)')


def _read_safetensors(path: str, device: str) -> dict[str, Any]:
    state: dict[str, Any] = load_file(path, device=device)
    with safe_open(path, 'pt') as file:
        text = (file.metadata() or {}).get('meta', '')
    try:
        meta = json.loads(text)
    except ValueError:
        return state  # another program's
    return {'state_dict': state, 'meta': meta} if isinstance(meta, dict) else state


def local_file(checkpoint: str) -> str:
    """The local file of a path or URL, downloaded unless it is in torch.hub's cache.

    Raises:
        CheckpointError: If it cannot be downloaded, or is not the file whose hash it has in its
            name.
    """
    url = urlparse(checkpoint)
    if url.scheme in ('http', 'https'):
        return _download(checkpoint, os.path.basename(url.path))
    is_url = url.scheme == 'file'
    path = url2pathname(url.path) if is_url else os.path.expanduser(checkpoint)
    match = (HASH_REGEX if is_url else _LOCAL_HASH).search(os.path.basename(path))
    if match and os.path.isfile(path):
        with open(path, 'rb') as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        if not digest.startswith(match[1]):
            raise CheckpointError(
                f'checkpoint {checkpoint!r}: invalid hash value '
                f'(expected "{match[1]}", got "{digest}")'
            )
    return path


def _download(url: str, name: str) -> str:
    folder = os.path.join(get_dir(), 'checkpoints')
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        match = HASH_REGEX.search(name)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            part = os.path.join(temporary, name)
            try:
                download_url_to_file(url, part, match.group(1) if match else None)
                read_checkpoint(part)  # torch.hub takes a broken connection for the file's end
            except (OSError, HTTPException, RuntimeError) as error:
                message = str(error).replace(part, url)
                raise CheckpointError(f'checkpoint {url!r}, downloading: {message}') from error
            os.replace(part, path)
    return path


def check_target(path: str | os.PathLike) -> None:
    """Fail unless ``path`` can become a new checkpoint.

    Raises:
        OSError: If it exists already, or its folder does not.
        ValueError: If it does not end in ``.pth`` or ``.safetensors``.
    """
    path = os.fspath(path)
    if not path.endswith(ENDINGS):
        raise ValueError(f'{path}: expected a name ending in {" or ".join(ENDINGS)}')
    if not os.path.isdir(os.path.dirname(path) or '.'):
        raise FileNotFoundError(f'{path}: there is no such folder')
    _check_new(path)


def pack_checkpoint(
    state: Mapping[str, Tensor], path: str | os.PathLike, key: str, meta: Mapping | None = None
) -> bytes:
    """The bytes of a checkpoint, in the format that the ending of ``path`` names.

    Args:
        state: The weights; views and shared storages become tensors of their own.
        path: Ends in ``.pth``: a dict of the weights under ``key`` and of ``meta``, which
            ``torch.load(weights_only=True)`` reads if ``meta`` holds builtin values; or in
            ``.safetensors``: the weights alone, and ``meta`` as JSON in the file's metadata.
        key: Where loaders look for the weights, ``'state_dict'`` or ``'model'``.
        meta: What else is needed to use them.

    Raises:
        RuntimeError: If the format cannot hold the weights.
    """
    state = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
    }
    if os.fspath(path).endswith('.safetensors'):
        extra = {} if meta is None else {'meta': json.dumps(meta)}
        try:
            return save(state, metadata={'format': 'pt', **extra})
        except SafetensorError as error:
            raise RuntimeError(f'{path}: {error}') from error
    content: dict[str, Any] = {key: state} if meta is None else {key: state, 'meta': dict(meta)}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write_new(path: str | os.PathLike, data: bytes) -> None:
    """Write a new file, whole or not at all.

    Raises:
        OSError: If it exists already or cannot be written.
    """
    with new_file(path) as file:
        file.write(data)


@contextmanager
def new_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A new file to write, which takes its name when it is complete and flushed to disk.

    Raises:
        OSError: If it exists already or cannot be written.
    """
    path = os.fspath(path)
    part = os.path.join(os.path.dirname(path), f'.{uuid.uuid4().hex}.partial')
    try:
        with open(part, 'xb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _check_new(path)
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def _check_new(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f'{path} exists already; move it or choose another name')
