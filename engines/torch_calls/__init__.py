"""Products, convolutions and attention by torch's own kernels: cuBLAS, cuDNN inside torch, flash attention."""

from graphfuse.engines.torch_calls.engine import TorchEngine

__all__ = ["TorchEngine"]
