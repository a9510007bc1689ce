"""The config zoo: every config trains, predicts and says what the toolboxes' own recipes say."""

import importlib
import pickle
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.datasets import CocoDataset
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import HorizontalBoxes
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmengine.utils import import_modules_from_strings
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
from toy import run_tool

from mmnala import NaLaFormer
from mmnala.datasets import shapes
from mmnala.engine.errors import InputError
from mmnala.engine.label_check import LabelCheckHook
from mmnala.engine.tools import argument_parser, load_config

CONFIGS = Path(__file__).parents[1] / 'configs'
LEAVES = sorted(path for path in CONFIGS.rglob('*.py') if '_base_' not in path.parts)

NO = object()
# What the toolboxes' own configs spell out although it is the default.
DEFAULTS = dict(
    backend_args=None,
    debug=False,
    format_only=False,
    ignore_iof_thr=-1,
    init_cfg=None,
    norm_cfg=None,
    dropout_layer=None,
    add_identity=True,
    attn_drop=0.0,
    proj_drop=0.0,
    im2col_step=64,
    pretrained=None,
    allow_failed_imports=False,
)


def stock(toolbox: str, name: str) -> Config:
    folder = Path(importlib.import_module(toolbox).__file__).parent
    # Some name modules that are not installed here.
    return Config.fromfile(folder / f'.mim/configs/{name}.py', import_custom_modules=False)


def flat(value, at: str = '') -> dict:
    """The leaves of a part of a config by path, without scopes and spelled-out defaults."""
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if DEFAULTS.get(key, NO) != item]
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {at: value.removeprefix('mmdet.') if isinstance(value, str) else value}
    size = {at: len(value)} if isinstance(value, (list, tuple)) else {}
    return size | {
        path: leaf for key, item in items for path, leaf in flat(item, f'{at}.{key}').items()
    }


DETECTORS = {
    'mask-rcnn_nala-t_fpn_1x': 'mask_rcnn/mask-rcnn_r50_fpn_1x',
    'retinanet_nala-t_fpn_1x': 'retinanet/retinanet_r50_fpn_1x',
    'mask-rcnn_nala-t_fpn_ms-crop-3x': 'swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x',
    'cascade-mask-rcnn_nala-t_fpn_4conv1fc-giou_ms-crop-3x': 'convnext/cascade-mask-rcnn_'
    'convnext-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x',
    'mask2former_nala-t_8xb2-lsj-50e': 'mask2former/mask2former_r50_8xb2-lsj-50e',
    'dino-4scale_nala-t_8xb2-12e': 'dino/dino-4scale_r50_8xb2-12e',
}


# Besides the backbone and its channels.
DIFFERENCES = [
    r'\.neck\.start_level',  # RetinaNet: ours leaves the unused stage out in the backbone
    r'\.data_preprocessor\.seg_pad_value',  # Mask2Former: of the panoptic base, not used
    r'\.dataset\.data_prefix\.seg',  # likewise
    r'\.transforms\.1\.0\.scales\.\d\.1',  # the longer side before a crop: Swin 1333, DETR 4200
    r'.*\.(cross|self)_attn_cfg\.dropout',  # Mask2Former: 0 by default
    r'.*\.reduce_zero_label',  # by default that of the dataset
    r'\.num_workers',
    r'\.pretrained',
    r'\.(.*_head|neck)\.in_channels(\.\d)?',
]


def assert_same(ours, theirs, *differences: str) -> None:
    ours, theirs = flat(ours), flat(theirs)
    different = {path for path in ours | theirs if ours.get(path, NO) != theirs.get(path, NO)}
    allowed = re.compile('|'.join((*DIFFERENCES, *differences)))
    assert not {path for path in different if not allowed.fullmatch(path)}


@pytest.mark.parametrize(('ours', 'theirs'), DETECTORS.items())
def test_detectors_follow_the_toolbox(ours, theirs):
    ours, theirs = (
        Config.fromfile(CONFIGS / f'coco/{ours}_coco.py'),
        stock('mmdet', f'{theirs}_coco'),
    )
    assert_same(ours.model, theirs.model, r'\.backbone.*')
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        assert_same(ours[loader], theirs[loader], r'\.dataset\.pipeline.*\.scales\.\d\.1')
    assert_same(ours.val_evaluator, theirs.val_evaluator)
    assert ours.train_cfg == theirs.train_cfg


