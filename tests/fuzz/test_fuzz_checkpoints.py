"""Whatever the bytes of a checkpoint are, the converter takes it or says one line."""

import contextlib
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from conftest import Golden
from hypothesis import given
from hypothesis import strategies as st
from mmengine.logging import HistoryBuffer
from mutations import bounded, damaged, is_one_line, run_script
from safetensors.torch import save

from mmnala.checkpoint import unpickling
from mmnala.checkpoint.unpickling import unpickle


def contents() -> dict[str, bytes]:
    state = Golden('nalaformer_micro').under('state.')
    logs = OrderedDict(loss=HistoryBuffer([1.0], [1]))
    training = dict(state_dict=OrderedDict(state), message_hub=dict(log_scalars=logs), meta={})
    files = {'model.safetensors': save(state)}
    for name, content in (('release', dict(model=state)), ('training', training)):
        for ending, zipped in (('pth', True), ('old.pth', False)):
            buffer = io.BytesIO()
            torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
            files[f'{name}.{ending}'] = buffer.getvalue()
    return files


FILES = contents()


def convert(folder: Path, name: str, data: bytes, layout: str) -> None:
    source, target = folder / name, folder / f'out{Path(name).suffix}'
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    ended, _ = run_script('convert_checkpoint.py', source, target, '--to', layout)
    assert target.exists() if ended is None else is_one_line(ended)
    assert {path.name for path in folder.iterdir()} <= {source.name, target.name}


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('fuzz')


LAYOUTS = st.sampled_from(['release', 'backbone', 'classifier'])


@pytest.mark.parametrize('name', FILES)
def test_damaged_bytes(folder, name):
    @given(damaged(FILES[name]), LAYOUTS)
    def check(data: bytes, layout: str) -> None:
        convert(folder, name, data, layout)

    check()
    (folder / name).unlink()
    for path in folder.glob('out*'):
        path.unlink()


@pytest.mark.parametrize('name', ['release.pth', 'training.pth'])
def test_damaged_pickles_in_archives_with_right_checksums(folder, name):
    with zipfile.ZipFile(io.BytesIO(FILES[name])) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    (pickled,) = [part for part in parts if part.endswith('data.pkl')]

    @given(damaged(parts[pickled]), LAYOUTS)
    def check(data: bytes, layout: str) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, 'w') as archive:
            for part, content in (parts | {pickled: data}).items():
                archive.writestr(part, content)
        convert(folder, name, buffer.getvalue(), layout)

    check()
    (folder / name).unlink()
    for path in folder.glob('out*'):
        path.unlink()


def operations() -> st.SearchStrategy[bytes]:
    """A pickle's next step: values, containers, known and unknown names, calls."""
    names = [*unpickling._KNOWN, *unpickling._BUILT, ('os', 'getpid'), ('builtins', 'exec')]
    plain = b'(}])NKl0123tRbOsu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98aed.'
    return st.one_of(
        st.sampled_from([bytes([code]) for code in plain]),
        st.sampled_from([f'c{module}\n{name}\n'.encode() for module, name in names]),
        st.binary(min_size=1, max_size=1).map(lambda number: b'K' + number),
        st.integers(0, 9).flatmap(lambda i: st.sampled_from([b'q%c' % i, b'h%c' % i])),
        st.sampled_from([b'X\x06\0\0\0latin1', b'X\x02\0\0\0f8', b'C\x02ab', b'G' + b'\x40' * 8]),
    )


@given(st.lists(operations(), max_size=40).map(b''.join))
def test_any_program_of_a_pickle(program):
    with bounded(), contextlib.suppress(pickle.UnpicklingError):
        unpickle(io.BytesIO(b'\x80\x02' + program + b'.'))
