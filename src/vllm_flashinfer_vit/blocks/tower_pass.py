# SPDX-License-Identifier: Apache-2.0
"""The passes through a tower's blocks: buffers that the blocks share, settled launches.

A pass that has ended is kept for the next one of its size, where it is small: that one
settles nothing. What is captured in a CUDA graph belongs to the graph.
"""

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_flashinfer_vit.blocks.act_bound import Bounds
from vllm_flashinfer_vit.blocks.rotary import Tables, repeated, tables
from vllm_flashinfer_vit.blocks.spec import Rotary
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.kernels.formats import QuantizedQKV
from vllm_flashinfer_vit.ops.batch import row_offsets

# Passes that are kept: some of up to 3000 patches each, where the host's time counts.
MAX_KEPT_BYTES = 64 * 2**20
# Elements: buffers start at whole lines of the cache.
_ALIGNMENT = 128


class TowerProgram:
    """The programs of a tower's blocks, and the pass that runs through them.

    Attributes:
        blocks: The blocks' programs, by their place in the tower.
        problems: The algorithms of its GEMMs.
        groups: Numbers of layers that can use each other's settled attention.
        trials: Why a kernel cannot run layers of some sizes, None if it can, by the
            kernel's name and the sizes.
        tuned_dir: Folder of the user's measurements, or None to ignore them.
        gemms: The `Gemms` of layers in FP8, the `Kernels` of projections that turn or
            quantise, and the kernels of `activating_gemm`, by what layers have alike.
        bounds: The factors of blocks' activations; see `Bound`.
        now: The pass that a block has handed on and none has taken yet.
        told: The longest lengths of the tower's call by blocks' places, `[] int32` on
            the CPU, where blocks themselves are given none.
    """

    def __init__(self, tuned_dir: Path | None = None) -> None:
        """Begin without blocks."""
        self.tuned_dir = tuned_dir
        self.gemms: dict[object, Any] = {}
        self.bounds = Bounds()
        self.blocks: dict[int, Any] = {}
        self.problems = Problems()
        self.groups: dict[tuple[object, ...], int] = {}
        self.trials: dict[tuple[object, ...], str | None] = {}
        self.now: Pass | None = None
        self.told: Mapping[int, torch.Tensor] = {}
        self._kept: OrderedDict[object, Pass] = OrderedDict()

    def take(self, index: int, x: torch.Tensor) -> "Pass | None":
        """Return the pass that the block before handed on with `x`, if it did.

        Nothing is left behind: an error frees the buffers, and whoever then calls the
        block again does not find them half written.
        """
        now, self.now = self.now, None
        if now is None or now.total is None or now.total() is not x:
            return None
        return now if now.index == index else None

    def hand_on(self, now: "Pass", index: int, total: torch.Tensor) -> None:
        """Keep a pass for a block that gets `total`, while that tensor lives."""
        self.now = now
        now.index = index
        now.total = weakref.ref(total, self._forget)

    def begin(self, x: torch.Tensor) -> "Pass":
        """Return a pass for a stream `[..., C]`: one that has ended, or a new one."""
        key = _pass_key(x)
        now = None if key is None else self._kept.pop(key, None)
        rows = x.numel() // x.shape[-1]
        can_bound = self.bounds.follow(rows)
        if now is None or now.can_bound != can_bound:
            blocks = self.blocks.values()
            widths = [block.widths(rows, can_bound) for block in blocks]
            now = Pass(widths, x, key, can_bound)
        return now

    def end(self, now: "Pass") -> None:
        """Keep a pass for the next one of its size: its launches stay settled."""
        # One that is too large would drive all others out before it goes itself.
        if now.key is None or now.nbytes > MAX_KEPT_BYTES:
            return
        now.rest()
        self._kept[now.key] = now
        while sum(kept.nbytes for kept in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Drop what is kept, since blocks have other steps now."""
        self._kept.clear()

    def _forget(self, dead: "weakref.ref[torch.Tensor]") -> None:
        # Nobody can call the next block any more: the buffers go, too.
        if self.now is not None and self.now.total is dead:
            self.now = None


class Widths(NamedTuple):
    """Columns of the buffers that a block needs, 0 for one that it does not need.

    Attributes:
        hidden: For what the MLP's second layer gets, in 16 bits.
        first: For what its first layer returns, where the activation moves it.
        activated: For what its second layer gets in e4m3, where the first GEMM writes
            that.
        qkv: For q, k and v.
        quantized: For other rows in e4m3.
        groups: For scales of these, where each group of a row has its own.
    """

    hidden: int = 0
    first: int = 0
    activated: int = 0
    qkv: int = 0
    quantized: int = 0
    groups: int = 0


class Settled(NamedTuple):
    """Attention, settled for all blocks that are given the same.

    Attributes:
        read: `cu_seqlens`, cosines, sines and the longest length that it reads.
        project: Projects and turns q and k, given a layer's parameters; None where a
            block's own projection runs.
        quantized: What `project` writes in place of `Pass.qkv`, or None.
        turn: Normalises and turns q and k first, given the norms' weights; or None.
        attend: Returns the context, given a layer's `own_scales` if it has any.
        settled: Launches of what reads the context.
    """

    read: tuple[Any, ...]
    project: Callable[..., object] | None
    quantized: QuantizedQKV | None
    turn: Callable[..., object] | None
    attend: Callable[..., torch.Tensor]
    settled: dict[object, Any]


class Pass:
    """What the blocks of one pass share: buffers, and launches that use them.

    Attributes:
        normed: `[T, C]`, what a block's attention or MLP gets; then the MLP's output.
        qkv: `[T, (H + 2 H_kv) D]`.
        attended: `[T, C]`, what attention adds to the stream.
        scales: `[T, 1]` fp32, of rows in e4m3 that have scales of their own.
        activated_scales: The same of those that an MLP's first GEMM writes; the norm
            before it writes these scales.
        index: The block whose first norm `normed` holds.
        total: The sum that the last block returned.
        settled: Launches, by what they are for.
        attention: Settled attention.
        key: What it can be kept by, or None.
        is_clean: Whether the stream's rows of no sequence are finite.
        can_bound: Whether the tower's bounds can be computed.
        is_bounded: Whether they have been, of its weights now.
    """

    def __init__(
        self, widths: Sequence[Widths], x: torch.Tensor, key: object, can_bound: bool
    ) -> None:
        """Make the buffers.

        Args:
            widths: What each block needs. Quantised layers may be in some blocks only.
            x: A stream `[..., C]` of T rows.
            key: What the pass can be kept by, or None.
            can_bound: Whether the tower's bounds can be computed.
        """
        width = x.shape[-1]
        rows = x.numel() // width
        found = Widths(*map(max, zip(*widths, strict=True)))
        qkv, hidden, first = found.qkv, found.hidden, found.first
        # Attention's projection, which outlives q, k and v, lies before the MLP's.
        sizes = [width, hidden, first]
        tail = max(rows * qkv, sum(_aligned(rows * size) for size in sizes))
        memory = x.new_empty(_aligned(rows * width) + tail)
        starts = [0]
        for size in (width, width, hidden):
            starts.append(starts[-1] + _aligned(rows * size))
        self._memory = memory
        self._rows = rows
        self._starts = {"hidden": starts[2], "first": starts[3]}
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        e4m3, fp32 = torch.float8_e4m3fn, torch.float32
        self._quantized = x.new_empty(rows * found.quantized, dtype=e4m3)
        self._activated: dict[int, torch.Tensor] = {}
        self.scales = x.new_empty(rows * bool(found.quantized), 1, dtype=fp32)
        self.activated_scales = x.new_empty(rows * bool(found.activated), 1, dtype=fp32)
        self._group_scales = x.new_empty(rows * found.groups, dtype=fp32)
        self.normed = _rows(memory, 0, rows, width)
        self.qkv = _rows(memory, starts[1], rows, qkv)
        self.attended = _rows(memory, starts[1], rows, width)
        self.index = 0
        self.total: weakref.ref[torch.Tensor] | None = None
        self.settled: dict[object, Any] = {}
        self.attention: dict[object, Settled] = {}
        self.key = key
        self.is_clean = False
        self.can_bound, self.is_bounded = can_bound, False
        self._turned: tuple[tuple[Any, ...], Tables] | None = None
        self._own: tuple[tuple[Any, ...], Tables] | None = None
        self._masked: tuple[torch.Tensor, torch.Tensor] | None = None

    def tables(self, rotary: Rotary, given: tuple[torch.Tensor, ...]) -> Tables:
        """Return cosines and sines, made once for all blocks that are given the same.

        Args:
            rotary: What is given.
            given: See `rotary.tables`.
        """
        if rotary.form == "tables":
            return tables(rotary, given)
        if self._turned is None or not all(map(operator.is_, self._turned[0], given)):
            self._turned = given, tables(rotary, given)
        return self._turned[1]

    def own_tables(
        self,
        rotary: Rotary,
        make: Callable[[tuple[Any, ...]], torch.Tensor],
        given: tuple[Any, ...],
    ) -> Tables:
        """Return what a block makes, once for all passes that are given the same.

        Args:
            rotary: What is made.
            make: See `Rotary.own`.
            given: The values of its parameters.
        """
        if self._own is None or self._own[0] != given:
            self._own = given, repeated(tables(rotary, (make(given),)), self._rows)
        return self._own[1]

    def offsets(self, mask: torch.Tensor) -> torch.Tensor:
        """Return `cu_seqlens`, made once for all blocks that are given one mask.

        Args:
            mask: See `BlockSpec.key_mask`.
        """
        if self._masked is None or self._masked[0] is not mask:
            tokens = (mask == 0).sum(dim=(1, 2, 3), dtype=torch.int32)
            self._masked = mask, row_offsets(tokens, mask.shape[-1])
        return self._masked[1]

    def rest(self) -> None:
        """Forget what follows from what its batch held; another one may use it."""
        self._turned = self._masked = None
        self.is_bounded = False

    def hidden(self, width: int) -> torch.Tensor:
        """Return `[T, width]` for what the MLP's second layer gets."""
        return self._view("hidden", width)

    def first(self, width: int) -> torch.Tensor:
        """Return `[T, width]` for what the MLP's first layer returns."""
        return self._view("first", width)

    def quantized(self, width: int) -> torch.Tensor:
        """Return `[T, width]` e4m3 for the rows that the next layer gets."""
        return self._view("quantized", width)

    def activated(self, width: int) -> torch.Tensor:
        """Return `[T, width]` e4m3 for what an MLP's first GEMM writes.

        Each width has memory of its own, since its padding stays as it is.
        """
        found = self._activated.get(width)
        if found is None:
            shape, dtype = (self._rows, width), self._quantized.dtype
            found = self._activated[width] = self.normed.new_empty(shape, dtype=dtype)
        return found

    def group_scales(self, groups: int) -> torch.Tensor:
        """Return `[T, groups]` fp32 in contiguous columns, of rows in e4m3."""
        key = "groups", groups
        found = self._views.get(key)
        if found is None:
            columns = _rows(self._group_scales, 0, groups, self._rows)
            found = self._views[key] = columns.t()
        return found

    def _view(self, name: str, width: int) -> torch.Tensor:
        # The same tensor each time: launches are settled for it.
        found = self._views.get((name, width))
        if found is None:
            memory, start = self._memory, self._starts.get(name, 0)
            if name == "quantized":
                memory = self._quantized
            found = self._views[name, width] = _rows(memory, start, self._rows, width)
        return found

    @property
    def nbytes(self) -> int:
        """About the memory that it holds, in bytes."""
        # Attention turns q and k, and returns, in as much memory as the projection's.
        attention = len(self.attention) * self.qkv.nbytes
        activated = self._activated.values()
        buffers = self._memory, self._quantized, self._group_scales, *activated
        return sum(buffer.nbytes for buffer in buffers) + attention


def _rows(memory: torch.Tensor, start: int, rows: int, columns: int) -> torch.Tensor:
    return memory.narrow(0, start, rows * columns).view(rows, columns)


def _pass_key(x: torch.Tensor) -> object:
    """Return what passes have alike that can follow each other, None for no other."""
    stream = 0
    if x.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            # Its memory is the graph's.
            return None
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    # A tensor of inference mode cannot be written outside of it.
    return x.shape, x.dtype, x.device, stream, torch.is_inference_mode_enabled()


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
