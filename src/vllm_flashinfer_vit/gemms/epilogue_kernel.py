# SPDX-License-Identifier: Apache-2.0
"""QuACK's GEMM for Hopper with scales and a bias on its sums, in CuTe DSL.

It is what this package's own epilogues begin with. A tile's fp32 sums lie in registers
as wgmma leaves them: a thread has, of each eight columns, two neighbours, in rows that
are eight apart.

Sums of products in e4m3 stay in the tensor cores to their end, as vLLM's GEMMs leave
them there; see `gemms.scaled_mm`.

It imports QuACK, and uses what QuACK 0.6 has for epilogues of other packages; see
`gemms.epilogue_gemm`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack.compile_utils import make_fake_tensor
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import EpiOp
from quack.gemm_sm90 import GemmSm90
from quack.rounding import RoundingMode

# Columns of a thread are pairs, one in each of so many, which are four lanes'.
PAIR = 2
GROUP = 8
_LANES = 4
_WARP = 32


class Read(EpiOp):
    """A tensor in global memory that the epilogue reads by itself."""

    def param_fields(self) -> list[tuple[str, type, None]]:
        """Say what the kernel is handed."""
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        """Hand the tensor over as it is."""
        return {self.name: getattr(args, self.name)}


class Vector(Read):
    """One value for all, or one for each row or column."""

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        """Describe it for the compiler."""
        return make_fake_tensor(key[0], (cute.sym_int(),), leading_dim=0)


class EpilogueGemm(ComposableEpiMixin, GemmSm90):
    """A kernel whose epilogue begins with scales and a bias; for subclasses.

    A subclass names what it reads in `_epi_ops` and `EpilogueArguments`, and computes
    in `finish`.

    Attributes:
        revision: Of the sources: QuACK finds compiled kernels on disk by such values.
    """

    revision = ""
    # The group of warps whose arithmetic is being written, until it waits to store.
    _group: Int32 | None = None

    _extra_param_fields = (
        ("split_k_semaphore", object, None),
        ("split_k_workspace", object, None),
    )

    def __init__(self, acc_dtype: Any, a_dtype: Any, *args: Any, **options: Any):
        """Take what QuACK hands over."""
        if a_dtype.width == 8:
            options["fp8_fast_accum"] = True
        super().__init__(acc_dtype, a_dtype, *args, **options)

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

    def pingpong_barrier_sync(self, warp_group_idx: Int32, stage: str) -> None:
        """Wait for a group's turn; for that to store `epi_visit_acc` waits.

        Both groups store by the same shared memory, so one at a time does. QuACK would
        wait before the arithmetic of `epi_visit_acc`, too.
        """
        if stage == "epi":
            assert self._group is None
            self._group = warp_group_idx
        else:
            super().pingpong_barrier_sync(warp_group_idx, stage)

    def _wait_to_store(self) -> None:
        assert self._group is not None
        super().pingpong_barrier_sync(self._group, "epi")
        self._group = None

    @cute.jit
    def epi_visit_acc(self, params, acc, tiled_mma, tile_coord_mnkl, tidx):
        """Scale a tile's sums, add the bias, and `finish`."""
        tile_m, tile_n = self.cta_tile_shape_mnk[0], self.cta_tile_shape_mnk[1]
        tile = cute.make_identity_tensor((tile_m, tile_n))
        coords = tiled_mma.get_slice(tidx).partition_C(tile)
        first_row = self.first_row(params, tile_coord_mnkl)
        first_col = tile_coord_mnkl[1] * tile_n
        # What is read is on its way at once, and not one wait after the other.
        held = self.read(params, coords, tile_coord_mnkl)
        row_scales = self.of_rows(params.row_scales, coords, first_row)
        col_scales = self._of_columns(params.col_scales, first_col, True)
        bias = self._of_columns(params.bias, first_col, False)
        lane = cute.arch.lane_idx() % _LANES
        for g in cutlass.range_constexpr(tile_n // GROUP):
            for e in cutlass.range_constexpr(PAIR):
                at = (g * GROUP) % _WARP + PAIR * lane + e
                scale, added = Float32(1), Float32(0)
                if const_expr(col_scales is not None):
                    scale = cute.arch.shuffle_sync(col_scales[g * GROUP // _WARP], at)
                if const_expr(bias is not None):
                    added = cute.arch.shuffle_sync(bias[g * GROUP // _WARP], at)
                for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    for r in cutlass.range_constexpr(2):
                        value = acc[(e, r, g), m, 0]
                        if const_expr(row_scales is not None):
                            value = value * row_scales[m][r]
                        if const_expr(col_scales is not None):
                            value = value * scale
                        if const_expr(bias is not None):
                            value = value + added
                        acc[(e, r, g), m, 0] = value
        self.finish(params, acc, coords, held, first_row, first_col)
        self._wait_to_store()

    def first_row(self, params, tile_coord_mnkl):
        """Return a tile's first row."""
        return tile_coord_mnkl[0] * self.cta_tile_shape_mnk[0]

    def read(self, params, coords, tile_coord_mnkl):
        """Read what `finish` needs; for subclasses."""
        return None

    def column(self, at, first):
        """Return the layer's output in a tile's column.

        Args:
            at: The column in the tile.
            first: The tile's first one.
        """
        return first + at

    @cute.jit
    def of_rows(self, vector, coords, first):
        """Load what a vector has for a thread's rows, `[m][r]` in fp32, or None."""
        found = None
        if const_expr(vector is not None):
            # One for all is at the last place, too.
            last = cute.size(vector) - 1
            found = []
            for m in cutlass.range_constexpr(cute.size(coords, mode=[1])):
                found.append([])
                for r in cutlass.range_constexpr(2):
                    row = cutlass.min(first + coords[(0, r, 0), m, 0][0], last)
                    found[m].append(vector[row].to(Float32))
        return found

    @cute.jit
    def _of_columns(self, vector, first, repeats):
        """Load a vector for a tile's columns, a warp's lanes one each, in fp32.

        Args:
            vector: One value for each column, or None.
            first: The tile's first column.
            repeats: Whether columns past the last have the last one's, else 0.
        """
        found = None
        if const_expr(vector is not None):
            last = cute.size(vector) - 1
            found = []
            for i in cutlass.range_constexpr(-(-self.cta_tile_shape_mnk[1] // _WARP)):
                col = self.column(cute.arch.lane_idx() + i * _WARP, first)
                value = vector[cutlass.min(col, last)].to(Float32)
                if const_expr(not repeats):
                    value = cutlass.select_(col <= last, value, Float32(0))
                found.append(value)
        return found
