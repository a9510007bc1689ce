"""A hook for losses that are infinite or not a number."""

import random
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.dist import all_gather_object, get_world_size
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from .agreement import highest
from .errors import InputError

ACTIONS = ('stop', 'skip')


class NonFiniteLossError(InputError):
    """A loss that is infinite or not a number."""


@HOOKS.register_module(force=True)
class NonFiniteLossHook(Hook):
    """Stop at a loss that is infinite or not a number, or skip its iteration.

    The loss is looked at before the backward pass, so weights and optimizer are still those of the
    iteration before. The message names the first module whose output is not finite, the losses
    that are not, and the images.

    Skipping leaves out the backward pass and the optimizer's step and puts all buffers back,
    statistics of batch norms above all; with gradient accumulation, the step that the iteration
    would have taken is dropped with what was accumulated for it. Schedules move on. The number of
    skipped iterations is logged as ``skipped`` and kept in checkpoints. If one rank's loss is not
    finite, all do the same.

    What it costs: in each iteration the loss is read before the backward pass and, with several
    processes, one integer reduced on the CPU; with ``'skip'`` the buffers are copied. To name the
    module, the forward pass is run once more, on the same input and random numbers.

    Args:
        action: ``'stop'`` or ``'skip'``. Defaults to ``'stop'``.
        max_in_a_row: How many iterations one after the other may be skipped; the next one stops.
            Defaults to 10.

    Raises:
        InputError: If an argument has a value it does not allow, or for an ``OptimWrapperDict``.
        NonFiniteLossError: When the training stops.
    """

    def __init__(self, action: str = 'stop', max_in_a_row: int = 10) -> None:
        if action not in ACTIONS:
            raise InputError(f"NonFiniteLossHook: action must be 'stop' or 'skip', got {action!r}")
        if type(max_in_a_row) is not int or max_in_a_row < 1:
            raise InputError(
                f'NonFiniteLossHook: max_in_a_row must be a positive integer, got {max_in_a_row!r}'
            )
        self.action = action
        self.max_in_a_row = max_in_a_row
        self._call: tuple | None = None
        self._buffers: list[Tensor] = []

    def before_train(self, runner: Runner) -> None:
        """Come between the loss and the backward pass."""
        wrapper = runner.optim_wrapper
        if not isinstance(wrapper, OptimWrapper) or isinstance(wrapper, OptimWrapperDict):
            raise InputError(
                'NonFiniteLossHook: optim_wrapper must be a single OptimWrapper, '
                f'got {type(wrapper).__name__}'
            )
        self._model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        # A compiled model stays one graph, and its modules are not named.
        if not runner.cfg.get('compile'):
            self._handle = self._model.register_forward_pre_hook(self._note, with_kwargs=True)
        update = torch.compiler.disable(partial(self._update_params, runner, wrapper.update_params))
        wrapper.update_params = update

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any | None = None
    ) -> None:
        """Keep what a forward pass changes."""
        if self.action == 'skip':
            self._buffers = [buffer.clone() for buffer in self._model.buffers()]

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any | None = None,
        outputs: dict | None = None,
    ) -> None:
        self._call = None  # the memory of the batch

    def after_train(self, runner: Runner) -> None:
        """Leave model and optimizer as they were."""
        del runner.optim_wrapper.update_params
        if not runner.cfg.get('compile'):
            self._handle.remove()

    def _note(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if model.training:
            self._call = args, kwargs, _random_state()

    def _update_params(
        self, runner: Runner, update_params: Any, loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        info = runner.message_hub.runtime_info
        if not highest(int(not torch.isfinite(loss).all())):
            if info.get('skipped_in_a_row'):
                runner.message_hub.update_info('skipped_in_a_row', 0)
            update_params(loss, *args, **kwargs)
            return

        found = self._describe(runner, loss)
        in_a_row = info.get('skipped_in_a_row', 0) + 1
        if self.action == 'stop':
            raise NonFiniteLossError(found)
        if in_a_row > self.max_in_a_row:
            raise NonFiniteLossError(f'{found}; {self.max_in_a_row} were skipped before it')
        for buffer, kept in zip(self._model.buffers(), self._buffers, strict=True):
            buffer.copy_(kept)
        wrapper = runner.optim_wrapper
        wrapper._inner_count += 1
        if wrapper.should_update():
            wrapper.zero_grad()

        skipped = info.get('skipped', 0) + 1
        runner.message_hub.update_info('skipped', skipped)
        runner.message_hub.update_info('skipped_in_a_row', in_a_row)
        runner.message_hub.update_scalar('train/skipped', skipped)
        runner.logger.warning(f'{found}; skipped, {in_a_row} in a row, {skipped} in all')

    def _describe(self, runner: Runner, loss: Tensor) -> str:
        what = self._trace(runner, loss)
        if get_world_size() > 1:
            ranks = enumerate(all_gather_object(what))
            what = '; '.join(f'rank {rank}: {text}' for rank, text in ranks)
        return f'iteration {runner.iter + 1}: {what}'

    def _trace(self, runner: Runner, loss: Tensor) -> str:
        """What is known of this rank's loss; the forward pass is collective, so all run it."""
        where = 'the module is not known, as the model is compiled'
        names: list[str] = []
        if self._call is not None:
            args, kwargs, state = self._call
            after = _random_state()
            _set_random_state(state)
            with runner.optim_wrapper.optim_context(self._model):
                where, losses = first_non_finite(runner.model, args, kwargs)
            _set_random_state(after)
            if isinstance(losses, Mapping):
                names = [name for name, value in losses.items() if not all_finite(value)]
        value = loss.detach().sum().item()
        if np.isfinite(value):
            return f'the loss is {value:g}'
        of = f' ({", ".join(names)})' if names else ''
        images = _image_paths(self._call[1] if self._call else {})
        return f'the loss is {value}{of}: {where}' + (f'; images: {images}' if images else '')


@torch.no_grad()
def first_non_finite(model: nn.Module, args: tuple, kwargs: Mapping) -> tuple[str, Any]:
    """Run a model and find where its numbers stop being finite.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        In words, the input or the module whose output, in the order of the computation, is the
        first with an infinity or NaN; and the model's output.
    """
    found: list[tuple[str, nn.Module]] = []
    names = {module: _own_name(name) for name, module in model.named_modules() if _own_name(name)}

    def look(module: nn.Module, inputs: tuple, output: Any) -> None:
        if not found and not all_finite(output):
            found.append((names[module], module))

    finite_input = all_finite((args, dict(kwargs)))
    handles = [module.register_forward_hook(look) for module in names]
    try:
        output = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if not finite_input:
        return 'the input of the model is not finite', output
    if not found:
        return (
            'the computation of the loss is not finite, all modules are'
            if not all_finite(output)
            else 'not so when the forward pass was repeated'
        ), output
    name, module = found[0]
    text = f'the first module whose output is not finite is {name} ({type(module).__name__})'
    if not all_finite(list(module.parameters())):
        text += ', whose weights are not finite'
    return text, output


def _own_name(name: str) -> str:
    """A module's name without those of the wrappers of distributed training."""
    return re.sub(r'(^module\b\.?|\b_fsdp_wrapped_module\b\.?)', '', name).rstrip('.')


def all_finite(value: Any) -> bool:
    """Whether no tensor in nested containers has an infinity or NaN."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _image_paths(kwargs: Mapping, most: int = 4) -> str:
    paths = [str(s.get('img_path')) for s in kwargs.get('data_samples') or () if 'img_path' in s]
    return ', '.join(paths[:most]) + (', ...' if len(paths) > most else '')


def _random_state() -> tuple:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def _set_random_state(state: tuple) -> None:
    python, numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
