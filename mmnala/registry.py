"""Registration with mmengine, and the norm layers that configs name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from mmengine.registry import MODELS, Registry
from torch import nn

Module = TypeVar('Module', bound=type[nn.Module])

# mmcv registers these names too; the table lets the backbone work where mmcv is not installed.
_NORMS: dict[str, type[nn.Module]] = {
    'BN': nn.BatchNorm2d,
    'BN2d': nn.BatchNorm2d,
    'SyncBN': nn.SyncBatchNorm,
}

_MODULES: dict[str, type[nn.Module]] = {}


def register_model(cls: Module) -> Module:
    """Make a class buildable by its name, such as ``type='NaLaFormer'``, in every scope.

    mmengine's root registry serves all scopes by fallback. Only the spelling with a scope inside
    that very scope (``mmdet.NaLaFormer`` in an mmdet config) is looked up in the child alone, so
    each child registry, now or once its toolbox is imported, gets the same entry.
    """
    _MODULES[cls.__name__] = cls
    for registry in (MODELS, *MODELS.children.values()):
        registry.register_module(module=cls, force=True)

    add_child = getattr(MODELS._add_child, 'original', MODELS._add_child)

    def add_child_and_register(registry: Registry) -> None:
        add_child(registry)
        for module in _MODULES.values():
            registry.register_module(module=module, force=True)

    add_child_and_register.original = add_child  # type: ignore[attr-defined]
    MODELS._add_child = add_child_and_register
    return cls


def build_norm(cfg: Mapping[str, Any], channels: int) -> nn.Module:
    """A norm layer over the channels of ``(B, C, H, W)``.

    Args:
        cfg: ``type`` (``'BN'``, ``'SyncBN'``, ``'GN'``, or any norm in mmengine's registry), the
            layer's own options, and optionally ``requires_grad``.
        channels: Number of channels.

    Raises:
        ValueError: If ``cfg`` is no dict, or its ``type`` is missing or unknown.
    """
    if not isinstance(cfg, Mapping):
        raise ValueError(f'norm_cfg must be a dict, got {cfg!r}')
    options = dict(cfg)
    name = options.pop('type', None)
    requires_grad = options.pop('requires_grad', True)
    if name == 'GN':
        norm: nn.Module = nn.GroupNorm(num_channels=channels, **options)
    else:
        layer = _NORMS.get(name) or (MODELS.get(name) if isinstance(name, str) else None)
        if layer is None:
            raise ValueError(
                f'norm_cfg must have a type of {[*_NORMS, "GN"]} or a registered norm, got {cfg}'
            )
        norm = layer(channels, **options)
    norm.requires_grad_(requires_grad)
    return norm
