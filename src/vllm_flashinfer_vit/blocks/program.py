# SPDX-License-Identifier: Apache-2.0
"""Runs the blocks of a vision tower, each step of which is one launch or a view.

A pass through a tower settles all launches once, for buffers that the blocks share:
then a block only hands over the addresses of its own weights. The sum at a block's end
is normalised for the next block in the same launch, and both branches of a block are
added at once: the residual stream is rounded once in a block, twice in the last.

Numerics: see `kernels.add_norm`, `kernels.rope` and the attention kernels; GEMMs round
their fp32 sums once, after the bias and the activation that they apply.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.utils import default_unquantized_gemm

from vllm_flashinfer_vit.blocks import norms, quack
from vllm_flashinfer_vit.blocks.aligned_linear import align, padded_inputs
from vllm_flashinfer_vit.blocks.compiled import compiled_op
from vllm_flashinfer_vit.blocks.linear import (
    BlockWeights,
    OwnLinear,
    QuackGemm,
    Step,
    Weights,
    gemm,
    is_plain,
    is_unquantized,
)
from vllm_flashinfer_vit.blocks.norms import Norm
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import Pass, TowerProgram
from vllm_flashinfer_vit.ops.batch import Batch

logger = init_logger("vllm.plugins.flashinfer_vit")

# From how many rows on QuACK is faster than cuBLAS and an activation on an H200, and
# than cuBLAS alone, where there is less to save (docs/experiments.md).
MIN_QUACK_ROWS = 1024
MIN_QUACK_PLAIN_ROWS = 2048

_QUACK_NAMES = {
    "swiglu": quack.SWIGLU,
    "quick_gelu": quack.QUICK_GELU,
    "tanh_gelu": quack.TANH_GELU,
}
# Of tables that a pass has settled attention for: two with windows, for two batches.
_MAX_TABLES = 4


class Attention(Protocol):
    """What the program needs of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    gets_rotary: bool
    is_watched: bool

    @property
    def prepares_for(self) -> tuple[object, ...] | None: ...

    def prepare(
        self, batch: Batch, sequence_lengths: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]: ...


