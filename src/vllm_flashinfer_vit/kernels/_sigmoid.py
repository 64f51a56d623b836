# SPDX-License-Identifier: Apache-2.0
"""Sigmoids for Triton kernels, and the tanh GELU by one."""

import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels import _triton

LOG2_E = tl.constexpr(_triton.LOG2_E)
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
# GELU by tanh, as a sigmoid of twice the argument: sqrt(8 / pi) (x + 0.044715 x^3).
_TANH_SCALE = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def over_one_plus_exp2(x):
    """Return `1 / (1 + 2^x)`: 1 where the power is too small, 0 where it is Inf."""
    # Triton's own take 10 instructions, for numbers below 2^-126 and divisors near Inf.
    if _IS_COMPILED:
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 power;
                ex2.approx.ftz.f32 power, $1;
                add.f32 power, power, 0f3F800000;
                rcp.approx.ftz.f32 $0, power;
            }""",
            "=r,r",
            [x],
            tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp2(x))


@triton.jit
def gelu_tanh(x):
    """Return the GELU of fp32 values by its tanh approximation."""
    slope = -_TANH_SCALE * LOG2_E
    return x * over_one_plus_exp2(x * (x * x * (_CUBIC * slope) + slope))
