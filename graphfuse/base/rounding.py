"""Conversion of float32 values to each storage type, in torch: the reference semantics.

Values round to nearest, ties to even. Integers saturate at the ends of their range, FP8 and FP4 at their largest finite
value, infinities too. NaN stays NaN if the type has one, and becomes 0 in integers. BOOLEAN is True for all but 0.
FP8_E8M0 holds only powers of two, and is for scales: magnitudes round up to it.
Functions get the torch module as `t`, so that importing this module does not load torch.
"""

from graphfuse.base.dtypes import data_type

_SATURATING = (data_type.FP8_E4M3, data_type.FP8_E5M2)


def encode(t, values, dtype: data_type):
    """`values` in storage form: a tensor of `dtype`. FP4_E2M1 is uint8, with two elements a byte along the last axis,
    whose extent must be even; the even element is in the low nibble."""
    if not values.is_floating_point():  # integers that float64 cannot represent must round only once, to FLOAT
        values = values.double() if dtype.is_float and dtype.bits < 16 else values.long()
    if dtype is data_type.FP4_E2M1:
        codes = _e2m1_codes(t, values)
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    if dtype is data_type.FP8_E8M0:
        return _e8m0_codes(t, values).view(t.float8_e8m0fnu)
    if dtype in _SATURATING:
        limit = dtype.facts.max
        # The conversion instruction makes one NaN; torch would keep the sign.
        values = values.clamp(-limit, limit).masked_fill(values.isnan(), float("nan"))
    if dtype.facts.integers is not None and dtype is not data_type.BOOLEAN:
        return _integers(t, values.nan_to_num(0.0).round(), dtype)
    return values.to(getattr(t, dtype.facts.torch))


def decode(t, stored, dtype: data_type, compute):
    """The inverse of `encode`: a tensor of the torch dtype `compute`."""
    if dtype is data_type.FP4_E2M1:
        codes = t.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
        return _E2M1.as_tensor(t, stored.device, compute)[codes.long()]
    return stored.to(compute)


def round_to(t, values, dtype: data_type):
    """`values` rounded to `dtype`, in their own type; integers that are rounded to a float type are in float64."""
    kind = t.float64 if dtype.facts.integers is None and not values.is_floating_point() else values.dtype
    if dtype is data_type.FP4_E2M1:
        return _E2M1.as_tensor(t, values.device, kind)[_e2m1_codes(t, values.to(kind)).long()]
    return encode(t, values, dtype).to(kind)


def to_e2m1_places(t, values):
    """float64 `values` rounded to the precision that kernels keep before E2M1: multiples of 2^-22, from 2 on of 2^-21,
    from 4 on of 2^-20. Values from 8 on, which saturate in E2M1, stay."""
    magnitude = values.abs()
    last = t.where(magnitude < 2, 2.0**-22, t.where(magnitude < 4, 2.0**-21, 2.0**-20)).to(values.dtype)
    return t.where(magnitude < 8, (values / last).round() * last, values)


def _integers(t, whole, dtype):
    # Clamping first would be wrong: the largest INT32 and INT64 round up in float32.
    low, high = dtype.facts.integers
    stored = whole.to(getattr(t, dtype.facts.torch))
    return stored.masked_fill(whole <= low, low).masked_fill(whole >= high, high)


class _E2M1:
    """The sixteen values of FP4 E2M1 (OCP Microscaling Formats v1.0, section 5.3.3)."""

    MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    # A magnitude above the midpoint of k and k+1 rounds up to code k+1; at the midpoint, if k is odd (ties to even).
    MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

    @classmethod
    def as_tensor(cls, t, device, dtype):
        return t.tensor(cls.MAGNITUDES + tuple(-m for m in cls.MAGNITUDES), device=device, dtype=dtype)


def _e2m1_codes(t, values):
    magnitude = values.abs()
    code = t.zeros(values.shape, dtype=t.uint8, device=values.device)
    for k, midpoint in enumerate(_E2M1.MIDPOINTS):
        code += (magnitude >= midpoint) if k % 2 else (magnitude > midpoint)
    code |= t.signbit(values).to(t.uint8) << 3
    # E2M1 has no NaN: it becomes +6, as with the conversion instruction.
    return t.where(values.isnan(), t.full_like(code, 7), code)


def _e8m0_codes(t, values):
    """127 + the exponent of the power of two at or above |value|, as by cvt.rp.satfinite.ue8m0x2. The code is 0 below
    2^-127 (and for zero), 254 above 2^127 (and for infinity), 255 for NaN."""
    magnitude = values.abs()
    fraction, exponent = t.frexp(magnitude)  # arbitrary for zero and infinity
    codes = (exponent - (fraction == 0.5).to(exponent.dtype) + 127).clamp(0, 254)
    codes = codes.masked_fill(magnitude == 0, 0).masked_fill(magnitude.isinf(), 254)
    return codes.masked_fill(values.isnan(), 255).to(t.uint8)
