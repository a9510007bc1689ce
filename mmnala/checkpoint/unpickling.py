"""Unpickling as a format for data: tensors, arrays, containers and mmengine's logs, and no calls.

Whoever writes a pickle chooses which functions its reader calls. Here a name that is not in the
tables of this module is never looked up, and what is in them takes memory for no more than the file
can hold.
"""

import io
import math
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from torch import Tensor

# A few bytes can put a container into others any number of times, and whatever walks through it,
# such as printing, would need the time or the stack.
MAX_DEPTH, MAX_ENTRIES = 64, 10_000_000

# Methods that objects of mmengine keep among their data.
_METHODS: dict[Any, tuple[str, ...]] = {
    HistoryBuffer: ('min', 'max', 'current', 'mean'),
    OneCycleParamScheduler: ('_annealing_cos', '_annealing_linear'),
}


class Inert:
    """Stands for an object of a type that is not known: takes all, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> 'Inert':
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    __setstate__ = append = extend = __call__


_KNOWN: dict[tuple[str, str], Any] = {
    ('torch', 'Size'): torch.Size,
    ('torch', 'device'): torch.device,
    ('torch._utils', '_rebuild_parameter'): torch._utils._rebuild_parameter,
    ('numpy', 'ndarray'): Inert,  # only an argument of _reconstruct
    ('mmengine.logging.history_buffer', 'HistoryBuffer'): HistoryBuffer,
    ('mmengine.optim.scheduler.param_scheduler', 'OneCycleParamScheduler'): OneCycleParamScheduler,
}
# The methods of _Unpickler that build the others.
_BUILT = {
    ('collections', 'OrderedDict'): 'ordered_dict',
    ('collections', 'Counter'): 'counter',
    ('torch._utils', '_rebuild_tensor_v2'): 'tensor',
    ('_codecs', 'encode'): 'encode',
    ('builtins', 'getattr'): 'method',
    ('numpy', 'dtype'): 'dtype',
    ('numpy.core.multiarray', '_reconstruct'): 'array',  # NumPy 1
    ('numpy.core.multiarray', 'scalar'): 'scalar',
    ('numpy._core.multiarray', '_reconstruct'): 'array',  # NumPy 2
    ('numpy._core.multiarray', 'scalar'): 'scalar',
    ('mmengine.config.config', 'ConfigDict'): 'plain_dict',
}


def _key(value: Any) -> Any:
    """A dict's key: the hash of nested tuples recurses in C, and too deep it ends the process."""
    if isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
        raise pickle.UnpicklingError('nested tuples as a key')
    return value


