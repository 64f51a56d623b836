# SPDX-License-Identifier: Apache-2.0
"""GEMMs that apply an MLP's activation to what they write, in CuTe DSL.

Rows in e4m3 need their scales before a row is known as a whole: they are given, one for
all rows or each its own; see `blocks.act_bound`. SwiGLU may also write 16 bits.

Gate and up of SwiGLU are stacked in the weight. A tile takes eight columns of one and
eight of the other in turns, so that a thread holds both, and what it makes of them lies
as wgmma would have left it.

Numerics: scales, bias and activation in fp32 on the sums, one rounding. In e4m3 what is
beyond 448 ends there, and NaN stays NaN. See `gemms.epilogue_kernel`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from quack.activation import gelu_erf, gelu_tanh_approx, quick_gelu, swiglu
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.ops import TileStore

from vllm_flashinfer_vit.gemms.epilogue_kernel import (
    GROUP,
    PAIR,
    EpilogueGemm,
    Vector,
)

# By the names of `formats.Activation`.
_ACTIVATIONS = {
    "tanh_gelu": gelu_tanh_approx,
    "gelu": gelu_erf,
    "quick_gelu": quick_gelu,
}
# Sums that are stored at once: rows, and columns that divide every tile.
_STORED = (64, 32)


class _Quantizing(EpilogueGemm):
    """A GEMM that may write e4m3."""

    @cute.jit
    def read(self, params, coords, tile_coord_mnkl):
        """Return the reciprocals of the scales of what is written, or None."""
        first_row = self.first_row(params, tile_coord_mnkl)
        scales = self.of_rows(params.out_scales, coords, first_row)
        found = None
        if const_expr(scales is not None):
            found = []
            for m in cutlass.range_constexpr(len(scales)):
                found.append([])
                for r in cutlass.range_constexpr(2):
                    found[m].append(Float32(1) / scales[m][r])
        return found


class ActivatingGemm(_Quantizing):
    """The kernel of an activation of one value; QuACK makes one for each set of sizes.

    Attributes:
        activation: One of `formats.Activation` but `swiglu`.
    """

    activation = ""

    _epi_ops = (
        Vector("out_scales"),
        Vector("bias"),
        Vector("row_scales"),
        Vector("col_scales"),
    )

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        """What the epilogue reads.

        Attributes:
            out_scales: fp32, one or `[T]`, of the rows that are written.
            bias: `[N]` of 16 bits, or None.
            row_scales: fp32, one or `[T]`, of the rows that are read.
            col_scales: fp32, one or `[N]`, of the weight.
        """

        out_scales: cute.Tensor
        bias: cute.Tensor | None = None
        row_scales: cute.Tensor | None = None
        col_scales: cute.Tensor | None = None

    @cute.jit
    def finish(self, params, acc, coords, held, first_row, first_col):
        """Apply the activation, and divide by the scales of what is written."""
        act = const_expr(_ACTIVATIONS[self.activation])
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for r in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(self.cta_tile_shape_mnk[1] // GROUP):
                    for e in cutlass.range_constexpr(PAIR):
                        found = act(acc[(e, r, g), m, 0])
                        acc[(e, r, g), m, 0] = found * held[m][r]


class _HalvedStore(TileStore):
    """Stores tiles of half as many columns as the sums have."""

    def __init__(self, name: str) -> None:
        super().__init__(name, epi_tile_fn=_halved)

    def epi_tile_shape_override(
        self, arch: int, cta_tile_shape_mnk: Any, atom_layout_mnk: Any
    ) -> tuple[int, int]:
        return _STORED

    def store_setup(
        self,
        gemm,
        params,
        smem_tensor,
        tiled_copy_r2s,
        tiled_copy_t2r,
        tile_coord_mnkl,
        varlen_manager,
        tidx,
    ):
        copy = self._make_tiled_copy_r2s(gemm, params, tiled_copy_r2s, tiled_copy_t2r)
        tile_m, tile_n = gemm.cta_tile_shape_mnk[:2]
        to_global, _, _ = gemm.epilog_gmem_copy_and_partition(
            getattr(params, self._tma_atom_key()),
            varlen_manager.offset_batch_epi(
                getattr(params, self.name), tile_coord_mnkl[3]
            ),
            (tile_m, tile_n // 2),
            getattr(params, self._epi_tile_key()),
            smem_tensor,
            tile_coord_mnkl,
        )
        return copy, copy.get_slice(tidx).partition_D(smem_tensor), to_global, None


def _halved(gemm: Any, epi_tile: tuple[int, int]) -> tuple[int, int]:
    return epi_tile[0], epi_tile[1] // 2


class SwigluGemm(_Quantizing):
    """The kernel of SwiGLU; QuACK makes one for each set of sizes.

    It has no D: half as many columns as sums are stored, by an op of its own.

    Attributes:
        half: Outputs of the gate, and of up: the weight's rows from `half` on.
    """

    half = 0

    _epi_ops = (
        _HalvedStore("out"),
        Vector("out_scales"),
        Vector("bias"),
        Vector("row_scales"),
        Vector("col_scales"),
    )

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        """What the epilogue writes and reads.

        Attributes:
            out: `[T, half]`, or with a few columns more, which hold nothing.
            out_scales: See `ActivatingGemm`, like the others; None for 16 bits.
            bias: `[2 half]`.
            row_scales: See `out_scales`.
            col_scales: See `out_scales`.
        """

        out: cute.Tensor
        out_scales: cute.Tensor | None = None
        bias: cute.Tensor | None = None
        row_scales: cute.Tensor | None = None
        col_scales: cute.Tensor | None = None

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, *args, **options):
        """Take eight rows of gate and eight of up in turns."""
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(
            mA, mB, mD, mC, epilogue_args, *args, **options
        )
        (_, inputs, batch), (row, col, step) = mB.shape, mB.stride
        groups = -(-self.half // GROUP)
        layout = cute.make_layout(
            ((GROUP, 2, groups), inputs, batch),
            stride=((row, self.half * row, GROUP * row), col, step),
        )
        mB = cute.make_tensor(mB.iterator, layout)
        return mA, mB, mD, mC, epilogue_args

    def column(self, at, first):
        """See `EpilogueGemm`."""
        gate = first // 2 + GROUP * (at // (2 * GROUP)) + at % GROUP
        return gate + self.half * (at // GROUP % 2)

    @cute.jit
    def finish(self, params, acc, coords, held, first_row, first_col):
        """Compute SwiGLU where the gate was, and divide by the scales of e4m3."""
        groups = const_expr(self.cta_tile_shape_mnk[1] // (2 * GROUP))
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for r in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(groups):
                    for e in cutlass.range_constexpr(PAIR):
                        up = acc[(e, r, 2 * g + 1), m, 0]
                        found = swiglu(acc[(e, r, 2 * g), m, 0], up)
                        if const_expr(held is not None):
                            found = found * held[m][r]
                        acc[(e, r, 2 * g), m, 0] = found

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        """Store the columns where gates were."""
        # Two neighbours in each of two rows are those of a group.
        *_, groups = tRS_rD.shape
        out = cute.make_rmem_tensor((*tRS_rD.shape[:-1], groups // 2), Float32)
        for i in cutlass.range_constexpr(cute.size(out)):
            g, at = const_expr(i // (2 * PAIR)), const_expr(i % (2 * PAIR))
            out[i] = tRS_rD[2 * g * 2 * PAIR + at]
        return (out,)
