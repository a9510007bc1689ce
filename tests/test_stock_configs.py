"""Stock configs of mmdet and mmseg with our backbone: only it and ``in_channels`` are changed.

``pretrained`` of an mmseg model belongs to the backbone it names, and ``c1_in_channels`` is the
second ``in_channels`` of DeepLabV3+. CSPNeXt counts its outputs in another way, so ``out_indices``
is named in its place; elsewhere it is the stock one.
"""

from copy import deepcopy

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.logging import MessageHub
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from test_zoo import instance_sample, semantic_sample, stock

from mmnala import NaLaFormer
from mmnala.engine.errors import InputError
from mmnala.engine.model_check import check_model

ARCH = dict(channels=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_heads=[1, 2, 3, 4], mlp_ratio=2)
SIDE = 64
NECK = ('neck.in_channels',)
HEAD = ('decode_head.in_channels',)
HEADS = (*HEAD, 'auxiliary_head.in_channels')

DETECTORS = {
    'faster_rcnn/faster-rcnn_r50_fpn_1x_coco': NECK,
    'mask_rcnn/mask-rcnn_r50_fpn_1x_coco': NECK,
    'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco': NECK,
    'htc/htc-without-semantic_r50_fpn_1x_coco': NECK,
    'retinanet/retinanet_r50_fpn_1x_coco': NECK,
    'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco': NECK,
    'atss/atss_r50_fpn_1x_coco': NECK,
    'gfl/gfl_r50_fpn_1x_coco': NECK,
    'tood/tood_r50_fpn_1x_coco': NECK,
    'vfnet/vfnet_r50_fpn_1x_coco': NECK,
    'sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco': NECK,
    'conditional_detr/conditional-detr_r50_8xb2-50e_coco': NECK,
    'deformable_detr/deformable-detr_r50_16xb2-50e_coco': NECK,
    'dino/dino-4scale_r50_8xb2-12e_coco': NECK,
    'rtmdet/rtmdet_tiny_8xb32-300e_coco': NECK,
    'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco': NECK,
    'yolof/yolof_r50-c5_8xb8-1x_coco': NECK,
    'solov2/solov2-light_r50_fpn_ms-3x_coco': NECK,
    'condinst/condinst_r50_fpn_ms-poly-90k_coco_instance': NECK,
    'mask2former/mask2former_r50_8xb2-lsj-50e_coco': ('panoptic_head.in_channels',),
}
SEGMENTORS = {
    'swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512': HEADS,
    'upernet/upernet_r50_4xb4-80k_ade20k-512x512': HEADS,
    'sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512': NECK,
    'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512': HEAD,
    'segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512': HEAD,
    'pspnet/pspnet_r50-d8_4xb4-80k_ade20k-512x512': HEADS,
    'deeplabv3plus/deeplabv3plus_r50-d8_4xb4-80k_ade20k-512x512': (
        *HEADS,
        'decode_head.c1_in_channels',
    ),
    'encnet/encnet_r50-d8_4xb4-80k_ade20k-512x512': HEADS,
    'fcn/fcn_r50-d8_4xb4-80k_ade20k-512x512': HEADS,
    'hrnet/fcn_hr18_4xb4-80k_ade20k-512x512': HEAD,
    'ocrnet/ocrnet_hr18_4xb4-80k_ade20k-512x512': (
        'decode_head.0.in_channels',
        'decode_head.1.in_channels',
    ),
    'point_rend/pointrend_r50_4xb4-160k_ade20k-512x512': NECK,
    'fastfcn/fastfcn_r50-d32_jpu_psp_4xb4-80k_ade20k-512x512': (
        *NECK,
        'auxiliary_head.in_channels',
    ),
    'knet/knet-s3_r50-d8_upernet_8xb2-adamw-80k_ade20k-512x512': (
        'decode_head.kernel_generate_head.in_channels',
        'auxiliary_head.in_channels',
    ),
    'maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512': HEAD,
    'mask2former/mask2former_r50_8xb2-160k_ade20k-512x512': HEAD,
}
OUT_INDICES = {'CSPNeXt': (1, 2, 3)}


def part(cfg: ConfigDict, path: str) -> tuple[ConfigDict, str]:
    """The dict that holds a setting, and the setting's key."""
    *parents, key = path.split('.')
    for parent in parents:
        cfg = cfg[int(parent)] if isinstance(cfg, list) else cfg[parent]
    return cfg, key


def replace_backbone(model: ConfigDict) -> list[int]:
    """Put a small NaLaFormer in the backbone's place and return its channels."""
    old = model.backbone
    stages = OUT_INDICES.get(old.type, old.get('out_indices', (0, 1, 2, 3)))
    model.backbone = ConfigDict(type='NaLaFormer', arch=ARCH, out_indices=stages)
    if 'pretrained' in model:
        model.pretrained = None
    return [ARCH['channels'][stage] for stage in stages]


