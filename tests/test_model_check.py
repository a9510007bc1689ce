"""Settings that do not fit the backbone, found before the model is built."""

import re

import pytest
import torch
from mmengine.registry import MODELS
from toy import run_tool, write_detection_config, write_segmentation_config

from mmnala import NaLaFormer
from mmnala.engine.errors import InputError
from mmnala.engine.model_check import check_model

T = dict(type='NaLaFormer', arch='t')
RESNET = [256, 512, 1024, 2048]
CHANNELS = [64, 128, 256, 512]
GIVES = "but NaLaFormer 't' gives [64, 128, 256, 512]"
HEAD = dict(type='UPerHead', in_channels=CHANNELS, in_index=[0, 1, 2, 3])


@pytest.mark.parametrize(
    ('model', 'message'),
    [
        (
            dict(backbone=T, neck=dict(type='FPN', in_channels=RESNET)),
            f'model.neck.in_channels is {RESNET}, {GIVES}',
        ),
        (
            dict(backbone=T, neck=[dict(type='FPN', in_channels=RESNET), dict(in_channels=256)]),
            f'model.neck.0.in_channels is {RESNET}, {GIVES}',
        ),
        (
            dict(
                backbone=dict(T, type='mmdet.NaLaFormer', out_indices=(1, 2, 3)),
                neck=dict(type='ChannelMapper', in_channels=CHANNELS),
            ),
            f"model.neck.in_channels is {CHANNELS}, but NaLaFormer 't' gives [128, 256, 512]",
        ),
        (
            dict(
                backbone=dict(type=NaLaFormer, out_indices=[2, 3]),
                neck=dict(type='CSPNeXtPAFPN', in_channels=(128, 256, 512)),
            ),
            "model.neck.in_channels is [128, 256, 512], but NaLaFormer 't' gives [256, 512]",
        ),
        (
            dict(backbone=T, neck=dict(type='DilatedEncoder', in_channels=2048)),
            "model.neck.in_channels is 2048, but NaLaFormer 't' gives 512",
        ),
        (
            dict(backbone=T, panoptic_head=dict(in_channels=RESNET)),
            f'model.panoptic_head.in_channels is {RESNET}, {GIVES}',
        ),
        (
            dict(backbone=dict(T, out_indices=(2,)), rpn_head=dict(in_channels=1024)),
            "model.rpn_head.in_channels is 1024, but NaLaFormer 't' gives [256]",
        ),
        (
            dict(
                backbone=T,
                decode_head=dict(HEAD, in_channels=RESNET),
                auxiliary_head=dict(in_channels=1024, in_index=2),
            ),
            f'model.decode_head.in_channels is {RESNET}, {GIVES}; '
            "model.auxiliary_head.in_channels is 1024, but NaLaFormer 't' gives 256",
        ),
        (
            dict(
                backbone=T,
                decode_head=[dict(in_channels=512), dict(in_channels=[128, 128], in_index=[1, 2])],
            ),
            "model.decode_head.1.in_channels is [128, 128], but NaLaFormer 't' gives [128, 256]",
        ),
        (
            dict(backbone=T, decode_head=dict(in_channels=512, in_index=3, c1_in_channels=256)),
            "model.decode_head.c1_in_channels is 256, but NaLaFormer 't' gives 64",
        ),
        (
            dict(
                backbone=dict(T, out_indices=(3,)),
                neck=dict(type='NaLaFormerNeck', in_channels=384),
                head=dict(type='LinearClsHead', in_channels=512),
            ),
            "model.neck.in_channels is 384, but NaLaFormer 't' gives 512; "
            'model.head.in_channels is 512, but NaLaFormerNeck gives 1024',
        ),
        (
            dict(
                backbone=T,
                neck=dict(type='mmpretrain.NaLaFormerNeck', in_channels=256),
                head=dict(type='LinearClsHead', in_channels=1024),
            ),
            "model.neck.in_channels is 256, but NaLaFormer 't' gives 512",
        ),
        (
            dict(
                backbone=T,
                neck=dict(type='mmpretrain.GlobalAveragePooling'),
                head=dict(type='LinearClsHead', in_channels=1024),
            ),
            "model.head.in_channels is 1024, but NaLaFormer 't' gives 512",
        ),
        (
            dict(backbone=T, decode_head=dict(type='Mask2FormerHead', in_channels=RESNET)),
            f'model.decode_head.in_channels is {RESNET}, {GIVES}',
        ),
        (
            dict(
                backbone=T,
                decode_head=dict(kernel_generate_head=dict(in_channels=2048, in_index=3)),
            ),
            'model.decode_head.kernel_generate_head.in_channels is 2048, '
            "but NaLaFormer 't' gives 512",
        ),
        (
            dict(backbone=dict(T, out_indices=(0, 1)), decode_head=HEAD),
            "model.decode_head.in_index is [0, 1, 2, 3], but NaLaFormer 't' gives 2 outputs",
        ),
        (
            dict(backbone=T, decode_head=dict(HEAD, in_index=[None, 1, 2, 3])),
            "model.decode_head.in_index is [None, 1, 2, 3], but NaLaFormer 't' gives 4 outputs",
        ),
        (
            dict(backbone=T, decode_head=dict(in_channels=512, in_index='3')),
            "model.decode_head.in_index is ['3'], but NaLaFormer 't' gives 4 outputs",
        ),
        (
            dict(backbone=T, rpn_head=dict(in_channels={})),
            "model.rpn_head.in_channels is {}, but NaLaFormer 't' gives [64, 128, 256, 512]",
        ),
        (
            dict(type='SegTTAModel', module=dict(backbone=T, decode_head=dict(in_channels=2048))),
            "model.decode_head.in_channels is 2048, but NaLaFormer 't' gives 512",
        ),
        (dict(backbone=dict(T, arch='huge')), "model.backbone: arch must be one of .* got 'huge'"),
        (
            dict(backbone=dict(T, depth=50)),
            "model.backbone: NaLaFormer has the arguments .* got ['depth']: .*_delete_=True",
        ),
        (
            dict(backbone=T, decode_head=HEAD, pretrained='open-mmlab://resnet50_v1c'),
            "model.backbone: .* got ['pretrained']: .* init_cfg=.*pretrained=None",
        ),
    ],
)
def test_misfits_are_named(model, message):
    state = torch.get_rng_state()
    pattern = re.escape(message).replace(r'\.\*', '.*')
    with pytest.raises(InputError, match=f'^{pattern}') as caught:
        check_model(model)
    assert '\n' not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    'model',
    [
        {},
        dict(backbone=dict(type='ResNet', depth=50), neck=dict(type='FPN', in_channels=[1])),
        dict(backbone=T, neck=dict(type='FPN', in_channels=tuple(CHANNELS))),
        dict(backbone=T, neck=dict(type='YOLOV3Neck', in_channels=CHANNELS[::-1])),
        dict(backbone=T, neck=dict(type='CTResNetNeck', in_channels=512)),
        dict(backbone=T, neck=dict(type='GlobalAveragePooling'), head=dict(in_channels=512)),
        dict(backbone=T, neck=dict(type='SomeNeck'), head=dict(in_channels=1)),
        dict(backbone=T, neck=dict(in_channels=CHANNELS), decode_head=dict(in_channels=1)),
        dict(backbone=T, decode_head=HEAD, auxiliary_head=[dict(in_channels=256, in_index=-2)]),
        dict(backbone=T, decode_head=[1], auxiliary_head=dict(kernel_generate_head=3)),
        dict(backbone=T, decode_head=dict(in_channels=512, c1_in_channels=0), pretrained=None),
        dict(backbone=dict(T, norm_cfg=dict(type='MMSyncBN')), decode_head=dict(in_channels=512)),
        dict(backbone=dict(T, out_indices=(2,)), rpn_head=dict(in_channels=256)),
        dict(backbone=T, bbox_head=dict(num_classes=80)),
    ],
)
def test_what_fits_passes(model):
    check_model(model)


