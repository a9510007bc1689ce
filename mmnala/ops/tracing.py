import torch


def is_traced() -> bool:
    """Whether a compiler or tracer records the operations; what it sees should be plain."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