class BlockProgram:
    """The steps of one block, resolved once its weights are loaded.

    Attributes:
        steps: What each step is, for people.
        widths: Columns of the buffers for q, k and v, for the MLP's hidden values, and
            for stacked gate and up, 0 without.
    """

    def __init__(
        self,
        spec: BlockSpec,
        block: torch.nn.Module,
        place: tuple[TowerProgram, int],
        off: frozenset[str],
    ) -> None:
        """Take a block that was just built; `build` makes it ready.

        Args:
            spec: What the block is.
            block: The block.
            place: The tower's program, and the block's place in it.
            off: Names of `OPTIMISATIONS` that are left out.
        """
        self.spec = spec
        self.steps: dict[str, str] = {}
        self.widths = (0, 0, 0)
        self._block = block
        self._tower, self._index = place
        self._off = off
        self._is_ready = False
        self._tower.blocks[self._index] = self
        self._attention: Attention = self._part(spec.attention)
        self._attention.gets_rotary = True
        # Adapters are added to what a layer itself returns, in the checkpoint's size.
        self._gets_adapters = _gets_adapters()
        first, second = self._part(spec.first), self._part(spec.second)
        if (
            "aligned" not in off
            and not self._gets_adapters
            and _computes(self._part(spec.act), spec.activation)
            and is_unquantized(first)
            and is_unquantized(second)
        ):
            # All activations here make 0 of the 0 that the first layer pads with.
            align(first, second, 2 if spec.activation == "swiglu" else 1)

    def _part(self, path: str) -> Any:
        return self._block.get_submodule(path)

    def build(self) -> None:
        """Resolve the steps. The weights are loaded; later loads need no other call."""
        spec = self.spec
        attention = self._attention
        self._norm1, self._norm2 = (
            Norm(self._part(path)) for path in (spec.norm1, spec.norm2)
        )
        heads = attention.num_heads + 2 * attention.num_kv_heads
        self._heads = attention.num_heads, attention.num_kv_heads, attention.head_size
        self._split = None
        if spec.split is not None and getattr(self._part(spec.qkv), "tp_size", 1) > 1:
            owner, _, method = spec.split.rpartition(".")
            self._split = getattr(self._part(owner), method)
        self._group = None
        # What ranks gather are tensors of its own for each block.
        if self._split is None and attention.prepares_for is not None:
            groups = self._tower.groups
            self._group = groups.setdefault(attention.prepares_for, len(groups))
        self._tower.forget()
        self._weights = BlockWeights()
        self._qkv, self._quack_qkv = self._projection(spec.qkv, may_quack=True)
        self._proj, _ = self._projection(spec.proj)
        self._second, _ = self._projection(spec.second)
        self._build_mlp()
        hidden = self._width(spec.second)
        is_gated = spec.activation == "swiglu"
        self.widths = heads * attention.head_size, hidden, 2 * hidden * is_gated
        is_fused = "add_norm" not in self._off
        self._prepare_sum = norms.prepare if is_fused else norms.separate
        self.steps["add_norm"] = "one kernel" if is_fused else "left out by a setting"
        self._is_ready = True

    def _width(self, path: str) -> int:
        """Return a layer's inputs on this rank, padding included."""
        return padded_inputs(self._part(path))

    def _projection(
        self, path: str, may_quack: bool = False
    ) -> tuple[Step | OwnLinear, QuackGemm | None]:
        """Return a layer's step, and the one for large batches if there is another."""
        layer = self._part(path)
        if not self._is_direct(layer):
            self.steps[path] = f"vLLM's own {type(layer).__name__}"
            return OwnLinear(self._block, path), None
        weights = self._weights.add(layer)
        self.steps[path] = "cuBLAS"
        fast = None
        if may_quack and "quack_qkv" not in self._off:
            expected = functools.partial(_linear, weights)
            fast = self._quack(path, weights, None, MIN_QUACK_PLAIN_ROWS, expected)
        return gemm(weights, self._tower.problems), fast

    def _build_mlp(self) -> None:
        spec = self.spec
        layer, act = self._part(spec.first), self._part(spec.act)
        self._act = act
        self._quack_mlp = None
        is_known = _computes(act, spec.activation)
        self._act_into = _compiled_act(spec.activation) if is_known else None
        self._first_acts = False
        self._first: Step | OwnLinear = OwnLinear(self._block, spec.first)
        if not self._is_direct(layer):
            self.steps[spec.first] = f"vLLM's own {type(layer).__name__}"
            return
        weights = self._weights.add(layer)
        self._first_acts = (
            is_known
            and spec.activation == "tanh_gelu"
            and weights.bias is not None
            and "fused_gelu" not in self._off
        )
        self._first = gemm(weights, self._tower.problems, self._first_acts)
        with_act = "with the activation" if self._first_acts else "then the activation"
        self.steps[spec.first] = f"cuBLAS, {with_act}"
        if is_known and "quack_mlp" not in self._off:
            name = _QUACK_NAMES[spec.activation]
            expected = functools.partial(self._plain_hidden, weights)
            self._quack_mlp = self._quack(
                spec.first, weights, name, MIN_QUACK_ROWS, expected
            )

    def _plain_hidden(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        return self._act(_linear(weights, x))

    def _is_direct(self, layer: torch.nn.Module) -> bool:
        return can_run(layer) and not self._gets_adapters

    def _quack(
        self,
        path: str,
        weights: Weights,
        activation: str | None,
        min_rows: int,
        expected: Callable[[torch.Tensor], torch.Tensor],
    ) -> QuackGemm | None:
        """Return a layer's step by QuACK, or None and say why."""
        weight = weights.weight
        if not quack.has_quack():
            return None
        if not quack.fits(len(weight), weight.shape[1], weight.dtype, activation):
            return None
        sizes = (*weight.shape, weight.dtype, activation, weights.bias is None)
        if sizes not in self._tower.quack:
            self._tower.quack[sizes] = quack.build(
                weight, weights.bias, activation, expected
            )
        if reason := self._tower.quack[sizes]:
            logger.warning_once(
                "QuACK cannot run %s of the vision tower's blocks, so batches of every "
                "size run as small ones do: %s",
                path,
                reason,
            )
            return None
        gpu = torch.cuda.get_device_properties(weight.device)
        self.steps[path] += f"; from {min_rows} rows on QuACK"
        return QuackGemm(weights, activation, min_rows, gpu.multi_processor_count)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the program can run on a stream: `[T, 1, C]`, at least one token."""
        return (
            self._is_ready
            and x.dim() == 3
            and x.shape[1] == 1
            and x.shape[0] > 0
            and x.is_contiguous()
            and not torch.compiler.is_compiling()
        )

    def run(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        max_seqlen: torch.Tensor | int | None = None,
        sequence_lengths: torch.Tensor | None = None,
        seqlens: object = None,
    ) -> torch.Tensor:
        """Run the block. The names are those of vLLM's blocks.

        Args:
            x: `[T, 1, C]` that it `takes`.
            cu_seqlens: See `Batch`, or offsets in elements with `sequence_lengths`.
            rotary_pos_emb_cos: `[T, R / 2]`.
            rotary_pos_emb_sin: Like cos.
            max_seqlen: See `Batch`.
            sequence_lengths: See `FlashInferViTAttention.forward_cuda`.
            seqlens: What xFormers needed; not read.

        Returns:
            Like x, a new tensor.
        """
        self._weights.refresh()
        tower = self._tower
        now = tower.take(self._index, x)
        if now is None:
            now = tower.begin(self.widths, x)
            now.normed.copy_(self._norm1.module(x).view(now.normed.shape))
        tables = cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen
        qkv = self._project(now)
        context, settled = self._attend(now, qkv, tables, sequence_lengths)
        attended = self._linear(settled, "proj", self._proj, context, now.attended)
        self._sum(now, x, (attended,), self._norm2, None)
        hidden = self._hidden(now)
        out = self._linear(now.settled, "second", self._second, hidden, now.normed)
        following = tower.blocks.get(self._index + 1)
        if following is None:
            tower.end(now)
            return x + attended.view(x.shape) + out.view(x.shape)
        norm = following._norm1
        total = torch.empty_like(x)
        self._sum(now, x, (attended, out), norm, total)
        tower.hand_on(now, self._index + 1, total)
        return total

    def _sum(
        self,
        now: Pass,
        x: torch.Tensor,
        branches: tuple[torch.Tensor, ...],
        norm: Norm,
        total: torch.Tensor | None,
    ) -> None:
        """Add branches to the stream, into `total` if it is wanted, and normalise."""
        key = len(branches), norm.eps
        found = now.settled.get(key)
        # vLLM's own layers return a tensor of their own each time.
        if found is None or found[0] is not branches[0] or found[1] is not branches[-1]:
            call = self._prepare_sum(x, branches, norm, now.normed)
            found = now.settled[key] = branches[0], branches[-1], call
        found[2](x, norm, total)

    def _project(self, now: Pass) -> torch.Tensor:
        fast = self._quack_qkv
        if fast is not None and len(now.qkv) >= fast.min_rows:
            return self._linear(now.settled, "fast qkv", fast, now.normed, now.qkv)
        return self._linear(now.settled, "qkv", self._qkv, now.normed, now.qkv)

    def _hidden(self, now: Pass) -> torch.Tensor:
        fast = self._quack_mlp
        if fast is not None and len(now.hidden) >= fast.min_rows:
            return self._linear(now.settled, "fast first", fast, now.normed, now.hidden)
        out = now.hidden
        if now.stacked is not None and not self._first_acts:
            out = now.stacked
        values = self._linear(now.settled, "first", self._first, now.normed, out)
        if self._first_acts:
            return values
        if self._act_into is None or values is not out:
            return self._act(values)
        # Where nothing is stacked it is in place, each value by its own thread.
        self._act_into(now.hidden, values)
        return now.hidden

    @staticmethod
    def _linear(
        settled: dict[object, Any],
        name: str,
        step: Step | OwnLinear,
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Return a layer's output: `out`, unless the layer is vLLM's own."""
        if isinstance(step, OwnLinear):
            return step(x.flatten(1))
        found = settled.get(name)
        # Attention may return a tensor of its own each time.
        if found is None or found[0] is not x:
            flat = x.flatten(1)
            found = settled[name] = x, step.prepare(flat, out)
        found[1](step.layer)
        return out

    def _attend(
        self,
        now: Pass,
        qkv: torch.Tensor,
        tables: tuple[Any, ...],
        sequence_lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[object, Any]]:
        """Return attention's output, and where what reads it keeps its launches."""
        attention = self._attention
        cu_seqlens, cos, sin, max_seqlen = tables
        is_shared = (
            self._group is not None and qkv is now.qkv and not attention.is_watched
        )
        key = id(cu_seqlens), self._group
        if is_shared and (found := now.attention.get(key)) is not None:
            call, read, settled = found
            # An id is another tensor's once its own has died.
            if all(map(operator.is_, read, tables)):
                return call(), settled
        q, k, v = self._heads_of(qkv)
        batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen)
        call = attention.prepare(batch, sequence_lengths)
        if not is_shared:
            return call(), now.settled
        if len(now.attention) == _MAX_TABLES:
            now.attention.clear()
        now.attention[key] = call, tables, {}
        return call(), now.attention[key][2]

    def _heads_of(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._split is not None:
            return tuple(part.squeeze(1) for part in self._split(qkv.unsqueeze(1)))
        heads, kv_heads, head_dim = self._heads
        by_head = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim)
        return by_head.split([heads, kv_heads, kv_heads], dim=1)


