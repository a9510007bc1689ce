"""Export of segmentors, classifiers and backbones, and evaluation of what was exported.

An exported file computes from a normalised image; how to normalise it, and what the classes are,
is in the file's metadata.
"""

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS
from torch import Tensor, nn

from .backbones.nalaformer import GatedAttention
from .checkpoint.files import write_new
from .engine.errors import InputError
from .engine.tools import innermost_dataset
from .version import __version__

ENDINGS = ('.onnx', '.pt2', '.pt', '.ts')
PARTS = ('model', 'backbone')
OPSET = 18
TOLERANCE = 1e-4  # of the largest absolute value of an output

# Batch, height and width of the images on which every exported file is compared with the model.
# torch.export takes a size of 1 for a constant, and the last stage has it below 33.
CHECKED = ((1, 64, 96), (3, 65, 33), (2, 128, 128))
EXAMPLE = (72, 104)
EXPORTS_SIZES = hasattr(torch.export.Dim, 'DYNAMIC')  # torch.export leaves sizes open, from 2.6 on

_METADATA = 'metadata.json'  # its name in the zip archives of torch

Outputs = Sequence[Tensor]


class AdaptiveAveragePool(nn.Module):
    """:class:`torch.nn.AdaptiveAvgPool2d` as two matrix products, which suit any image size.

    Args:
        output_size: Height and width of the result; None keeps that of the input.
    """

    def __init__(self, output_size: int | tuple[int | None, int | None] | None) -> None:
        super().__init__()
        sides = output_size if isinstance(output_size, tuple) else (output_size, output_size)
        self.height, self.width = sides

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C, height, width)``."""
        rows, columns = (
            averaging_matrix(size, cells, x)
            for size, cells in zip(x.shape[2:], (self.height, self.width), strict=True)
        )
        return rows @ x @ columns.mT


class UpsampleByInteger(nn.Module):
    """mmseg's ``Upsample`` without its float sizes, which ``torch.export`` takes for constants."""

    def __init__(self, scale: int, mode: str, align_corners: bool | None) -> None:
        super().__init__()
        self.scale, self.mode, self.align_corners = scale, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C, scale H, scale W)``."""
        size = [side * self.scale for side in x.shape[2:]]
        return F.interpolate(x, size, mode=self.mode, align_corners=self.align_corners)


def exportable_form(module: Any) -> nn.Module:
    """What computes the same as ``module`` and has a form that exporters can express."""
    if type(module) is nn.AdaptiveAvgPool2d:
        return AdaptiveAveragePool(module.output_size)
    scale = getattr(module, 'scale_factor', None)
    of_mmseg = type(module).__module__ == 'mmseg.models.utils.wrappers'  # Upsample
    if of_mmseg and not module.size and isinstance(scale, float) and scale.is_integer():
        return UpsampleByInteger(int(scale), module.mode, module.align_corners)
    return module


def averaging_matrix(size: int, cells: int | None, like: Tensor) -> Tensor:
    """``(cells, size)``: each row averages from ``floor(i size / cells)`` to below
    ``ceil((i + 1) size / cells)``, as torch divides a side into cells that may overlap."""
    if cells is None:
        cells = size
    cell = torch.arange(cells, device=like.device)[:, None]
    start = cell * size // cells
    end = ((cell + 1) * size + cells - 1) // cells
    position = torch.arange(size, device=like.device)
    inside = ((start <= position) & (position < end)).to(like.dtype)
    return inside / (end - start)


class Exportable(nn.Module):
    """A copy of a model in forms that exporters can express; takes an image, gives a tuple.

    Args:
        model: The model.
        kind: ``'segmentor'``, ``'classifier'`` or ``'backbone'``, see :func:`kind_of`.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.kind = kind
        # The backbone alone, as exporters write everything that a module holds.
        self.inner = revert_sync_batchnorm(
            deepcopy(model.backbone if kind == 'backbone' else model)
        )
        for module in list(self.inner.modules()):
            for name, child in module.named_children():
                setattr(module, name, exportable_form(child))
        self.eval().requires_grad_(False)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return compute(self.inner, self.kind, image)


def compute(model: Any, kind: str, image: Tensor) -> tuple[Tensor, ...]:
    """The stages of a backbone, or the logits of a model, of a segmentor at the image's size."""
    if kind == 'segmentor':
        return (model.encode_decode(image, [dict(img_shape=image.shape[2:])]),)
    outputs = model(image)
    return tuple(outputs) if kind == 'backbone' else (outputs,)


