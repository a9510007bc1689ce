"""Writing label maps as the annotation files of a data set, and its test server, have them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from PIL import Image


class DumpLabelMaps(BaseMetric):
    """Save each predicted label map, of the image's original size, as ``IMAGE_NAME.png``.

    mmseg's ``IoUMetric`` knows no labelIds, and its ``CityscapesMetric`` needs cityscapesscripts.

    Args:
        out_dir: Folder of the maps, which must exist.
        labels: For each class, the value of its pixels.
    """

    def __init__(self, out_dir: str, labels: Sequence[int]) -> None:
        super().__init__()
        self.out_dir = Path(out_dir)
        self.labels = np.array(labels, dtype=np.min_scalar_type(max(labels)))

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Write the maps of a batch."""
        for sample in data_samples:
            path = self.out_dir / f'{Path(sample["img_path"]).stem}.png'
            prediction = sample['pred_sem_seg']['data'].squeeze(0).long().cpu().numpy()
            # Nobody meets half a map: not after a killed run, nor where two ranks get one image.
            new = path.with_name(f'.{path.name}.{os.getpid()}')
            Image.fromarray(self.labels[prediction]).save(new, 'PNG')
            new.replace(path)
            self.results.append(path.name)

    def compute_metrics(self, results: list) -> dict:
        """Log the number of maps; there is nothing to evaluate."""
        print_log(f'{len(results)} label maps are in {self.out_dir}', logger='current')
        return {}