# The one in C allocates as many memo entries as a damaged file asks for, gigabytes of them, and
# lets nobody look at keys and states.
class _Unpickler(pickle._Unpickler):
    """Builds what is known; any other name becomes :class:`Inert`.

    Attributes:
        size: Bytes of the file. What is built has at most four times as many elements: tensors may
            share storages.
        unknown: The names that became inert.
    """

    size: int
    unknown: set[str]
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, **kwargs: Any) -> None:
        super().__init__(file, **kwargs)
        self.spent = 0
        self.storages: set[Any] = set()

    def spend(self, elements: int) -> None:
        # Without a count, one object in the file could be copied again and again.
        self.spent += elements
        if not 0 <= elements <= self.spent <= 4 * self.size:
            raise pickle.UnpicklingError('its content is larger than the file')

    def find_class(self, module: str, name: str) -> Any:
        module = {'__builtin__': 'builtins'}.get(module, module)
        if (module, name) in _BUILT:
            return getattr(self, _BUILT[module, name])
        if module == 'torch' and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        return self.inert(f'{module}.{name}')

    def inert(self, name: str) -> type[Inert]:
        self.unknown.add(name)
        return Inert

    def ordered_dict(self, pairs: Any = ()) -> OrderedDict:
        self.spend(len(pairs))
        return OrderedDict((_key(key), value) for key, value in pairs)

    def counter(self, counts: dict) -> Counter:
        self.spend(len(counts))
        return Counter(dict(counts))

    def plain_dict(self, content: dict) -> dict:
        # Its class would convert what lies in it, as often as the file says so.
        return content

    def tensor(self, *args: Any) -> Tensor:
        tensor = torch._utils._rebuild_tensor_v2(*args)
        self.spend(tensor.numel())  # one element of a storage can be stretched to any shape
        return tensor

    def encode(self, text: str, encoding: str) -> bytes:
        """How protocol 2 writes bytes."""
        if encoding != 'latin1':
            raise pickle.UnpicklingError(f'text encoded as {encoding!r}')
        self.spend(len(text))
        return text.encode('latin1')

    def method(self, owner: Any, name: str) -> Any:
        if isinstance(owner, type) and name in _METHODS.get(owner, ()):
            return getattr(owner, name)
        return self.inert(f'{getattr(owner, "__name__", "object")}.{name}')()

    def dtype(self, code: str, *_: Any) -> Any:
        if re.fullmatch(r'[?biufc]\d{0,2}', code):
            return np.dtype(code)
        return self.inert(f'numpy.dtype({code!r})')()

    def array(self, *_: Any) -> np.ndarray:
        return np.empty(0, np.int8)  # its state, which follows, has shape and type

    def scalar(self, dtype: Any, data: bytes) -> Any:
        if isinstance(dtype, Inert):
            return dtype
        (value,) = np.frombuffer(data, dtype)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == 'persistent_load':  # torch's, which allocates what a damaged file asks for
            value = self.bounded(value)
        super().__setattr__(name, value)

    def bounded(self, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def load_bounded(saved_id: Any) -> Any:
            if saved_id[0] == 'module':
                return saved_id[1]  # torch would compare its source with the installed one
            if saved_id[0] == 'storage':
                if not 0 <= saved_id[4] <= self.size:
                    raise pickle.UnpicklingError('a tensor is larger than the file')
                if _key(saved_id[2]) not in self.storages:
                    self.storages.add(saved_id[2])
                    self.spend(saved_id[4])
            return load(saved_id)

        return load_bounded

    def set_state(self, found: Any, state: Any) -> None:
        """What an object's own ``__setstate__`` or ``__dict__`` would take, of the known ones."""
        if isinstance(found, Inert):
            pass
        elif isinstance(found, OrderedDict):  # of a state_dict, the versions of its modules
            versions = state.get('_metadata')
            if isinstance(versions, dict) and all(isinstance(v, dict) for v in versions.values()):
                found._metadata = versions  # type: ignore[attr-defined]
        elif isinstance(found, HistoryBuffer):
            logs, counts = state['_log_history'], state['_count_history']
            if not all(isinstance(x, np.ndarray) and x.ndim == 1 for x in (logs, counts)):
                raise pickle.UnpicklingError('a HistoryBuffer without arrays')
            # Without its statistics, which are the class's, and so those of all buffers.
            own = dict(max_length=state['max_length'], _log_history=logs, _count_history=counts)
            found.__setstate__(own)
        elif isinstance(found, np.dtype):
            if not found.newbyteorder(state[1]).isnative:
                raise pickle.UnpicklingError('an array in the byte order of another machine')
        elif isinstance(found, np.ndarray):
            _, shape, dtype, is_fortran, data = state
            if isinstance(dtype, Inert):
                return
            if (
                not isinstance(dtype, np.dtype)
                or not isinstance(data, bytes)
                or not all(type(side) is int and side >= 0 for side in shape)
                or len(data) != math.prod(shape) * dtype.itemsize
            ):
                raise pickle.UnpicklingError('an array whose size is not that of its data')
            self.spend(len(data))
            found.__setstate__((1, tuple(shape), dtype, bool(is_fortran), data))  # type: ignore[arg-type]
        else:
            raise pickle.UnpicklingError(f'a state of a {type(found).__name__}')

    def load_build(self) -> None:
        state = self.stack.pop()
        self.set_state(self.stack[-1], state)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack[-1]
        # Their constructors do more than to hold data.
        if isinstance(function, type) and function in _METHODS:
            raise pickle.UnpicklingError(f'a call of {function.__name__}')
        self.stack[-1] = function(*args)

    def load_dict(self) -> None:
        items = self.pop_mark()
        pairs = zip(items[::2], items[1::2], strict=True)
        self.append({_key(key): value for key, value in pairs})

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_key(key)] = value

    def refuse(self) -> None:
        raise pickle.UnpicklingError('a set or a buffer')

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: load_reduce,
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        # These hash what lies in them, or allocate before they read.
        pickle.ADDITEMS[0]: refuse,
        pickle.FROZENSET[0]: refuse,
        pickle.BYTEARRAY8[0]: refuse,
        pickle.NEXT_BUFFER[0]: refuse,
    }


def pickle_module(size: int) -> Any:
    """What stands in for :mod:`pickle` in :func:`torch.load`, for one file of ``size`` bytes.

    Its ``unknown`` are the names in the file that became :class:`Inert`.
    """
    unknown: set[str] = set()
    unpickler = type('Unpickler', (_Unpickler,), dict(size=size, unknown=unknown))
    return SimpleNamespace(
        __name__='known types only',
        Unpickler=unpickler,
        load=lambda file, **kwargs: unpickler(file, **kwargs).load(),
        unknown=unknown,
    )


def unpickle(file: BinaryIO) -> Any:
    """Read a pickle of numbers, texts, NumPy arrays and containers.

    Raises:
        pickle.UnpicklingError: If it is damaged or has anything else.
    """
    data = file.read()
    module = pickle_module(len(data))
    try:
        content = module.load(io.BytesIO(data))
        check_nesting(content)
    except Exception as error:  # as many kinds as there are kinds of damage
        raise pickle.UnpicklingError(f'{type(error).__name__}: {error}') from error
    if module.unknown:
        raise pickle.UnpicklingError(f'it holds {", ".join(sorted(module.unknown))}')
    return content


def check_nesting(content: Any) -> None:
    """Fail for containers that nothing can walk through.

    Raises:
        pickle.UnpicklingError: If they lie in each other deeper than :data:`MAX_DEPTH`, or have
            more than :data:`MAX_ENTRIES`, counted as often as a walk would meet them.
    """
    level: list[Any] = [[content]]
    entries = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for found in level:
            items = found.values() if isinstance(found, Mapping) else found
            entries += len(items)
            if entries > MAX_ENTRIES:
                raise pickle.UnpicklingError(f'more than {MAX_ENTRIES} entries in containers')
            below += [item for item in items if isinstance(item, dict | list | tuple)]
        level = below
    if level:
        raise pickle.UnpicklingError(f'containers in each other, more than {MAX_DEPTH} deep')