SEGMENTORS = {
    'ade20k/upernet_nala-t_8xb2-160k_ade20k-512x512': 'swin/swin-tiny-patch4-window7-in1k-pre_'
    'upernet_8xb2-160k_ade20k-512x512',
    'ade20k/segformer_nala-t_8xb2-160k_ade20k-512x512': 'segformer/'
    'segformer_mit-b0_8xb2-160k_ade20k-512x512',
    'ade20k/mask2former_nala-t_8xb2-160k_ade20k-512x512': 'mask2former/'
    'mask2former_r50_8xb2-160k_ade20k-512x512',
    'ade20k/fpn_nala-t_8xb2-80k_ade20k-512x512': 'sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512',
    'cityscapes/upernet_nala-t_4xb2-160k_cityscapes-512x1024': 'upernet/'
    'upernet_r50_4xb2-80k_cityscapes-512x1024',
    'cityscapes/upernet_nala-t_4xb2-160k_cityscapes-769x769': 'upernet/'
    'upernet_r50_4xb2-80k_cityscapes-769x769',
    'cityscapes/fpn_nala-t_4xb2-80k_cityscapes-512x1024': 'sem_fpn/'
    'fpn_r50_4xb2-80k_cityscapes-512x1024',
}


@pytest.mark.parametrize(('ours', 'theirs'), SEGMENTORS.items())
def test_segmentors_follow_the_toolbox(ours, theirs):
    ours, theirs = Config.fromfile(CONFIGS / f'{ours}.py'), stock('mmseg', theirs)
    assert_same(ours.model, theirs.model, r'\.backbone.*')
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        assert_same(ours[loader], theirs[loader], r'\.batch_size')
    assert_same(ours.tta_pipeline, stock('mmseg', theirs_dataset(ours)).tta_pipeline)
    assert ours.val_evaluator == theirs.val_evaluator


def test_classifier_follows_the_toolbox_and_the_recipe():
    ours = Config.fromfile(CONFIGS / 'imagenet/nala-t_8xb128-300e_in1k.py')
    theirs = stock('mmpretrain', 'swin_transformer/swin-tiny_16xb64_in1k')
    assert_same(
        ours.model,
        theirs.model,
        r'\.(backbone|neck|init_cfg).*',
        r'\.head\.(init_cfg.*|cal_acc|in_channels)',
    )
    assert ours.data_preprocessor == theirs.data_preprocessor
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        assert_same(
            ours[loader], theirs[loader], r'\.batch_size', r'.*persistent.*', r'\.sampler.*'
        )
    assert ours.train_dataloader.sampler == dict(type='RepeatAugSampler', shuffle=True)
    assert ours.val_evaluator == ours.test_evaluator == theirs.val_evaluator
    assert ours.optim_wrapper.optimizer == theirs.optim_wrapper.optimizer
    assert ours.optim_wrapper.optimizer.lr == 1e-3 and ours.optim_wrapper.paramwise_cfg == dict(
        norm_decay_mult=0.0, bias_decay_mult=0.0
    )
    warm_up, cosine = ours.param_scheduler
    assert (warm_up.end, cosine.begin, cosine.end, cosine.eta_min) == (5, 5, 300, 1e-5)
    assert (ours.train_cfg, ours.auto_scale_lr) == (
        theirs.train_cfg,
        theirs.auto_scale_lr | dict(enable=False),
    )
    (ema,) = [hook for hook in ours.custom_hooks if hook.type == 'EMAHook']
    assert ema.update_buffers


def theirs_dataset(cfg: Config) -> str:
    return '_base_/datasets/' + cfg.dataset_type.removesuffix('Dataset').lower()


