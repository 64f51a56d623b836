# SPDX-License-Identifier: Apache-2.0
"""A GEMM that turns q and k before it writes them, in CuTe DSL.

A tile is as wide as whole heads, and of q, k and v it holds one kind. Both columns that
turn together are in one thread if they are neighbours, or if half a head is a multiple
of eight columns; if it is one of four only, the other column is two lanes on.

Numerics: scales, bias and rotation in fp32 on the sums, one rounding as they are
stored. See `gemms.epilogue_kernel`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple, torch2cute_dtype_map

from vllm_flashinfer_vit.gemms.epilogue_kernel import (
    GROUP,
    PAIR,
    EpilogueGemm,
    Read,
    Vector,
)


class Table(Read):
    """Cosines or sines, `[T, D / 2]`."""

    def host_arg_key(self, value: Any) -> tuple[Any, int]:
        """Make a constant of D / 2."""
        return torch2cute_dtype_map[value.dtype], value.shape[1]

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        """Describe it for the compiler."""
        dtype, half = key
        return make_fake_tensor(
            dtype, (cute.sym_int(), half), leading_dim=1, divisibility=PAIR
        )


@cute.jit
def _pair(tensor: cute.Tensor, at: Int32):
    """Load two neighbours in fp32; the first is at an even place."""
    at = cute.assume(at, divby=PAIR)
    read = cute.make_rmem_tensor(PAIR, tensor.element_type)
    pair = cute.make_tensor(tensor.iterator + at, cute.make_layout(PAIR))
    cute.autovec_copy(pair, read)
    return read[0].to(Float32), read[1].to(Float32)


class TurningGemm(EpilogueGemm):
    """The kernel; QuACK makes one for each set of sizes.

    Attributes:
        head_dim: D, a divisor of the tile's width.
        turned: Columns of q and k, a multiple of the tile's width.
        is_interleaved: Whether columns 2 i and 2 i + 1 of a head turn together; else
            columns i and i + D / 2 do.
    """

    head_dim = 0
    turned = 0
    is_interleaved = False

    _epi_ops: tuple[Read, ...] = (
        Table("cos"),
        Table("sin"),
        Vector("bias"),
        Vector("row_scales"),
        Vector("col_scales"),
    )

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        """What the epilogue reads.

        Attributes:
            cos: `[T, D / 2]`, like `sin`.
            sin: See `cos`.
            bias: `[N]` of 16 bits, or None.
            row_scales: fp32, one or `[T]`, of rows in FP8, else None.
            col_scales: fp32, one or `[N]`, of the weight, likewise.
        """

        cos: cute.Tensor
        sin: cute.Tensor
        bias: cute.Tensor | None = None
        row_scales: cute.Tensor | None = None
        col_scales: cute.Tensor | None = None

    @cute.jit
    def finish(self, params, acc, coords, held, first_row, first_col):
        """Turn the sums of q and k."""
        if first_col < self.turned:
            self._turn(params, acc, coords, first_row)

    @cute.jit
    def _turn(self, params, acc, coords, first):
        last = cute.size(params.cos, mode=[0]) - 1
        lane = coords[(0, 0, 0), 0, 0][1]
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for r in cutlass.range_constexpr(2):
                row = cutlass.min(first + coords[(0, r, 0), m, 0][0], last)
                if const_expr(self.is_interleaved):
                    self._turn_neighbours(params, acc, row, lane, m, r)
                elif const_expr(self.head_dim % (2 * GROUP) == 0):
                    self._turn_own(params, acc, row, lane, m, r)
                else:
                    self._turn_lanes(params, acc, row, lane, m, r)

    @cute.jit
    def _turn_neighbours(self, params, acc, row, lane, m, r):
        """Turn columns 2 i and 2 i + 1."""
        groups = const_expr(self.head_dim // GROUP)
        for g in cutlass.range_constexpr(groups):
            at = (lane + GROUP * g) // 2
            c = params.cos[row, at].to(Float32)
            s = params.sin[row, at].to(Float32)
            for h in cutlass.range_constexpr(
                self.cta_tile_shape_mnk[1] // self.head_dim
            ):
                i, j = (0, r, h * groups + g), (1, r, h * groups + g)
                x1, x2 = acc[i, m, 0], acc[j, m, 0]
                acc[i, m, 0] = x1 * c - x2 * s
                acc[j, m, 0] = x2 * c + x1 * s

    @cute.jit
    def _turn_own(self, params, acc, row, lane, m, r):
        """Turn columns i and i + D / 2, both of this thread."""
        groups = const_expr(self.head_dim // GROUP)
        half = const_expr(groups // 2)
        for g in cutlass.range_constexpr(half):
            c = _pair(params.cos, row * params.cos.stride[0] + (lane + GROUP * g))
            s = _pair(params.sin, row * params.sin.stride[0] + (lane + GROUP * g))
            for h in cutlass.range_constexpr(
                self.cta_tile_shape_mnk[1] // self.head_dim
            ):
                for e in cutlass.range_constexpr(PAIR):
                    i = (e, r, h * groups + g)
                    j = (e, r, h * groups + g + half)
                    x1, x2 = acc[i, m, 0], acc[j, m, 0]
                    acc[i, m, 0] = x1 * c[e] - x2 * s[e]
                    acc[j, m, 0] = x2 * c[e] + x1 * s[e]

    @cute.jit
    def _turn_lanes(self, params, acc, row, lane, m, r):
        """Turn columns i and i + D / 2, of which another lane has one.

        D / 2 is 8 b + 4. A lane whose columns of a group are the low four finds those
        that turn with them among the high four of another group, two lanes on, and the
        other way about.
        """
        groups = const_expr(self.head_dim // GROUP)
        heads = const_expr(self.cta_tile_shape_mnk[1] // self.head_dim)
        b = const_expr(groups // 2)
        is_low = lane < GROUP // 2
        # All are read before any is turned.
        others = []
        for h in cutlass.range_constexpr(heads):
            others.append([])
            for g in cutlass.range_constexpr(groups):
                for e in cutlass.range_constexpr(PAIR):
                    x = acc[(e, r, h * groups + g), m, 0]
                    others[h].append(cute.arch.shuffle_sync_bfly(x, offset=2))
        for g in cutlass.range_constexpr(groups):
            # Where the columns lie in their half, the groups of what turns with them,
            # and the sine's sign: minus in the first half.
            if const_expr(g < b):
                at, low, high, sign = lane + GROUP * g, g + b, g + b + 1, Float32(-1)
            elif const_expr(g == b):
                at = lane + cutlass.select_(is_low, Int32(GROUP * b), Int32(-4))
                low, high = 2 * b, 0
                sign = cutlass.select_(is_low, Float32(-1), Float32(1))
            else:
                at = lane + GROUP * (g - b) - 4
                low, high, sign = g - b - 1, g - b, Float32(1)
            c = _pair(params.cos, row * params.cos.stride[0] + at)
            s = _pair(params.sin, row * params.sin.stride[0] + at)
            for h in cutlass.range_constexpr(heads):
                for e in cutlass.range_constexpr(PAIR):
                    i = (e, r, h * groups + g)
                    x2 = cutlass.select_(
                        is_low,
                        others[h][PAIR * low + e],
                        others[h][PAIR * high + e],
                    )
                    acc[i, m, 0] = acc[i, m, 0] * c[e] + sign * x2 * s[e]
