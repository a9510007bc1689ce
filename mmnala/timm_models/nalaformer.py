"""The ImageNet classifier as timm's models ``nalaformer_xtiny`` to ``nalaformer_large``.

Backbone and neck are those of the OpenMMLab configs, so that a state dict has the names of an
mmpretrain ``ImageClassifier``. Scripting (``torch.jit.script``) is not supported; tracing, export
and compiling are.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, Format, nchw_to, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..backbones import NaLaFormer
from ..backbones.nalaformer import ARCH_WORDS
from ..checkpoint.layouts import shorten
from ..conversion import convert
from ..necks import NaLaFormerNeck

# What of the backbone's arguments a user may set; the others are the classifier's to choose.
_OPTIONS = [
    name
    for name in inspect.signature(NaLaFormer).parameters
    if name not in ('arch', 'in_channels', 'out_indices', 'out_norm', 'init_cfg', 'unknown')
]
_FORMATS = [fmt.value for fmt in Format]  # dynamo can't list an enumeration


class NaLaFormerClassifier(nn.Module):
    """NaLaFormer with its classifier, by timm's interface.

    The features (:meth:`forward_features`) are the last stage's output; the linear layer and batch
    norm of the neck belong to the head, which pools behind them.

    Args:
        arch (str | dict): As in :class:`~mmnala.NaLaFormer`, of four stages. Defaults to 't'.
        num_classes (int): Number of classes, 0 for no classifier. Defaults to 1000.
        in_chans (int): Channels of the image. Defaults to 3.
        global_pool (str): timm's name of a pooling: ``'avg'``, ``'max'``, ``'avgmax'``,
            ``'catavgmax'``, their ``'fast'`` forms, or ``''`` for none, which leaves no place for a
            classifier. Defaults to 'avg'.
        head_hidden_size (int): Channels of the neck. Defaults to 1024.
        drop_rate (float): Dropout in front of the classifier. Defaults to 0.
        norm_cfg (dict): Norm layer of stem, downsampling and neck. Defaults to
            ``dict(type='BN')``.
        device, dtype: Where and as what the weights end up.
        **options: Any of the backbone's ``drop_path_rate`` (the variant's ImageNet value unless
            given; 0 turns it off), ``stage_attention``, ``feature_map``, ``attn_impl``,
            ``norm_eval``, ``frozen_stages`` and ``with_cp``.

    Raises:
        TypeError: If there are other arguments.
        ValueError: If an argument has a value it does not allow.

    Example:
        >>> import mmnala, timm
        >>> model = timm.create_model('nalaformer_xtiny', features_only=True, out_indices=(1, 3))
        >>> [tuple(x.shape) for x in model(torch.zeros(1, 3, 64, 96))]
        [(1, 64, 8, 12), (1, 384, 2, 3)]
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 't',
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        head_hidden_size: int = 1024,
        drop_rate: float = 0.0,
        norm_cfg: Mapping[str, Any] = {'type': 'BN'},
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise TypeError(
                f'a model of timm has the options {_OPTIONS}, got {unknown}; '
                'out_indices goes with features_only=True'
            )
        _check_head(num_classes, global_pool)
        super().__init__()
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.backbone = NaLaFormer(arch, in_chans, norm_cfg=norm_cfg, out_norm=False, **options)
        self.feature_info: list[dict[str, Any]] = [
            dict(num_chs=channels, reduction=2 ** (i + 2), module=f'backbone.layers.{i}')
            for i, channels in enumerate(self.backbone.out_channels)
        ]
        self._end_with_stage(len(self.feature_info) - 1)
        self.neck: NaLaFormerNeck | None
        self.neck = NaLaFormerNeck(self.num_features, head_hidden_size, norm_cfg)
        self._build_head(num_classes, global_pool)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of an image ``(B, in_chans, H, W)`` of any size.

        Without a classifier they are the pooled features ``(B, head_hidden_size)``, and without
        pooling the neck's ``(B, head_hidden_size, ceil(H / 32), ceil(W / 32))``.
        """
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last stage's output ``(B, num_features, ceil(H / 32), ceil(W / 32))``."""
        return self.backbone(x)[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Neck, pooling and classifier; with ``pre_logits`` all but the classifier."""
        if self.neck is not None:
            x = self.neck.project(x)
        return self.head(x, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of several stages.

        Args:
            x: Image ``(B, in_chans, H, W)``.
            indices: Stages to return, counted from 0, from the last if negative; a number takes
                as many last ones, None all.
            norm: As in timm, whether to apply the final norm; the model has none.
            stop_early: Run no stage behind the last that is returned.
            output_fmt: Layout of the outputs, ``'NCHW'``, ``'NHWC'``, ``'NCL'`` or ``'NLC'``.
            intermediates_only: Return the outputs alone.

        Returns:
            The list of outputs; unless ``intermediates_only``, behind the output of the last stage
            that ran, ``(B, C, H, W)``.

        Raises:
            AssertionError: If a stage does not exist.
            ValueError: If ``output_fmt`` is another.
        """
        if output_fmt not in _FORMATS:
            raise ValueError(f'output_fmt must be one of {_FORMATS}, got {output_fmt!r}')
        stages = self.backbone.layers
        take_indices, last = feature_take_indices(len(stages), indices)
        intermediates = []
        x = self.backbone.patch_embed(x.contiguous(memory_format=torch.channels_last))
        for i, stage in enumerate(stages[: last + 1] if stop_early else stages):
            output, x = stage(x, self.backbone.with_cp)
            if i in take_indices:
                intermediates.append(self.backbone._output(output, i))
        features = self.backbone._output(output, i)
        if output_fmt != 'NCHW':  # nor can it call one in torch 2.4
            intermediates = [nchw_to(out, Format(output_fmt)) for out in intermediates]
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove the stages behind the last of ``indices``, and the head with its neck.

        Args:
            indices: As in :meth:`forward_intermediates`.
            prune_norm: As in timm, whether to remove the final norm; the model has none.
            prune_head: Remove neck and classifier even if all stages stay.

        Returns:
            The stages in ``indices``, counted from 0.
        """
        num_stages = len(self.backbone.layers)
        take_indices, last = feature_take_indices(num_stages, indices)
        self._end_with_stage(last)
        if prune_head or last < num_stages - 1:
            self.reset_classifier(0, reset_other=True)
        return take_indices

    def get_classifier(self) -> nn.Module:
        """The last linear layer, or an identity where there is none."""
        return self.head.fc

    def reset_classifier(
        self, num_classes: int, global_pool: str | None = None, reset_other: bool = False
    ) -> None:
        """Put a new classifier on the model.

        Args:
            num_classes: Number of classes, 0 for no classifier.
            global_pool: As in the constructor; None keeps the pooling.
            reset_other: Remove the neck, too.

        Raises:
            ValueError: If there would be classes but no pooling, or ``num_classes`` is no such
                number.
        """
        pool = self.head.global_pool.pool_type if global_pool is None else global_pool
        _check_head(num_classes, pool)
        if reset_other:
            self.neck = None
        self._build_head(num_classes, pool)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Depth by parameter name for layer-wise decay, by blocks or, ``coarse``, by stages."""
        backbone = self.backbone
        depth = backbone.get_stage_depth if coarse else backbone.get_layer_depth
        return lambda name: depth(name, 'backbone.')[0]

    def no_weight_decay(self) -> set[str]:
        """None beyond norms, biases and layer scales, which timm spares as vectors."""
        return set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass to save memory."""
        self.backbone.with_cp = enable

    def _end_with_stage(self, last: int) -> None:
        """Keep the stages up to ``last``, without the downsampling behind it."""
        backbone = self.backbone
        backbone.layers = backbone.layers[: last + 1]
        backbone.layers[last].downsample = None  # type: ignore[assignment]
        backbone.depths = backbone.depths[: last + 1]
        backbone.out_indices = (last,)
        self.num_features = self.feature_info[last]['num_chs']
        backbone.out_channels = (self.num_features,)

    def _build_head(self, num_classes: int, global_pool: str) -> None:
        width = self.num_features if self.neck is None else self.neck.proj.out_features
        head = ClassifierHead(width, num_classes, global_pool, self.drop_rate)
        self.head_hidden_size = width * head.global_pool.feat_mult()
        if num_classes:  # a 1x1 convolution in the release, and initialised like all of them
            trunc_normal_(head.fc.weight, std=0.02)
            nn.init.zeros_(head.fc.bias)
        weight = self.backbone.get_parameter('patch_embed.proj.0.weight')  # its device and dtype
        self.head = head.to(weight).train(self.training)
        self.num_classes = num_classes


def _check_head(num_classes: Any, global_pool: str) -> None:
    if type(num_classes) is not int or num_classes < 0:
        raise ValueError(f'num_classes must be an integer from 0 up, got {num_classes!r}')
    if num_classes and not global_pool:
        raise ValueError("global_pool='' needs num_classes=0: a classifier takes pooled features")


def _convert_weights(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Take weights of any layout, but whole; timm keeps random ones if the classes differ."""
    state = convert(state, 'classifier').state
    names, own = ({k for k in s if not k.startswith('head.')} for s in (state, model.state_dict()))
    for kind, wrong in (('missing', own - names), ('unexpected', names - own)):
        if wrong:
            raise RuntimeError(f'pretrained weights: {len(wrong)} {kind}: {shorten(sorted(wrong))}')
    fc = state.get('head.fc.weight')
    classes = model.pretrained_cfg['num_classes']  # type: ignore[index]
    if fc is not None and len(fc) == model.num_classes != classes:
        raise RuntimeError(
            f"pretrained weights: their head has the model's {len(fc)} classes, but timm would "
            f'keep a random one, as num_classes={classes} in pretrained_cfg: give '
            f'pretrained_cfg_overlay=dict(num_classes={len(fc)}, ...)'
        )
    return state


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    return build_model_with_cfg(
        NaLaFormerClassifier,
        variant,
        pretrained,
        feature_cfg=dict(out_indices=(0, 1, 2, 3), feature_cls='getter'),
        pretrained_filter_fn=_convert_weights,
        **kwargs,
    )


# No url: no weights have been published.
_CFG = dict(
    input_size=(3, 224, 224),
    pool_size=(7, 7),
    interpolation='bicubic',
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    num_classes=1000,
    first_conv='backbone.patch_embed.proj.0',
    classifier='head.fc',
)
default_cfgs = generate_default_cfgs({f'nalaformer_{word}': _CFG for word in ARCH_WORDS})


@register_model
def nalaformer_xtiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """NaLaFormer-XT."""
    return _create('nalaformer_xtiny', pretrained, **dict(dict(arch='xt'), **kwargs))


@register_model
def nalaformer_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """NaLaFormer-T."""
    return _create('nalaformer_tiny', pretrained, **dict(dict(arch='t'), **kwargs))


@register_model
def nalaformer_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """NaLaFormer-S."""
    return _create('nalaformer_small', pretrained, **dict(dict(arch='s'), **kwargs))


@register_model
def nalaformer_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """NaLaFormer-B."""
    return _create('nalaformer_base', pretrained, **dict(dict(arch='b'), **kwargs))


@register_model
def nalaformer_large(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """NaLaFormer-L."""
    return _create('nalaformer_large', pretrained, **dict(dict(arch='l'), **kwargs))
