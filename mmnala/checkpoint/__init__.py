"""Checkpoint files: reading, writing, their layouts, and loading them into the backbone."""

from .files import read_checkpoint
from .layouts import from_release
from .loading import load_pretrained

__all__ = ['from_release', 'load_pretrained', 'read_checkpoint']