def _linear(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weights.weight, weights.bias)


def can_run(layer: Any) -> bool:
    """Whether a linear layer is run here, past its own method."""
    # On a CPU vLLM packs weights for kernels of its own.
    return is_plain(layer) and bool(layer.weight.is_cuda) and _has_default_gemm(layer)


def _has_default_gemm(layer: Any) -> bool:
    """Whether no other GEMM was chosen, as `--linear-backend` of vLLM 0.29 does."""
    chosen = getattr(layer.quant_method, "_gemm_impl", default_unquantized_gemm)
    return chosen is default_unquantized_gemm


def _gets_adapters() -> bool:
    from vllm.config import get_current_vllm_config

    lora = get_current_vllm_config().lora_config
    return lora is not None and lora.enable_tower_connector_lora


def _computes(act: Any, activation: str) -> bool:
    """Whether a module computes an activation: vLLM's, or a platform's in its place."""
    from vllm.model_executor.layers.activation import QuickGELU, SiluAndMul

    if activation == "tanh_gelu":
        return type(act) is torch.nn.GELU and act.approximate == "tanh"
    op = SiluAndMul if activation == "swiglu" else QuickGELU
    return getattr(type(act), "forward_native", None) is op.forward_native


def _compiled_act(activation: str) -> Callable[..., Any] | None:
    """Return vLLM's compiled activation, `(out, values)`, if this process has it."""
    name = {"swiglu": "silu_and_mul", "quick_gelu": "gelu_quick"}.get(activation)
    return None if name is None else compiled_op(name)
