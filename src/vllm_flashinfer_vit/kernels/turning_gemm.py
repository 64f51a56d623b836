# SPDX-License-Identifier: Apache-2.0
"""QuACK's GEMM for Hopper that turns q and k before it writes them, in CuTe DSL.

A tile is as wide as whole heads, and of q, k and v it holds one kind. Its fp32 sums lie
in registers as wgmma leaves them: a thread has, of each eight columns, two neighbours,
in rows that are eight apart. With that, both columns that turn together are in one
thread if they are neighbours, or if half a head is a multiple of eight columns; if it
is one of four only, the other column is two lanes on.

Numerics: scales, bias and rotation in fp32 on the sums, one rounding as they are
stored. Sums of products in e4m3 stay in the tensor cores to their end, as vLLM's GEMMs
leave them there; see `kernels.scaled_mm`.

It imports QuACK, and uses what QuACK 0.6 has for epilogues of other packages; see
`blocks.quack_turn`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple, torch2cute_dtype_map
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import EpiOp
from quack.gemm_sm90 import GemmSm90
from quack.rounding import RoundingMode

# Columns of a thread are pairs, one in each of so many.
_GROUP = 8
# What `_pair` loads at once, in elements.
_PAIR = 2


class _Read(EpiOp):
    """A tensor in global memory that the epilogue reads by itself."""

    def param_fields(self) -> list[tuple[str, type, None]]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}


class _Table(_Read):
    """Cosines or sines, `[T, D / 2]`."""

    def host_arg_key(self, value: Any) -> tuple[Any, int]:
        return torch2cute_dtype_map[value.dtype], value.shape[1]

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        dtype, half = key
        return make_fake_tensor(
            dtype, (cute.sym_int(), half), leading_dim=1, divisibility=_PAIR
        )


class _Bias(_Read):
    """One value for each column, `[N]`."""

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        return make_fake_tensor(key[0], (fctx.n,), leading_dim=0, divisibility=_PAIR)


class _Scales(_Read):
    """fp32: one, or one for each row or column."""

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        return make_fake_tensor(key[0], (cute.sym_int(),), leading_dim=0)


@cute.jit
def _pair(tensor: cute.Tensor, at: Int32):
    """Load two neighbours in fp32; the first is at an even place."""
    at = cute.assume(at, divby=_PAIR)
    read = cute.make_rmem_tensor(_PAIR, tensor.element_type)
    pair = cute.make_tensor(tensor.iterator + at, cute.make_layout(_PAIR))
    cute.autovec_copy(pair, read)
    return read[0].to(Float32), read[1].to(Float32)


class TurningGemm(ComposableEpiMixin, GemmSm90):
    """The kernel; QuACK makes one for each set of sizes.

    Attributes:
        head_dim: D, a divisor of the tile's width.
        turned: Columns of q and k, a multiple of the tile's width.
        is_interleaved: Whether columns 2 i and 2 i + 1 of a head turn together; else
            columns i and i + D / 2 do.
        revision: Of this file: QuACK finds compiled kernels on disk by such values.
    """

    head_dim = 0
    turned = 0
    is_interleaved = False
    revision = ""

    _epi_ops = (
        _Table("cos"),
        _Table("sin"),
        _Bias("bias"),
        _Scales("row_scales"),
        _Scales("col_scales"),
    )
    _extra_param_fields = (
        ("split_k_semaphore", object, None),
        ("split_k_workspace", object, None),
    )

    def __init__(self, acc_dtype: Any, a_dtype: Any, *args: Any, **options: Any):
        """Take what QuACK hands over."""
        if a_dtype.width == 8:
            options["fp8_fast_accum"] = True
        super().__init__(acc_dtype, a_dtype, *args, **options)

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

    def epi_to_underlying_arguments(
        self, args: Any, *, loc: Any = None, ip: Any = None
    ) -> Any:
        """Hand over what is read as it is."""
        self.rounding_mode = RoundingMode.RN
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """Store what `epi_visit_acc` left."""
        return ()

    @cute.jit
    def epi_visit_acc(self, params, acc, tiled_mma, tile_coord_mnkl, tidx):
        """Scale a tile's sums, add the bias, and turn those of q and k."""
        tile_m, tile_n = self.cta_tile_shape_mnk[0], self.cta_tile_shape_mnk[1]
        tile = cute.make_identity_tensor((tile_m, tile_n))
        coords = tiled_mma.get_slice(tidx).partition_C(tile)
        first_row = tile_coord_mnkl[0] * tile_m
        first_col = tile_coord_mnkl[1] * tile_n
        if const_expr(params.row_scales is not None):
            self._scale_rows(params.row_scales, acc, coords, first_row)
        if const_expr(params.col_scales is not None):
            self._scale_columns(params.col_scales, acc, coords, first_col)
        if const_expr(params.bias is not None):
            self._add(params.bias, acc, coords, first_col)
        if first_col < self.turned:
            self._turn(params, acc, coords, first_row)

    @cute.jit
    def _scale_rows(self, scales, acc, coords, first):
        # One for all is at the last place, too.
        last = cute.size(scales) - 1
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for r in cutlass.range_constexpr(2):
                row = first + coords[(0, r, 0), m, 0][0]
                scale = scales[cutlass.min(row, last)]
                for g in cutlass.range_constexpr(self.cta_tile_shape_mnk[1] // _GROUP):
                    for e in cutlass.range_constexpr(_PAIR):
                        acc[(e, r, g), m, 0] = acc[(e, r, g), m, 0] * scale

    @cute.jit
    def _scale_columns(self, scales, acc, coords, first):
        last = cute.size(scales) - 1
        for g in cutlass.range_constexpr(self.cta_tile_shape_mnk[1] // _GROUP):
            for e in cutlass.range_constexpr(_PAIR):
                col = first + coords[(e, 0, g), 0, 0][1]
                scale = scales[cutlass.min(col, last)]
                for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    for r in cutlass.range_constexpr(2):
                        acc[(e, r, g), m, 0] = acc[(e, r, g), m, 0] * scale

    @cute.jit
    def _add(self, bias, acc, coords, first):
        # Columns past the last are not stored, but read.
        last = cute.size(bias) - _PAIR
        for g in cutlass.range_constexpr(self.cta_tile_shape_mnk[1] // _GROUP):
            col = first + coords[(0, 0, g), 0, 0][1]
            pair = _pair(bias, cutlass.min(col, last))
            for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                for r in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(_PAIR):
                        acc[(e, r, g), m, 0] = acc[(e, r, g), m, 0] + pair[e]

    @cute.jit
    def _turn(self, params, acc, coords, first):
        last = cute.size(params.cos, mode=[0]) - 1
        lane = coords[(0, 0, 0), 0, 0][1]
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for r in cutlass.range_constexpr(2):
                row = cutlass.min(first + coords[(0, r, 0), m, 0][0], last)
                if const_expr(self.is_interleaved):
                    self._turn_neighbours(params, acc, row, lane, m, r)
                elif const_expr(self.head_dim % (2 * _GROUP) == 0):
                    self._turn_own(params, acc, row, lane, m, r)
                else:
                    self._turn_lanes(params, acc, row, lane, m, r)

    @cute.jit
    def _turn_neighbours(self, params, acc, row, lane, m, r):
        """Turn columns 2 i and 2 i + 1."""
        groups = const_expr(self.head_dim // _GROUP)
        for g in cutlass.range_constexpr(groups):
            at = (lane + _GROUP * g) // 2
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
        groups = const_expr(self.head_dim // _GROUP)
        half = const_expr(groups // 2)
        for g in cutlass.range_constexpr(half):
            c = _pair(params.cos, row * params.cos.stride[0] + (lane + _GROUP * g))
            s = _pair(params.sin, row * params.sin.stride[0] + (lane + _GROUP * g))
            for h in cutlass.range_constexpr(
                self.cta_tile_shape_mnk[1] // self.head_dim
            ):
                for e in cutlass.range_constexpr(_PAIR):
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
        groups = const_expr(self.head_dim // _GROUP)
        heads = const_expr(self.cta_tile_shape_mnk[1] // self.head_dim)
        b = const_expr(groups // 2)
        is_low = lane < _GROUP // 2
        # All are read before any is turned.
        others = []
        for h in cutlass.range_constexpr(heads):
            others.append([])
            for g in cutlass.range_constexpr(groups):
                for e in cutlass.range_constexpr(_PAIR):
                    x = acc[(e, r, h * groups + g), m, 0]
                    others[h].append(cute.arch.shuffle_sync_bfly(x, offset=2))
        for g in cutlass.range_constexpr(groups):
            # Where the columns lie in their half, the groups of what turns with them,
            # and the sine's sign: minus in the first half.
            if const_expr(g < b):
                at, low, high, sign = lane + _GROUP * g, g + b, g + b + 1, Float32(-1)
            elif const_expr(g == b):
                at = lane + cutlass.select_(is_low, Int32(_GROUP * b), Int32(-4))
                low, high = 2 * b, 0
                sign = cutlass.select_(is_low, Float32(-1), Float32(1))
            else:
                at = lane + _GROUP * (g - b) - 4
                low, high, sign = g - b - 1, g - b, Float32(1)
            c = _pair(params.cos, row * params.cos.stride[0] + at)
            s = _pair(params.sin, row * params.sin.stride[0] + at)
            for h in cutlass.range_constexpr(heads):
                for e in cutlass.range_constexpr(_PAIR):
                    i = (e, r, h * groups + g)
                    x2 = cutlass.select_(
                        is_low,
                        others[h][_PAIR * low + e],
                        others[h][_PAIR * high + e],
                    )
                    acc[i, m, 0] = acc[i, m, 0] * c[e] + sign * x2 * s[e]
