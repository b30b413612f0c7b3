# Made by tests/op_stub.py from the op table (graphfuse/ops/table.py); do not edit.
#
# Numbers may stand for tensors of one element. A method of several outputs is typed as returning a tuple, which has a
# type for each; it returns a list, as cuDNN's do. An output that is not always made may be None: `Tensor | Any` says
# so without asking for a check where it is known to be there. Options of cuDNN's that are not offered stand behind the
# star: they may be given where they ask for nothing.
import builtins
from collections.abc import Sequence
from typing import Any

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import (
    attention_implementation,
    convolution_mode,
    diagonal_alignment,
    moe_grouped_matmul_mode,
    norm_forward_phase,
    reduction_mode,
    reshape_mode,
)
from graphfuse.op_graph.tensor import Tensor

class OpMethods:
    def rmsnorm(
        self,
        input: Tensor | float,
        scale: Tensor | float | None = None,
        epsilon: Tensor | float = ...,
        bias: Tensor | float | None = None,
        norm_forward_phase: norm_forward_phase = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor | Any]:
        """RMS normalization: Y = input * inv_variance * scale (+ bias) with
        inv_variance = 1 / sqrt(mean(input^2) + epsilon) over the axes where scale varies
        (Zhang and Sennrich 2019, equation 4, with epsilon inside the root). Without a scale it is
        1 and the axis is the last one. bias has the extents of scale: input's along those axes,
        1 along others. Either may have a lower rank than input, and then has its last axes.
        epsilon, one element, must be given. Returns [Y, inv_variance];
        inv_variance is None in the INFERENCE phase."""

    def layernorm(
        self,
        input: Tensor | float,
        scale: Tensor | float | None = None,
        bias: Tensor | float | None = None,
        epsilon: Tensor | float = ...,
        norm_forward_phase: norm_forward_phase = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor | Any, Tensor | Any]:
        """Layer normalization: (input - mean) * inv_variance * scale + bias, over the axes along which scale
        varies, those of rmsnorm without a scale; mean is that of input, inv_variance is
        1 / sqrt(mean((input - mean)^2) + epsilon), of the differences themselves. scale and bias may be left
        out, then 1 and 0. norm_forward_phase must be given. Returns [Y, mean, inv_variance], the last two None
        in INFERENCE."""

    def rmsnorm_backward(
        self,
        grad: Tensor | float,
        input: Tensor | float,
        scale: Tensor | float | None = None,
        inv_variance: Tensor | float = ...,
        has_dbias: bool = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor | Any, Tensor | Any]:
        """Gradients of rmsnorm, from grad, that of Y, and inputs and outputs of the TRAINING phase. With
        n = input * inv_variance and g = grad * scale, over the same axes as rmsnorm:
        DX = inv_variance * (g - n * mean(g * n)), DScale = sum(grad * n) and DBias = sum(grad), the sums over
        all rows, in the shape of scale; their order is not specified. has_dbias must be given. Returns
        [DX, DScale, DBias]; DBias is None without has_dbias, and without a scale, which is 1 then,
        DScale is, too, and has_dbias must be False."""

    def layernorm_backward(
        self,
        grad: Tensor | float,
        input: Tensor | float,
        scale: Tensor | float | None = None,
        mean: Tensor | float = ...,
        inv_variance: Tensor | float = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor | Any, Tensor | Any]:
        """Gradients of layernorm, from grad, that of Y, and inputs and outputs of the TRAINING phase. With
        n = (input - mean) * inv_variance and g = grad * scale, over the same axes as layernorm:
        DX = inv_variance * (g - mean(g) - n * mean(g * n)), DScale = sum(grad * n) and DBias = sum(grad), the
        sums over all rows, in the shape of scale; their order is not specified. Returns [DX, DScale, DBias];
        without a scale, which is 1 then, the last two are None."""

    def adalayernorm(
        self,
        input: Tensor | float,
        scale: Tensor | float,
        bias: Tensor | float | None = None,
        epsilon: Tensor | float = ...,
        norm_forward_phase: norm_forward_phase = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor | Any, Tensor | Any]:
        """Layer normalization with a scale and a bias of each sample (adaptive layer norm: Peebles and Xie 2023):
        layernorm over the axes along which scale varies, but the first, along which samples are, so that scale
        has input's extent. bias has scale's shape and may be left out, then 0. norm_forward_phase must be given.
        Returns [Y, mean, inv_variance], the last two None in INFERENCE."""

    def adalayernorm_backward(
        self,
        grad: Tensor | float,
        input: Tensor | float,
        scale: Tensor | float,
        mean: Tensor | float,
        inv_variance: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of adalayernorm, as layernorm_backward makes them, but DScale and DBias, in the shape of
        scale, are sums over the rows of each sample. Kernels compute these only for a single sample; for several
        they compute only DX. Returns [DX, DScale, DBias]."""

    def softmax(
        self,
        input: Tensor | float,
        axis: int | None = -1,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """e^input divided by its sum along axis, computed from e^(input - m), with m the largest along axis, so that
        nothing overflows. -infinity becomes 0. If all are -infinity, or one is infinity or NaN, all become NaN."""

    def log_softmax(
        self,
        input: Tensor | float,
        axis: int | None = -1,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The logarithm of softmax along axis, as input - m - log(sum(e^(input - m))) with m the largest along axis.
        -infinity remains. If all are -infinity, or one is infinity or NaN, all become NaN."""

    def logsumexp(
        self,
        input: Tensor | float,
        axis: int | None = -1,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """log(sum(e^input)) along axis, whose extent becomes 1, as m + log(sum(e^(input - m))) with m the largest
        along axis. If all are -infinity, it is -infinity; if one is infinity and none NaN, infinity.
        Stored as FLOAT unless set otherwise."""

    def softmax_backward(
        self,
        grad: Tensor | float,
        output: Tensor | float,
        axis: int | None = -1,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of softmax, from grad, that of its output, and output: (grad - sum(grad * output)) * output, the
        sum along axis. Returns DX."""

    def log_softmax_backward(
        self,
        grad: Tensor | float,
        output: Tensor | float,
        axis: int | None = -1,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of log_softmax, from grad, that of its output, and output: grad - e^output * sum(grad), the sum
        along axis. Returns DX."""

    def reduction(
        self,
        input: Tensor | float,
        mode: reduction_mode | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        group_offset: None = ...,
    ) -> Tensor:
        """One number per group of elements, by mode: ADD sum, MUL product, MIN, MAX, AMAX max|input|,
        AVG mean, NORM1 sum|input|, NORM2 sqrt(sum input^2), MUL_NO_ZEROS product of all but zeros.
        set_dim of the result determines the reduced axes: those of extent 1; all axes if it is unset.
        NaN stays NaN. The order of sums and products is not specified. Results for no elements: 0, 1 for
        products, +-infinity for MIN and MAX, NaN for AVG. Stored as FLOAT unless set otherwise."""

    def block_scale_quantize(
        self,
        input: Tensor | float,
        block_size: int | None = 16,
        axis: int | None = None,
        transpose: bool | None = False,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        group_offset: None = ...,
    ) -> tuple[Tensor, Tensor]:
        """Block quantization: each block of block_size elements along axis (default: the last one that
        is not 1) gets the scale max|input| * (1 / largest finite element), rounded to the scale's
        type, and the elements are input * (1 / scale as stored), inverses and products in float32.
        block_size 16, NVFP4: FP4_E2M1 elements, FP8_E4M3 scales, or FP8_E8M0 if set.
        block_size 32, MXFP8 and MXFP4 (OCP Microscaling Formats 1.0): FP8_E4M3 elements, or
        FP8_E5M2 or FP4_E2M1 if set, FP8_E8M0 scales.
        block_size 128: FP8_E4M3 elements, or FP8_E5M2 if set, FLOAT scales, or FP8_E8M0 if set.
        FLOAT scales are that product, and at least 2^-126, also for blocks of zeros; an infinity in a block
        makes its scale infinite, its finite elements zero and the infinity NaN.
        FP8_E4M3 scales round to nearest even and saturate; a block whose scale rounds to zero becomes
        zeros. FP8_E8M0 scales round up to a power of two from 2^-127 to 2^127, as cuDNN's and
        FlashInfer's do, so that no element saturates; the conversion that OCP describes rounds down.
        Elements round to nearest even and saturate, those of FP4 after rounding to a multiple of
        2^-22 (2^-21 from 2 on, 2^-20 from 4 on). A scale reordered as F8_128x4 may have the extents of
        whole tiles, as block_scale_dequantize reads them; its padding is zero. Returns [Y, scale]."""

    def add(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """a + b."""

    def sub(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """a - b."""

    def mul(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """a * b."""

    def div(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """a / b."""

    def add_square(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """a + b * b."""

    def mod(
        self,
        input0: Tensor | float,
        input1: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The remainder of input0 / input1, with the sign of input0; NaN if input1 is 0."""

    def pow(
        self,
        input0: Tensor | float,
        input1: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input0 to the power of input1; NaN for negative input0 unless input1 is whole."""

    def scale(
        self,
        input: Tensor | float,
        scale: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input * scale."""

    def max(
        self,
        input0: Tensor | float,
        input1: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The larger of the two (0 is larger than -0); NaN if either is."""

    def min(
        self,
        input0: Tensor | float,
        input1: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The smaller of the two (-0 is smaller than 0); NaN if either is."""

    def abs(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """|input|."""

    def neg(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """-input."""

    def reciprocal(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """1 / input."""

    def sqrt(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Square root; NaN below 0."""

    def rsqrt(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """1 / sqrt(input)."""

    def exp(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """e^input."""

    def log(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Natural logarithm; NaN below 0."""

    def exp2(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """2^input."""

    def log2(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Logarithm to base 2; NaN below 0."""

    def log1p(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Natural logarithm of 1 + input; NaN below -1. The sum is not rounded."""

    def expm1(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """e^input - 1, without cancellation near 0."""

    def ceil(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """The smallest whole number not below input."""

    def floor(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """The largest whole number not above input."""

    def round(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """The nearest whole number; ties to even."""

    def trunc(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """input rounded toward zero to a whole number."""

    def sin(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Sine of an angle in radians; NaN for infinities."""

    def cos(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Cosine of an angle in radians; NaN for infinities."""

    def tan(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Tangent of an angle in radians; NaN for infinities."""

    def erf(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Error function: 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to input."""

    def identity(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """input unchanged, for a change of data type."""

    def relu(
        self,
        input: Tensor | float,
        negative_slope: float | None = 0.0,
        lower_clip: float | None = 0.0,
        upper_clip: float | None = ...,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """min(input, upper_clip) above lower_clip, else lower_clip + negative_slope * (input - lower_clip)."""

    def sigmoid(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """1 / (1 + exp(-input))."""

    def tanh(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """Hyperbolic tangent."""

    def swish(
        self,
        input: Tensor | float,
        swish_beta: float | None = 1.0,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """input * sigmoid(swish_beta * input); SiLU when swish_beta is 1."""

    def gelu(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """input * Phi(input) with the normal distribution function (the erf form)."""

    def gelu_approx_tanh(
        self,
        input: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """0.5 * input * (1 + tanh(sqrt(2/pi) * (input + 0.044715 * input^3)))."""

    def elu(
        self,
        input: Tensor | float,
        elu_alpha: float | None = 1.0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input above 0, else elu_alpha * (exp(input) - 1)."""

    def softplus(
        self,
        input: Tensor | float,
        softplus_beta: float | None = 1.0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """log(1 + exp(softplus_beta * input)) / softplus_beta."""

    def relu_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        negative_slope: float | None = 0.0,
        lower_clip: float | None = 0.0,
        upper_clip: float | None = ...,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """Gradient of relu, from that of its result: loss where input is above lower_clip and at most
        upper_clip, negative_slope * loss up to lower_clip, 0 above upper_clip. NaN if input is."""

    def sigmoid_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """loss * sigmoid(input) * sigmoid(-input)."""

    def tanh_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """loss * (1 - tanh(input)^2)."""

    def swish_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        swish_beta: float | None = 1.0,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """loss * s * (1 + swish_beta * input * (1 - s)) with s = sigmoid(swish_beta * input)."""

    def elu_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        elu_alpha: float | None = 1.0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of elu, from that of its result: loss where input is above 0, else loss * elu_alpha * exp(input)."""

    def softplus_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        softplus_beta: float | None = 1.0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """loss * sigmoid(softplus_beta * input)."""

    def gelu_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """loss * (Phi(input) + input * phi(input)) with the normal distribution function and its density."""

    def gelu_approx_tanh_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """loss times the derivative of gelu_approx_tanh at input."""

    def gen_index(
        self,
        input: Tensor | float,
        axis: int = ...,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """The index of each element of input along axis, from 0, in the compute data type: FLOAT is exact up to 2^24.
        Only the shape of input is used. A negative axis counts from the last."""

    def cmp_eq(
        self,
        input: Tensor | float,
        comparison: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if input == comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is
        in no order with everything."""

    def cmp_neq(
        self,
        input: Tensor | float,
        comparison: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if input != comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is
        unequal to everything."""

    def cmp_gt(
        self,
        input: Tensor | float,
        comparison: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if input > comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is
        in no order with everything."""

    def cmp_ge(
        self,
        input: Tensor | float,
        comparison: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if input >= comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is
        in no order with everything."""

    def cmp_lt(
        self,
        input: Tensor | float,
        comparison: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if input < comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is
        in no order with everything."""

    def cmp_le(
        self,
        input: Tensor | float,
        comparison: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if input <= comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is
        in no order with everything."""

    def logical_and(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if neither a nor b is 0, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is not 0."""

    def logical_or(
        self,
        a: Tensor | float,
        b: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """1 if a or b is not 0, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is not 0."""

    def logical_not(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """1 if input is 0, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is not 0."""

    def binary_select(
        self,
        input0: Tensor | float,
        input1: Tensor | float,
        mask: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input0 where mask is not 0, else input1."""

    def block_scale_dequantize(
        self,
        input: Tensor | float,
        descale: Tensor | float,
        block_size: Sequence[int] = ...,
        is_negative_scale: bool | None = False,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Dequantization in blocks: each element of input times the element of descale for its block. block_size has a
        block's extent along each axis, or along the last ones: [1, 32] for blocks within rows, [32, 1] within
        columns, [128, 128] for tiles. A single number is the extent along the axis that descale's shape fits.
        descale has input's extents divided by those of a block, rounded up. Reordered as F8_128x4, for blocks along
        one axis, it may also have those of whole tiles: multiples of 4 along that axis and of 128 along the last
        other one. Types of elements and scales may be combined freely: MXFP8 and MXFP4 have FP8_E8M0 scales, NVFP4
        has FP8_E4M3. The product is in the compute data type, FLOAT unless set, which is exact for an FP8 or FP4
        element and an 8-bit scale, except for magnitudes below 2^-126 or above 2^127. A matmul of two such outputs
        is the block-scaled product."""

    def cross_entropy(
        self,
        input: Tensor | float,
        target: Tensor | float,
        ignore_index: int | None = -100,
        label_smoothing: float | None = 0.0,
        z_loss: float | None = 0.0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy of the softmax of each row of input, along its last axis, with the target's column:
        loss = logsumexp - (1 - label_smoothing) * input[target] - label_smoothing * mean(input)
        + z_loss * logsumexp^2, with logsumexp = log(sum(exp(input))), and 0 for ignored rows. target: the number of
        a column for each row, of any type, including INT32 and INT64. Rows whose target is
        ignore_index are ignored. A target that is neither ignore_index nor the number of a column makes the loss
        NaN,
        without a read out of bounds. A row with infinity, or
        only of -infinity, has NaN for both. Returns [loss, logsumexp], one value per row each, FLOAT unless set."""

    def cross_entropy_backward(
        self,
        grad: Tensor | float,
        input: Tensor | float,
        target: Tensor | float,
        logsumexp: Tensor | float,
        ignore_index: int | None = -100,
        label_smoothing: float | None = 0.0,
        z_loss: float | None = 0.0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of cross_entropy, from grad, that of the loss, one per row, and its output logsumexp:
        DX = grad * (exp(input - logsumexp) * (1 + 2 * z_loss * logsumexp) - (1 - label_smoothing) * [column =
        target] - label_smoothing / columns), and 0 in ignored rows, whatever their grad and input. target: the
        number of a column for each row, of any type, including INT32 and INT64. Rows whose target is
        ignore_index are ignored. A target that is neither ignore_index nor the number of a column makes the row's
        DX NaN,
        without a read out of bounds. Attributes
        as in cross_entropy. Returns DX."""

    def dropout(
        self,
        input: Tensor | float,
        seed: Tensor | float,
        offset: Tensor | float,
        probability: float = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Each element of input becomes 0 with the given probability, rounded up to 16 bits, independently of others,
        and input / (1 - probability) otherwise. It becomes 0 if its 16-bit random number is below probability *
        2^16. Random numbers depend only on seed and offset, integers below 2^24 of one element each, and on row and
        column of the element: column is its index along the last axis, row that among all other axes. The number
        is the lower half of a word for an even column, else the upper half: of word (column / 2) mod 4 of Philox
        4x32 with seven rounds, key (seed, offset) and counter (column / 8, row mod 2^32, row / 2^32, 0)."""

    def matmul(
        self,
        A: Tensor | float,
        B: Tensor | float,
        compute_data_type: data_type | Any = ...,
        padding: float = 0.0,
        name: str = "",
    ) -> Tensor:
        """The matrix product C = A B of [batch axes..., M, K] and [batch axes..., K, N]. Extents of 1 along batch axes
        broadcast. Strides give the layouts of A and B: either may be transposed.
        A virtual input is read in the type that it declares. Products and sums are in the compute data type, FLOAT
        unless set, in an order that is not specified, and C is rounded once, to its own type. The reference
        engine uses torch.matmul, on a GPU with FLOAT inputs with the precision of
        torch.set_float32_matmul_precision.
        In INT32 they are exact, modulo 2^32. C is row-major unless set."""

    def moe_grouped_matmul(
        self,
        token: Tensor | float,
        weight: Tensor | float,
        first_token_offset: Tensor | float,
        token_index: Tensor | float | None = None,
        token_ks: Tensor | float | None = None,
        mode: moe_grouped_matmul_mode | None = ...,
        top_k: int | None = 0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        top_k_scores: Tensor | float | None = None,
    ) -> Tensor:
        """Rows of tokens times the weight of their expert: token [1, tokens, K], weight [experts, K, N]. Group g has
        the rows from first_token_offset[g] up to the next offset, and its expert is g modulo experts. The offsets
        are [groups + 1, 1, 1], with the end of the last group, or [groups, 1, 1], if that is the last row. mode
        NONE: tokens and result are in the order of groups. GATHER: row r of the groups is token number
        token_index[r], [1, rows, 1]. SCATTER: row r of the result is written to row token_index[r] * top_k +
        token_ks[r]. COMBINE: it is added to row token_index[r], times top_k_scores[token_index[r], token_ks[r]],
        [1, tokens, top_k]. Each slot of a token occurs once. Rows of the result are zero if they are in no group or
        if no row is written to them; a gathered row is zero if its number is invalid. Products and sums are in the
        compute data type, FLOAT unless set, in an order that is not specified."""

    def moe_grouped_matmul_bwd(
        self,
        doutput: Tensor | float,
        token: Tensor | float,
        first_token_offset: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The gradient of the weight of moe_grouped_matmul, in mode NONE, from that of its output: for each group the
        sum over its rows of token times doutput, [groups, K, N]. first_token_offset includes the end of the last
        group if the result, by set_dim, has one group less than there are offsets. The result's columns have no
        gaps unless its strides are set. Gradients of groups with the same expert are not summed."""

    def conv_fprop(
        self,
        image: Tensor | float,
        weight: Tensor | float,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: convolution_mode | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Convolution of image [N, C, H, W] or [N, C, D, H, W] with weight [K, C / groups, taps along each spatial
        axis]: the number of groups is the quotient of their channels. Strides give the layouts: channels-last is
        C with stride 1. padding, zeros on both sides of each spatial axis, or pre_padding and post_padding; stride
        and dilation; the defaults are 0, 1 and 1. convolution_mode: CROSS_CORRELATION, as in neural networks, or
        CONVOLUTION, which flips the weight. A virtual input is read in the type that it declares. Products
        and sums are in the compute data type, FLOAT unless set, in an order that is not specified, and Y is rounded
        once, to its own type. In INT32 they are exact, modulo 2^32. Y has
        [N, K, (extent + padding - dilation (taps - 1) - 1) / stride + 1, ...], channels-last unless set."""

    def conv_dgrad(
        self,
        loss: Tensor | float,
        filter: Tensor | float,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: convolution_mode | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of conv_fprop with respect to image, from loss, that of its result. Window and channels are
        conv_fprop's, with the same defaults. Products and sums
        are in the compute data type, FLOAT unless set, in an order that is not specified, and DX is
        rounded once, to its own type. Its shape must be set by set_dim, because several shapes fit that of loss. DX
        is channels-last unless set."""

    def conv_wgrad(
        self,
        image: Tensor | float,
        loss: Tensor | float,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: convolution_mode | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of conv_fprop with respect to weight, from loss, that of its result. Window and channels are
        conv_fprop's, with the same defaults. Products and sums
        are in the compute data type, FLOAT unless set, in an order that is not specified, and DW is
        rounded once, to its own type. Its shape, with taps and channels of the weight, must be set by set_dim. DW
        is channels-last unless set."""

    def sdpa(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | float | None = None,
        block_mask: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        cu_seq_len_q: Tensor | float | None = None,
        cu_seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        paged_attention_k_table: Tensor | float | None = None,
        paged_attention_v_table: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        is_inference: bool | None = None,
        generate_stats: bool | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment | None = ...,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        stats_use_log2: bool | None = False,
        unfuse_fma: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        implementation: attention_implementation | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        score_mod: None = ...,
        kv_mask: None = ...,
        softmax_precision: None = ...,
        attn_scale_prefolded: bool = ...,
        dropout: Sequence[Any] | None = None,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        rng_dump: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | Any]:
        """Attention of q [batch, heads, rows, columns] to k and v (Vaswani et al. 2017, equation 1):
        O = softmax(attn_scale * q k^T + bias) v. Heads of k and v must divide those of q: head h of q attends to
        head h / (heads of q / heads of k), so one serves several (grouped and multi-query attention). attn_scale,
        a number or a tensor of one element, is 1 by default; bias has the extents of the scores or 1.
        Row i attends to column j if i - diagonal_band_left_bound < j <= i + diagonal_band_right_bound; a bound of
        None is no bound. With diagonal_alignment BOTTOM_RIGHT i counts from rows of k - rows of q.
        use_causal_mask is TOP_LEFT with right bound 0, use_causal_mask_bottom_right BOTTOM_RIGHT with it,
        sliding_window_length the left bound. A row that attends to nothing is 0, and -infinity in Stats.
        Returns [O, Stats]; Stats, FLOAT unless set, is the log-sum-exp of each row's scores, written with
        generate_stats=True, or is_inference=False, else None. Scores, their exponentials and sums are in the
        compute data type, FLOAT unless set, and are not rounded in between: kernels of cuDNN and torch round the
        exponentials to q's type. O is rounded once, to its own type. Both are row-major unless set.
        use_padding_mask: rows of sequence b end at seq_len_q[b], columns at seq_len_kv[b], [batch, 1, 1, 1], or
        sequences begin at cu_seq_len_q and cu_seq_len_kv, [batch + 1, 1, 1, 1] or [batch + 1]. BOTTOM_RIGHT counts
        from these ends; memory beyond them is not used. block_mask: a bit for each 128 x 128 scores, the lowest of
        a byte first; 0 masks them. use_alibi_mask, with a right bound of 0, adds slope * (j -
        i), slopes as Press et al. 2022. paged_attention_k_table [batch, 1, pages, 1] numbers the pages of k [all
        pages, heads, rows, columns] that make up each sequence, the v table likewise;
        paged_attention_max_seq_len_kv: rows of the longest. The numbers of a sequence may begin at a ragged offset
        of the table.
        sink_token [1, heads of q, 1, 1]: an additional score of each row, without a value that is added to O.
        dropout: (mask, scale), by which exp(score) / sum is multiplied, or (probability, seed, offset), with which
        it drops the same elements as the op dropout of the scores; cuDNN drops others. rng_dump: a tensor of the
        scores' extents for 1 where an element is kept, and 0 where it is dropped.
        score_max, score_sum_exp: tensors for the largest score of each row, and the sum of exp(score - largest).
        implementation: which one cuDNN's engine requests, AUTO, COMPOSITE or UNIFIED; it has no plan if cuDNN
        rejects it. Other engines have one implementation, whatever the value. unfuse_fma: products and sums of
        scores are rounded separately, as the reference engine always does. max_total_seq_len_q,
        max_total_seq_len_kv: bounds of the rows of all sequences together, without effect here.
        score_mod: a function (graph, scores) -> tensor, which adds nodes between q k^T, scaled and with the bias,
        and softmax. Attention is then built from separate nodes. The result of softmax is rounded to q's type, if
        that has 16 bits. Of other options, only attn_scale, bias and Stats are accepted with it."""

    def sdpa_backward(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        o: Tensor | float,
        dO: Tensor | float,
        stats: Tensor | float,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        cu_seq_len_q: Tensor | float | None = None,
        cu_seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment | None = ...,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        use_deterministic_algorithm: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        score_mod: None = ...,
        score_mod_bprop: None = ...,
        dropout: Sequence[Any] | None = None,
        dBias: Tensor | None = None,
        dSink_token: Tensor | None = None,
        rng_dump: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of sdpa's q, k and v, [dQ, dK, dV], from that of its O, with sdpa's options and its inputs, O and
        Stats, of base e. dBias, dSink_token: tensors for the gradients of bias, summed along its axes of extent 1,
        and of sink_token. dropout: as in sdpa, or (mask, scale, scale_inv), of which scale_inv is not used.
        Gradients beyond the end of a sequence are zero. Scores are recomputed in the compute data type, and only
        results are rounded. use_deterministic_algorithm: what cuDNN's engine requests; the reference engine always
        is deterministic. score_mod as in sdpa, and with it score_mod_bprop, a function (graph, gradient of
        score_mod's result) -> gradient of its scores, which may read tensors that score_mod made."""

    def sdpa_fp8(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        descale_q: Tensor | float,
        descale_k: Tensor | float,
        descale_v: Tensor | float,
        descale_s: Tensor | float,
        scale_s: Tensor | float,
        scale_o: Tensor | float,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        cu_seq_len_q: Tensor | float | None = None,
        cu_seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        paged_attention_k_table: Tensor | float | None = None,
        paged_attention_v_table: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        is_inference: bool | None = None,
        generate_stats: bool | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window: int | None = None,
        diagonal_alignment: diagonal_alignment | None = ...,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        stats_use_log2: bool | None = False,
        unfuse_fma: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        implementation: attention_implementation | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        fn: None = ...,
        sf_o: None = ...,
        kv_mask: None = ...,
        softmax_precision: None = ...,
        attn_scale_prefolded: bool = ...,
        dropout: Sequence[Any] | None = None,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        rng_dump: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | Any, Tensor, Tensor]:
        """sdpa of FP8_E4M3 or FP8_E5M2, with a scale for each tensor, a tensor of one element each: q, k and v are
        multiplied by descale_q, descale_k and descale_v. P, the result of softmax and dropout, is rounded to q's
        type as P * scale_s, and multiplied by descale_s and v. O is the product times scale_o. Returns [O,
        Stats, Amax_S, Amax_O]; the last two are the largest magnitudes of P and of O before its scale, FLOAT, one
        element each. sliding_window, left_bound and right_bound are sdpa's sliding_window_length,
        diagonal_band_left_bound and diagonal_band_right_bound; all other options are sdpa's. Values beyond FP8's
        largest saturate."""

    def sdpa_fp8_backward(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        o: Tensor | float,
        dO: Tensor | float,
        stats: Tensor | float,
        descale_q: Tensor | float,
        descale_k: Tensor | float,
        descale_v: Tensor | float,
        descale_o: Tensor | float,
        descale_dO: Tensor | float,
        descale_s: Tensor | float,
        descale_dP: Tensor | float,
        scale_s: Tensor | float,
        scale_dQ: Tensor | float,
        scale_dK: Tensor | float,
        scale_dV: Tensor | float,
        scale_dP: Tensor | float,
        attn_scale: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        diagonal_alignment: diagonal_alignment | None = ...,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        use_deterministic_algorithm: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        dropout: Sequence[Any] | None = None,
        dSink_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of sdpa_fp8's q, k and v from that of its O, with its options. q, k, v, o and dO, all FP8, are
        multiplied by their descales. P is rounded to q's type as P * scale_s and multiplied by descale_s. The
        gradient of the scores, times attn_scale and scale_dP, is rounded to dO's type and multiplied by descale_dP.
        Returns
        [dQ, dK, dV, amax_dQ, amax_dK, amax_dV, amax_dP]: gradients times scale_dQ, scale_dK and scale_dV, and the
        largest magnitudes before these scales, FLOAT, one element each. stats: of base e. dSink_token as in
        sdpa_backward."""

    def sdpa_mxfp8(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        descale_q: Tensor | float,
        descale_k: Tensor | float,
        descale_v: Tensor | float,
        attn_scale: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        cu_seq_len_q: Tensor | float | None = None,
        cu_seq_len_kv: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        generate_stats: bool | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        diagonal_alignment: diagonal_alignment | None = ...,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_padding_mask: bool | None = False,
        unfuse_fma: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        implementation: attention_implementation | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        paged_attention_k_table: None = ...,
        paged_attention_v_table: None = ...,
        paged_attention_max_seq_len_kv: None = ...,
        sf_o: None = ...,
        scale_o: None = ...,
        kv_mask: None = ...,
        softmax_precision: None = ...,
        attn_scale_prefolded: bool = ...,
    ) -> tuple[Tensor, Tensor | Any, Tensor]:
        """sdpa of MXFP8: q, k and v are FP8_E4M3 or FP8_E5M2, with a scale, FP8_E8M0, for each block of 32 elements,
        along columns in descale_q and descale_k, along rows in descale_v. These have the extents of their tensors,
        divided by 32 along that axis, rounded up. They may be reordered as F8_128x4, then also with the extents of
        whole tiles: multiples of 4 along that axis and of 128 along the other. Elements are multiplied exactly;
        the result of softmax is not rounded. Returns [O, Stats, Amax_O], the last the largest magnitude of
        O, FLOAT, one element. Options are sdpa's."""

    def sdpa_mxfp8_backward(
        self,
        q: Tensor | float,
        q_T: Tensor | float,
        k: Tensor | float,
        k_T: Tensor | float,
        v: Tensor | float,
        o_f16: Tensor | float,
        dO_f16: Tensor | float,
        dO: Tensor | float,
        dO_T: Tensor | float,
        stats: Tensor | float,
        descale_q: Tensor | float,
        descale_q_T: Tensor | float,
        descale_k: Tensor | float,
        descale_k_T: Tensor | float,
        descale_v: Tensor | float,
        descale_dO: Tensor | float,
        descale_dO_T: Tensor | float,
        attn_scale: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        diagonal_alignment: diagonal_alignment | None = ...,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        use_deterministic_algorithm: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        dropout: Sequence[Any] | None = None,
        dSink_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of sdpa_mxfp8's q, k and v from that of its O, with its options. Products along columns read q, k,
        v and dO, with scales along columns; products along rows read q_T, k_T and dO_T, of the same extents, with
        scales along rows. The sum of products of O and dO reads o_f16 and dO_f16. Scales are as in sdpa_mxfp8.
        Returns [dQ, dK, dV, amax_dQ, amax_dK, amax_dV], the last three largest magnitudes, FLOAT, one
        element each. stats: of base e. Only results are rounded. dSink_token as in sdpa_backward."""

    def instancenorm(
        self,
        input: Tensor | float,
        scale: Tensor | float,
        bias: Tensor | float,
        epsilon: Tensor | float,
        norm_forward_phase: norm_forward_phase = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor | Any, Tensor | Any]:
        """Instance normalization of [N, C, spatial axes...] (Ulyanov et al. 2016):
        Y = (input - mean) * inv_variance * scale + bias with inv_variance = 1 / sqrt(mean((input - mean)^2) +
        epsilon),
        means over the spatial axes; scale and bias are [1, C, 1, ...]. norm_forward_phase must be given. Returns
        [Y, mean, inv_variance], the last two, [N, C, 1, ...], None in INFERENCE."""

    def instancenorm_backward(
        self,
        grad: Tensor | float,
        input: Tensor | float,
        scale: Tensor | float,
        mean: Tensor | float,
        inv_variance: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of instancenorm, from grad, that of Y, and outputs of forward, as in layernorm_backward.
        DScale and DBias are sums over samples and spatial axes, in the shape of scale. Returns
        [DX, DScale, DBias]."""

    def batchnorm(
        self,
        input: Tensor | float,
        scale: Tensor | float,
        bias: Tensor | float,
        in_running_mean: Tensor | float | None = None,
        in_running_var: Tensor | float | None = None,
        epsilon: Tensor | float = ...,
        momentum: Tensor | float | None = None,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        peer_stats: list[Any] = ...,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | Any, Tensor | Any]:
        """Batch normalization of [N, C, spatial axes...] in training (Ioffe and Szegedy 2015):
        Y = (input - mean) * inv_variance * scale + bias with inv_variance = 1 / sqrt(mean((input - mean)^2) +
        epsilon),
        means over samples and spatial axes; scale and bias are [1, C, 1, ...]. With in_running_mean,
        in_running_var and momentum, one element, next_running_mean = (1 - momentum) * in_running_mean +
        momentum * mean, and next_running_var likewise of the unbiased variance, divided by one less than the
        count. Returns [Y, mean, inv_variance, next_running_mean, next_running_var], all but Y [1, C, 1, ...], the
        last two None without their inputs."""

    def batchnorm_inference(
        self,
        input: Tensor | float,
        mean: Tensor | float,
        inv_variance: Tensor | float,
        scale: Tensor | float,
        bias: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Batch normalization of [N, C, spatial axes...] by given statistics, [1, C, 1, ...] like scale and bias:
        Y = (input - mean) * inv_variance * scale + bias."""

    def batchnorm_backward(
        self,
        grad: Tensor | float,
        input: Tensor | float,
        scale: Tensor | float,
        mean: Tensor | float,
        inv_variance: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        peer_stats: list[Any] = ...,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of batchnorm, from grad, that of Y, and outputs of forward, as in layernorm_backward.
        DScale and DBias are sums over samples and spatial axes, in the shape of scale. Returns
        [DX, DScale, DBias]."""

    def genstats(
        self,
        input: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> tuple[Tensor, Tensor]:
        """Statistics of each channel of [N, C, spatial axes...], sums over samples and spatial axes: of the elements,
        and of their squares. Returns [SUM, SQ_SUM], both [1, C, 1, ...]. Sums are in the compute data type, FLOAT
        unless set, in an order that is not specified."""

    def transpose(
        self,
        input: Tensor | float,
        permutation: Sequence[int] = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input with its axes in another order: axis i of the output is axis permutation[i] of input. Unless set, the
        output's strides are input's in that order, as of a view."""

    def slice(
        self,
        input: Tensor | float,
        slices: Sequence[builtins.slice] = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The elements of input that slices select, a Python slice with a step above 0 for each axis. Unless set, the
        output's strides are input's times the steps, as of a view."""

    def reshape(
        self,
        input: Tensor | float,
        reshape_mode: reshape_mode | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The elements of input in row-major order of their indices, in another shape with as many elements, which
        must be set as the dim of the output. cuDNN's default is the order of elements in memory (VIEW_ONLY), which
        is the same for tensors in row-major order without gaps."""

    def expand(self, input: Tensor | float, compute_data_type: data_type | Any = ..., name: str = "") -> Tensor:
        """input broadcast to the output's dim, which must be set: elements are repeated along axes on which input has
        extent 1."""

    def gather_rows(
        self,
        input: Tensor | float,
        index: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Slices of input along its first axis, by number: output[i, ...] = input[index[i, ...], ...]. index, of any
        type, including INT32 and INT64, has extent 1 along the last axis, and along each other axis but the first
        either index or input has extent 1. A slice whose number is out of range is NaN, without a read out of
        bounds."""

    def scatter_rows(
        self,
        input: Tensor | float,
        index: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Slices of input along its first axis, written by number: output[index[i, ...], ...] = input[i, ...]. Other
        slices of output keep their values in memory, such as those of a cache that is filled step by step. A slice
        whose number is out of range is not written. Of two slices with the same number, either is written. index is
        as in gather_rows. The dim of output must be set, and it must be an output of the graph."""

    def add_rows(
        self,
        input: Tensor | float,
        index: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Slices of input along its first axis, summed by number: output[j, ...] is the sum of input[i, ...] over all
        i with index[i, ...] = j, in the order of i; 0 if there are none. It is the gradient of gather_rows. Slices
        whose number is out of range are ignored. index is as in gather_rows. The dim of output must be set."""

    def rotate_pairs(
        self,
        input: Tensor | float,
        cos: Tensor | float,
        sin: Tensor | float,
        interleaved: bool | None = False,
        inverse: bool | None = False,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Rotary position embedding (Su et al. 2021): pairs of columns of input are rotated by angles, given as cos
        and sin, one for each pair: (x, y) becomes (x cos - y sin, y cos + x sin). With n pairs, columns i and
        n + i are a pair (half-split, as in GPT-NeoX), or, interleaved, columns 2 i and 2 i + 1 (GPT-J). Columns
        from 2 n on are unchanged. inverse rotates back, which is the gradient. cos and sin broadcast along all axes
        but the last. rope takes angles."""

    def rope(
        self,
        input: Tensor | float,
        freqs: Tensor | float,
        output_scale: float | None = 1.0,
        rope_dim: int | None = 0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Rotary position embedding by angles: the last rope_dim columns of input, [samples, heads, rows, columns],
        are rotated, in rotate_pairs' half-split pairs; all columns are multiplied by output_scale. freqs has a row
        of angles in radians for each of input's rows, or more rows: [rows, 1, 1, rope_dim]. Only the first half of
        its columns is used, and the other half may be missing. rope_dim 0: all columns."""

    def rope_backward(
        self,
        dY: Tensor | float,
        freqs: Tensor | float,
        output_scale: float | None = 1.0,
        rope_dim: int | None = 0,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Gradient of rope's input, from dY, that of its output: dY rotated back by the same angles, and
        multiplied by output_scale. Angles have no gradient. Returns DX."""

    def turn_pairs(
        self,
        input: Tensor | float,
        interleaved: bool | None = False,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """Pairs of columns of input, rotated by a right angle: (x, y) becomes (-y, x). All columns are in pairs, as in
        rotate_pairs. So input * cos + turn_pairs(input) * sin is a rotation with cosines and sines for each column
        of input."""

    def join(
        self,
        a: Tensor | float,
        b: Tensor | float,
        axis: int = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The elements of a, then those of b along axis. A negative axis counts from the last."""

    def all_reduce(
        self,
        input: Tensor | float,
        peers: Tensor | float,
        rank: int = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """The sum of input over the ranks of one host, in the order of ranks. input lies in memory that all ranks can
        read, and each rank reads the others' at the same offset as its own. Each rank makes the call, with the same
        rows or with different ones, as in a reduce-scatter. peers, INT64, lies in such memory, too. It has the
        signals of the caller's rank, 512 bytes that are zero before the first call; then the address at which the
        memory of input begins on each rank; then that of peers on each rank. rank is the caller's. Calls with the
        same peers must be on one stream. Later work on this stream may overwrite input."""

    def all_gather(
        self,
        input: Tensor | float,
        peers: Tensor | float,
        rank: int = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input, written to the memory of all ranks of one host, at the same offset as output in the caller's. Each
        rank makes the call, with its own output. Later work on the caller's stream may read what all ranks wrote.
        peers, rank: as in all_reduce, for the memory of output."""

    def bias(
        self,
        input: Tensor | float,
        bias: Tensor | float,
        compute_data_type: data_type | Any = ...,
        name: str = "",
    ) -> Tensor:
        """input + bias: a node of add."""

    def leaky_relu(
        self,
        input: Tensor | float,
        negative_slope: float,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """input above 0, else negative_slope * input: a node of relu."""

    def leaky_relu_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        negative_slope: float,
        name: str = "",
        compute_data_type: data_type | Any = ...,
    ) -> Tensor:
        """Gradient of leaky_relu, from that of its result: a node of relu_backward."""

    def scaled_dot_product_flash_attention(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | float | None = None,
        block_mask: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        cu_seq_len_q: Tensor | float | None = None,
        cu_seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        paged_attention_k_table: Tensor | float | None = None,
        paged_attention_v_table: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        is_inference: bool | None = None,
        generate_stats: bool | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment | None = ...,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        stats_use_log2: bool | None = False,
        unfuse_fma: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        implementation: attention_implementation | None = ...,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        score_mod: None = ...,
        kv_mask: None = ...,
        softmax_precision: None = ...,
        attn_scale_prefolded: bool = ...,
        dropout: Sequence[Any] | None = None,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        rng_dump: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | Any]:
        """An earlier name of sdpa."""

    def scaled_dot_product_flash_attention_backward(
        self,
        q: Tensor | float,
        k: Tensor | float,
        v: Tensor | float,
        o: Tensor | float,
        dO: Tensor | float,
        stats: Tensor | float,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | float | None = None,
        seq_len_q: Tensor | float | None = None,
        seq_len_kv: Tensor | float | None = None,
        cu_seq_len_q: Tensor | float | None = None,
        cu_seq_len_kv: Tensor | float | None = None,
        dropout_seed: Tensor | float | None = None,
        dropout_offset: Tensor | float | None = None,
        dropout_mask: Tensor | float | None = None,
        dropout_scale: Tensor | float | None = None,
        sink_token: Tensor | float | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment | None = ...,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        dropout_probability: float | int | None = None,
        use_deterministic_algorithm: bool | None = False,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: data_type | Any = ...,
        name: str = "",
        *,
        score_mod: None = ...,
        score_mod_bprop: None = ...,
        dropout: Sequence[Any] | None = None,
        dBias: Tensor | None = None,
        dSink_token: Tensor | None = None,
        rng_dump: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """An earlier name of sdpa_backward."""
