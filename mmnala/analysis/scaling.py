"""What a training needs on each GPU: memory, communication and steps.

What a forward pass keeps for its backward pass is counted to the byte, by hooks of autograd;
the rest from the parameters, which are float32 in mixed precision, too. Nothing here is measured on
a GPU.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS
from mmengine.structures import InstanceData, PixelData
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..backbones import NaLaFormer
from ..backbones.nalaformer import Block, GatedAttention
from ..engine.errors import InputError
from ..ops import lean

ACTIVATION_COLUMNS = (
    *('precision', 'attn_impl', 'with_cp', 'backbone_mib', 'rest_mib', 'fixed_mib'),
    *('block_mib', 'batch_gib'),
)
STATE_COLUMNS = ('gpus', 'strategy', 'states_gib', 'sent_mib', 'seconds')
STEP_COLUMNS = ('gpus', 'batch', 'epoch_steps', 'steps')
STRATEGIES = ('DDP', 'ZeRO', 'SHARD_GRAD_OP', 'FULL_SHARD')
PRECISIONS = ('float32', 'bfloat16')
ATTN_IMPLS = ('plain', 'lean')  # what a GPU takes by itself, and what keeps least
OBJECTS = (8, 16)  # rows and columns: so many that a mask head samples all the instances it may
Size = tuple[int, int]


class Kept(NamedTuple):
    """Bytes that a forward pass keeps for its backward pass."""

    total: int
    block: int  # of the block that keeps most


def kept_for_backward(module: nn.Module, *args: Any, **kwargs: Any) -> Kept:
    """Count what a training step keeps: every storage once, parameters and buffers not.

    Autograd is given nothing to keep, so there can be no backward pass, and a module needs no more
    memory than in inference.

    Args:
        module: In training mode. Blocks of NaLaFormer in it are looked at one by one.
        *args: The arguments of its forward pass.
        **kwargs: The same.
    """
    # A weak reference outlives the data, so that no other storage gets its address meanwhile.
    seen = {StorageWeakRef(p.untyped_storage()) for p in (*module.parameters(), *module.buffers())}
    total = 0

    def pack(x: Tensor) -> None:
        nonlocal total
        reference = StorageWeakRef(x.untyped_storage())
        if reference not in seen:
            seen.add(reference)
            total += x.untyped_storage().nbytes()

    before: list[int] = []
    blocks: list[int] = []
    handles = []
    for part in module.modules():
        if isinstance(part, Block):
            handles += [
                part.register_forward_pre_hook(lambda *_: before.append(total)),
                part.register_forward_hook(lambda *_: blocks.append(total - before.pop())),
            ]
    try:
        with saved_tensors_hooks(pack, lambda nothing: nothing):
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return Kept(total, max(blocks, default=0))


def training_batch(model: Any, scope: str, size: Size, images: int) -> dict[str, Any]:
    """Drawn images with annotations, as the toolbox of a config has them in training.

    Args:
        model: Whose data preprocessor they pass.
        scope: ``'mmseg'``, ``'mmdet'`` or ``'mmpretrain'``.
        size: Height and width.
        images: How many.

    Raises:
        InputError: If ``scope`` is another.
    """
    if scope not in _SAMPLES:
        raise InputError(f'default_scope must be one of {list(_SAMPLES)}, got {scope!r}')
    generator = torch.Generator().manual_seed(0)
    if scope == 'mmseg':
        model.data_preprocessor.size = size  # the crop of the config's own recipe
    data = model.data_preprocessor(
        dict(
            inputs=[
                torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8)
                for _ in range(images)
            ],
            data_samples=[_SAMPLES[scope](size) for _ in range(images)],
        ),
        training=True,
    )
    return dict(data, mode='loss')


def _segmentation_sample(size: Size) -> Any:
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo=dict(img_shape=size, ori_shape=size))
    sample.gt_sem_seg = PixelData(data=torch.zeros(1, *size, dtype=torch.long))
    return sample


def _detection_sample(size: Size) -> Any:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    rows, columns = OBJECTS
    height, width = size[0] / rows, size[1] / columns
    corners = torch.cartesian_prod(torch.arange(columns) * width, torch.arange(rows) * height)
    boxes = torch.cat((corners, corners + torch.tensor([width, height])), dim=1)
    sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0)))
    sample.gt_instances = InstanceData(
        bboxes=boxes,
        labels=torch.zeros(len(boxes), dtype=torch.long),
        masks=BitmapMasks(torch.ones(len(boxes), *size, dtype=torch.uint8).numpy(), *size),
    )
    sample.ignored_instances = InstanceData(bboxes=boxes[:0], labels=torch.zeros(0).long())
    return sample


def _classification_sample(size: Size) -> Any:
    from mmpretrain.structures import DataSample

    return DataSample(metainfo=dict(img_shape=size)).set_gt_label(0)


_SAMPLES = {
    'mmseg': _segmentation_sample,
    'mmdet': _detection_sample,
    'mmpretrain': _classification_sample,
}


class _Features(nn.Module):
    """Puts out what a backbone does, without computing it."""

    def __init__(self, like: Iterable[Tensor]) -> None:
        super().__init__()
        self.shapes = [tuple(x.shape[1:]) for x in like]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(len(x), *shape, requires_grad=True) for shape in self.shapes)


def activations(
    model: Any, backbone: Mapping[str, Any], scope: str, size: Size, batch_size: int
) -> list[dict[str, Any]]:
    """What a GPU keeps of a batch, in both precisions, by both paths, with and without ``with_cp``.

    The backbone is run with torch's fake tensors, which have storages but no data; neck and heads,
    whose work depends on data, on feature maps of zeros, and in float32 alone, which is the most
    that they keep. Two images are counted beside one: what both keep is ``fixed``, such as the
    weights that autocast turned into another precision.

    Args:
        model: The model; left without backbone.
        backbone: The config of its backbone, a NaLaFormer.
        scope: See :func:`training_batch`.
        size: Height and width of the images.
        batch_size: Images on a GPU.

    Returns:
        Rows of :data:`ACTIVATION_COLUMNS`. ``batch_gib`` is ``fixed`` and a batch of ``backbone``
        and ``rest``, with ``with_cp`` also of ``block``: the largest block, which the backward pass
        computes anew with all that it keeps otherwise.

    Raises:
        InputError: If the model has another backbone.
    """
    if not isinstance(model.backbone, NaLaFormer):
        kind = type(model.backbone).__name__
        raise InputError(f'model.backbone must be a NaLaFormer, got {kind}')
    model = revert_sync_batchnorm(model.cpu()).train()
    mode = FakeTensorMode()
    one_chunk = mock.patch.object(lean, 'CHUNK_ELEMENTS', 2**62)  # as none is computed
    with mode:
        fake = revert_sync_batchnorm(MODELS.build(dict(backbone, init_cfg=None))).train()
        images = [torch.empty(number, fake.in_channels, *size) for number in (1, 2)]
    with mode, one_chunk:
        model.backbone = _Features(fake(images[0]))
    rest = [
        kept_for_backward(model, **training_batch(model, scope, size, number)).total
        for number in (1, 2)
    ]
    heads = rest[1] - rest[0]
    rows = []
    for precision in PRECISIONS:
        autocast = torch.autocast('cpu', torch.bfloat16, enabled=precision != 'float32')
        for attn_impl in ATTN_IMPLS:
            for module in fake.modules():
                if isinstance(module, GatedAttention):
                    module.attn_impl = attn_impl
            block = 0
            for with_cp in (False, True):
                fake.with_cp = with_cp
                with mode, autocast, one_chunk:
                    one, two = (kept_for_backward(fake, image) for image in images)
                if not with_cp:
                    block = two.block - one.block
                image = two.total - one.total
                fixed = one.total - image + rest[0] - heads
                again = block if with_cp else 0
                rows.append(
                    dict(
                        precision=precision,
                        attn_impl=attn_impl,
                        with_cp=with_cp,
                        backbone_mib=image / 2**20,
                        rest_mib=heads / 2**20,
                        fixed_mib=fixed / 2**20,
                        block_mib=block / 2**20,
                        batch_gib=(fixed + batch_size * (image + heads + again)) / 2**30,
                    )
                )
    return rows


class Weights(NamedTuple):
    """Bytes of a model's parameters in float32."""

    all: int
    trained: int
    block: int  # the largest
    outside: int  # of all blocks


