# SPDX-License-Identifier: Apache-2.0
"""Tiles of 16-bit values, two of which stay in one register.

Triton unpacks such values to fp32 and keeps them so until it stores them: a head that
waits for its scale then takes twice the registers, and none are left to read the next
head meanwhile. Only inline PTX keeps them packed. Values in fp32, mixed tables and
Triton's interpreter take the same steps, unpacked, to the same bits.
"""

import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels.rope import rotate

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_PTX_TYPES = {"bf16": "bf16x2", "fp16": "f16x2"}


@triton.jit
def finite(x):
    """Return x with NaN for Inf: a maximum skips it, e4m3 has no other.

    The result is in x's dtype or in fp32.
    """
    # Inf times 0 is NaN, in one instruction.
    if _is_packed(x.dtype):
        return tl.inline_asm_elementwise(
            _finite_ptx(x.dtype), "=r,r", [x], x.dtype, is_pure=True, pack=2
        )
    else:
        return tl.fma(x.to(tl.float32), 0.0, x.to(tl.float32))


@triton.jit
def rotate_finite(x1, x2, cos, sin):
    """Turn the pairs (x1, x2) as `rotate` does; returns what `finite` returns."""
    if _is_packed(x1.dtype) and cos.dtype == sin.dtype and _fits(x1.dtype, cos.dtype):
        return tl.inline_asm_elementwise(
            _rotate_ptx(x1.dtype, cos.dtype),
            "=&r,=&r,r,r,r,r" if cos.dtype == x1.dtype else "=&r,=&r,r,r,r,r,r,r",
            [x1, x2, cos, sin],
            (x1.dtype, x1.dtype),
            is_pure=True,
            pack=2,
        )
    else:
        y1, y2 = rotate(x1, x2, cos.to(tl.float32), sin.to(tl.float32))
        return finite(y1), finite(y2)


@triton.jit
def larger(x, y):
    """Return the larger one of |x| and |y|; a number where only one is NaN."""
    if _is_packed(x.dtype):
        return tl.inline_asm_elementwise(
            _larger_ptx(x.dtype), "=r,r,r", [x, y], x.dtype, is_pure=True, pack=2
        )
    else:
        return tl.max(tl.abs(tl.join(x, y)), axis=2)


@triton.jit
def to_e4m3(x, inverse):
    """Divide by a scale, given its reciprocal; the conversion saturates."""
    return (x.to(tl.float32) * inverse).to(tl.float8e4nv)


@triton.jit
def pairs_to_e4m3(x, y, inverse, LIMIT: tl.constexpr):
    """Return the pairs (x, y) as `to_e4m3` does, in turns.

    Args:
        x: `[N, M]`, what `finite` returned.
        y: Like x.
        inverse: fp32.
        LIMIT: The largest absolute value, or None for e4m3's.

    Returns:
        `[N, 2 M]` e4m3, or the same bytes as `[N, M]` uint16.
    """
    if _is_packed(x.dtype):
        return tl.inline_asm_elementwise(
            _pairs_to_e4m3_ptx(x.dtype, LIMIT),
            "=r,r,r,r,r",
            [x, y, inverse],
            tl.uint16,
            is_pure=True,
            pack=2,
        )
    else:
        x = tl.reshape(tl.join(x, y), [x.shape[0], 2 * x.shape[1]]) * inverse
        if LIMIT is not None:
            x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
            x = tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return x.to(tl.float8e4nv)


@triton.constexpr_function
def _is_packed(dtype):
    return _IS_COMPILED.value and dtype.name in _PTX_TYPES


@triton.constexpr_function
def _fits(dtype, table_dtype):
    return table_dtype.name in (dtype.name, "fp32")


@triton.constexpr_function
def _finite_ptx(dtype):
    return f"""{{
        .reg .b32 zero;
        mov.b32 zero, 0;
        fma.rn.{_PTX_TYPES[dtype.name]} $0, $1, zero, $1;
    }}"""


@triton.constexpr_function
def _larger_ptx(dtype):
    packed = _PTX_TYPES[dtype.name]
    return f"""{{
        .reg .b32 x, y;
        abs.{packed} x, $1;
        abs.{packed} y, $2;
        max.{packed} $0, x, y;
    }}"""


@triton.constexpr_function
def _rotate_ptx(dtype, table_dtype):
    packed = _PTX_TYPES[dtype.name]
    unpacked = _unpack(dtype, x="$2", y="$3")
    if table_dtype.name == dtype.name:
        unpacked = _unpack(dtype, x="$2", y="$3", c="$4", s="$5")
    else:
        unpacked += ".reg .b32 c0, c1, s0, s1;\n"
        unpacked += "mov.b32 c0, $4; mov.b32 c1, $5; mov.b32 s0, $6; mov.b32 s1, $7;"
    return f"""{{
        {unpacked}
        .reg .b32 a, b, r0, r1, zero;
        mov.b32 zero, 0;
        mul.rn.f32 a, x0, c0; mul.rn.f32 b, y0, s0; sub.rn.f32 r0, a, b;
        mul.rn.f32 a, x1, c1; mul.rn.f32 b, y1, s1; sub.rn.f32 r1, a, b;
        cvt.rn.{packed}.f32 a, r1, r0;
        fma.rn.{packed} $0, a, zero, a;
        mul.rn.f32 a, y0, c0; mul.rn.f32 b, x0, s0; add.rn.f32 r0, a, b;
        mul.rn.f32 a, y1, c1; mul.rn.f32 b, x1, s1; add.rn.f32 r1, a, b;
        cvt.rn.{packed}.f32 a, r1, r0;
        fma.rn.{packed} $1, a, zero, a;
    }}"""


@triton.constexpr_function
def _pairs_to_e4m3_ptx(dtype, limit):
    values = ("x0", "y0", "x1", "y1")
    scaled = "".join(f"mul.rn.f32 {x}, {x}, ${3 + int(x[1])};\n" for x in values)
    if limit is not None:
        scaled += "".join(
            f"max.NaN.f32 {x}, {x}, -{limit};\nmin.NaN.f32 {x}, {x}, {limit};\n"
            for x in values
        )
    return f"""{{
        {_unpack(dtype, x="$1", y="$2")}
        .reg .b16 low, high;
        {scaled}
        cvt.rn.satfinite.e4m3x2.f32 low, y0, x0;
        cvt.rn.satfinite.e4m3x2.f32 high, y1, x1;
        mov.b32 $0, {{low, high}};
    }}"""


@triton.constexpr_function
def _unpack(dtype, **registers: str) -> str:
    """Return PTX that declares and sets x0 and x1 in fp32 for each `x=register`."""
    lines = [".reg .b16 half0, half1;"]
    for x, register in registers.items():
        lines.append(f".reg .b32 {x}0, {x}1;")
        if dtype.name == "bf16":
            # It is the upper half of an fp32 number.
            lines.append(f"shl.b32 {x}0, {register}, 16;")
            lines.append(f"and.b32 {x}1, {register}, 0xffff0000;")
        else:
            lines.append(f"mov.b32 {{half0, half1}}, {register};")
            lines.append(f"cvt.f32.f16 {x}0, half0; cvt.f32.f16 {x}1, half1;")
    return "\n".join(lines)
