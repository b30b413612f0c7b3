"""Engine for products, convolutions and attention by torch's kernels: cuBLAS, cuDNN in torch, flash attention."""

from graphfuse.engines.torch_calls.engine import TorchEngine

__all__ = ["TorchEngine"]
