from .nala_attention import ATTN_IMPLS, nala_attention
from .plain import FEATURE_MAPS
from .rotary import apply_rotary, cached_rotary_table, rotary_table
from .tracing import is_traced

__all__ = [
    'ATTN_IMPLS',
    'FEATURE_MAPS',
    'apply_rotary',
    'cached_rotary_table',
    'is_traced',
    'nala_attention',
    'rotary_table',
]
