"""The benches there are, by name."""

from graphfuse.benchmarks import (
    add_rmsnorm,
    layernorm,
    norm_add_norm,
    qk_norm,
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
        rmsnorm_training.BENCH,
        rmsnorm_backward.BENCH,
        rmsnorm_backward.RESIDUAL_BENCH,
        norm_add_norm.BENCH,
        layernorm.BENCH,
        softmax.BENCH,
        silu_mul_fp8.BENCH,
    )
}
