"""What is known of the norm classes of models, by name: a claim that `module.recognized` holds against the class's own
forward.

A class that is not here is recognized by its forward alone. One that is here and computes something else is refused:
somebody changed it, or another class has its name.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from graphfuse.torch.fusion.form import Form

ROUNDED = Form("rms", "w", rounded=True)
WEIGHTED = Form("rms", "w")
ZERO_CENTRED = Form("rms", "1 + w")
THEN_GATED = Form("rms", "w", rounded=True, after="* SiLU(gate)")
OF_GATED = Form("rms", "w", rounded=True, before="* SiLU(gate)")


@dataclass(frozen=True)
class KnownNorm:
    """module, name: of the class, as ``fnmatch`` has them. form: what it computes. epsilon: the attribute."""

    module: str
    name: str
    form: Form
    epsilon: str


KNOWN = (
    KnownNorm("transformers.models.llama.*", "LlamaRMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.mistral.*", "MistralRMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.mixtral.*", "MixtralRMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.phi3.*", "Phi3RMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.qwen2.*", "Qwen2RMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.qwen3.*", "Qwen3RMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.qwen3_moe.*", "Qwen3MoeRMSNorm", ROUNDED, "variance_epsilon"),
    KnownNorm("transformers.models.gpt_oss.*", "GptOssRMSNorm", WEIGHTED, "variance_epsilon"),
    KnownNorm("transformers.models.olmo2.*", "Olmo2RMSNorm", WEIGHTED, "variance_epsilon"),
    KnownNorm("transformers.models.gemma.*", "GemmaRMSNorm", ZERO_CENTRED, "eps"),
    KnownNorm("transformers.models.gemma2.*", "Gemma2RMSNorm", ZERO_CENTRED, "eps"),
    KnownNorm("transformers.models.gemma3.*", "Gemma3RMSNorm", ZERO_CENTRED, "eps"),
    KnownNorm("transformers.models.qwen3_next.*", "Qwen3NextRMSNorm", ZERO_CENTRED, "eps"),
    KnownNorm("transformers.models.qwen3_next.*", "Qwen3NextRMSNormGated", THEN_GATED, "variance_epsilon"),
    KnownNorm("transformers.models.mamba2.*", "MambaRMSNormGated", OF_GATED, "variance_epsilon"),
    KnownNorm("transformers.models.zamba2.*", "Zamba2RMSNormGated", OF_GATED, "variance_epsilon"),
    KnownNorm("transformers.models.bamba.*", "BambaRMSNormGated", OF_GATED, "variance_epsilon"),
    KnownNorm("torch.nn.modules.normalization", "RMSNorm", WEIGHTED, "eps"),
)


def known(cls: type) -> KnownNorm | None:
    return next((k for k in KNOWN if fnmatchcase(cls.__module__, k.module) and cls.__name__ == k.name), None)
