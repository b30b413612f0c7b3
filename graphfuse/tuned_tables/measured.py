"""Times of engines, by family, that ``ranking`` makes entries of.

Written by `python -m graphfuse.benchmarks.programs.ranking --write`.
"""

SOURCES: tuple[dict[str, object], ...] = (
    {
        "origin": "measured",
        "device": "NVIDIA H200",
        "arch": "sm_90",
        "date": "2026-11-23",
        "driver": "580.159.04",
        "versions": {"graphfuse": "0.1.0", "nvrtc": "13.0", "cuda": "13.0"},
        "commit": "a2cfdfffd09d3bee6c73b1a95ccb98acf041b623",
    },
)
"""Where times are from, as ``Source.to_json`` has them."""

TIMES: tuple[tuple[int, str, dict[str, float]], ...] = (
    (0, "rmsnorm", {"rows": 20.21, "cudnn": 22.88, "reference": 740.51}),
    (0, "layernorm", {"rows": 21.58, "cudnn": 25.38, "reference": 853.3}),
    (0, "rmsnorm_backward", {"rows": 40.44, "cudnn": 43.4, "reference": 1237.36}),
    (0, "layernorm_backward", {"rows": 41.23, "cudnn": 46.92, "reference": 1398.03}),
    (0, "matmul", {"cudnn": 68.75, "reference": 1459.49}),
    (0, "conv_fprop", {"cudnn": 102.21, "reference": 3815.79}),
    (0, "sdpa", {"cudnn": 45.52, "reference": 2026.89}),
)
"""(place of the source, family, microseconds by engine)"""
