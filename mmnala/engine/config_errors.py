"""What a config got wrong, told from the errors of those who build from it."""

import difflib
import inspect
import re
from collections.abc import Iterable
from typing import Any

from mmengine.registry import Registry, build_from_cfg

_WRONG_TYPE = r'missing \d+ required|^(cfg|type) (should|must) be a|is not a callable object'


def config_error(error: Exception) -> str | None:
    """What in a config made a toolbox fail, if its own error is about that."""
    text = str(error.args[0]) if error.args else ''
    # mmengine packs the list of images and does not expect an empty one.
    if text == 'need at least one array to concatenate':
        return 'a dataset of the config is empty: check its data_root, prefixes, suffixes, ann_file'
    built = _innermost_build(error)
    if isinstance(error, KeyError) and (
        match := re.match(r"'?(.+?) is not in the (\S+) reg", text)
    ):
        name, registry = match[1], built.get('registry')
        known = _names(registry) if isinstance(registry, Registry) else []
        return f'config: type={name!r} is not in the registry {match[2]}{alike(name, known)}'
    if isinstance(error, KeyError) and 'must contain the key "type"' in text:
        return f'config: a part has no type: {" ".join(text.partition("but got")[2].split())}'
    if isinstance(error, TypeError) and (
        match := re.search(r"(?:unexpected keyword|multiple values for) argument '(\w+)'", text)
    ):
        known = _arguments(built.get('obj_cls'))
        return f'config: {text.strip()}{alike(match[1], known)}'
    if isinstance(error, TypeError) and re.search(_WRONG_TYPE, text):
        return f'config: {text.strip()}'
    return None


def _innermost_build(error: Exception) -> dict[str, Any]:
    """The variables of mmengine's function that was building something last."""
    found: dict[str, Any] = {}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is build_from_cfg.__code__:
            found = trace.tb_frame.f_locals
        trace = trace.tb_next
    return found


def _names(registry: Registry) -> list[str]:
    return [*registry.module_dict, *(registry.parent.module_dict if registry.parent else ())]


def _arguments(built: Any) -> list[str]:
    """The named arguments of a class, those that it hands on to its bases included."""
    functions = (
        [vars(c).get('__init__') for c in inspect.getmro(built)]
        if inspect.isclass(built)
        else [built]
    )
    parameters = [
        parameter
        for function in functions
        if inspect.isfunction(function)
        for parameter in inspect.signature(function).parameters.values()
    ]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return list(dict.fromkeys(p.name for p in parameters if p.kind in plain and p.name != 'self'))


def alike(name: str, known: Iterable[str]) -> str:
    """The end of a message: what may have been meant."""
    found = difflib.get_close_matches(name, known)
    return f'; did you mean {" or ".join(found)}?' if found else ''
