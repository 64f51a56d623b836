# SPDX-License-Identifier: Apache-2.0
"""The blocks of towers that take no patches and grids, at their true size.

A stack is vLLM's own blocks, with random weights and a random stream in place of what
the tower runs in front of them. What comes after the blocks is left out, too.

Blocks that take a longest length get it on the host, also where vLLM's tower has it on
the device. There stock's FLASH_ATTN waits for it in each block, and this package takes
the number of tokens for it, unless a patch hands it over (`longest` of
`docs/patches.md`): neither is in times of stacks. Blocks that take none are told it
where their tower tells them by such a patch; stock's compute it, and wait.
"""

import importlib
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import gemma4_stack
from gemma4_stack import Gemma4Stack
from known_stacks import STACKS, Stack
from stack_rotary import Tensors
from vllm_flashinfer_vit.blocks.attach import told_lengths
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower
from vllm_flashinfer_vit.towers.weights import fill_with_random_weights

Grids = Sequence[Sequence[int]]
# Holds the engine's configuration that blocks are built in.
_CONTEXT = TowerSpec(
    family="qwen2_vl",
    vision_config={
        "depth": 1,
        "embed_dim": 128,
        "hidden_size": 32,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    model="context",
    full_depth=1,
)
_ROPE_BASE = 10000.0
# Columns from which on random Q and K make scores so large that rounding alone decides
# what blocks return: stock's 28 of 2048 columns are off by 29 % in bf16.
_WIDE = 2048
# Modules whose towers tell blocks the longest length, whose `forward` takes none.
_TELLING = ("keye", "openpangu_vl")
# Such lengths.
_WHOLE, _WINDOWED = "told", "told in windows"


class BlockStack(nn.Module):
    """Blocks one after another, called as a tower is."""

    def __init__(self, stack: Stack, depth: int, dtype: torch.dtype) -> None:
        """Build the blocks, in an engine's configuration."""
        super().__init__()
        name, *_ = stack.module.split()
        folder = "vllm" if "." in name else "vllm.model_executor.models"
        module = importlib.import_module(f"{folder}.{name}")
        self.blocks = nn.ModuleList([stack.block(module) for _ in range(depth)])
        # As vLLM's towers with windows have it.
        self.window = stack.window
        self.fullatt_block_indexes = stack.full if stack.window else None
        self._stack, self._dtype = stack, dtype

    def prepare_encoder_metadata(self, grids: Grids) -> Tensors:
        """Return what all blocks are given for images of these grids.

        Raises:
            ValueError: A dense batch needs images of one size, or the blocks have no
                tables for an image.
        """
        stack = self._stack
        sizes = {(h, w) for _, h, w in grids}
        for h, w in sizes:
            if not stack.fits(h, w):
                raise ValueError(f"these blocks have no tables for {h} x {w} patches")
        if stack.shape == "BSC":
            if len(sizes) > 1:
                raise ValueError("a dense batch needs images of one size")
            return self._taken({"grid_hw": sizes.pop()})
        on = next(self.parameters()).device
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        ends, longest = _ends(lengths, on)
        metadata = self._taken(
            {
                "cu_seqlens": ends,
                "max_seqlen": longest,
                **stack.rotary(self._turns(grids).to(on), self._dtype),
            }
        )
        is_told = stack.module in _TELLING
        metadata |= {_WHOLE: longest} if is_told else {}
        if stack.window:
            windows = _window_lengths(grids, stack.window)
            ends, longest = _ends(windows, on)
            metadata |= {"cu_window_seqlens": ends}
            metadata |= {_WINDOWED: longest} if is_told else {}
            if "max_seqlen" in metadata:
                metadata |= {"max_window_seqlen": longest}
        return metadata

    @property
    def is_told_lengths(self) -> bool:
        """Whether blocks know the longest length, or have rows of one length.

        Else the tokens of a call stand for it, in windows, too.
        """
        stack = self._stack
        is_known = stack.shape == "BSC" or stack.module in _TELLING
        return is_known or "max_seqlen" in self._taken({"max_seqlen": torch.empty(0)})

    def _taken(self, metadata: Tensors) -> Tensors:
        """Return what the blocks' `forward` takes of this."""
        forward = inspect.signature(type(self.blocks[0]).forward).parameters
        # Some take no longest length; some have to be told that there is no mask.
        _, _, *others = forward.values()
        return {
            one.name: metadata.get(one.name)
            for one in others
            if one.name in metadata or one.default is inspect.Parameter.empty
        }

    def _turns(self, grids: Grids) -> torch.Tensor:
        """Return angles by rows and columns, half of them each, `[T, D / 2]`."""
        quarter = self._stack.head_dim // 4
        speeds = _ROPE_BASE ** -(torch.arange(quarter) / quarter)
        parts = []
        for frames, height, width in grids:
            rows, columns = torch.meshgrid(
                torch.arange(height), torch.arange(width), indexing="ij"
            )
            places = torch.stack([rows, columns], -1).view(-1, 2, 1)
            parts.append((places * speeds).flatten(1).repeat(frames, 1))
        return torch.cat(parts)

    def forward(
        self,
        pixels: torch.Tensor,
        grids: Grids | None,
        *,
        encoder_metadata: Tensors | None = None,
    ) -> torch.Tensor:
        """Run the blocks on a stream.

        Args:
            pixels: `[T, C]`.
            grids: As for `prepare_encoder_metadata`; for dense batches always given.
            encoder_metadata: What that returned, or None to prepare it.
        """
        if encoder_metadata is None:
            assert grids is not None
            encoder_metadata = self.prepare_encoder_metadata(grids)
        # As from a patch embedding: vLLM's fused norm writes over what a block gets.
        x = pixels.clone().view(self._shape(len(pixels), grids))
        metadata = dict(encoder_metadata)
        lengths = [metadata.pop(name, None) for name in (_WHOLE, _WINDOWED)]
        whole, windowed = _by_reach(metadata)
        full = self.fullatt_block_indexes
        # As vLLM's towers tell them, once patched.
        with told_lengths(self.blocks, full, *lengths):
            for index, block in enumerate(self.blocks):
                is_full = full is None or index in full
                found = block(x, **(whole if is_full else windowed))
                x = found[0] if isinstance(found, tuple) else found
        return x.reshape(pixels.shape)

    def _shape(self, rows: int, grids: Grids | None) -> tuple[int, ...]:
        width = self._stack.width
        if self._stack.shape == "BSC":
            assert grids is not None
            return sum(t for t, _, _ in grids), -1, width
        shapes = {"TC": (rows, width), "1TC": (1, rows, width)}
        return shapes.get(self._stack.shape, (rows, 1, width))


def _ends(lengths: Sequence[int], on: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the sequences' ends, from 0, and the longest length."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(on, torch.int32)
    return ends, torch.tensor(max(lengths), dtype=torch.int32)


@torch.no_grad()
def _shrink_scores(visual: BlockStack) -> None:
    """Halve the weights that make Q, K and V: they stay of bf16's precision."""
    for name, parameter in visual.named_parameters():
        if ".qkv.weight" in name:
            parameter.mul_(0.5)


def _window_lengths(grids: Grids, side: int) -> list[int]:
    """Return the lengths of windows, whose rows in the stream lie together."""
    return [
        min(side, h - top) * min(side, w - left)
        for t, h, w in grids
        for _ in range(t)
        for top in range(0, h, side)
        for left in range(0, w, side)
    ]


def _by_reach(metadata: Tensors) -> tuple[Tensors, Tensors]:
    """Return what blocks are given that attend to whole images, and in windows."""
    whole = {name: x for name, x in metadata.items() if "_window_" not in name}
    windowed = {
        name.replace("_window_", "_"): x
        for name, x in metadata.items()
        if "_window_" in name
    }
    return whole, {**whole, **windowed}


@dataclass(frozen=True)
class StackTower:
    """What `tower_worker` asks of a tower, of a stack.

    Attributes:
        spec: Its depth and the width of its stream.
        visual: The stack.
        context: The tower whose configuration it was built in.
    """

    spec: Any
    visual: BlockStack | Gemma4Stack
    context: Tower

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `Tower.running`."""
        with self.context.running():
            yield

    def attention_layers(self) -> dict[str, Any]:
        """See `Tower.attention_layers`; where Transformers attends, only the sizes."""
        from vllm.model_executor.layers.attention.mm_encoder_attention import (
            MMEncoderAttention,
        )

        layers = {
            name: module
            for name, module in self.visual.named_modules()
            if isinstance(module, MMEncoderAttention)
        }
        if not layers and isinstance(self.visual, Gemma4Stack):
            return {"all": self.visual.sizes}
        return layers

    def kernels(self, grids: Grids) -> dict[str, str]:
        """See `Tower.kernels`."""
        layer: Any = next(iter(self.attention_layers().values()))
        patches = sum(math.prod(grid) for grid in grids)
        is_told = getattr(self.visual, "is_told_lengths", True)
        longest = max(h * w for _, h, w in grids) if is_told else patches
        whole = layer.kernel_for(longest, patches / sum(t for t, _, _ in grids))
        side = getattr(self.visual, "window", 0)
        if not side:
            return {"all": whole}
        longest = max(_window_lengths(grids, side)) if is_told else patches
        return {"full": whole, "windows": layer.kernel_for(longest, None)}


def build_stack(
    name: str,
    *,
    depth: int | None,
    dtype: torch.dtype,
    device: torch.device,
    **how: Any,
) -> StackTower:
    """Build the blocks of a tower in `model_names.STACK_NAMES`.

    Args:
        name: The tower's.
        depth: Blocks to build, None for all.
        dtype: Of weights and stream.
        device: Where they are.
        **how: As for `build_tower`.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    stack = STACKS.get(name) or gemma4_stack.TOWERS[name]
    depth = stack.depth if depth is None else min(depth, stack.depth)
    context = build_tower(_CONTEXT, dtype=dtype, device=device, **how)
    with context.running(), set_default_torch_dtype(dtype), torch.device(device):
        visual: BlockStack | Gemma4Stack
        if isinstance(stack, Stack):
            visual = BlockStack(stack, depth, dtype)
        else:
            visual = Gemma4Stack(stack, depth, context.vllm_config)
        fill_with_random_weights(visual, seed=0)
        if isinstance(visual, Gemma4Stack):
            visual.shrink_scores()
        elif stack.width >= _WIDE:
            _shrink_scores(visual)
        model_config = context.vllm_config.model_config
        process_weights_after_loading(visual, model_config, torch.device(device))
    spec = SimpleNamespace(depth=depth, patch_dim=stack.width, merge_size=1)
    return StackTower(spec, visual.eval(), context)
