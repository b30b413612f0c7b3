"""Recognition of autoencoder classes by their source, because their forwards keep frames in lists and have branches.

A class is known if the syntax tree of its forward, without annotations and docstrings, is in a table. Its name does not
matter. A version of diffusers with another forward keeps its own.
"""

import ast
import functools
import hashlib
from types import FunctionType

import torch

from graphfuse.torch.analysis.source import syntax_tree
from graphfuse.torch.analysis.symbols import ForwardDeclined

CONVOLUTION = "causal convolution"
NORM = "norm of channels"
UPSAMPLE = "nearest upsampling"
RESIDUAL = "residual block"
ATTENTION = "attention of a frame"
RESAMPLE = "resampling"
MIDDLE = "middle block"
UP = "upsampling block"
RESIDUAL_UP = "residual upsampling block"
RESIDUAL_DOWN = "residual downsampling block"
ENCODER = "encoder"
DECODER = "decoder"
LAYOUT_KEPT = "encoder or decoder whose functions keep the layout"
LAYOUT_LOST = "encoder or decoder with functions that do not keep the layout"
SPLIT = "convolution of parts"
REPEATED = "convolution of repeated edges"
REPEATED_BY_CALL = "convolution of repeated edges, causal if the call says so"
FIRST_REPEATED = "convolution of repeated first frames"
CACHED = "causal convolution with kept frames"
SPATIAL_NORM = "spatial norm"
FRAME_NORM = "group norm of each frame"
ONE_GROUP_NORM = "norm of each frame, where it has one group"
WAVELETS = "wavelets of frames"
MASKED_ATTENTION = "attention between frames"
CAUSAL_MASK = "mask of later frames"
CONTAINERS, ENDS = (MIDDLE, UP, RESIDUAL_UP, RESIDUAL_DOWN), (ENCODER, DECODER)