@pytest.mark.parametrize('path', LEAVES, ids=lambda path: path.stem)
def test_names_say_what_the_config_does(path):
    """Variant, batch, schedule, crop and data set of the file's name are those inside."""
    cfg = Config.fromfile(path)
    backbone = cfg.model.backbone
    if variant := re.search(r'nala-(\w+?)_', path.stem):
        assert backbone.arch == variant[1]
    if backbone.type == 'NaLaFormer':
        stages = backbone.get('out_indices', (0, 1, 2, 3))
        channels = [NaLaFormer.out_channels[backbone.arch][stage] for stage in stages]
        parts = [cfg.model.get(part, {}) for part in ('neck', 'panoptic_head', 'decode_head')]
        given = next(part.in_channels for part in parts if 'in_channels' in part)
        assert given == (channels[-1] if cfg.default_scope == 'mmpretrain' else channels)
    datasets = importlib.import_module(f'{cfg.default_scope}.registry').DATASETS
    classes = cfg.get('metainfo', datasets.get(cfg.train_dataloader.dataset.type).METAINFO)
    for name in ('num_classes', 'num_things_classes'):
        for number in re.findall(rf"'{name}': (\d+)", repr(cfg.model.to_dict())):
            assert int(number) == len(classes['classes'])
    if cfg.default_scope == 'mmpretrain':
        assert cfg.data_preprocessor.num_classes == len(classes['classes'])
    assert (
        cfg.auto_scale_lr.base_batch_size in (4, 8, 16, 32, 1024) and not cfg.auto_scale_lr.enable
    )
    if batch := re.search(r'(\d+)xb(\d+)', path.stem):
        gpus, each = map(int, batch.groups())
        assert cfg.train_dataloader.batch_size == each
        assert cfg.auto_scale_lr.base_batch_size == gpus * each
    if iterations := re.search(r'-(\d+)k_', path.stem):
        assert cfg.train_cfg.max_iters == int(iterations[1]) * 1000 == cfg.param_scheduler[-1].end
    if epochs := re.search(r'-(\d+)e_in1k', path.stem):
        assert cfg.train_cfg.max_epochs == cfg.param_scheduler[-1].end == int(epochs[1])
    if crop := re.search(r'(\d+)x(\d+)$', path.stem):
        size = tuple(map(int, crop.groups()))
        assert cfg.crop_size == cfg.model.data_preprocessor.size == size
    for name, milestones in (('1x', [8, 11]), ('3x', [27, 33])):
        if f'{name}_' in path.stem:
            assert cfg.train_cfg.max_epochs == cfg.param_scheduler[-1].end == int(name[0]) * 12
            assert cfg.param_scheduler[-1].milestones == milestones
            assert cfg.optim_wrapper.optimizer == dict(
                type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05
            )
    dtype = {'amp-1x': 'float16', 'amp-160k': 'float16', 'amp-bf16': 'bfloat16'}
    amp = re.search('|'.join(dtype), path.stem)
    assert cfg.optim_wrapper.get('dtype') == (amp and dtype[amp[0]])
    assert ('constructor' in cfg.optim_wrapper) == ('-lld-' in path.stem)


