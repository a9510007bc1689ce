"""NaLaFormer, a hierarchical backbone with norm-aware linear attention.

"Norm x Direction: Restoring the Missing Query Norm in Vision Linear Attention", ICML 2026,
arXiv 2506.21137. Computes what the public ImageNet release computes; new here are the ``cosine``
feature map of the paper, the freedom to choose each stage's attention, and the interface of an
OpenMMLab backbone. Feature maps travel as ``(B, H, W, C)`` between stem and output, so linear
layers and norms need no layout change and convolutions see channels-last memory.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..checkpoint import load_pretrained
from ..ops import (
    ATTN_IMPLS,
    FEATURE_MAPS,
    apply_rotary,
    cached_rotary_table,
    is_traced,
    nala_attention,
)
from ..registry import build_norm, register_model

Rotary = tuple[Tensor, Tensor]

STAGE_ATTENTIONS = ('nala', 'softmax')

ARCHS: dict[str, dict[str, Any]] = {
    'xt': dict(
        channels=(32, 64, 128, 384),
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 12),
        mlp_ratio=3.5,
        layer_scale_init=1.0,
        drop_path_rate=0.1,
    ),
    't': dict(
        channels=(64, 128, 256, 512),
        depths=(2, 2, 6, 2),
        num_heads=(1, 2, 4, 8),
        mlp_ratio=4.0,
        layer_scale_init=1.0,
        drop_path_rate=0.1,
    ),
    's': dict(
        channels=(64, 128, 320, 512),
        depths=(3, 5, 9, 3),
        num_heads=(1, 2, 5, 8),
        mlp_ratio=3.5,
        layer_scale_init=1.0,
        drop_path_rate=0.15,
    ),
    'b': dict(
        channels=(96, 192, 384, 512),
        depths=(4, 6, 12, 6),
        num_heads=(1, 2, 6, 8),
        mlp_ratio=4.0,
        layer_scale_init=(1.0, 1.0, 1e-6, 1e-6),
        drop_path_rate=0.4,
    ),
    'l': dict(
        channels=(96, 192, 448, 640),
        depths=(4, 7, 19, 8),
        num_heads=(1, 2, 7, 10),
        mlp_ratio=3.5,
        layer_scale_init=1e-6,
        drop_path_rate=0.55,
    ),
}
ARCH_WORDS = {'xtiny': 'xt', 'tiny': 't', 'small': 's', 'base': 'b', 'large': 'l'}


class Conv2dNHWC(nn.Conv2d):
    """A convolution of ``(B, H, W, C)`` tensors; the layout change is free, only strides move."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def depthwise(channels: int, kernel_size: int) -> Conv2dNHWC:
    return Conv2dNHWC(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)


class Stem(nn.Module):
    """Image ``(B, in_channels, H, W)`` to ``(B, C, ceil(H / 4), ceil(W / 4))``."""

    def __init__(self, in_channels: int, channels: int, norm_cfg: Mapping[str, Any]) -> None:
        super().__init__()
        half = channels // 2
        layers: list[nn.Module] = []
        for c_in, c_out, stride in (
            (in_channels, half, 2),
            (half, half, 1),
            (half, half, 1),
            (half, channels, 2),
        ):
            layers += [
                nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1),
                build_norm(norm_cfg, c_out),
                nn.GELU(),
            ]
        self.proj = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Downsample(nn.Module):
    """``(B, C, H, W)`` to ``(B, C', ceil(H / 2), ceil(W / 2))`` between two stages."""

    def __init__(self, in_channels: int, out_channels: int, norm_cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.reduction = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1)
        self.norm = build_norm(norm_cfg, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.reduction(x))


def _keeps_inputs_only(x: Tensor) -> bool:
    """Whether to compute what cheap layers pass on to a linear layer again in the backward pass.

    It saves a third of the memory of training for 4 % of its time; the linear layer, being the
    last, is not run again. Compilers choose by themselves what to keep, and torch 2.4 cannot do it
    on the meta device, where nothing is kept.
    """
    return torch.is_grad_enabled() and not x.is_meta and not is_traced()


RECOMPUTED: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)


