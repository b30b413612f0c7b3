"""``fuse`` and ``unfuse``, which put operators into a model in place, and the provider for Hugging Face's
``kernels``."""

from graphfuse.torch.whole_models.hub import kernel_mapping
from graphfuse.torch.whole_models.model import fuse, unfuse

__all__ = ["fuse", "kernel_mapping", "unfuse"]
