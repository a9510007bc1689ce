"""What predictions leave in a folder: pictures, label maps and JSON, each file whole or not there.

``results.json`` lists the inputs with what was found in them; detections are in COCO's format, too,
with an ``images.json`` that has the ids of images and categories.
"""

import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.registry import TRANSFORMS
from mmengine.structures import InstanceData
from numpy.typing import NDArray
from PIL import Image

from ..checkpoint.files import write_new
from ..datasets.untrusted import MAX_PIXELS, FileError, check_coco, check_labels
from .errors import InputError
from .overlay import Entry, Object, Panel, blend, compose, draw_objects
from .predict import Frame, Predictor, ReadError, Source, frame_rate


class JsonList:
    """A JSON array that is written entry by entry and takes its name when it is complete."""

    def __init__(self, path: Path, before: str = '[', after: str = ']') -> None:
        self.path = path
        self.after = after
        self.partial = path.with_name(f'.{path.name}.partial')
        self.file = self.partial.open('w')
        self.file.write(before)
        self.separator = '\n'

    def append(self, entry: Any) -> None:
        self.file.write(self.separator + json.dumps(entry))
        self.separator = ',\n'

    def __enter__(self) -> 'JsonList':
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with self.file:
            self.file.write(f'\n{self.after}\n')
        if kind is None:
            os.replace(self.partial, self.path)
        else:
            self.partial.unlink()


class VideoFile:
    """An mp4 that is written frame by frame and takes its name when it is complete."""

    def __init__(self, path: Path, rate: float, picture: NDArray) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.partial = path.with_name(f'.{path.stem}.partial.mp4')  # OpenCV goes by the ending
        size = picture.shape[1::-1]
        code = cv2.VideoWriter.fourcc(*'mp4v')
        self.writer = cv2.VideoWriter(str(self.partial), code, rate, size)
        if not self.writer.isOpened():
            raise InputError(f'{path}: OpenCV cannot write it here; --video-frames saves PNG files')

    def write(self, picture: NDArray) -> None:
        self.writer.write(picture[..., ::-1])

    def close(self) -> None:
        self.writer.release()
        os.replace(self.partial, self.path)

    def discard(self) -> None:
        self.writer.release()
        self.partial.unlink(missing_ok=True)


class Results(contextlib.ExitStack):
    """Writes the results of one run; :class:`Segmentation` and the others say what they are.

    Leaving the context in order completes the lists.

    Args:
        out: An empty folder.
        predictor: Where the predictions come from.
        pictures: Whether to draw them.
        opacity: Of what is drawn, 0 to 1; None is 0.5 for label maps and masks, 1 for lines.
        score_thr: Draw objects of a higher score only.
        truth: What :func:`open_truth` gives.
        video_frames: Whether the pictures of a video are PNG files, not an mp4.

    Attributes:
        problems: What was the matter with files of the truth, by the input's path.
    """

    def __init__(
        self,
        out: Path,
        predictor: Predictor,
        pictures: bool = True,
        opacity: float | None = None,
        score_thr: float = 0.3,
        truth: 'LabelMapTruth | CocoTruth | None' = None,
        video_frames: bool = False,
    ) -> None:
        super().__init__()
        self.out = out
        self.predictor = predictor
        self.classes, self.palette = predictor.classes, predictor.palette
        self.pictures = pictures
        self.opacity = opacity
        self.score_thr = score_thr
        self.truth = truth
        self.video_frames = video_frames
        self.video: VideoFile | None = None
        self.video_source: Source | None = None
        self.problems: dict[Path, ReadError] = {}
        self.records = self.enter_context(JsonList(out / 'results.json'))

    def add(self, frame: Frame, sample: Any) -> None:
        """Write what was predicted of a frame. Those of a video must follow each other."""
        height, width = frame.image.shape[:2]
        record: dict[str, Any] = dict(input=str(frame.source.path))
        if frame.index is not None:
            record |= dict(frame=frame.index)
        record |= dict(width=width, height=height) | self.save(frame, sample)
        if self.pictures:
            record |= dict(picture=self._picture(frame, sample).as_posix())
        self.records.append(record)

    def save(self, frame: Frame, sample: Any) -> dict[str, Any]:
        """Write files of the prediction's own kind; returns its part of results.json."""
        raise NotImplementedError

    def draw(
        self, frame: Frame, image: NDArray, sample: Any
    ) -> tuple[list[Panel], list[Entry], list[str]]:
        """Panels and legend of a picture, and all texts that the run's legends may have."""
        raise NotImplementedError

    def class_legend(self, indices: Sequence[int]) -> list[Entry]:
        return [Entry(self.palette[i], self.classes[i]) for i in sorted(set(indices))]

    def read_truth(self, frame: Frame) -> Any:
        if self.truth is None or frame.source.is_video:
            return None
        try:
            return self.truth.read(frame)
        except ReadError as error:
            self.problems[frame.source.path] = error
            return None

    def _picture(self, frame: Frame, sample: Any) -> Path:
        as_video = frame.source.is_video and not self.video_frames
        panels, legend, texts = self.draw(frame, _rgb(frame.image), sample)
        picture = compose(panels, legend, texts, fixed=as_video)
        if not as_video:
            path = self.out / 'pictures' / f'{frame.name}.png'
            write_png(path, Image.fromarray(picture))
        else:
            path = self.out / 'pictures' / f'{frame.source.name}.mp4'
            if self.video_source is not frame.source:
                self._close_video()
                self.video = VideoFile(path, frame_rate(frame.source), picture)
                self.video_source = frame.source
            assert self.video is not None
            self.video.write(picture)
        return path.relative_to(self.out)

    def _close_video(self) -> None:
        if self.video is not None:
            self.video.close()
        self.video = None

    def __exit__(self, kind: Any, *details: Any) -> Any:
        if kind is None:
            self._close_video()
        elif self.video is not None:
            self.video.discard()
        return super().__exit__(kind, *details)