@pytest.mark.parametrize('layout', ['coco', 'ade20k', 'cityscapes', 'imagenet'])
def test_only_the_data_folder_changes(layout, tmp_path):
    """Every pipeline of the zoo reads a small folder that is laid out as the real one."""
    folder = tmp_path / 'small'
    shapes.make_dataset(folder, num_train=2, num_val=1, size=64, layout=layout)
    seen = set()
    for path in sorted((CONFIGS / layout).glob('*.py')):
        option = ['--cfg-options', f'data_root={folder}']
        cfg = load_config(argument_parser('').parse_args([str(path), *option]))
        init_default_scope(cfg.default_scope)
        for loader in (cfg.train_dataloader, cfg.val_dataloader):
            text = repr(loader.dataset)
            if text in seen:
                continue
            seen.add(text)
            dataset = DATASETS.build(loader.dataset)
            if layout == 'imagenet':
                labels = {int(dataset[i]['data_samples'].gt_label) for i in range(len(dataset))}
                assert labels <= {327, 805, 825, 890, 904, 921} and len(labels) > 1
                assert dataset[0]['inputs'].shape == (3, 224, 224)
                continue
            assert len(dataset) == (1 if loader is cfg.val_dataloader else 2)
            item = dataset[0]
            sample = item['data_samples']
            if layout == 'coco':
                assert len(dataset.metainfo['classes']) == 80
                assert len(sample.gt_instances) > 0
                assert max(item['inputs'].shape) <= 1333
                assert str(folder) in cfg.val_evaluator.ann_file
            else:
                size = item['inputs'].shape[1:]
                if loader is cfg.train_dataloader:  # smaller ones are padded by the model
                    assert all(side <= most for side, most in zip(size, cfg.crop_size, strict=True))
                else:
                    assert min(size) >= 512
                labels = sample.gt_sem_seg.data.unique().tolist()
                num_classes = len(dataset.metainfo['classes'])
                assert set(labels) <= {*range(num_classes), 255}
                assert num_classes == cfg.model.decode_head.num_classes
    assert len(seen) >= (4 if layout == 'coco' else 2)


def build(cfg: Config) -> torch.nn.Module:
    if 'custom_imports' in cfg:
        import_modules_from_strings(**cfg.custom_imports)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model


def semantic_sample(num_classes: int, side: int) -> SegDataSample:
    labels = torch.arange(side * side).reshape(1, side, side) // 97 % num_classes
    size = (side, side)
    return SegDataSample(
        gt_sem_seg=PixelData(data=labels), metainfo=dict(img_shape=size, ori_shape=size)
    )


def instance_sample(num_classes: int, side: int) -> DetDataSample:
    corners = np.array([[4, 4, 40, 36], [20, 30, 58, 60]]) * side / 64
    masks = np.zeros((2, side, side), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, corners.astype(int), strict=True):
        mask[top:bottom, left:right] = 1
    sample = DetDataSample(metainfo=dict(img_shape=(side, side), ori_shape=(side, side)))
    sample.set_metainfo(dict(scale_factor=(1.0, 1.0), batch_input_shape=(side, side)))
    sample.gt_instances = InstanceData(
        bboxes=HorizontalBoxes(torch.tensor(corners, dtype=torch.float32)),
        labels=torch.tensor([1, num_classes - 1]),
        masks=BitmapMasks(masks, side, side),
    )
    sample.ignored_instances = InstanceData(bboxes=HorizontalBoxes(torch.zeros(0, 4)))
    return sample


def image_sample(num_classes: int) -> DataSample:
    return DataSample().set_gt_label(num_classes - 1)


def shrink(cfg: Config, side: int) -> None:
    """Make images square with this side, and keep the proposals of detectors few."""
    if cfg.default_scope == 'mmpretrain':
        cfg.model.data_preprocessor = dict(cfg.data_preprocessor, type='ClsDataPreprocessor')
        return
    preprocessor = cfg.model.data_preprocessor
    if cfg.default_scope == 'mmseg':
        preprocessor.size = (side, side)
        return
    for augment in preprocessor.get('batch_augments', ()):
        augment.size = (side, side)
    train, test = cfg.model.train_cfg, cfg.model.test_cfg
    if 'rcnn' in test:
        train.rpn_proposal.max_per_img = test.rpn.max_per_img = 20
        test.rcnn.max_per_img = 4
        steps = train.rcnn if isinstance(train.rcnn, list) else [train.rcnn]
        for step in steps:
            step.sampler.num = 16
    if 'num_queries' in cfg.model:
        cfg.model.num_queries = 20
    test.get('rcnn', test).score_thr = 0.0  # an untrained model is not sure of anything


