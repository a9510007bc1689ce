"""Learning rates that fall from the head to the stem."""

from collections.abc import Callable

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from .errors import InputError

# The backbone's method for each type of decay.
_DEPTHS = {'layer_wise': 'get_layer_depth', 'stage_wise': 'get_stage_depth'}
_KEYS = (
    *('layer_decay_rate', 'decay_type', 'custom_keys', 'bias_lr_mult', 'bias_decay_mult'),
    *('norm_decay_mult', 'flat_decay_mult', 'dwconv_decay_mult', 'dcn_offset_lr_mult'),
    'bypass_duplicate',
)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise or stage-wise learning-rate decay, on top of mmengine's parameter-wise options.

    At depth ``i`` of ``n`` the learning rate is multiplied by ``layer_decay_rate ** (n - 1 - i)``.
    The backbone tells a parameter's depth by ``get_layer_depth(param_name, prefix)``, as those of
    mmpretrain do, or ``get_stage_depth``; what lies outside the backbone keeps the full rate.
    Parameters with the same settings share a group, and frozen ones are in none.

    Args:
        optim_wrapper_cfg (dict): As in mmengine; ``optimizer.lr`` is needed.
        paramwise_cfg (dict): ``layer_decay_rate`` in (0, 1], ``decay_type`` ``'layer_wise'`` (the
            default) or ``'stage_wise'``, and all options of mmengine's default constructor.

    Raises:
        InputError: If an option is unknown, missing or has a value it does not allow, or if the
            model has no such backbone.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        unknown = sorted(set(self.paramwise_cfg) - set(_KEYS))
        if unknown:
            raise InputError(f'paramwise_cfg must have keys of {list(_KEYS)}, got {unknown}')
        self.decay_rate = self.paramwise_cfg.get('layer_decay_rate')
        if type(self.decay_rate) not in (int, float) or not 0 < self.decay_rate <= 1:
            raise InputError(
                f'paramwise_cfg.layer_decay_rate must lie in (0, 1], got {self.decay_rate!r}'
            )
        self.decay_type = self.paramwise_cfg.get('decay_type', 'layer_wise')
        if self.decay_type not in list(_DEPTHS):
            raise InputError(
                f'paramwise_cfg.decay_type must be one of {list(_DEPTHS)}, got {self.decay_type!r}'
            )
        if self.base_lr is None:
            raise InputError('optim_wrapper.optimizer must have an lr for layer decay')

    def add_params(
        self,
        params: list[dict],
        module: nn.Module,
        prefix: str = '',
        is_dcn_module: bool | None = None,
    ) -> None:
        """Add the module's parameters to ``params`` as groups of scaled learning rates."""
        if prefix:  # mmengine descends through the modules by this very method
            super().add_params(params, module, prefix, is_dcn_module)
            return
        single: list[dict] = []
        super().add_params(single, module)
        names = {id(param): name for name, param in module.named_parameters()}
        get_depth, backbone_prefix = self._get_depth(module)

        groups: dict[str, dict] = {}
        for group in single:
            (param,) = group.pop('params')
            depth, num_depths = get_depth(names[id(param)], backbone_prefix)
            # What mmengine has already applied would only keep equal groups apart.
            options = {k: v for k, v in group.items() if k not in ('lr_mult', 'decay_mult')}
            options['lr'] = group.get('lr', self.base_lr) * self.decay_rate ** (
                num_depths - 1 - depth
            )
            if self.base_wd is not None:
                options.setdefault('weight_decay', self.base_wd)
            merged = groups.setdefault(repr(sorted(options.items())), dict(options, params=[]))
            merged['params'].append(param)
        params.extend(groups.values())

        for group in groups.values():
            settings = ', '.join(f'{k}={v}' for k, v in group.items() if k != 'params')
            print_log(
                f'{self.decay_type} decay -- {names[id(group["params"][0])]} and '
                f'{len(group["params"]) - 1} more: {settings}',
                logger='current',
            )

    def _get_depth(self, model: nn.Module) -> tuple[Callable[[str, str], tuple[int, int]], str]:
        backbone = getattr(model, 'backbone', model)
        method = _DEPTHS[self.decay_type]
        if not hasattr(backbone, method):
            raise InputError(
                f'decay_type {self.decay_type!r} needs a backbone with {method}, '
                f'got {type(backbone).__name__}'
            )
        return getattr(backbone, method), '' if backbone is model else 'backbone.'
