# SPDX-License-Identifier: Apache-2.0
"""A GEMM that turns q and k and writes q, k and v in e4m3, in CuTe DSL.

A tile is a block of `formats.QuantizedQKV`, 128 tokens of one sequence, and as wide as
whole heads of q, of k or of v. So a scale is the largest value of a head's columns in
one tile, which one group of warps holds in registers. Tiles begin at sequences as those
of QuACK's `varlen_m` do, which is for a weight of each sequence's own.

It has no D. A thread stores what it holds straight to global memory: of q and k eight
columns of a row at once, in an order of columns that both share; of v four keys of a
column, for which it exchanges halves with the lane that has the tokens beside its own.

Numerics: scales, bias and rotation in fp32 on the sums, then one rounding, to e4m3.
What is neither finite nor of the block has no part in its scale. See
`gemms.epilogue_kernel`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.ops import EpiSmemBytes
from quack.gemm_base import NamedBarrierGemm
from quack.layout_utils import expand
from quack.tile_scheduler import VarlenMTileScheduler, WorkTileInfo

from vllm_flashinfer_vit.gemms.epilogue_kernel import GROUP, PAIR, Read, Vector
from vllm_flashinfer_vit.gemms.turning_kernel import Table, TurningGemm
from vllm_flashinfer_vit.kernels.formats import BLOCK, E4M3_MAX, FP32_TINY, qk_max

# Bytes of an Int32, what is stored of v at once.
_WORD = 4
# Columns of q and k that four lanes store at once, two words each.
_STEP = 32
_STORED = 2
_WARPS = 4
_THREADS = 128
# Groups of warps have a tile each; a tile has six heads at most.
_MAXIMA = (2, 6, _WARPS)
# Where `prmt` finds bytes: the first word's are 0 to 3, the second's 4 to 7.
_LOW_FIRST, _LOW_SECOND = 0x5140, 0x1504
_HIGH_FIRST, _HIGH_SECOND = 0x7362, 0x3726


class _Written(Read):
    """Words in global memory that the epilogue writes by itself."""

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        return make_fake_tensor(
            key[0], (cute.sym_int(),), leading_dim=0, divisibility=_WORD
        )


class _Scales(Vector):
    """Scales that are written, and room for what warps tell each other of them."""

    def smem_bytes(
        self,
        arg_tensor: Any,
        cta_tile_shape_mnk: Any,
        epi_tile: Any,
        warp_shape_mnk: Any = None,
    ) -> EpiSmemBytes:
        return EpiSmemBytes(unstaged=cute.size(_MAXIMA) * _WORD)

    def smem_struct_field(self, gemm: Any, params: Any) -> tuple[str, Any]:
        room: Any = cute.struct.MemRange[Float32, cute.size(_MAXIMA)]
        return "s_maxima", cute.struct.Align[room, 16]

    def get_smem_tensor(self, gemm: Any, params: Any, storage_epi: Any) -> Any:
        return storage_epi.s_maxima.get_tensor(
            cute.make_ordered_layout(_MAXIMA, order=(2, 1, 0))
        )


@dsl_user_op
def _to_e4m3(
    a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None
) -> Int32:
    """Round four values to e4m3; the first is in the lowest byte."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)],
            """{
                .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def _finite(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Return x with NaN for Inf: a maximum skips it, e4m3 has no other."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(x).ir_value(loc=loc, ip=ip)],
            "fma.rn.f32 $0, $1, 0f00000000, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )


class _Sequences(VarlenMTileScheduler):
    """Hands out the tiles of sequences."""

    @cute.jit
    def _get_num_m_blocks(self, lane, bidb_start, block_size):
        # Offsets beyond all rows end there; one that ends before it starts is empty.
        num_seqs = self.params.problem_shape_ncluster_mnl[2]
        sequence = lane + bidb_start
        start = Int32(0)
        if sequence <= num_seqs:
            offset = self.params.cu_seqlens_m[sequence]
            start = cutlass.min(offset, self.params.total_m)
        end = cute.arch.shuffle_sync_down(start, offset=1)
        blocks = cutlass.max(cute.ceil_div(end - start, block_size), Int32(0))
        # The last lane knows no end.
        has_end = (sequence < num_seqs) & (lane < cute.arch.WARP_SIZE - 1)
        return cutlass.select_(has_end, blocks, Int32(0))

    def _delinearize_work_idx(self, *args: Any, **options: Any) -> WorkTileInfo:
        found = super()._delinearize_work_idx(*args, **options)
        # Lanes have looked for it together; else all branches might part them.
        uniform = cute.arch.make_warp_uniform
        m, n, split, sequence = found.tile_idx
        tile = uniform(m), uniform(n), split, uniform(sequence)
        return WorkTileInfo(tile, uniform(Int32(found.is_valid_tile)) != 0)


class QuantizingGemm(TurningGemm):
    """The kernel; QuACK makes one for each set of sizes.

    Attributes:
        q_heads: H.
        kv_heads: H_kv; tiles are as wide as divisors of both.
    """

    q_heads = 0
    kv_heads = 0
    # Where warps tell each other their largest values.
    _maxima: cute.Tensor | None = None

    _epi_ops: tuple[Read, ...] = (
        _Written("q"),
        _Written("k"),
        _Written("v"),
        _Scales("q_scale"),
        Vector("k_scale"),
        Vector("v_scale"),
        Vector("cu_seqlens"),
        Table("cos"),
        Table("sin"),
        Vector("bias"),
        Vector("row_scales"),
        Vector("col_scales"),
    )

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        """What the epilogue writes and reads.

        Attributes:
            q: `[H, 128 NB, D_qk]` e4m3 as Int32, all in one dimension, like `k`: see
                `formats.QuantizedQKV`, and `quantizing_gemm.column_order`.
            k: `[H_kv, 128 NB, D_qk]`.
            v: `[H_kv, D_v, 128 NB]`.
            q_scale: `[H, NB]` fp32 in one dimension, like the others.
            k_scale: `[H_kv, NB]`.
            v_scale: `[H_kv, NB]`.
            cu_seqlens: `[N + 1]` int32, as the scheduler has it.
            cos: `[T, D / 2]`, like `sin`.
            sin: See `cos`.
            bias: `[N]` of 16 bits, or None.
            row_scales: fp32, one or `[T]`, of rows in FP8, else None.
            col_scales: fp32, one or `[N]`, of the weight, likewise.
        """

        q: cute.Tensor
        k: cute.Tensor
        v: cute.Tensor
        q_scale: cute.Tensor
        k_scale: cute.Tensor
        v_scale: cute.Tensor
        cu_seqlens: cute.Tensor
        cos: cute.Tensor
        sin: cute.Tensor
        bias: cute.Tensor | None = None
        row_scales: cute.Tensor | None = None
        col_scales: cute.Tensor | None = None

    def epi_get_smem_tensors(self, params: Any, storage: Any) -> Any:
        """Remember where the warps' largest values are."""
        found = super().epi_get_smem_tensors(params, storage)
        self._maxima = found["q_scale"]
        return found

    def pingpong_barrier_arrive(self, warp_group_idx: Int32, stage: str) -> None:
        """Let the other group compute; it never waits to store."""
        if stage != "epi":
            super().pingpong_barrier_arrive(warp_group_idx, stage)

    def _wait_to_store(self) -> None:
        # Groups share no memory that they would store by.
        self._group = None

    def epilogue(
        self,
        params: Any,
        epi_smem_tensors: Any,
        epi_pipeline: Any,
        epi_store_pipeline: Any,
        epi_read_state: Any,
        epi_producer_state: Any,
        *args: Any,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Do nothing: `finish` has stored all."""
        return epi_read_state, epi_producer_state

    def get_scheduler_class(self, varlen_m: bool = False) -> type[_Sequences]:
        """Hand out tiles by sequences."""
        assert varlen_m
        return _Sequences

    def rotate_batch_last(
        self, mA: Any, mB: Any, *others: Any, **options: Any
    ) -> tuple[Any, ...]:
        """Give all sequences one weight."""
        mA, mB, *rest = super().rotate_batch_last(mA, mB, *others, **options)
        return mA, expand(mB[None, None, 0], 2, 1), *rest

    @cute.jit
    def first_row(self, params, tile_coord_mnkl):
        """Return a block's first token."""
        m, _, _, n = tile_coord_mnkl
        return params.cu_seqlens[n] + m * BLOCK

    @cute.jit
    def read(self, params, coords, tile_coord_mnkl):
        """Return a block's number, and how many tokens it has or that follow it."""
        m, _, _, n = tile_coord_mnkl
        start = params.cu_seqlens[n]
        end = cutlass.min(params.cu_seqlens[n + 1], self._tokens(params))
        return start // BLOCK + n + m, end - start - m * BLOCK

    @cute.jit
    def finish(self, params, acc, coords, held, first_row, first_col):
        """Turn q and k, find the scales of the tile's heads, and store it."""
        assert self.cta_tile_shape_mnk[0] == BLOCK
        block, length = held
        if first_col < self.turned:
            self._turn(params, acc, coords, first_row)
        self._leave_out(acc, coords, length)
        self._store(params, acc, coords, block, first_col)

    def _tokens(self, params: Any) -> Int32:
        return cute.size(params.cos, mode=[0])

    @cute.jit
    def _leave_out(self, acc, coords, length):
        """Make zeros of rows past the block's last token, and NaN of Inf."""
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for r in cutlass.range_constexpr(2):
                has_token = coords[(0, r, 0), m, 0][0] < length
                for g in cutlass.range_constexpr(self.cta_tile_shape_mnk[1] // GROUP):
                    for e in cutlass.range_constexpr(PAIR):
                        value = _finite(acc[(e, r, g), m, 0])
                        acc[(e, r, g), m, 0] = cutlass.select_(
                            has_token, value, Float32(0)
                        )

    @cute.jit
    def _store(self, params, acc, coords, block, first_col):
        heads = const_expr(self.cta_tile_shape_mnk[1] // self.head_dim)
        num_seqs = cute.size(params.cu_seqlens) - 1
        num_blocks = self._tokens(params) // BLOCK + num_seqs
        is_turned = first_col < self.turned
        largest = cutlass.select_(
            is_turned, Float32(qk_max(self.head_dim)), Float32(E4M3_MAX)
        )
        head = first_col // self.head_dim
        maxima = self._largest(acc)
        inverses = []
        for h in cutlass.range_constexpr(heads):
            scale = cute.arch.fmax(maxima[h] / largest, Float32(FP32_TINY))
            scale = cutlass.select_(maxima[h] > 0, scale, Float32(1))
            inverses.append(Float32(1) / scale)
            if cute.arch.thread_idx()[0] % _THREADS == h:
                self._store_scale(params, scale, head + h, num_blocks, block)
        if is_turned:
            self._store_rows(params, acc, coords, inverses, head, num_blocks, block)
        else:
            self._store_columns(params, acc, coords, inverses, head, num_blocks, block)

    @cute.jit
    def _largest(self, acc):
        """Return the largest absolute values of the tile's heads, 0 for none."""
        groups = const_expr(self.head_dim // GROUP)
        heads = const_expr(self.cta_tile_shape_mnk[1] // self.head_dim)
        shared = self._maxima
        warp = cute.arch.warp_idx()
        group = cute.arch.make_warp_uniform(warp // _WARPS)
        for h in cutlass.range_constexpr(heads):
            found = Float32(0)
            for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                for r in cutlass.range_constexpr(2):
                    for g in cutlass.range_constexpr(groups):
                        for e in cutlass.range_constexpr(PAIR):
                            value = acc[(e, r, h * groups + g), m, 0]
                            found = cute.arch.fmax(found, cute.math.absf(value))
            found = cute.arch.warp_reduction(found, cute.arch.fmax)
            if cute.arch.lane_idx() == 0:
                shared[group, h, warp % _WARPS] = found
        # Before the next tile writes, the group has waited for its turn to compute.
        cute.arch.barrier(
            barrier_id=int(NamedBarrierGemm.EpiWG0) + group, number_of_threads=_THREADS
        )
        maxima = []
        for h in cutlass.range_constexpr(heads):
            found = shared[group, h, 0]
            for w in cutlass.range_constexpr(1, _WARPS):
                found = cute.arch.fmax(found, shared[group, h, w])
            maxima.append(found)
        return maxima

    @cute.jit
    def _store_scale(self, params, scale, head, num_blocks, block):
        kv_head = head - self.q_heads
        if kv_head < 0:
            params.q_scale[head * num_blocks + block] = scale
        elif kv_head < self.kv_heads:
            params.k_scale[kv_head * num_blocks + block] = scale
        else:
            at = (kv_head - self.kv_heads) * num_blocks + block
            params.v_scale[at] = scale

    @cute.jit
    def _store_rows(self, params, acc, coords, inverses, head, num_blocks, block):
        """Store heads of q or k, rows padded to 32 columns with zeros.

        Of each 32 columns a thread has two in each of four groups; these are eight
        bytes that it stores side by side.
        """
        steps = const_expr(-(-self.head_dim // _STEP))
        words = const_expr(steps * _STEP // _WORD)
        is_q = head < self.q_heads
        out = cute.make_ptr(
            Int32,
            cutlass.select_(is_q, params.q.iterator.toint(), params.k.iterator.toint()),
            cute.AddressSpace.gmem,
            assumed_align=16,
        )
        head = cutlass.select_(is_q, head, head - self.q_heads)
        row, col = coords[(0, 0, 0), 0, 0]
        for h in cutlass.range_constexpr(len(inverses)):
            at = (Int64(head + h) * num_blocks + block) * (BLOCK * words)
            # A lane's first column is the place of its words in eight.
            base = out + cute.assume(at + (row * words + col), divby=_STORED)
            for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                for r in cutlass.range_constexpr(2):
                    for s in cutlass.range_constexpr(steps):
                        stored = cute.make_rmem_tensor(_STORED, Int32)
                        for i in cutlass.range_constexpr(_STORED):
                            g = const_expr(s * _STEP // GROUP + i * 2)
                            four = ((0, r, g), (1, r, g), (0, r, g + 1), (1, r, g + 1))
                            stored[i] = self._rounded(acc, inverses, h, m, four)
                        below = const_expr(64 * m + 8 * r)
                        place = base + (below * words + s * _STEP // _WORD)
                        cute.autovec_copy(
                            stored, cute.make_tensor(place, cute.make_layout(_STORED))
                        )

    @cute.jit
    def _store_columns(self, params, acc, coords, inverses, head, num_blocks, block):
        """Store heads of v transposed, padded to 16 columns with zeros.

        A thread has rows t and t + 8 of 16, and two columns. Four lanes on are those of
        row t + 1: where t is even it takes both rows of the first column from there,
        else of the second column.
        """
        groups = const_expr(self.head_dim // GROUP)
        pairs = const_expr(-(-groups // 2))
        words = num_blocks * (BLOCK // _WORD)
        head = head - (self.q_heads + self.kv_heads)
        row, col = coords[(0, 0, 0), 0, 0]
        is_even = row % 2 == 0
        low = cutlass.select_(is_even, Int32(_LOW_FIRST), Int32(_LOW_SECOND))
        high = cutlass.select_(is_even, Int32(_HIGH_FIRST), Int32(_HIGH_SECOND))
        # 16 keys are four words, of which two neighbouring rows have one.
        place = row // 16 * 4 + row % GROUP // 2
        for h in cutlass.range_constexpr(len(inverses)):
            column = (head + h) * (pairs * 2 * GROUP) + col + row % 2
            at = Int64(column) * words + (block * (BLOCK // _WORD) + place)
            base = params.v.iterator + at
            for p in cutlass.range_constexpr(pairs):
                for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    both = []
                    for e in cutlass.range_constexpr(PAIR):
                        g = const_expr(2 * p)
                        four = ((e, 0, g), (e, 1, g), (e, 0, g + 1), (e, 1, g + 1))
                        both.append(self._rounded(acc, inverses, h, m, four))
                    kept = cutlass.select_(is_even, both[0], both[1])
                    given = cutlass.select_(is_even, both[1], both[0])
                    taken = cute.arch.shuffle_sync_bfly(given, offset=4)
                    first = base + (64 * m // _WORD)
                    second = first + GROUP * words
                    first[0] = cute.arch.prmt(kept, taken, low)
                    second[0] = cute.arch.prmt(kept, taken, high)
                base = base + 2 * GROUP * words

    def _rounded(
        self, acc: Any, inverses: Any, h: int, m: int, places: tuple[Any, ...]
    ) -> Int32:
        """Round four of a thread's values to e4m3, zeros for columns past the head's.

        Args:
            acc: The tile.
            inverses: Reciprocals of the heads' scales.
            h: The head.
            m: Which 64 rows.
            places: For each a column of a pair, a row of two, and the head's group.
        """
        groups = self.head_dim // GROUP
        found = [
            acc[(e, r, h * groups + g), m, 0] * inverses[h]
            if g < groups
            else Float32(0)
            for e, r, g in places
        ]
        return _to_e4m3(*found)
