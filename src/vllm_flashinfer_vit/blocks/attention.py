# SPDX-License-Identifier: Apache-2.0
"""The attention of a block: its QKV projection, what turns q and k, and the kernel.

Blocks that are alike share what one of them has settled in a pass.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.attention_layer import AttentionLayer
from vllm_flashinfer_vit.blocks.inputs import Inputs
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import OwnLinear
from vllm_flashinfer_vit.blocks.qkv import Qkv
from vllm_flashinfer_vit.blocks.rotary import Turn
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import Pass, Settled
from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.kernels.formats import QuantizedQKV
from vllm_flashinfer_vit.ops.batch import Batch, Turning, ready

# Of tables that a pass has settled attention for: two with windows, for two batches.
_MAX_TABLES = 4

# What projects in place of the block's own step, and what it writes in e4m3.
Projected = tuple[Callable[..., object] | None, QuantizedQKV | None]


class Attention:
    """Projects and attends, in a pass of the block's tower.

    Attributes:
        layer: The attention layer.
        qkv: What projects.
        group: Its number among groups of blocks that share what is settled, or None.
    """

    def __init__(self, spec: BlockSpec, block: torch.nn.Module, inputs: Inputs) -> None:
        """Take a block that was just built, and tell its layer what it will get."""
        self._spec, self._block, self._inputs = spec, block, inputs
        layer: Any = block.get_submodule(spec.attention)
        self.layer: AttentionLayer = layer
        self.layer.turning = self._turning()
        self._is_interleaved = spec.rotary is not None and spec.rotary.is_interleaved

    def build(self, layers: Layers) -> None:
        """Resolve the layers; the weights are loaded."""
        spec, layer = self._spec, self.layer
        self._heads = layer.num_heads, layer.num_kv_heads, layer.head_size
        self._split = None
        qkv = self._block.get_submodule(spec.qkv)
        if spec.split is not None and getattr(qkv, "tp_size", 1) > 1:
            self._split = spec.split(self._block)
        # Rows of what ranks gather are as wide as all heads: v is copied.
        layer.layouts = ("views",) if self._split is None else ("packed",)
        qk_norms = self._qk_norms()
        self._turn = Turn(qk_norms) if qk_norms else None
        self._has_scales = layer.own_scales is not None
        heads, takes = self._projected_heads(), layer.takes
        turned = heads if "turned" in takes else None
        quantized = heads if "quantized" in takes else None
        self.qkv = Qkv(spec.qkv, layers, turned, quantized)
        steps = self.qkv.turning, self.qkv.quantizing
        layer.settle_projection(*(step is not None for step in steps))
        self.group: int | None = None
        # What ranks gather, or vLLM's own layers return, are each block's own tensors.
        if self._split is None and not isinstance(self.qkv.step, OwnLinear):
            groups = layers.tower.groups
            projects = [step and step.kernels for step in steps]
            shared = layer.prepares_for, self._is_interleaved, *projects
            self.group = groups.setdefault(shared, len(groups))

    @property
    def columns(self) -> int:
        """How many values of q, k and v a token has."""
        heads, kv_heads, head_dim = self._heads
        return (heads + 2 * kv_heads) * head_dim

    @property
    def needs_tables(self) -> bool:
        """Whether it has to get tables: it normalises q and k as it turns them."""
        return self._turn is not None

    def __call__(
        self,
        now: Pass,
        x: torch.Tensor,
        given: Mapping[str, Any],
        max_seqlen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[object, Any]]:
        """Project what a pass has normalised, and attend.

        Args:
            now: The pass.
            x: The block's stream.
            given: What the block's `forward` was given, see `BlockProgram.run`.
            max_seqlen: See `Batch`.

        Returns:
            Attention's output, and where what reads it keeps its launches.
        """
        cos, sin = self._inputs.tables(now, x, given)
        cu_seqlens = self._inputs.offsets(now, given)
        read = cu_seqlens, cos, sin, max_seqlen
        is_shared = self.group is not None and not self.layer.is_watched
        key = id(cu_seqlens), self.group
        found = now.attention.get(key) if is_shared else None
        # An id is another tensor's once its own has died.
        if found is not None and not all(map(operator.is_, found.read, read)):
            found = None
        if found is None:
            projected = self._projection(now, x, read, given)
        else:
            projected = found.project, found.quantized
        project, quantized = projected
        if project is None:
            qkv = self.qkv(now)
        else:
            qkv = now.qkv
            step = self.qkv.turning if quantized is None else self.qkv.quantizing
            # Blocks of a group all have one, or none has.
            assert step is not None
            project(step.layer(now))
        if found is None:
            found = self._settle(now, x, qkv, read, given, *projected)
            if is_shared:
                if len(now.attention) == _MAX_TABLES:
                    now.attention.clear()
                now.attention[key] = found
        if found.turn is not None and self._turn is not None:
            found.turn(*self._turn.weights)
        settled = found.settled if is_shared else now.settled
        if self._has_scales:
            return found.attend(self.layer.own_scales), settled
        return found.attend(), settled

    def _qk_norms(self) -> list[Any]:
        """Return the RMSNorms of each head's q and k, if the block has them."""
        try:
            return [
                self._block.get_submodule(path) for path in self._spec.qk_norms or ()
            ]
        except AttributeError:
            return []

    def _turning(self) -> Turning | None:
        """Return what attention gets with q and k, None where it gets no tables."""
        rotary, layer = self._spec.rotary, self.layer
        if rotary is None or self._qk_norms():
            return None
        is_exact = rotary.form not in ("tables", "doubled")
        dtype = torch.float32 if is_exact else layer.dtype
        dim = layer.head_size
        if rotary.dim:
            dim = operator.attrgetter(rotary.dim)(self._block)
        return Turning(dtype, dim, rotary.is_interleaved)

    def _projected_heads(self) -> tuple[Heads, torch.dtype] | None:
        """Return what a projection that does more has to know, None without one."""
        heads, kv_heads, head_dim = self._heads
        turning = self.layer.turning
        if turning is None or turning.dim != head_dim or self._split is not None:
            return None
        return Heads(head_dim, heads, kv_heads, turning.interleaved), turning.dtype

    def _projection(
        self,
        now: Pass,
        x: torch.Tensor,
        read: tuple[Any, ...],
        given: Mapping[str, Any],
    ) -> Projected:
        """Settle a projection that does for attention what that would have to do.

        Returns:
            What projects, if another step than the block's own does, and what it writes
            in place of `now.qkv`, if it does.
        """
        turning, quantizing = self.qkv.turning, self.qkv.quantizing
        cu_seqlens, cos, sin, max_seqlen = read
        # Offsets in elements are attention's to read.
        if cos is None or given.get("sequence_lengths") is not None:
            return None, None
        if turning is None and quantizing is None:
            return None, None
        lengths = self._inputs.lengths(x, cu_seqlens, max_seqlen)
        q, k, v = self._heads_of(now.qkv)
        batch = Batch(q, k, v, None, None, *lengths)
        taken, rows = self.layer.taken(batch), len(now.qkv)
        if turning is not None and taken == "turned":
            if turning.kernels.turns(rows, cos, sin):
                place = turning.rows(now), cos, sin, now.qkv
                return turning.kernels.prepare(*place), None
        elif quantizing is not None and taken == "quantized":
            offsets = ready(batch).cu_seqlens
            # Who watches a layer sees q, k and v.
            can_run = not self.layer.is_watched
            if can_run and quantizing.kernels.reads(rows, cos, sin, offsets):
                place = quantizing.rows(now), cos, sin, offsets
                return quantizing.kernels.prepare(*place)
        return None, None

    def _settle(
        self,
        now: Pass,
        x: torch.Tensor,
        qkv: torch.Tensor,
        read: tuple[Any, ...],
        given: Mapping[str, Any],
        project: Callable[..., object] | None,
        quantized: QuantizedQKV | None,
    ) -> Settled:
        """Settle attention for a projection's output and what a pass reads with it."""
        q, k, v = self._heads_of(qkv)
        cu_seqlens, cos, sin, max_seqlen = read
        turn = None
        if self._turn is not None and cos is not None:
            turn = self._turn.prepare(q, k, cos, sin)
            cos = sin = None
        elif project is not None:
            cos = sin = None
        lengths = self._inputs.lengths(x, cu_seqlens, max_seqlen)
        batch = Batch(q, k, v, cos, sin, *lengths, self._is_interleaved)
        elements = given.get("sequence_lengths")
        attend = self.layer.prepare(batch, elements, now.is_clean, quantized)
        return Settled(read, project, quantized, turn, attend, {})

    def _heads_of(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._split is not None:
            return tuple(part.squeeze(1) for part in self._split(qkv.unsqueeze(1)))
        heads, kv_heads, head_dim = self._heads
        by_head = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim)
        return by_head.split([heads, kv_heads, kv_heads], dim=1)
