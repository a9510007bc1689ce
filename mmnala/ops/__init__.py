from .nala_attention import ATTN_IMPLS, nala_attention
from .plain import FEATURE_MAPS
from .rotary import apply_rotary, rotary_table

__all__ = ['ATTN_IMPLS', 'FEATURE_MAPS', 'apply_rotary', 'nala_attention', 'rotary_table']