def kind_of(model: nn.Module, part: str = 'model') -> str:
    """What is exported of a model: ``'segmentor'``, ``'classifier'`` or ``'backbone'``.

    Raises:
        InputError: If that part of the model cannot be exported.
    """
    name = type(model).__name__
    scope = type(model).__module__.partition('.')[0]
    if part not in PARTS:
        raise InputError(f'part must be one of {PARTS}, got {part!r}')
    if part == 'backbone':
        if not isinstance(getattr(model, 'backbone', None), nn.Module):
            raise InputError(f"part 'backbone': {name} has none")
        return 'backbone'
    if scope == 'mmseg' and hasattr(model, 'encode_decode'):
        return 'segmentor'
    if scope == 'mmpretrain' and getattr(model, 'head', None) is not None:
        return 'classifier'
    if scope == 'mmdet':
        raise InputError(
            f"{name} is a detector, of which only part 'backbone' is exported; mmdeploy is the "
            'tool for whole detectors'
        )
    raise InputError(
        f'{name} cannot be exported: expected an mmseg segmentor or an mmpretrain image '
        "classifier, or part 'backbone'"
    )


class FixedSize(nn.Module):
    """A TorchScript trace that refuses image sizes other than its own, which it has built in."""

    def __init__(self, traced: torch.jit.ScriptModule, height: int, width: int) -> None:
        super().__init__()
        self.traced = traced
        self.height = height
        self.width = width

    def forward(self, image: Tensor):  # TorchScript infers how many outputs there are
        if image.dim() != 4 or image.shape[2] != self.height or image.shape[3] != self.width:
            raise ValueError(
                f'image must be (B, C, {self.height}, {self.width}), got {list(image.shape)}'
            )
        return self.traced(image)


def metadata(cfg: Config, kind: str) -> dict[str, str]:
    """What is needed to use an exported file without its config, each value as JSON.

    ``mean``, ``std`` and ``bgr_to_rgb`` (of images as OpenCV reads them), ``classes`` and
    ``palette`` where the data set has them, ``kind`` and ``mmnala_version``.
    """
    model = cfg.model
    while isinstance(inner := model.get('module'), Mapping):
        model = inner  # out of the test-time augmentation wrapper
    processor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    swaps = ('bgr_to_rgb', 'rgb_to_bgr', 'to_rgb')
    dataset = innermost_dataset((cfg.get('test_dataloader') or {}).get('dataset', {}))
    cls = DATASETS.get(dataset['type']) if isinstance(dataset.get('type'), str) else None
    names = {**getattr(cls, 'METAINFO', {}), **(dataset.get('metainfo') or {})}
    values = dict(
        kind=kind,
        mmnala_version=__version__,
        mean=processor.get('mean'),
        std=processor.get('std'),
        bgr_to_rgb=any(processor.get(swap) for swap in swaps),
        classes=names.get('classes'),
        palette=names.get('palette'),
    )
    return {name: json.dumps(value) for name, value in values.items()}


def check_request(out: str, static: tuple[int, int] | None, int8: bool) -> None:
    """Fail unless a file of that name can be made, before anything expensive is done.

    Raises:
        InputError: Naming the argument that does not fit, or a package that is missing.
        OSError: If the file exists already, or its folder does not.
    """
    ending = Path(out).suffix
    if ending not in ENDINGS:
        raise InputError(f'{out}: expected a name ending in {", ".join(ENDINGS)}')
    if int8 and ending != '.onnx':
        raise InputError(f'--int8 is for .onnx files, got {out}')
    if ending in ('.pt', '.ts') and static is None:
        raise InputError(f'{out}: TorchScript keeps the size it was traced with, give --static HxW')
    if not Path(out).parent.is_dir():
        raise FileNotFoundError(f'{out}: there is no such folder')
    if os.path.lexists(out):
        raise FileExistsError(f'{out} exists already; move it or choose another name')
    if ending in ('.onnx', '.pt2') and not EXPORTS_SIZES:
        raise InputError(
            f'{out}: {ending} needs torch 2.6 or newer, not {torch.__version__}; '
            'TorchScript (a .ts file, --static HxW) does not'
        )
    if ending == '.onnx':
        require('onnx', 'onnxscript', 'onnxruntime')


