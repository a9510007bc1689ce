"""Results of evaluations as files that are whole or not there, by the toolboxes' own metrics."""

import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.evaluator import DumpResults
from mmengine.logging import print_log

from ..checkpoint.files import new_file


def dump_whole(metric: DumpResults) -> None:
    """Let a metric that pickles all data samples write its file at once."""

    def compute_metrics(results: list) -> dict:
        path = metric.out_file_path
        with new_file(path) as file:
            pickle.dump(results, file, protocol=2)  # as mmengine.dump does
        print_log(f'The results are in {path}', logger='current')
        return {}

    metric.compute_metrics = compute_metrics


def save_coco_whole(metric: Any) -> None:
    """Let mmdet's ``CocoMetric`` write each of its JSON files at once."""
    write = metric.results2json

    def results2json(results: Sequence[dict], outfile_prefix: str) -> dict[str, str]:
        prefix = Path(outfile_prefix)
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix='.') as folder:
            written = write(results, str(Path(folder, prefix.name)))
            files = {kind: str(prefix.with_name(Path(f).name)) for kind, f in written.items()}
            for source, target in {written[kind]: files[kind] for kind in files}.items():
                os.replace(source, target)
        return files

    metric.results2json = results2json