def weights(model: nn.Module) -> Weights:
    """Count a model's parameters."""
    blocks = [_bytes(m.parameters()) for m in model.modules() if isinstance(m, Block)]
    every = _bytes(model.parameters())
    trained = _bytes(p for p in model.parameters() if p.requires_grad)
    return Weights(every, trained, max(blocks, default=0), every - sum(blocks))


def _bytes(parameters: Iterable[Tensor]) -> int:
    return 4 * sum(parameter.numel() for parameter in parameters)


def states(size: Weights, strategy: str, gpus: int) -> float:
    """Bytes of weights, gradients and AdamW's two moments on each GPU, at most.

    DDP has a second copy of the gradients in its buckets. The sharded strategies have whole units
    for a while: of ``SHARD_GRAD_OP`` all weights and a unit's gradients, of ``FULL_SHARD`` what is
    outside of the blocks, two blocks (one in use, one fetched), and a unit's gradients.
    """
    unit = max(size.block, size.outside)
    shards = (size.all + 3 * size.trained) / gpus
    return {
        'DDP': size.all + 4 * size.trained,
        'ZeRO': size.all + 2 * size.trained + 2 * size.trained / gpus,
        'SHARD_GRAD_OP': size.all + unit + shards,
        'FULL_SHARD': size.outside + 2 * size.block + unit + shards,
    }[strategy]