class GatedAttention(nn.Module):
    """Attention of either kind with a local enhancement of the values and an output gate."""

    def __init__(
        self, channels: int, num_heads: int, attention: str, feature_map: str, attn_impl: str
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.feature_map = feature_map
        self.attn_impl = attn_impl
        self.qkvg = nn.Linear(channels, 4 * channels)
        self.lepe = depthwise(channels, 5)
        self.ln = nn.LayerNorm(channels)
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """``(B, H, W, C)`` to the same shape; ``rotary`` as in :func:`~mmnala.ops.rotary_table`."""
        query, key, value, gate = self.qkvg(x).chunk(4, dim=-1)
        heads = self.lepe(value).add_(self._attend(query, key, value, rotary))
        if _keeps_inputs_only(x):
            return checkpoint(self._project, heads, gate, **RECOMPUTED)
        return self._project(heads, gate)

    def _project(self, heads: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj(self.ln(heads) * F.silu(gate))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
        shape = value.shape
        query, key, value = (self._split_heads(x) for x in (query, key, value))
        if self.attention == 'nala':
            heads = nala_attention(query, key, value, rotary, self.feature_map, self.attn_impl)
        else:
            query, key = (apply_rotary(x, rotary).to(value.dtype) for x in (query, key))
            heads = F.scaled_dot_product_attention(query, key, value)
        return heads.transpose(1, 2).reshape(shape)

    def _split_heads(self, x: Tensor) -> Tensor:
        """``(B, H, W, C)`` to ``(B, heads, H * W, C / heads)``."""
        return x.flatten(1, 2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers around a depthwise convolution with a shortcut."""

    def __init__(self, channels: int, mlp_ratio: float) -> None:
        super().__init__()
        hidden = int(channels * mlp_ratio)
        self.fc1 = nn.Linear(channels, hidden)
        self.dwconv = depthwise(hidden, 3)
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        if _keeps_inputs_only(x):
            return checkpoint(self._project, self.fc1(x), **RECOMPUTED)
        return self._project(self.fc1(x))

    def _project(self, x: Tensor) -> Tensor:
        x = F.gelu(x)
        return self.fc2(self.dwconv(x).add_(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a depthwise positional convolution."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        mlp_ratio: float,
        attention: str,
        feature_map: str,
        attn_impl: str,
        drop_path: float,
        layer_scale_init: float,
    ) -> None:
        super().__init__()
        self.cpe1 = depthwise(channels, 3)
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.attn = GatedAttention(channels, num_heads, attention, feature_map, attn_impl)
        self.gamma_1 = nn.Parameter(torch.full((channels,), float(layer_scale_init)))
        self.cpe2 = depthwise(channels, 3)
        self.norm2 = nn.LayerNorm(channels, eps=1e-6)
        self.ffn = FeedForward(channels, mlp_ratio)
        self.gamma_2 = nn.Parameter(torch.full((channels,), float(layer_scale_init)))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.cpe1(x)
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), rotary))
        x = x + self.cpe2(x)
        return x + self.drop_path(self.gamma_2 * self.ffn(self.norm2(x)))


class Stage(nn.Module):
    """Blocks at one resolution, and the downsampling to the next (absent after the last)."""

    def __init__(self, blocks: list[Block], head_dim: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor, with_cp: bool = False) -> tuple[Tensor, Tensor]:
        """``(B, C, H, W)`` to the stage's output, of the same shape, and the next stage's input."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        height, width = x.shape[2:]
        rotary = cached_rotary_table(height, width, self.head_dim, x.device, dtype)
        x = x.permute(0, 2, 3, 1)
        for block in self.blocks:
            if with_cp and torch.is_grad_enabled():
                x = checkpoint(block, x, rotary, use_reentrant=False)
            else:
                x = block(x, rotary)
        x = x.permute(0, 3, 1, 2)
        return x, x if self.downsample is None else self.downsample(x)


@register_model
class NaLaFormer(BaseModule):
    """NaLaFormer backbone (arXiv 2506.21137).

    Args:
        arch (str | dict): ``'xt'``, ``'t'``, ``'s'``, ``'b'``, ``'l'`` (or ``xtiny``, ``tiny``,
            ``small``, ``base``, ``large``), or a dict of ``channels``, ``depths`` and ``num_heads``
            (one integer a stage), ``mlp_ratio`` (or ``mlp_ratios``; one number, or one a stage)
            and optionally ``layer_scale_init`` (likewise, default 1) and ``drop_path_rate``.
        in_channels (int): Channels of the image. Defaults to 3.
        out_indices (Sequence[int]): Stages to return, counted from 0; stages behind the last one
            are not built. Defaults to (0, 1, 2, 3).
        stage_attention (Sequence[str]): Each stage's attention, ``'nala'`` (linear) or
            ``'softmax'``. Defaults to ('nala', 'nala', 'softmax', 'softmax').
        feature_map (str): Feature map of the linear attention, ``'signed'`` (the release) or
            ``'cosine'`` (the paper); for comparison ``'elu'``, ``'relu'`` or ``'focused'``.
            Defaults to 'signed'.
        attn_impl (str): How the linear attention is computed, ``'plain'``, ``'lean'``,
            ``'triton'`` or ``'auto'``, see :func:`~mmnala.ops.nala_attention`. Defaults to 'auto'.
        drop_path_rate (float, optional): Stochastic depth of the last block, growing linearly from
            0 at the first. None takes the variant's ImageNet value (0 for a dict without one).
        norm_cfg (dict): Norm layer of stem and downsampling. Defaults to ``dict(type='BN')``.
        norm_eval (bool): Keep batch norms in eval mode while training. Defaults to False.
        frozen_stages (int): Freeze the stem (0) and so many stages with the downsampling behind
            them (1 to 4); -1 freezes nothing. Defaults to -1.
        out_norm (bool): Put a channel LayerNorm of its own on each returned stage. It is no part
            of the ImageNet model, so it always starts fresh. Defaults to True.
        with_cp (bool): Recompute each block in the backward pass to save memory. Defaults to False.
        init_cfg (dict | list[dict], optional): As in mmengine. ``dict(type='Pretrained',
            checkpoint=FILE_OR_URL)`` reads the checkpoints of this project, of the release and of
            whole models strictly, and adapts the stem to other ``in_channels``, see
            :func:`~mmnala.checkpoint.load_pretrained`.

    Attributes:
        out_channels: On the class, the channels of each variant's four stages by name, e.g.
            ``NaLaFormer.out_channels['t']``; on an instance, those of its returned stages.

    Raises:
        TypeError: If there are other arguments.
        ValueError: If an argument has a value it does not allow.

    Example:
        >>> model = NaLaFormer('xt', out_indices=(2, 3)).eval()
        >>> [tuple(x.shape) for x in model(torch.zeros(1, 3, 65, 64))]
        [(1, 128, 5, 4), (1, 384, 3, 2)]
    """

    init_cfg: Any
    out_channels: Any = {
        name: ARCHS[short]['channels']
        for name, short in ({short: short for short in ARCHS} | ARCH_WORDS).items()
    }

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 't',
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        stage_attention: Sequence[str] = ('nala', 'nala', 'softmax', 'softmax'),
        feature_map: str = 'signed',
        attn_impl: str = 'auto',
        drop_path_rate: float | None = None,
        norm_cfg: Mapping[str, Any] = {'type': 'BN'},
        norm_eval: bool = False,
        frozen_stages: int = -1,
        out_norm: bool = True,
        with_cp: bool = False,
        init_cfg: dict | list[dict] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(_unknown_arguments(unknown))
        super().__init__(init_cfg=init_cfg)
        settings = _arch_settings(arch)
        channels, depths = settings['channels'], settings['depths']
        num_stages = len(channels)
        if drop_path_rate is None:
            drop_path_rate = settings['drop_path_rate']
        if not isinstance(drop_path_rate, (int, float)) or not 0 <= drop_path_rate < 1:
            raise ValueError(f'drop_path_rate must lie in [0, 1), got {drop_path_rate!r}')
        if not isinstance(in_channels, int) or in_channels < 1:
            raise ValueError(f'in_channels must be a positive integer, got {in_channels!r}')
        if feature_map not in list(FEATURE_MAPS):
            raise ValueError(
                f'feature_map must be one of {sorted(FEATURE_MAPS)}, got {feature_map!r}'
            )
        if attn_impl not in ('auto', *ATTN_IMPLS):
            raise ValueError(
                f"attn_impl must be 'auto' or one of {sorted(ATTN_IMPLS)}, got {attn_impl!r}"
            )
        if not _is_list(stage_attention, num_stages) or any(
            attention not in STAGE_ATTENTIONS for attention in stage_attention
        ):
            raise ValueError(
                f'stage_attention must name {num_stages} of {STAGE_ATTENTIONS}, '
                f'got {stage_attention!r}'
            )
        if not _is_list(out_indices) or (
            not out_indices
            or not all(type(i) is int for i in out_indices)
            or list(out_indices) != sorted(set(out_indices))
            or not set(out_indices) <= set(range(num_stages))
        ):
            raise ValueError(
                'out_indices must be increasing stage numbers from '
                f'{tuple(range(num_stages))}, got {out_indices!r}'
            )
        if type(frozen_stages) is not int or not -1 <= frozen_stages <= num_stages:
            raise ValueError(f'frozen_stages must be -1 to {num_stages}, got {frozen_stages!r}')

        self.in_channels = in_channels
        self.out_indices = tuple(out_indices)
        self.out_channels = tuple(channels[i] for i in self.out_indices)
        self.norm_eval = norm_eval
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp

        self.patch_embed = Stem(in_channels, channels[0], norm_cfg)
        drop_paths = iter(np.linspace(0, drop_path_rate, sum(depths)).tolist())
        self.layers = nn.ModuleList()
        # Stages behind the last output would hold parameters without gradient, an error in DDP.
        last = self.out_indices[-1]
        self.depths = tuple(depths[: last + 1])
        for i in range(last + 1):
            blocks = [
                Block(
                    channels[i],
                    settings['num_heads'][i],
                    settings['mlp_ratio'][i],
                    stage_attention[i],
                    feature_map,
                    attn_impl,
                    next(drop_paths),
                    settings['layer_scale_init'][i],
                )
                for _ in range(depths[i])
            ]
            downsample = None
            if i < last:
                downsample = Downsample(channels[i], channels[i + 1], norm_cfg)
            self.layers.append(Stage(blocks, channels[i] // settings['num_heads'][i], downsample))
        for i in self.out_indices if out_norm else ():
            self.add_module(f'norm{i}', nn.LayerNorm(channels[i], eps=1e-6))
        self.out_norm = out_norm
        self.apply(_init_convolution)
        self._freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Multi-scale features of an image.

        Args:
            x: Floating tensor ``(B, in_channels, H, W)``, any size from 1x1 up.

        Returns:
            For each stage ``i`` of ``out_indices`` a tensor ``(B, C_i, ceil(H / 2^(i + 2)),
            ceil(W / 2^(i + 2)))``, contiguous.

        Raises:
            ValueError: If the image's shape is another.
        """
        if x.dim() != 4 or x.shape[1] != self.in_channels or 0 in x.shape:
            raise ValueError(
                f'image must be (B, {self.in_channels}, H, W) and not empty, got {tuple(x.shape)}'
            )
        x = self.patch_embed(x.contiguous(memory_format=torch.channels_last))
        outputs = []
        for i, stage in enumerate(self.layers):
            output, x = stage(x, self.with_cp)
            if i in self.out_indices:
                outputs.append(self._output(output, i))
        return tuple(outputs)

    def _output(self, x: Tensor, stage: int) -> Tensor:
        if self.out_norm:
            norm = getattr(self, f'norm{stage}')
            x = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # Convolutions of a neck would pass a channels-last layout on, and mmcv's RoIAlign reads
        # memory as if it were contiguous, whatever the strides say.
        return x.contiguous()

    def init_weights(self) -> None:
        """Apply ``init_cfg``; the reference's initialisation is in place since construction."""
        if self.is_init:  # mmengine warns and leaves the weights alone
            super().init_weights()
            return
        init_cfg = self.init_cfg
        configs = [init_cfg] if isinstance(init_cfg, dict) else list(init_cfg or [])
        # mmengine's own loader skips what does not match with a log line; ours is strict.
        pretrained = [cfg for cfg in configs if _is_pretrained(cfg['type'])]
        self.init_cfg = [cfg for cfg in configs if cfg not in pretrained]
        super().init_weights()
        self.init_cfg = init_cfg
        try:
            for cfg in pretrained:
                arguments = {k: v for k, v in cfg.items() if k not in ('type', 'checkpoint')}
                load_pretrained(self, cfg.get('checkpoint'), **arguments)
        except Exception:
            self._is_init = False  # a second call must not pass over it
            raise

    def train(self, mode: bool = True) -> 'NaLaFormer':
        """Switch mode; frozen stages, and with ``norm_eval`` all batch norms, stay in eval."""
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Depth of a parameter for layer-wise learning-rate decay, and the number of depths.

        The stem has depth 0 and the blocks count from 1 through all stages. The output norms start
        fresh, so they come last, with whatever lies outside the backbone.

        Args:
            param_name: The parameter's name in the model.
            prefix: The backbone's in it, such as ``'backbone.'``.
        """
        return self._depth(param_name, prefix, self.depths)

    def get_stage_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """As :meth:`get_layer_depth`, but all blocks of a stage have one depth."""
        return self._depth(param_name, prefix, [1] * len(self.depths))

    def _depth(self, param_name: str, prefix: str, depths: Sequence[int]) -> tuple[int, int]:
        first = [1, *(1 + np.cumsum(depths)).tolist()]  # of each stage, and behind the last
        depth = first[-1]
        match param_name.removeprefix(prefix).split('.') if param_name.startswith(prefix) else ():
            case ['patch_embed', *_]:
                depth = 0
            # The downsampling is stored with the stage before it but computes the input of the
            # next, whose width it has: as in ConvNeXt's recipe, it goes with the first block there.
            case ['layers', stage, 'downsample', *_]:
                depth = first[int(stage) + 1]
            case ['layers', stage, 'blocks', block, *_]:
                depth = first[int(stage)] + min(int(block), depths[int(stage)] - 1)
        return depth, first[-1] + 1

    def _freeze(self) -> None:
        frozen = [self.patch_embed, *self.layers][: self.frozen_stages + 1]
        for module in frozen:
            module.eval()
            module.requires_grad_(False)


def _unknown_arguments(unknown: Mapping[str, Any]) -> str:
    known = [name for name in inspect.signature(NaLaFormer).parameters if name != 'unknown']
    meant = [match for name in unknown for match in difflib.get_close_matches(name, known, 1)]
    hint = f'did you mean {" or ".join(meant)}? ' if meant else ''
    if 'pretrained' in unknown:
        hint += (
            "weights are named by init_cfg=dict(type='Pretrained', checkpoint=...), and an mmseg "
            'model takes pretrained=None; '
        )
    hint += 'in a config that inherits another backbone, write backbone=dict(_delete_=True, ...)'
    return f'NaLaFormer has the arguments {known}, got {sorted(unknown)}: {hint}'


def _is_list(value: Any, length: int | None = None) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and length in (None, len(value))


def _is_pretrained(kind: str | type) -> bool:
    return (WEIGHT_INITIALIZERS.get(kind) if isinstance(kind, str) else kind) is PretrainedInit


def _init_convolution(module: nn.Module) -> None:
    """Convolutions as in the release; linear layers and norms keep torch's default."""
    if isinstance(module, nn.Conv2d):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _arch_settings(arch: str | Mapping[str, Any]) -> dict[str, Any]:
    """The complete, checked settings of a variant, per-stage values spelled out."""
    if isinstance(arch, str):
        name = ARCH_WORDS.get(arch.lower(), arch.lower())
        if name not in ARCHS:
            raise ValueError(f'arch must be one of {[*ARCHS, *ARCH_WORDS]} or a dict, got {arch!r}')
        settings = dict(ARCHS[name])
    elif isinstance(arch, Mapping):
        settings = dict(arch)
        if 'mlp_ratios' in settings and 'mlp_ratio' not in settings:
            settings['mlp_ratio'] = settings.pop('mlp_ratios')
        settings = {'layer_scale_init': 1.0, 'drop_path_rate': 0.0} | settings
        if set(settings) != set(ARCHS['t']):
            raise ValueError(f'arch must have the keys {sorted(ARCHS["t"])}, got {sorted(arch)}')
    else:
        raise ValueError(f'arch must be a name or a dict, got {arch!r}')

    if not _is_list(settings['channels']) or not settings['channels']:
        raise ValueError(f"arch['channels'] must be a list, got {settings['channels']!r}")
    stages = len(settings['channels'])
    for key, kind in (
        *(('channels', int), ('depths', int), ('num_heads', int)),
        *(('mlp_ratio', float), ('layer_scale_init', float)),
    ):
        value = settings[key]
        if kind is float and isinstance(value, (int, float)):
            settings[key] = value = (value,) * stages
        if not _is_list(value, stages):
            raise ValueError(
                f"arch['{key}'] must have one value for each of the {stages} stages, got {value!r}"
            )
        if not all(isinstance(n, (int, kind)) and n > 0 for n in value):
            raise ValueError(f"arch['{key}'] must be positive {kind.__name__} values, got {value}")
    if settings['channels'][0] % 2:
        raise ValueError(f"arch['channels'] must start even (stem), got {settings['channels']}")
    for channels, heads in zip(settings['channels'], settings['num_heads'], strict=True):
        if channels % (4 * heads):
            raise ValueError(
                "arch['channels'] / arch['num_heads'] must be a multiple of 4 (rotary), "
                f'got {channels} / {heads}'
            )
    return settings
