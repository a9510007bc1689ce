from .nalaformer import NaLaFormer

__all__ = ['NaLaFormer']
