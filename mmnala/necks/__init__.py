from .nalaformer_neck import NaLaFormerNeck

__all__ = ['NaLaFormerNeck']
