"""Data sets that come with mmnala; import the module you need, none is loaded by ``mmnala``."""