def require(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(
            f"ONNX needs {', '.join(missing)}, not installed: pip install 'mmnala[export]'"
        )


def export(
    model: nn.Module,
    out: str,
    part: str = 'model',
    static: tuple[int, int] | None = None,
    int8: bool = False,
    meta: Mapping[str, str] | None = None,
) -> float:
    """Write a model as a file of ``out``'s ending and compare the file with the model.

    Args:
        model: An mmseg segmentor or mmpretrain classifier, or, for its backbone, any model.
        out: The new file: ``.onnx`` (opset 18), ``.pt2`` (:func:`torch.export.save`), ``.pt`` or
            ``.ts`` (TorchScript). The batch size is free; so are height and width from 33 up,
            unless ``static``.
        part: ``'model'``: normalised image ``(B, C, H, W)`` to ``logits`` (of a segmentor: at the
            image's size); ``'backbone'``: to ``stage0``, ``stage1``, ...
        static: Height and width, if only one size is wanted; TorchScript needs it.
        int8: Quantise the linear layers of an ONNX file to int8, with scales of the activations
            that are found anew in every run.
        meta: Strings to keep in the file, see :func:`metadata`.

    Returns:
        The largest difference from the model over several images, relative to the largest
        absolute value of an output.

    Raises:
        InputError: If the model cannot be exported, or the file differs by more than 1e-4 (with
            ``int8``: by as much as the output itself); no file is left.
        OSError: If the file cannot be written or exists already.
    """
    check_request(out, static, int8)
    kind = kind_of(model, part)
    model = deepcopy(model).cpu().eval()
    for module in model.modules():
        if isinstance(module, GatedAttention):
            module.attn_impl = 'auto'  # the plain formula under a tracer, lean beside it
    exportable = Exportable(model, kind)
    reference = model.backbone if kind == 'backbone' else model
    channels = getattr(model.backbone, 'in_channels', 3)
    shapes = CHECKED if static is None else ((1, *static), (3, *static))
    generator = torch.Generator().manual_seed(0)

    def image(batch: int, height: int, width: int) -> Tensor:
        return torch.randn(batch, channels, height, width, generator=generator)

    write = _WRITERS[Path(out).suffix]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = os.path.join(folder, f'exported{Path(out).suffix}')
        try:
            with quiet():
                write(exportable, image(2, *(static or EXAMPLE)), path, static, meta or {})
                path = quantised(path) if int8 else path
                exported = load(path)
                images = [image(*shape) for shape in shapes]
                difference = largest(
                    [relative_difference(exported(x), compute(reference, kind, x)) for x in images]
                )
        except Exception as error:  # exporters raise nearly anything on what they cannot express
            first = (str(error).strip().splitlines() or [''])[0]
            hint = '' if static else '; one size alone (--static HxW) may work'
            raise InputError(f'{out}: {type(error).__name__}: {first}{hint}') from error
        allowed = 1.0 if int8 else TOLERANCE
        if not difference <= allowed:  # nor is NaN
            raise InputError(
                f'{out}: differs from the model by {difference:.1e}, allowed is {allowed:g}; the '
                'file is not kept'
            )
        write_new(out, Path(path).read_bytes())
    return difference


def relative_difference(actual: Outputs, expected: Outputs) -> float:
    """The largest difference in units of the largest absolute value, over all outputs."""
    pairs = zip(actual, expected, strict=True)
    return largest([float((a - e).abs().max() / e.abs().max()) for a, e in pairs])


def largest(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).max())  # Python's max passes over NaN


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn of much that is checked afterwards."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(level)


def _write_onnx(
    model: Exportable, image: Tensor, path: str, static: Any, meta: Mapping[str, str]
) -> None:
    names = {0: 'batch'} if static else {0: 'batch', 2: 'height', 3: 'width'}
    program = torch.onnx.export(
        model,
        (image,),
        dynamo=True,
        verbose=False,
        opset_version=OPSET,
        dynamic_shapes=(names,),
        input_names=['image'],
        output_names=output_names(model),
    )
    for node in program.model.graph.all_nodes():  # type: ignore[union-attr]
        node.metadata_props.clear()  # stack traces, with paths of this machine
    program.model.metadata_props.update(meta)  # type: ignore[union-attr]
    program.save(path, external_data=False)  # type: ignore[union-attr]


def output_names(model: Exportable) -> list[str]:
    if model.kind == 'backbone':
        return [f'stage{i}' for i in model.inner.out_indices]
    return ['logits']