@pytest.mark.parametrize('path', LEAVES, ids=lambda path: path.stem)
def test_a_step_and_a_prediction(path):
    """Losses and gradients are finite, no parameter is left out, predictions have their shapes."""
    cfg = Config.fromfile(path)
    scope = cfg.default_scope
    side = 64
    shrink(cfg, side)
    if scope == 'mmpretrain':
        num_classes = cfg.model.head.num_classes
        sample = image_sample(num_classes)
    elif scope == 'mmseg':
        num_classes = cfg.model.decode_head.num_classes
        sample = semantic_sample(num_classes, side)
    else:
        num_classes = len(cfg.get('metainfo', CocoDataset.METAINFO)['classes'])
        sample = instance_sample(num_classes, side)

    torch.manual_seed(0)
    model = build(cfg).train()
    images = [torch.randint(0, 256, (3, side, side), dtype=torch.uint8) for _ in range(2)]
    batch = dict(inputs=images, data_samples=[sample, deepcopy(sample)])
    losses = model(**model.data_preprocessor(deepcopy(batch), True), mode='loss')
    loss, parts = model.parse_losses(losses)
    loss.backward()
    assert all(part.isfinite() for part in parts.values()), parts
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (parameter.grad is None or not parameter.grad.isfinite().all())
    ]
    assert not wrong

    model.eval()
    with torch.no_grad():
        results = model.test_step(batch)
    assert len(results) == 2
    for result in results:
        if scope == 'mmpretrain':
            assert result.pred_score.shape == (num_classes,)
            torch.testing.assert_close(result.pred_score.sum(), torch.tensor(1.0))
            assert result.pred_label == result.pred_score.argmax()
        elif scope == 'mmseg':
            assert result.seg_logits.data.shape == (num_classes, side, side)
            assert result.pred_sem_seg.data.shape == (1, side, side)
            assert result.pred_sem_seg.data.max() < num_classes
        else:
            found = result.pred_instances
            assert len(found) > 0 and found.bboxes.shape == (len(found), 4)
            assert found.labels.max() < num_classes
            if 'segm' in cfg.val_evaluator.metric:
                assert found.masks.shape == (len(found), side, side)


def test_the_data_folder_of_a_derived_config_moves_too(tmp_path):
    config = tmp_path / 'own.py'
    base = CONFIGS / 'mask_rcnn_nala_coco.py'
    config.write_text(f"_base_ = {str(base)!r}\ndata_root = 'elsewhere'")
    option = ['--cfg-options', 'data_root=there/']
    cfg = load_config(argument_parser('').parse_args([str(config), *option]))
    assert cfg.train_dataloader.dataset.data_root == 'there/'
    assert cfg.test_evaluator.ann_file == 'there/annotations/instances_val2017.json'


def test_layer_decay_without_its_constructor_is_refused():
    config = str(CONFIGS / 'upernet_nala_ade20k.py')
    option = 'optim_wrapper.paramwise_cfg.layer_decay_rate=0.9'
    args = argument_parser('').parse_args([config, '--cfg-options', option])
    with pytest.raises(SystemExit, match='layer_decay_rate needs optim_wrapper.constructor='):
        load_config(args)


def test_instances_are_trained_and_evaluated(tmp_path):
    """The small Mask R-CNN, with nothing but the length of the job changed."""
    shapes.make_dataset(tmp_path / 'data', num_train=4, num_val=2, size=64)
    options = [
        f'data_root={tmp_path / "data"}',
        'train_cfg.max_iters=2',
        'train_cfg.val_interval=2',
    ]
    for loader in ('train', 'val', 'test'):
        options += [f'{loader}_dataloader.num_workers=0']
        options += [f'{loader}_dataloader.persistent_workers=False']
    config = CONFIGS / 'shapes/mask-rcnn_nala-xt_fpn_shapes.py'
    options += ['model.test_cfg.rcnn.score_thr=0', 'default_hooks.checkpoint.interval=1']
    finished = run_tool('train.py', config, '--cfg-options', *options, cwd=tmp_path)
    assert finished.code == 0, finished.output
    for metric in ('bbox_mAP_50', 'segm_mAP_50'):
        (value,) = re.findall(rf'coco/{metric}: (-?[\d.]+)', finished.output)
        assert 0 <= float(value) <= 1
    assert (tmp_path / 'work_dirs' / config.stem / 'iter_2.pth').exists()


