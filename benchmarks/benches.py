"""The benches there are, by name."""

from graphfuse.benchmarks import (
    add_rmsnorm,
    add_rmsnorm_blocks,
    cross_entropy,
    layernorm,
    layernorm_backward,
    norm_add_norm,
    qk_norm,
    qk_norm_rope,
    qk_norm_rope_cache,
    qk_norm_rope_training,
    rmsnorm_backward,
    rmsnorm_channels,
    rmsnorm_silu,
    rmsnorm_training,
    silu_mul_fp8,
    softmax,
)

BENCHES = {
    bench.name: bench
    for bench in (
        rmsnorm_silu.BENCH,
        rmsnorm_channels.BENCH,
        add_rmsnorm.BENCH,
        add_rmsnorm.FP8,
        qk_norm.BENCH,
        qk_norm_rope.BENCH,
        qk_norm_rope_cache.BENCH,
        qk_norm_rope_training.BENCH,
        rmsnorm_training.BENCH,
        rmsnorm_backward.BENCH,
        rmsnorm_backward.RESIDUAL_BENCH,
        norm_add_norm.BENCH,
        layernorm.BENCH,
        layernorm_backward.BENCH,
        softmax.BENCH,
        cross_entropy.BENCH,
        add_rmsnorm_blocks.BENCH,
        silu_mul_fp8.BENCH,
    )
}
