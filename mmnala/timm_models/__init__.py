from .nalaformer import (
    NaLaFormerClassifier,
    nalaformer_base,
    nalaformer_large,
    nalaformer_small,
    nalaformer_tiny,
    nalaformer_xtiny,
)

__all__ = [
    'NaLaFormerClassifier',
    'nalaformer_base',
    'nalaformer_large',
    'nalaformer_small',
    'nalaformer_tiny',
    'nalaformer_xtiny',
]