class Segmentation(Results):
    """Label maps with the annotations' numbers, and in results.json the pixels of each class.

    Args:
        labels: For each class, the value of its pixels in the maps.
        **options: Of :class:`Results`.
    """

    def __init__(self, *args: Any, labels: Sequence[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.labels = np.array(labels, np.min_scalar_type(max(labels)))
        colours = np.zeros((256, 3), np.uint8)
        if self.labels.dtype == np.uint8:
            colours[self.labels] = self.palette
        self.png_palette = colours.tobytes()

    def save(self, frame: Frame, sample: Any) -> dict[str, Any]:
        prediction = _label_map(sample)
        png = Image.fromarray(self.labels[prediction])
        if self.labels.dtype == np.uint8:  # viewers show it in colours, the values stay
            png.putpalette(self.png_palette)
        path = self.out / 'labels' / f'{frame.name}.png'
        write_png(path, png)
        indices, pixels = np.unique(prediction, return_counts=True)
        names = [self.classes[i] for i in indices]
        return dict(
            label_map=path.relative_to(self.out).as_posix(),
            pixels=dict(zip(names, pixels.tolist(), strict=True)),
        )

    def draw(
        self, frame: Frame, image: NDArray, sample: Any
    ) -> tuple[list[Panel], list[Entry], list[str]]:
        opacity = 0.5 if self.opacity is None else self.opacity
        maps = {'prediction': _label_map(sample)}
        if (truth := self.read_truth(frame)) is not None:
            maps = {'truth': truth, **maps}
        panels = [Panel('image', image)] if truth is not None else []
        panels += [
            Panel(name, blend(image, label_map, self.palette, opacity))
            for name, label_map in maps.items()
        ]
        present = {int(i) for label_map in maps.values() for i in np.unique(label_map)}
        legend = self.class_legend([i for i in present if i < len(self.classes)])
        return panels, legend, self.classes


class Detection(Results):
    """In results.json and COCO's format, all objects with class, score, box and mask."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        truth = self.truth if isinstance(self.truth, CocoTruth) else None
        used = truth.categories if truth is not None else {}
        new = max(used.values(), default=0)
        self.category_ids = []
        for name in self.classes:
            new += name not in used
            self.category_ids.append(used.get(name, new))
        self.next_image = max(truth.coco.imgs, default=0) + 1 if truth is not None else 1
        categories = [
            dict(id=number, name=name)
            for number, name in zip(self.category_ids, self.classes, strict=True)
        ]
        after = f'], "categories": {json.dumps(categories)}}}'
        self.images = self.enter_context(JsonList(self.out / 'images.json', '{"images": [', after))
        self.boxes = self.enter_context(JsonList(self.out / 'results.bbox.json'))
        self.masks: JsonList | None = None

    def save(self, frame: Frame, sample: Any) -> dict[str, Any]:
        from pycocotools import mask as rle

        instances = sample.pred_instances
        image_id = self._add_image(frame)
        objects = []
        for i, (label, score, box) in enumerate(
            zip(
                instances.labels.tolist(),
                instances.scores.tolist(),
                instances.bboxes.tolist(),
                strict=True,
            )
        ):
            objects.append({'class': self.classes[label], 'score': score, 'bbox': box})
            x1, y1, x2, y2 = box
            found = dict(
                image_id=image_id,
                category_id=self.category_ids[label],
                bbox=[x1, y1, x2 - x1, y2 - y1],
                score=score,
            )
            self.boxes.append(found)
            if 'masks' in instances:
                mask = rle.encode(np.asfortranarray(instances.masks[i].numpy(), np.uint8))
                segmentation = dict(size=mask['size'], counts=mask['counts'].decode())
                assert self.masks is not None
                self.masks.append(found | dict(segmentation=segmentation))
        return dict(image_id=image_id, objects=objects)

    def add(self, frame: Frame, sample: Any) -> None:
        if 'pred_instances' not in sample:
            raise InputError('the model predicts no instances, which is all that is saved')
        if 'masks' in sample.pred_instances and self.masks is None:
            self.masks = self.enter_context(JsonList(self.out / 'results.segm.json'))
        super().add(frame, sample)

    def draw(
        self, frame: Frame, image: NDArray, sample: Any
    ) -> tuple[list[Panel], list[Entry], list[str]]:
        instances = sample.pred_instances
        shown = instances[instances.scores > self.score_thr]
        shown = shown[shown.scores.argsort()]  # the surest on top
        objects = self._objects(shown, [f' {score:.2f}' for score in shown.scores.tolist()])
        panels = [Panel('prediction', draw_objects(image, objects, self.palette, self.opacity))]
        if (truth := self.read_truth(frame)) is not None:
            if 'masks' not in instances and 'masks' in truth:
                del truth.masks
            true = self._objects(truth, [''] * len(truth))
            drawn = draw_objects(image, true, self.palette, self.opacity)
            panels.insert(0, Panel('truth', drawn))
            objects += true
        return panels, self.class_legend([found.label for found in objects]), self.classes

    def _objects(self, instances: InstanceData, scores: Sequence[str]) -> list[Object]:
        labels = instances.labels.tolist()
        texts = [self.classes[i] + score for i, score in zip(labels, scores, strict=True)]
        masks = instances.masks.numpy() > 0 if 'masks' in instances else [None] * len(labels)
        return list(map(Object, labels, texts, instances.bboxes.tolist(), masks))

    def _add_image(self, frame: Frame) -> int:
        truth = self.truth if isinstance(self.truth, CocoTruth) else None
        image_id = None if truth is None or frame.source.is_video else truth.find(frame.source)
        if truth is not None and image_id is not None:
            name = truth.coco.imgs[image_id]['file_name']
        else:
            image_id = self.next_image
            self.next_image += 1
            unique = frame.source.unique.as_posix()
            name = unique if frame.index is None else f'{frame.name}.png'
        height, width = frame.image.shape[:2]
        self.images.append(dict(id=image_id, file_name=name, width=width, height=height))
        return image_id


class Classification(Results):
    """In results.json, the classes of the highest scores, the best first."""

    TOP = 5

    def save(self, frame: Frame, sample: Any) -> dict[str, Any]:
        return dict(classes=[{'class': name, 'score': score} for name, score in self._best(sample)])

    def draw(
        self, frame: Frame, image: NDArray, sample: Any
    ) -> tuple[list[Panel], list[Entry], list[str]]:
        legend = [Entry(None, f'{name} {score:.2f}') for name, score in self._best(sample)]
        texts = [f'{name} 0.00' for name in self.classes]
        return [Panel('', image)], legend, texts

    def _best(self, sample: Any) -> list[tuple[str, float]]:
        best = sample.pred_score.topk(min(self.TOP, len(self.classes)))
        names = [self.classes[i] for i in best.indices.tolist()]
        return list(zip(names, best.values.tolist(), strict=True))


class LabelMapTruth:
    """A folder of annotations with the config's endings, flat or with the inputs' folders.

    Args:
        folder: The folder.
        predictor: Whose config says how to read them.
        max_pixels: Of an annotation.
    """

    def __init__(self, folder: Path, predictor: Predictor, max_pixels: int = MAX_PIXELS) -> None:
        self.folder = folder
        self.max_pixels = max_pixels
        self.dataset = predictor.dataset
        self.load = TRANSFORMS.build(dict(type='LoadAnnotations'))

    def find(self, source: Source) -> Path | None:
        """The annotation of an image."""
        image = source.relative
        ending = self.dataset.img_suffix
        stem = image.name.removesuffix(ending) if image.name.endswith(ending) else image.stem
        for folder in (self.folder / image.parent, self.folder):
            for suffix in (self.dataset.seg_map_suffix, '.png'):
                if (path := folder / f'{stem}{suffix}').is_file():
                    return path
        return None

    def read(self, frame: Frame) -> NDArray | None:
        """Indices of classes, 255 where there is none; None if there is no such file.

        Raises:
            ReadError: If it is damaged or not of the image's size.
        """
        path = self.find(frame.source)
        if path is None:
            return None
        content = dict(
            seg_map_path=str(path),
            reduce_zero_label=self.dataset.reduce_zero_label,
            label_map=self.dataset.label_map,
            seg_fields=[],
        )
        try:
            check_labels(path, max_pixels=self.max_pixels)
            truth = self.load(content)['gt_seg_map']
        except Exception as error:  # of the decoder
            raise ReadError(f'its truth {path} cannot be read: {error}') from error
        if truth.shape != frame.image.shape[:2]:
            raise ReadError(
                f'its truth {path} has the shape {truth.shape}, the image {frame.image.shape[:2]}'
            )
        return truth


class CocoTruth:
    """COCO's JSON of objects, which names images by their file names.

    Args:
        path: The file.
        predictor: Whose classes its categories must name.
        max_pixels: Of an image, by the sides that the file gives.

    Raises:
        InputError: If it is no such file, or has none of the classes.
    """

    def __init__(self, path: Path, predictor: Predictor, max_pixels: int = MAX_PIXELS) -> None:
        from pycocotools.coco import COCO

        try:
            check_coco(path, max_pixels, complete=False)
        except FileError as error:
            raise InputError(f'--truth {error}') from error
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(str(path))
        names = [(image['file_name'], i) for i, image in self.coco.imgs.items()]
        self.categories = {entry['name']: number for number, entry in self.coco.cats.items()}
        self.image_ids = {Path(name).name: i for name, i in names} | dict(names)
        self.classes = {
            self.categories[name]: index
            for index, name in enumerate(predictor.classes)
            if name in self.categories
        }
        if not self.classes:
            raise InputError(
                f'--truth {path}: its categories are {", ".join(self.categories)}, '
                f'the classes {", ".join(predictor.classes)}'
            )

    def find(self, source: Source) -> int | None:
        """The id of an image."""
        name = source.relative
        return self.image_ids.get(name.as_posix(), self.image_ids.get(name.name))

    def read(self, frame: Frame) -> InstanceData | None:
        """Boxes (x1, y1, x2, y2), labels and, if all have one, masks; None of another image.

        Raises:
            ReadError: If an annotation has no box, or a mask that cannot be decoded.
        """
        image_id = self.find(frame.source)
        if image_id is None:
            return None
        entries = self.coco.loadAnns(self.coco.getAnnIds(imgIds=[image_id], iscrowd=False))
        entries = [entry for entry in entries if entry['category_id'] in self.classes]
        labels = [self.classes[entry['category_id']] for entry in entries]
        instances = InstanceData(labels=torch.tensor(labels, dtype=torch.long))
        try:
            boxes = torch.tensor([entry['bbox'] for entry in entries]).float().reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            instances.bboxes = boxes
            if entries and all(entry.get('segmentation') for entry in entries):
                masks = np.stack([self.coco.annToMask(entry) for entry in entries])
                instances.masks = torch.from_numpy(masks)
        except Exception as error:  # what lacks, or pycocotools' own
            raise ReadError(f'its truth has a box or mask that is none: {error!r}') from error
        return instances


def open_truth(
    path: Path, predictor: Predictor, sources: Sequence[Source], max_pixels: int = MAX_PIXELS
) -> LabelMapTruth | CocoTruth:
    """The truth that ``--truth`` names.

    Raises:
        InputError: If there is none for any of the sources.
    """
    truth: LabelMapTruth | CocoTruth
    if predictor.scope == 'mmseg' and path.is_dir():
        truth = LabelMapTruth(path, predictor, max_pixels)
    elif predictor.scope == 'mmdet' and path.is_file():
        truth = CocoTruth(path, predictor, max_pixels)
    else:
        expected = dict(mmseg='a folder of label maps', mmdet='a JSON file of COCO annotations')
        what = expected.get(predictor.scope, 'nothing for a classifier')
        raise InputError(f'--truth {path}: expected {what}')
    images = [source for source in sources if not source.is_video]
    found: dict[Any, Source] = {}
    for source in images:
        if (target := truth.find(source)) is not None:
            other = found.setdefault(target, source)
            if other is not source:
                raise InputError(
                    f'--truth {path}: {other.path} and {source.path} would share {target}'
                )
    if not found:
        names = ', '.join(source.relative.as_posix() for source in images[:3])
        raise InputError(f'--truth {path}: it has none of the images ({names}, ...)')
    return truth


def write_png(path: Path, image: Image.Image) -> None:
    """Write a new file and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    image.save(buffer, 'PNG')
    write_new(path, buffer.getvalue())


def _label_map(sample: Any) -> NDArray[np.int64]:
    return sample.pred_sem_seg.data[0].numpy().astype(np.int64)


def _rgb(image: NDArray) -> NDArray[np.uint8]:
    channels = np.stack([image] * 3, -1) if image.ndim == 2 else image[..., 2::-1]
    return np.clip(channels, 0, 255).astype(np.uint8)