def quantised(path: str) -> str:
    """Quantise the weights of linear layers; other matrix products have no constant side."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(path)
    del model.graph.value_info[:]  # shapes of weights that the quantiser transposes
    target = path.replace('.onnx', '.int8.onnx')
    quantize_dynamic(model, target, op_types_to_quantize=['MatMul', 'Gemm'], per_channel=True)
    return target


def _write_program(
    model: Exportable, image: Tensor, path: str, static: Any, meta: Mapping[str, str]
) -> None:
    free = dict.fromkeys((0,) if static else (0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.export.export(model, (image,), dynamic_shapes=(free,))
    torch.export.save(program, path, extra_files={_METADATA: json.dumps(dict(meta))})


def _write_trace(
    model: Exportable, image: Tensor, path: str, static: Any, meta: Mapping[str, str]
) -> None:
    script = torch.jit.script(FixedSize(torch.jit.trace(model, image), *static))
    torch.jit.save(script, path, _extra_files={_METADATA: json.dumps(dict(meta))})


_WRITERS: dict[str, Callable[..., None]] = {
    '.onnx': _write_onnx,
    '.pt2': _write_program,
    '.pt': _write_trace,
    '.ts': _write_trace,
}


def load(path: str) -> Callable[[Tensor], Outputs]:
    """The function of an exported file, by its ending."""
    if path.endswith('.pt2'):
        return torch.export.load(path).module()
    if not path.endswith('.onnx'):
        return torch.jit.load(path)
    return _runner(onnx_session(path), path)


def _runner(session: Any, path: str) -> Callable[[Tensor], Outputs]:
    size = session.get_inputs()[0].shape[2:]

    def run(image: Tensor) -> list[Tensor]:
        if isinstance(size[0], int) and list(image.shape[2:]) != size:
            raise InputError(f'{path}: takes images of {size} alone, got {list(image.shape[2:])}')
        outputs = session.run(None, {'image': image.cpu().numpy()})
        return [torch.from_numpy(output).to(image.device) for output in outputs]

    return run


def onnx_session(path: str) -> Any:
    require('onnxruntime')
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(
            path, options, providers=onnxruntime.get_available_providers()
        )
    except Exception as error:  # of onnxruntime's own kinds, with no common one
        raise InputError(f'{path}: {str(error).strip().splitlines()[0]}') from error


def compute_by_onnx(model: nn.Module, path: str, cfg: Config | None = None) -> None:
    """Let onnxruntime compute the logits of a segmentor or classifier from now on.

    What the model does with them (sliding windows, flips, resizing to the original image) stays.

    Args:
        model: The model that was exported, its weights do not matter; changed in place.
        path: The ONNX file, exported as ``part='model'``.
        cfg: The config, whose normalisation and classes must be those in the file's metadata, as
            far as it has any.

    Raises:
        InputError: If onnxruntime is missing, the file is none of a model of this kind and number
            of classes, its metadata contradicts the config, or, later, if an image has a size that
            it does not take.
    """
    while isinstance(inner := getattr(model, 'module', None), nn.Module):
        model = inner  # out of the distributed and the test-time augmentation wrapper
    kind = kind_of(model)
    session = onnx_session(path)
    outputs = [output.name for output in session.get_outputs()]
    logits = session.get_outputs()[0].shape
    if outputs != ['logits'] or len(logits) != (4 if kind == 'segmentor' else 2):
        raise InputError(f'{path}: expected a {kind}, its outputs are {", ".join(outputs)}')
    any_model: Any = model
    classes = any_model.out_channels if kind == 'segmentor' else any_model.head.num_classes
    if logits[1] != classes:
        raise InputError(f'{path}: has {logits[1]} classes, the config {classes}')
    if cfg is not None:
        _compare_metadata(session.get_modelmeta().custom_metadata_map, metadata(cfg, kind), path)
    run = _runner(session, path)
    if kind == 'segmentor':
        any_model.encode_decode = lambda image, metas: run(image)[0]
    else:
        any_model.extract_feat = lambda image: run(image)[0]
        any_model.head.forward = lambda logits: logits


def _compare_metadata(in_file: Mapping[str, str], in_config: Mapping[str, str], path: str) -> None:
    for name in ('mean', 'std', 'bgr_to_rgb', 'classes'):
        if name not in in_file:
            continue
        expected = json.loads(in_config[name])
        try:
            value = json.loads(in_file[name])
        except ValueError:  # another exporter's
            value = in_file[name]
        if name == 'classes' and None in (value, expected):
            continue  # of a data set that does not tell
        if name == 'classes' and isinstance(value, list) and len(value) == len(expected):
            pairs = enumerate(zip(value, expected, strict=True))
            differing = ((f'classes[{i}]', a, b) for i, (a, b) in pairs if a != b)
            name, value, expected = next(differing, (name, None, None))
        if value != expected:
            raise InputError(f'{path}: {name} is {value!r} in the file, {expected!r} in the config')