def set_channels(model: ConfigDict, paths: tuple[str, ...], channels: list[int]) -> None:
    for path in paths:
        owner, key = part(model, path)
        index = 0 if key == 'c1_in_channels' else owner.get('in_index', -1)
        if isinstance(owner[key], int):
            owner[key] = channels[index]
        elif isinstance(index, int):
            owner[key] = type(owner[key])(channels)
        else:
            owner[key] = type(owner[key])(channels[i] for i in index)


def shrink(model: ConfigDict, toolbox: str) -> None:
    """Fewer queries and proposals and smaller images, for speed."""
    if toolbox == 'mmseg':
        model.data_preprocessor.size = (SIDE, SIDE)
        return
    model.data_preprocessor.batch_augments = None
    for owner in (model, model.get('rpn_head', {})):
        for name in {'num_queries', 'num_proposals'} & set(owner):
            owner[name] = 20
    train, test = model.get('train_cfg') or {}, model.test_cfg
    if 'rcnn' in test:
        test.rcnn.max_per_img = 20
        if test.rpn:
            train.rpn_proposal.max_per_img = test.rpn.max_per_img = 20


def load(toolbox: str, name: str, paths: tuple[str, ...]) -> Config:
    """The stock config with our backbone; until its channels are set, the check names them."""
    cfg = stock(toolbox, name)
    channels = replace_backbone(cfg.model)
    with pytest.raises(InputError) as caught:
        check_model(cfg.model)
    for path in paths:  # each is named, but for heads behind a neck
        assert f'model.{path} is ' in str(caught.value) or 'neck' in paths[0]
    set_channels(cfg.model, paths, channels)
    check_model(cfg.model)
    shrink(cfg.model, toolbox)
    return cfg


def build(cfg: Config) -> torch.nn.Module:
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    model.init_weights()
    assert type(model.backbone) is NaLaFormer
    return model


def train(model: torch.nn.Module, batch: dict) -> None:
    """A step reaches all parameters of the backbone but those of outputs that nobody reads."""
    model.train()
    losses = model(**model.data_preprocessor(deepcopy(batch), True), mode='loss')
    loss, parts = model.parse_losses(losses)
    loss.backward()
    assert loss > 0 and all(value.isfinite() for value in parts.values()), parts
    gradients = {name: parameter.grad for name, parameter in model.backbone.named_parameters()}
    without = {name for name, gradient in gradients.items() if gradient is None}
    assert without <= {name for name in gradients if name.startswith('norm')}
    gradients = [gradient for gradient in gradients.values() if gradient is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(gradient.abs().sum() > 0 for gradient in gradients) > len(gradients) / 2


@pytest.mark.parametrize('name', DETECTORS)
def test_detectors(name):
    cfg = load('mmdet', name, DETECTORS[name])
    with_mask = any(step.get('with_mask') for step in cfg.train_dataloader.dataset.pipeline)
    model = build(cfg)
    MessageHub.get_current_instance().update_info('epoch', 0)  # TOOD asks the runner
    images = [torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8) for _ in range(2)]
    batch = dict(inputs=images, data_samples=[instance_sample(80, SIDE) for _ in images])
    for sample in batch['data_samples']:
        if not with_mask:
            del sample.gt_instances.masks
    train(model, batch)
    with torch.no_grad():
        results = model.eval().test_step(batch)
    assert len(results) == 2
    for result in results:
        found = result.pred_instances
        assert found.bboxes.shape == (len(found), 4) and found.bboxes.dtype == torch.float32
        assert found.scores.shape == found.labels.shape == (len(found),)
        assert found.bboxes.isfinite().all()
        assert ('masks' in found) == with_mask
        if with_mask:
            assert found.masks.shape == (len(found), SIDE, SIDE)
        if len(found):  # mmdet's empty results have other dtypes
            assert found.labels.dtype == torch.int64 and found.labels.max() < 80
            assert not with_mask or found.masks.dtype == torch.bool


@pytest.mark.parametrize('name', SEGMENTORS)
def test_segmentors(name):
    model = build(load('mmseg', name, SEGMENTORS[name]))
    num_classes = model.num_classes
    images = [torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8) for _ in range(2)]
    batch = dict(inputs=images, data_samples=[semantic_sample(num_classes, SIDE) for _ in images])
    train(model, batch)
    with torch.no_grad():
        results = model.eval().test_step(batch)
    assert len(results) == 2
    for result in results:
        assert result.seg_logits.data.shape == (num_classes, SIDE, SIDE)
        assert result.seg_logits.data.isfinite().all()
        labels = result.pred_sem_seg.data
        assert labels.shape == (1, SIDE, SIDE) and labels.dtype == torch.int64
        assert labels.min() >= 0 and labels.max() < num_classes
