# SPDX-License-Identifier: Apache-2.0
"""Runs the blocks of a vision tower, each step of which is one launch or a view.

A pass through a tower settles all launches once, for buffers that the blocks share:
then a block only hands over the addresses of its own weights. The sum at a block's end
is normalised for the next block in the same launch, and both branches of a block are
added at once: the residual stream is rounded once in a block, twice in the last.

Numerics: see `kernels.add_norm`, `kernels.rope` and the attention kernels; GEMMs round
their fp32 sums once, after the bias and the activation that they apply.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.blocks import fp8_linear, norms
from vllm_flashinfer_vit.blocks.attention import Attention
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.fp8_mlp import Fp8Mlp
from vllm_flashinfer_vit.blocks.inputs import Inputs
from vllm_flashinfer_vit.blocks.layers import Layers, gets_adapters
from vllm_flashinfer_vit.blocks.linear import BlockWeights, run
from vllm_flashinfer_vit.blocks.mlp import build_mlp, pad_rows
from vllm_flashinfer_vit.blocks.norms import Norm
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import Pass, TowerProgram, Widths
from vllm_flashinfer_vit.kernels.formats import Bound
from vllm_flashinfer_vit.ops.batch import Batch

logger = init_logger("vllm.plugins.flashinfer_vit")


class BlockProgram:
    """The steps of one block, resolved once its weights are loaded.

    Attributes:
        spec: What the block is.
        steps: What each step is, for people.
        is_ready: Whether `build` was called.
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
        self._block = block
        self._inputs = Inputs(spec, block)
        self._tower, self._index = place
        self._off = off
        self.is_ready = False
        self._tower.blocks[self._index] = self
        self._attention = Attention(spec, block, self._inputs)
        # Adapters are added to what a layer itself returns, in the checkpoint's size.
        self._gets_adapters = gets_adapters()
        if "aligned" not in off and not self._gets_adapters:
            first, act, second = map(self._part, (spec.first, spec.act, spec.second))
            pad_rows(first, act, second, runs_fp8="fp8_linear" not in off)

    def _part(self, path: str) -> Any:
        return self._block.get_submodule(path)

    def build(self) -> None:
        """Resolve the steps. The weights are loaded; later loads need no other call."""
        spec = self.spec
        self._norm1, self._norm2 = (
            Norm(self._part(path)) for path in (spec.norm1, spec.norm2)
        )
        weight = self._norm1.weight
        dtype = self._attention.layer.dtype
        self._inputs.build(len(weight), dtype, weight.device)
        self._scaling = norms.scaling_of(self._block, spec.layer_scales or ())
        self._tower.forget()
        self._weights = BlockWeights()
        layers = Layers(
            self._block,
            self._tower,
            self._off,
            self._gets_adapters,
            self._weights,
            self.steps,
            self._index,
        )
        self._attention.build(layers)
        self._proj = layers.projection(spec.proj)
        self._tower.bounds.drop(self._index)
        self._mlp = build_mlp(spec, layers)
        is_fused = "add_norm" not in self._off
        self._prepare_sum = norms.prepare if is_fused else norms.separate
        self.steps["add_norm"] = "one kernel" if is_fused else "left out by a setting"
        steps = "; ".join(f"{path}: {what}" for path, what in self.steps.items())
        # Blocks of a tower are alike, and so are said once.
        logger.debug_once("The vision tower's blocks run %s", steps)
        self.is_ready = True
        if isinstance(self._mlp, Fp8Mlp) and self._mlp.activates:
            self._settle_small(self._mlp)

    def _settle_small(self, mlp: Fp8Mlp) -> None:
        """Compile what runs in small passes alone: vLLM's profiling is a large one."""
        weight = self._norm2.weight
        x = weight.new_empty(1, len(weight), dtype=self._attention.layer.dtype)
        now = Pass([self.widths(1, False)], x, None, False)
        normed, scales = _read_by(now, mlp.first)
        branches, scaled = (now.attended,), self._layer_scales()[:1]
        like = x, branches, self._norm2, None, scales, scaled, None
        self._prepare_sum(like, normed)
        mlp.settle_small(now)

    def widths(self, rows: int, can_bound: bool) -> Widths:
        """Return the columns of the buffers that a pass needs; see `Pass`."""
        # A block of a tower may not be built yet, and then takes no part in a pass.
        if not self.is_ready:
            return Widths()
        layers = self._attention.qkv.step, self._proj, *self._mlp.quantized
        quantized = [layer for layer in layers if isinstance(layer, Fp8Linear)]
        return self._mlp.widths(rows, can_bound)._replace(
            qkv=self._attention.columns,
            quantized=max((layer.inputs for layer in quantized), default=0),
            groups=max((layer.groups for layer in quantized), default=0),
        )

    def takes(self, x: torch.Tensor, given: Mapping[str, Any]) -> bool:
        """Whether the program can run on a stream of at least one token.

        Args:
            x: The stream, of a shape that the spec says.
            given: What else the block's `forward` was given, by name.
        """
        if not self.is_ready or x.numel() == 0:
            return False
        if torch.compiler.is_compiling():
            return False
        if self._attention.needs_tables and self._inputs.tables_in(given) is None:
            return False
        if self.spec.is_packed or (
            self.spec.packed_by is not None and given.get("cu_seqlens") is not None
        ):
            # Rows of several batches would be in turns.
            is_one = x.dim() == 2 or (x.dim() == 3 and 1 in x.shape[:2])
            # Without offsets, `[T, C]` can be one sequence only.
            return is_one and (x.dim() == 2 or given.get("cu_seqlens") is not None)
        mask = self._inputs.mask_in(given)
        if mask is not None and mask.shape != (x.shape[0], 1, 1, x.shape[1]):
            return False
        # Of anything else this knows nothing.
        known = None, x, mask, *self._inputs.own_in(given)
        return x.dim() == 3 and all(any(v is k for k in known) for v in given.values())

    def run(self, x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        """Run the block.

        Args:
            x: A stream that it `takes`.
            given: What the block's `forward` was given, by name: `cu_seqlens`, see
                `Batch`, or offsets in elements with `sequence_lengths`; `max_seqlen`,
                see `Batch`; `sequence_lengths`, see
                `FlashInferViTAttention.forward_cuda`; and what the spec's rotary names.

        Returns:
            Like x, a new tensor, contiguous.
        """
        tower = self._tower
        now = tower.take(self._index, x)
        if now is None:
            self._weights.refresh()
            # A convolution that embeds patches writes them channel by channel.
            x = x.contiguous()
            now = tower.begin(x)
            self._inputs.clear_padding(now, x, given)
            normed, scales = _read_by(now, self._attention.qkv.step)
            norms.write_norm(self._norm1, x.view(now.normed.shape), normed, scales)
            if self._index == 0:
                self._count(now, x, given)
        context, settled = self._attention(now, x, given, self._longest(given))
        attended = self._projected(now, settled, context)
        scaled = self._layer_scales()
        mlp, bound = self._mlp, self._mlp.bound(now)
        self._sum(
            now, x, (attended,), self._norm2, None, mlp.first, scaled[:1], bound=bound
        )
        out = self._mlp(now)
        following = tower.blocks.get(self._index + 1)
        # One that was taken out of the tower is never built.
        if following is None or not following.is_ready:
            # In front of the end, after which a pass holds nothing of its batch.
            if self._index:
                self._count(now, x, given)
            tower.end(now)
            return norms.add(x, (attended, out), scaled)
        norm, reader = following._norm1, following._attention.qkv.step
        # Its scale of rows, given in FP8, is read here already.
        following._weights.refresh()
        total = torch.empty_like(x)
        self._sum(now, x, (attended, out), norm, total, reader, scaled)
        tower.hand_on(now, self._index + 1, total)
        return total

    def _count(self, now: Pass, x: torch.Tensor, given: Mapping[str, Any]) -> None:
        """Count the pass at a tower's first block, and at its last."""
        offsets, longest = self._inputs.offsets(now, given), self._longest(given)
        lengths = self._inputs.lengths(x, offsets, longest)
        batch = Batch(now.qkv, now.qkv, now.qkv, None, None, *lengths)
        self._attention.layer.counts.passed("blocks", batch, self._index == 0)

    def _longest(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        return given.get("max_seqlen", self._tower.told.get(self._index))

    def count_refused(self, x: torch.Tensor) -> None:
        """Count a pass whose stream the tower's blocks do not take."""
        # A rank without an image has no tokens, and compiled blocks have no program.
        if self._index == 0 and not torch.compiler.is_compiling() and x.numel():
            self._attention.layer.counts.fell_back("block_input")
            logger.info_once(
                "%s: a batch runs by vLLM's own steps, since the blocks' program does "
                "not take what they are given, such as an attention mask.",
                type(self._block).__name__,
            )

    def _layer_scales(self) -> norms.LayerScales:
        # As weights are, read where the block has them now.
        return tuple(has[name].detach() for has, name in self._scaling)

    def _sum(
        self,
        now: Pass,
        x: torch.Tensor,
        branches: tuple[torch.Tensor, ...],
        norm: Norm,
        total: torch.Tensor | None,
        reader: object,
        layer_scales: norms.LayerScales,
        bound: Bound | None = None,
    ) -> None:
        """Add branches to the stream, into `total` if it is wanted, and normalise.

        `reader` is what gets the norm, in its own format.
        """
        normed, scales = _read_by(now, reader)
        form = None if scales is None else scales.shape
        key = len(branches), norm.eps, form, bound is None
        terms = x, branches, norm, total, scales, layer_scales, bound
        call = now.settled.get(key)
        if call is None:
            call = now.settled[key] = self._prepare_sum(terms, normed)
        call(terms)

    def _projected(
        self, now: Pass, settled: dict[object, Any], context: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(self._proj, Fp8Linear):
            return run(settled, "proj", self._proj, context, now.attended)
        rows, scales = self._proj.rows(now)
        key = "quantising context", scales.shape
        found = settled.get(key)
        # Attention may return a tensor of its own each time.
        if found is None or found[0] is not context:
            flat = context.flatten(1)
            sizes = flat, flat.shape[1], None, None
            call = fp8_linear.prepare_rows(*sizes, rows, scales)
            found = settled[key] = context, call
        found[1](None, scales)
        return self._proj(now, rows, scales, now.attended)


def _read_by(now: Pass, reader: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return where a layer reads its rows, and their scales if it is in FP8."""
    return reader.rows(now) if isinstance(reader, Fp8Linear) else (now.normed, None)
