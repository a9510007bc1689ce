"""NaLaFormer for OpenMMLab: ``custom_imports = dict(imports=['mmnala'])`` registers everything."""

from importlib.util import find_spec

from .version import __version__

if find_spec('mmengine') is None:
    raise ModuleNotFoundError(
        'mmnala needs mmengine, which is not installed. Install one OpenMMLab family: '
        "pip install 'mmnala[onedl]' (maintained continuation) or "
        "pip install 'mmnala[openmmlab]' (original packages)",
        name='mmengine',
    )

from . import engine, timm_models
from .backbones import NaLaFormer
from .necks import NaLaFormerNeck

__all__ = ['NaLaFormer', 'NaLaFormerNeck', '__version__', 'engine', 'timm_models']