def test_objects_are_classified(tmp_path):
    """The small classifier, trained and evaluated, with nothing but the length changed."""
    shapes.make_dataset(tmp_path / 'data', num_train=4, num_val=2, size=64, layout='imagenet')
    config = CONFIGS / 'shapes/classifier_nala-xt_shapes.py'
    options = [f'data_root={tmp_path / "data"}', 'train_cfg.max_epochs=2', 'auto_scale_lr.enable=1']
    options += ['train_dataloader.batch_size=4']
    for loader in ('train', 'val', 'test'):
        options += [f'{loader}_dataloader.num_workers=0']
        options += [f'{loader}_dataloader.persistent_workers=False']
    finished = run_tool('train.py', config, '--cfg-options', *options, cwd=tmp_path)
    assert finished.code == 0, finished.output
    accuracies = re.findall(r'accuracy/top1: ([\d.]+)', finished.output)
    assert len(accuracies) == 2

    checkpoint = tmp_path / 'work_dirs' / config.stem / 'epoch_2.pth'
    images = ['--show-dir', tmp_path / 'pictures', '--out', tmp_path / 'results.pkl']
    tested = run_tool(
        'test.py', config, checkpoint, *images, '--cfg-options', *options, cwd=tmp_path
    )
    assert tested.code == 0, tested.output
    assert re.findall(r'accuracy/top1: ([\d.]+)', tested.output) == accuracies[-1:]
    results = pickle.loads((tmp_path / 'results.pkl').read_bytes())
    hits = [result['pred_label'] == result['gt_label'] for result in results]
    assert len(hits) == len(list((tmp_path / 'data/val').rglob('*.JPEG')))
    assert float(accuracies[-1]) == pytest.approx(
        100 * float(sum(map(int, hits))) / len(hits), abs=1e-3
    )
    assert len(list((tmp_path / 'pictures').rglob('*.png'))) == len(hits)


def test_a_classifier_with_other_classes_is_refused(tmp_path):
    shapes.make_dataset(tmp_path / 'data', num_train=2, num_val=1, size=32, layout='imagenet')
    options = [f'data_root={tmp_path / "data"}', 'model.head.num_classes=5']
    options += ['train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False']
    config = CONFIGS / 'shapes/classifier_nala-xt_shapes.py'
    finished = run_tool('train.py', config, '--cfg-options', *options, cwd=tmp_path)
    assert finished.code == 1
    assert 'head.num_classes must be 6, the number of classes' in finished.output.splitlines()[-1]


@pytest.mark.parametrize('label', [-1, 6])
def test_an_image_label_outside_the_classes_is_refused(label):
    dataset = SimpleNamespace(metainfo=dict(classes=tuple('abcdef')))
    runner = SimpleNamespace(val_dataloader=SimpleNamespace(dataset=dataset))
    sample = DataSample(metainfo=dict(img_path='a.jpg')).set_gt_label(label)
    message = rf'a.jpg has label \[{label}\], allowed are 0 to 5'
    with pytest.raises(InputError, match=message):
        LabelCheckHook().before_val_iter(runner, 0, dict(data_samples=[sample]))


AMP = [path for path in LEAVES if re.search('[_-]amp-', path.stem)]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('path', AMP, ids=lambda path: path.stem)
def test_mixed_precision(path, dtype):
    """What reaches the heads is that of float32 but for rounding, and gradients are finite.

    mmcv's suppression of boxes takes no half precision on the CPU, so it ends before the heads.
    """
    cfg = Config.fromfile(path)
    shrink(cfg, 64)
    torch.manual_seed(0)
    model = build(cfg).eval()
    images = torch.randn(2, 3, 64, 64)

    def run(enabled: bool) -> list[torch.Tensor]:
        with torch.autocast('cpu', dtype, enabled=enabled):
            return model.extract_feat(images)

    tolerance = {torch.float16: 0.01, torch.bfloat16: 0.05}[dtype]
    for exact, rounded in zip(run(False), run(True), strict=True):
        error = (rounded.float() - exact).norm() / exact.norm()
        assert error < tolerance
    model.train()
    sum(output.float().square().mean() for output in run(True)).backward()
    gradients = [p.grad for p in model.backbone.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
