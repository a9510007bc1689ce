from .nala_attention import FEATURE_MAPS, nala_attention
from .rotary import apply_rotary, rotary_table

__all__ = ['FEATURE_MAPS', 'apply_rotary', 'nala_attention', 'rotary_table']
