"""Strategies that damage real files, and running a tool on them.

By hand, with many examples:

    pytest tests/fuzz --hypothesis-profile=thorough
"""

import contextlib
import copy
import gc
import io
import resource
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

TOOLS = Path(__file__).parents[2] / 'tools'
gc.freeze()  # the toolboxes' modules, so that collecting is fast
SECONDS, MEBIBYTES = 60, 400  # of one example, and by which the process may grow


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes of a file with bits flipped, parts cut off, copied, removed or made up."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        spot = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 64))
        match draw(st.sampled_from(['flip', 'cut', 'copy', 'remove', 'replace', 'insert'])):
            case 'flip' if data:
                data[spot] ^= 1 << draw(st.integers(0, 7))
            case 'cut':
                del data[spot:]
            case 'copy':
                target = draw(st.integers(0, len(data)))
                data[target:target] = data[spot : spot + length]
            case 'remove':
                del data[spot : spot + length]
            case 'replace':
                data[spot : spot + length] = draw(st.binary(max_size=length))
            case 'insert':
                data[spot:spot] = draw(st.binary(max_size=length))
    return bytes(data)


NUMBERS = st.integers(-3, 300) | st.sampled_from([2**31, 2**63, -(2**63), 10**40, 1e308, 0.5])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, tree: Any, values: st.SearchStrategy = VALUES) -> Any:
    """A JSON tree of which entries are replaced, removed, renamed or doubled."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        spots = list(_spots(tree))
        if not spots:
            break
        parent, key = draw(st.sampled_from(spots))
        match draw(st.sampled_from(['replace', 'remove', 'rename', 'double', 'borrow'])):
            case 'replace':
                parent[key] = draw(values)
            case 'remove':
                del parent[key]
            case 'rename' if isinstance(parent, dict):
                parent[draw(st.text(max_size=5))] = parent.pop(key)
            case 'double' if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[key]))
            case 'borrow':
                other, name = draw(st.sampled_from(spots))
                if isinstance(other, dict) and name in other:
                    parent[key] = copy.deepcopy(other[name])
    return tree


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _spots(value)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail where the block takes too long, or the process grows by more than it may."""
    gc.collect()  # what the examples before left behind in cycles

    def stop(*_: object) -> None:
        raise AssertionError(f'it takes more than {SECONDS} seconds')

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEBIBYTES, f'it takes {grown:.0f} MiB'


def run_script(script: str, *arguments: object) -> tuple[Any, str]:
    """What a script of ``tools`` ends with (None: nothing said) and what it prints."""
    path, output = str(TOOLS / script), io.StringIO()
    with (
        patch.object(sys, 'argv', [path, *map(str, arguments)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        bounded(),
    ):
        try:
            runpy.run_path(path, run_name='__main__')
        except SystemExit as ended:
            return ended.code, output.getvalue()
    return None, output.getvalue()


def is_one_line(ended: Any) -> bool:
    return isinstance(ended, str) and ended.startswith('error: ') and len(ended.splitlines()) == 1