_ROLES = {
    "04d4cc1d5eef07df": CONVOLUTION,
    "13d23c0e7d565d8e": NORM,
    "2589c33f8908ab21": NORM,  # before 0.38: normalizes in the type of its input
    "9324770ad80c15cc": UPSAMPLE,
    "6b11c2b5830c2809": RESIDUAL,
    "65fa537881419e61": RESIDUAL,  # Qwen-Image
    "220c002c809b1ace": ATTENTION,
    "d2ba2e5c1e04d9bc": RESAMPLE,
    "a5db7953bea157e8": RESAMPLE,  # Qwen-Image, as in similar entries: counts the frames that it keeps
    "23fc1bae73fbb131": MIDDLE,
    "680be2f1110718f9": MIDDLE,  # before 0.38, as in similar entries: passes the frames by position
    "426ef8cfa2fa91d7": UP,
    "dd853fe626a7c2ba": UP,
    "5b27564abe5a56c0": UP,  # Qwen-Image, and before 0.35: has no argument for the first chunk
    "083afe537c743027": RESIDUAL_UP,
    "3caf892c82025550": RESIDUAL_UP,
    "f2798108d5a5002f": RESIDUAL_DOWN,
    "afd25e4c2af44b70": RESIDUAL_DOWN,
    "e49c76e8d9c2ab8c": ENCODER,
    "ccf7adb7b36ca049": ENCODER,
    "746b1a42078871be": ENCODER,  # Qwen-Image
    "79b6e1480503651b": DECODER,
    "04ba78038458710f": DECODER,
    "5c6fe2f4721cccf5": DECODER,  # before 0.35
    "eeab46ddbeb13e54": DECODER,  # Qwen-Image
    "d4c19856858d3843": LAYOUT_KEPT,  # encoder
    "091a8eba0cd82488": LAYOUT_KEPT,  # decoder
    "adec460d49ce43cd": LAYOUT_KEPT,  # decoder, before 0.38
    "8bd49d9e02784b99": LAYOUT_LOST,  # HunyuanVideo
    "52308ed9d61f2a8a": LAYOUT_LOST,
    "e7e2ee29f67ae8ef": LAYOUT_LOST,  # CogVideoX
    "5801e8b0fb36ef39": LAYOUT_LOST,
    "88b892268d96cc09": LAYOUT_LOST,  # Mochi
    "c85a5e5f95f80f58": LAYOUT_LOST,
    "e02ed3fa74a67b75": LAYOUT_LOST,  # LTX-Video
    "eb31a4a3f3b7c635": LAYOUT_LOST,
    "f80f030a2cc829cc": LAYOUT_LOST,  # Cosmos
    "7589ad0062f9951e": LAYOUT_LOST,
    "d05ce8680143c190": LAYOUT_LOST,  # DC
    "b8268b81d4689448": LAYOUT_LOST,
    "a71258fc330db98c": LAYOUT_LOST,  # HunyuanImage
    "09f94b4bb3c7f085": LAYOUT_LOST,
    "fabffa03a53b4ddc": LAYOUT_LOST,  # HunyuanVideo 1.5, and the refiner of HunyuanImage
    "aba93f2bc9495922": LAYOUT_LOST,
    "53e4ca692f42d4be": LAYOUT_LOST,  # Allegro
    "ea861a1a815cc36d": LAYOUT_LOST,
    "2ede6efcc2e49b87": LAYOUT_LOST,  # LTX-2
    "7f4bff21068ae188": LAYOUT_LOST,
    "48b189ff36fdb76a": SPLIT,  # CogVideoX and Mochi
    "1694c050155a5772": REPEATED,  # LTX-Video
    "f8c4c309a2a5c101": REPEATED_BY_CALL,  # LTX-2
    "24c8e0f899def48d": FIRST_REPEATED,  # Cosmos
    "bfee60e7f91eb486": CACHED,  # CogVideoX and Mochi
    "18503d9ff0c715f2": SPATIAL_NORM,  # CogVideoX
    "f79a7221d52bc2ac": FRAME_NORM,  # Mochi
    "4be79003be2c69aa": ONE_GROUP_NORM,  # Cosmos
    "1f9de50658b4ce7b": WAVELETS,  # Cosmos, of its encoder
    "b540426afe1d5ca8": MASKED_ATTENTION,  # HunyuanVideo 1.5
    "d4b415dfe4cdfba6": CAUSAL_MASK,  # HunyuanVideo 1.5
}
"""Roles by digests of functions: AutoencoderKLWan and AutoencoderKLQwenImage of diffusers 0.33 to 0.42, the encoder and
decoder that AutoencoderKL and others have, and those of the autoencoders that are named."""


def role(module: torch.nn.Module) -> str:
    """Role of a module's class; "" if the class is not known."""
    forward = type(module).forward
    is_torchs = str(getattr(forward, "__module__", "")).startswith("torch.")  # torch's files need not be read
    return "" if is_torchs else role_of(forward)


def role_of(function: object) -> str:
    """Role of a function; "" if it is not known."""
    return _role(function) if isinstance(function, FunctionType) else ""


@functools.lru_cache(maxsize=1024)
def _role(function: FunctionType) -> str:
    try:
        return _ROLES.get(digest(function), "")
    except ForwardDeclined:
        return ""


def digest(function: FunctionType) -> str:
    """A digest of a function's syntax tree, the same in all versions of Python."""
    tree = syntax_tree(function)
    if isinstance(tree, ast.FunctionDef) and ast.get_docstring(tree) is not None:
        tree = ast.FunctionDef(tree.name, tree.args, tree.body[1:], tree.decorator_list, None)
    return hashlib.sha256(_tree_text(tree).encode()).hexdigest()[:16]


_IGNORED = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind"})


def _tree_text(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_tree_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{n}={_tree_text(v)}" for n, v in ast.iter_fields(node) if n not in _IGNORED and v not in (None, []))
    return f"{type(node).__name__}({','.join(fields)})"