@pytest.mark.parametrize(
    ('unknown', 'hint'),
    [
        (dict(depth=50, num_stages=4, style='pytorch'), r'_delete_=True, \.\.\.\)$'),
        (dict(arhc='t', feature_maps='relu'), r'did you mean arch or feature_map\? in a config'),
        (dict(embed_dims=96, window_size=7), r'_delete_=True, \.\.\.\)$'),
        (dict(pretrained='swin.pth'), r"init_cfg=dict\(type='Pretrained', .*pretrained=None"),
    ],
)
def test_arguments_of_another_backbone(unknown, hint):
    names = re.escape(str(sorted(unknown)))
    with pytest.raises(
        TypeError, match=rf"arguments \['arch', .*'init_cfg'\], got {names}: .*{hint}"
    ):
        MODELS.build(dict(T, **unknown))


@pytest.mark.parametrize(
    ('write', 'lines', 'message'),
    [
        (
            write_detection_config,
            "model['neck']['in_channels'] = [8, 16, 16, 32]",
            'model.neck.in_channels is [8, 16, 16, 32], but NaLaFormer gives [8, 16, 16, 24]',
        ),
        (
            write_segmentation_config,
            "model['backbone'].update(depth=50, style='pytorch')",
            "model.backbone: NaLaFormer has the arguments ['arch', ",
        ),
    ],
)
def test_the_tools_show_one_line(tmp_path, write, lines, message):
    config = write(tmp_path / 'config.py', tmp_path, lines)
    for command in (['train.py', config], ['test.py', config, tmp_path / 'weights.pth']):
        torch.save({}, tmp_path / 'weights.pth')
        finished = run_tool(*command, cwd=tmp_path)
        assert finished.code == 1
        assert f'error: {message}' in finished.output.splitlines()[-1]
        assert 'Traceback' not in finished.output
