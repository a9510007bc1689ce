"""A hook that watches the attention of a NaLaFormer while it trains."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ..analysis.attention import Heads, attention_weights, entropy
from ..backbones import NaLaFormer
from ..backbones.nalaformer import GatedAttention, Rotary
from ..ops import apply_rotary
from ..ops.plain import OFFSET, POWER
from .errors import InputError

# The feature maps whose exponent the query norm sets.
NORM_AWARE = ('signed', 'cosine')
SATURATED_TANH = 0.99


class AttentionSample(NamedTuple):
    """What :func:`sample_attention` finds of some queries, ``(heads, queries)`` each."""

    entropy: Tensor
    tanh_norm: Tensor | None  # tanh ‖q‖; None in a layer without exponent


@torch.no_grad()
def sample_attention(
    attention: GatedAttention, x: Tensor, rotary: Rotary, num_queries: int
) -> AttentionSample:
    """How a layer's queries attend, for evenly spaced positions of the first image of a batch.

    Weights and their entropy are those of :mod:`mmnala.analysis.attention`; the only position of an
    image has the entropy 0.

    Args:
        attention: The layer.
        x: Its input ``(B, H, W, C)``.
        rotary: Its rotary tables, ``(H * W, C / heads)`` each.
        num_queries: Number of positions; smaller images have fewer.
    """
    # Two of the layer's four projections, of one image: the layer itself is not run again.
    rows = 2 * x.shape[-1]
    projected = F.linear(x[:1], attention.qkvg.weight[:rows], attention.qkvg.bias[:rows])
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(projected.dtype, torch.float32)
        query, key = (
            attention._split_heads(part).squeeze(0).to(dtype) for part in projected.chunk(2, -1)
        )
        tokens, head_dim = key.shape[-2:]
        picks = torch.linspace(0, tokens - 1, min(num_queries, tokens), device=x.device).long()
        query = query[:, picks]
        feature_map = attention.feature_map if attention.attention == 'nala' else None
        if feature_map is None:
            cos, sin = rotary
            query = apply_rotary(query, (cos[picks], sin[picks]))
            key = apply_rotary(key, rotary)
        heads = Heads(query[None], key[None], feature_map, scale=head_dim**-0.5)
        found = entropy(attention_weights(heads, torch.arange(len(picks), device=x.device)))
        if feature_map not in NORM_AWARE:
            return AttentionSample(found, None)
        return AttentionSample(found, torch.linalg.vector_norm(query, dim=-1).tanh())


@HOOKS.register_module(force=True)
class AttentionMonitorHook(Hook):
    """Log how each stage of a NaLaFormer attends, and warn when its attention degenerates.

    Every ``interval`` iterations it logs as ``attention/stageI/...``, of sampled queries of all
    blocks and heads of stage I:

    - ``entropy``, the mean; 0 is attention to one position, 1 is uniform attention, see
      :func:`sample_attention`;
    - in stages whose feature map is norm-aware, ``exponent_mean``, ``exponent_min`` and
      ``exponent_max`` of p = 3 (0.5 + tanh ‖q‖), between 1.5 and 4.5, and ``saturated``, the share
      of queries so long that the tanh exceeds 0.99 and the norm tells them apart no longer.

    They reach the log and every visualizer backend as the loss does. The training is not changed by
    a bit: nothing is drawn at random, and the forward hooks exist in the measured iterations alone.
    With several processes the first one measures, its own batch. Models with another backbone, and
    compiled ones, whose forward hooks would have them compiled anew, are left alone.

    Args:
        interval: Iterations from one measurement to the next. The log repeats the latest, so
            ``LoggerHook`` best has the same interval. Defaults to 50.
        num_queries: Positions to sample in an image, for each head. Defaults to 64.
        collapsed: Warn, once, when the entropy of a stage falls below. Defaults to 0.02.
        uniform: Warn, once, when the entropy of a stage rises above. Defaults to 0.999.
        saturated: Warn, once, when the share of saturated queries reaches this in every norm-aware
            stage. Defaults to 1, all of them.

    Raises:
        InputError: If an argument has a value it does not allow.
    """

    def __init__(
        self,
        interval: int = 50,
        num_queries: int = 64,
        collapsed: float = 0.02,
        uniform: float = 0.999,
        saturated: float = 1.0,
    ) -> None:
        for name, number in (('interval', interval), ('num_queries', num_queries)):
            if type(number) is not int or number < 1:
                raise InputError(
                    f'AttentionMonitorHook: {name} must be a positive integer, got {number!r}'
                )
        for name, share in (
            *(('collapsed', collapsed), ('uniform', uniform), ('saturated', saturated)),
        ):
            if type(share) not in (int, float) or not 0 <= share <= 1:
                raise InputError(f'AttentionMonitorHook: {name} must lie in [0, 1], got {share!r}')
        self.interval = interval
        self.num_queries = num_queries
        self.collapsed = collapsed
        self.uniform = uniform
        self.saturated = saturated
        self._stages: dict[GatedAttention, int] = {}
        self._handles: dict[GatedAttention, Any] = {}
        self._samples: dict[int, list[AttentionSample]] = {}
        self._warned: set[str] = set()

    def before_train(self, runner: Runner) -> None:
        """Look for the backbone."""
        if runner.rank != 0:
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        backbone = next((m for m in model.modules() if isinstance(m, NaLaFormer)), None)
        if backbone is None or runner.cfg.get('compile'):
            reason = 'the model has no NaLaFormer' if backbone is None else 'the model is compiled'
            runner.logger.info(f'AttentionMonitorHook: {reason}, so nothing is measured')
            return
        self._stages = {
            layer: i
            for i, stage in enumerate(backbone.layers)
            for layer in stage.modules()
            if isinstance(layer, GatedAttention)
        }

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any | None = None
    ) -> None:
        """Listen to the attention layers in an iteration to be measured."""
        if self.every_n_train_iters(runner, self.interval):
            for layer in self._stages:
                self._handles[layer] = layer.register_forward_hook(self._listen)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any | None = None,
        outputs: dict | None = None,
    ) -> None:
        """Hand what was measured to the log, before ``LoggerHook`` reads it."""
        while self._handles:
            self._handles.popitem()[1].remove()
        samples, self._samples = self._samples, {}
        if not samples:
            return
        entropies, saturations = {}, {}
        for stage, of_stage in samples.items():
            values = _summary(of_stage)
            for name, value in values.items():
                runner.message_hub.update_scalar(f'train/attention/stage{stage}/{name}', value)
            entropies[stage] = values['entropy']
            if 'saturated' in values:
                saturations[stage] = values['saturated']
        self._warn(runner, entropies, saturations)

    def _listen(self, layer: GatedAttention, args: tuple, output: Tensor) -> None:
        # The first pass counts: activation checkpointing runs the layer once more.
        self._handles.pop(layer).remove()
        x, rotary = args
        sample = sample_attention(layer, x, rotary, self.num_queries)
        self._samples.setdefault(self._stages[layer], []).append(sample)

    def _warn(
        self, runner: Runner, entropies: dict[int, float], saturations: dict[int, float]
    ) -> None:
        found = {
            'attention has collapsed, queries attend to one position each: entropy below '
            f'{self.collapsed}': {i: e for i, e in entropies.items() if e < self.collapsed},
            'attention has become uniform, queries attend to all positions alike: entropy above '
            f'{self.uniform}': {i: e for i, e in entropies.items() if e > self.uniform},
            'the exponent saturates everywhere, so that the query norm has no effect: share of '
            f'tanh > {SATURATED_TANH} at least {self.saturated}': (
                saturations if min(saturations.values(), default=-1) >= self.saturated else {}
            ),
        }
        for message, stages in found.items():
            if stages and message not in self._warned:
                self._warned.add(message)
                where = ', '.join(f'{value:.4f} in stage {i}' for i, value in stages.items())
                runner.logger.warning(
                    f'AttentionMonitorHook: iteration {runner.iter + 1}: {message}: {where}'
                )


def _summary(samples: list[AttentionSample]) -> dict[str, float]:
    statistics = dict(entropy=torch.cat([s.entropy.flatten() for s in samples]).mean())
    tanhs = [s.tanh_norm.flatten() for s in samples if s.tanh_norm is not None]
    if tanhs:
        tanh = torch.cat(tanhs)
        exponent = POWER * (OFFSET + tanh)
        statistics |= dict(
            exponent_mean=exponent.mean(),
            exponent_min=exponent.min(),
            exponent_max=exponent.max(),
            saturated=(tanh > SATURATED_TANH).to(tanh.dtype).mean(),
        )
    values = torch.stack(list(statistics.values())).tolist()  # one transfer from the GPU
    return dict(zip(statistics, values, strict=True))
