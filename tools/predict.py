"""Predict images and videos with an mmseg, mmdet or mmpretrain config, and draw the predictions.

The folder OUT gets results.json and pictures/ with a legend of the classes; of a segmentor, also
labels/, PNG files with the annotations' numbers; of a detector, results.bbox.json and, of masks,
results.segm.json in COCO's format, and images.json with the ids that they use.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mmnala.engine.predict import (
    Frame,
    Predictor,
    ReadError,
    count_frames,
    find_sources,
    read_image,
    read_video,
)
from mmnala.engine.results import Classification, Detection, Results, Segmentation, open_truth
from mmnala.engine.testing import annotation_labels, check_slide
from mmnala.engine.tools import (
    CfgOptions,
    add_max_pixels,
    claim,
    fail,
    limit_pixels,
    load_config,
    read_checkpoint,
    run,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='INPUT',
        help="an image, a video, a folder with all in it or a quoted pattern such as 'a/**/*.jpg'",
    )
    parser.add_argument('--out', type=Path, required=True, help='folder, new or empty')
    parser.add_argument(
        '--truth',
        type=Path,
        help='draw the annotations beside the predictions of images: a folder of label maps that '
        "bear the images' names (mmseg) or a JSON file of COCO annotations (mmdet), whose ids the "
        'results then use',
    )
    parser.add_argument('--batch-size', type=int, default=1, help='(default: 1)')
    parser.add_argument('--device', help="such as cpu or cuda:1 (default: a GPU if there's one)")
    parser.add_argument(
        '--tta',
        action='store_true',
        help="test-time augmentation by the config's tta_model and tta_pipeline "
        '(mmdet configs without them: horizontal flip)',
    )
    parser.add_argument(
        '--score-thr',
        type=float,
        help='draw the objects of a higher score; the JSON files have all (default: 0.3)',
    )
    parser.add_argument(
        '--opacity',
        type=float,
        help='of what is drawn, from 0 to 1 (default: 0.5 of label maps and masks, 1 of lines)',
    )
    parser.add_argument(
        '--video-frames', action='store_true', help='save pictures of a video as PNG, not as mp4'
    )
    add_max_pixels(parser)
    parser.add_argument('--no-pictures', action='store_true', help='draw nothing')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        default={},
        metavar='KEY=VALUE',
        help='override entries of the config, as in tools/test.py',
    )
    parser.set_defaults(launcher='none', local_rank=0, work_dir=None)
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Fail for options that cannot be, or would do nothing."""
    limit_pixels(args.max_pixels)
    if args.batch_size < 1:
        fail(f'--batch-size {args.batch_size}: expected a positive number')
    for name, value in (('--score-thr', args.score_thr), ('--opacity', args.opacity)):
        if value is not None and not 0 <= value <= 1:
            fail(f'{name} {value}: expected a number from 0 to 1')
    if args.no_pictures:
        drawing = dict(vars(args), score_thr=args.score_thr is not None)
        drawing['opacity'] = args.opacity is not None
        for name in ('score_thr', 'opacity', 'video_frames'):
            if drawing[name]:
                fail(f'--no-pictures leaves --{name.replace("_", "-")} nothing to do')


def open_results(args: argparse.Namespace, predictor: Predictor, options: dict) -> Results:
    if predictor.scope == 'mmseg':
        labels = annotation_labels(predictor.inferencer.cfg, predictor.dataset.metainfo)
        return Segmentation(args.out, predictor, labels=labels, **options)
    kinds = dict(mmdet=Detection, mmpretrain=Classification)
    return kinds[predictor.scope](args.out, predictor, **options)


def main() -> None:
    args = parse_args()
    check(args)
    sources = find_sources(args.inputs)
    cfg = load_config(args)
    check_slide(cfg.get('model', {}).get('test_cfg') or {})
    checkpoint = read_checkpoint(args.checkpoint)
    predictor = Predictor(cfg, checkpoint, args.checkpoint, args.device, args.tta)
    del checkpoint

    if args.score_thr is not None and predictor.scope != 'mmdet':
        fail('--score-thr is for detectors')
    if args.no_pictures and args.truth and predictor.scope == 'mmseg':
        fail('--no-pictures leaves --truth nothing to do')
    options = dict(
        pictures=not args.no_pictures,
        opacity=args.opacity,
        score_thr=0.3 if args.score_thr is None else args.score_thr,
        truth=open_truth(args.truth, predictor, sources, args.max_pixels) if args.truth else None,
        video_frames=args.video_frames,
    )
    claim(args.out)

    failures: dict[Path, ReadError] = {}

    def frames() -> Iterator[Frame]:
        for source in sources:
            try:
                if source.is_video:
                    yield from read_video(source, args.max_pixels)
                else:
                    image = read_image(source.path, predictor.loader, args.max_pixels)
                    yield Frame(source, None, image)
            except ReadError as error:
                failures[source.path] = error

    columns = (
        TextColumn('predicting'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    number = 0
    with (
        open_results(args, predictor, options) as results,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task('predicting', total=count_frames(sources))
        for batch in predictor.batches(frames(), args.batch_size):
            samples = predictor.predict([prepared for _, prepared in batch])
            for (frame, _), sample in zip(batch, samples, strict=True):
                results.add(frame, sample)
                number += 1
                progress.advance(bar)
    print(f'{args.out}: predictions of {number} images and frames')
    if (truth := results.truth) is not None:
        images = [source for source in sources if not source.is_video]
        if lacking := sum(truth.find(source) is None for source in images):
            print(f'--truth {args.truth}: none for {lacking} of {len(images)} images')
    sentences = [
        f'{len(problems)} of {len(sources)} inputs {what}:'
        + ''.join(f'\n  {path}: {error}' for path, error in problems.items())
        for what, problems in (
            ('could not be read', failures),
            ('have a truth that could not be used', results.problems),
        )
        if problems
    ]
    if sentences:
        fail('\n'.join(sentences))


if __name__ == '__main__':
    run(main)