def sent(size: Weights, strategy: str, gpus: int) -> float:
    """Bytes that each GPU sends, and receives, for an update without gradient accumulation.

    In a ring, gathering or scattering ``x`` bytes moves ``x (n - 1) / n``, reducing to all twice as
    much. DDP reduces the gradients to all; ZeRO then broadcasts the weights; the sharded
    strategies scatter the gradients and gather the weights, ``FULL_SHARD`` those of blocks twice.
    """
    blocks = size.all - size.outside
    return (1 - 1 / gpus) * {
        'DDP': 2 * size.trained,
        'ZeRO': 3 * size.trained,
        'SHARD_GRAD_OP': size.trained + size.all,
        'FULL_SHARD': size.trained + size.all + blocks,
    }[strategy]


def state_rows(size: Weights, gpus: Iterable[int], bandwidth: float) -> list[dict[str, Any]]:
    """Rows of :data:`STATE_COLUMNS`; ``seconds`` at ``bandwidth`` bytes a second, if nothing else
    happens meanwhile."""
    return [
        dict(
            gpus=number,
            strategy=strategy,
            states_gib=states(size, strategy, number) / 2**30,
            sent_mib=sent(size, strategy, number) / 2**20,
            seconds=sent(size, strategy, number) / bandwidth,
        )
        for number in gpus
        for strategy in STRATEGIES
    ]


def step_rows(
    cfg: Config, gpus: Iterable[int], batch_size: int, images: int | None
) -> list[dict[str, Any]]:
    """Rows of :data:`STEP_COLUMNS`: the schedule of a config, with ``batch_size`` on each GPU.

    Raises:
        InputError: If the schedule counts epochs and the number of ``images`` is not given.
    """
    schedule = cfg.get('train_cfg') or {}
    rows = []
    for number in gpus:
        row: dict[str, Any] = dict(gpus=number, batch=number * batch_size)
        if 'max_iters' in schedule:
            row['steps'] = schedule['max_iters']
        elif images is None:
            raise InputError("--images: the config's schedule counts epochs, so it is needed")
        else:
            row['epoch_steps'] = math.ceil(math.ceil(images / number) / batch_size)
            row['steps'] = row['epoch_steps'] * schedule['max_epochs']
        rows.append(row)
    return rows
