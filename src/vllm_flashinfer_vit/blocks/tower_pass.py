# SPDX-License-Identifier: Apache-2.0
"""The passes through a tower's blocks: buffers that the blocks share, settled launches.

A pass that has ended is kept for the next one of its size, where it is small: that one
settles nothing. What is captured in a CUDA graph belongs to the graph.
"""

import weakref
from collections import OrderedDict
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.cublaslt import Problems

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
        quack: Why QuACK cannot run layers of some sizes, by the sizes; None if it can.
        now: The pass that a block has handed on and none has taken yet.
    """

    def __init__(self) -> None:
        """Begin without blocks."""
        self.blocks: dict[int, Any] = {}
        self.problems = Problems()
        self.groups: dict[tuple[object, ...], int] = {}
        self.quack: dict[tuple[object, ...], str | None] = {}
        self.now: Pass | None = None
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

    def begin(self, widths: tuple[int, int, int], x: torch.Tensor) -> "Pass":
        """Return a pass for a stream `[T, 1, C]`: one that has ended, or a new one.

        Args:
            widths: As for `Pass`.
            x: The stream.
        """
        key = _pass_key(x)
        now = None if key is None else self._kept.pop(key, None)
        if now is None:
            now = Pass(widths, x, key)
        return now

    def end(self, now: "Pass") -> None:
        """Keep a pass for the next one of its size: its launches stay settled."""
        if now.key is None:
            return
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


class Pass:
    """What the blocks of one pass share: buffers, and launches that use them.

    Attributes:
        normed: `[T, C]`, what a block's attention or MLP gets; then the MLP's output.
        qkv: `[T, (H + 2 H_kv) D]`.
        attended: `[T, C]`, what attention adds to the stream.
        stacked: `[T, 2 I]`, gate and up, or None.
        hidden: `[T, I]`, what the MLP's second layer gets.
        index: The block whose first norm `normed` holds.
        total: The sum that the last block returned.
        settled: Launches, by what they are for.
        attention: Settled attention, with the tables that it reads, and the launches of
            what reads its output.
        key: What it can be kept by, or None.
    """

    def __init__(
        self, widths: tuple[int, int, int], x: torch.Tensor, key: object
    ) -> None:
        """Make the buffers.

        Args:
            widths: See `BlockProgram.widths`; those of all blocks.
            x: A stream `[T, 1, C]`.
            key: What the pass can be kept by, or None.
        """
        rows, width = x.shape[0], x.shape[-1]
        qkv, hidden, stacked = widths
        # Attention's projection, which outlives q, k and v, lies before the MLP's.
        sizes = [width, hidden, stacked]
        tail = max(rows * qkv, sum(_aligned(rows * size) for size in sizes))
        memory = x.new_empty(_aligned(rows * width) + tail)
        starts = [0]
        for size in (width, width, hidden):
            starts.append(starts[-1] + _aligned(rows * size))

        def buffer(start: int, columns: int) -> torch.Tensor:
            return memory.narrow(0, start, rows * columns).view(rows, columns)

        self.normed = buffer(0, width)
        self.qkv = buffer(starts[1], qkv)
        self.attended = buffer(starts[1], width)
        self.hidden = buffer(starts[2], hidden)
        self.stacked = buffer(starts[3], stacked) if stacked else None
        self.index = 0
        self.total: weakref.ref[torch.Tensor] | None = None
        self.settled: dict[object, Any] = {}
        self.attention: dict[
            object, tuple[Any, tuple[Any, ...], dict[object, Any]]
        ] = {}
        self.key = key
        self._memory = memory

    @property
    def nbytes(self) -> int:
        """About the memory that it holds, in bytes."""
        # Attention turns q and k, and returns, in as much memory as the projection's.
        return self._memory.nbytes + len(self.attention) * self.qkv.nbytes


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
