"""Sizes of models that run on a CPU in no time."""

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Fields of transformers' configurations of decoders."""
