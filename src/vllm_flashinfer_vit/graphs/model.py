# SPDX-License-Identifier: Apache-2.0
"""A model as the manager of exact graphs sees it: exact buffers, all in one memory."""

import itertools
import math
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from vllm.model_executor.models.utils import scatter_output_slices

from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
from vllm_flashinfer_vit.graphs.layouts import Layout
from vllm_flashinfer_vit.graphs.sizes import (
    ReplayPixelsError,
    even_split,
    is_cu_seqlens,
    max_sequences,
    max_windows,
    real_first,
    usual_frames,
)

# Sets of graphs beside vLLM's own; see `ExactManager.capture`. The first that holds a
# batch serves it.
SHORT, SINGLE = "short", "single"


class ExactModel:
    """A model as a manager sees it: exact buffers, all in the largest budget's.

    Graphs run one after another, and every replay fills what it reads, so the graphs of
    smaller budgets use the first rows of the largest one's inputs and output.

    Attributes:
        wrapped: The model itself.
        layout: What its buffers are.
        unit: Patches that become a token in a packed tower, else 1.
        short_bound: The longest sequence that some layer has another kernel for, in
            patches; None if there is none.
        axis_keys: What each budget is captured for; `()` where that is one thing.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        smallest: int,
        max_budget: int,
        frames: bool,
        axes: Iterable[Iterable[Hashable]] = (),
        max_rows: int | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: What the manager was built with.
            layout: What its buffers are.
            smallest: Tokens of the smallest item, as the model says.
            max_budget: Tokens of the largest graph.
            frames: Whether the user has said how many frames a graph should hold.
            axes: What each budget is captured for: the model's `capture_axes`.
            max_rows: Rows that a batch of a dense tower has at most; None where the
                budget alone bounds them.
        """
        self.wrapped = model
        self.layout = layout
        self.unit = layout.patches_per_token(model) if layout.is_packed else 1
        self.short_bound = _short_bound(model, layout)
        self._smallest = smallest
        self._max_budget = max_budget
        self._has_frames = frames
        self.axis_keys = list(itertools.product(*axes))
        self._max_rows = max_rows
        # What the largest graph writes; 0 if there is none.
        self._most = max(self.tokens(max_budget, keys) for keys in self.axis_keys)
        self._inputs: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._output: torch.Tensor | None = None
        # Of the graph that is being captured.
        self._tokens = max_budget
        self._eager: weakref.ref[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def clear(self) -> None:
        """Release the shared buffers."""
        self._output = None
        self._inputs.clear()

    def frames(self, token_budget: int, max_frames: int) -> int:
        """Return how many of a manager's frames a budget's graph is captured for."""
        if self._has_frames or not self.layout.is_packed:
            return max_frames
        return min(max_frames, usual_frames(token_budget))

    def sequences(self, token_budget: int, max_items: int, max_frames: int) -> int:
        """Return how many sequences a graph of a packed tower has room for."""
        frames = self.frames(token_budget, max_frames)
        return max_sequences(token_budget, max_items, frames)

    def tokens(self, token_budget: int, axis_keys: tuple[Hashable, ...] = ()) -> int:
        """Return the tokens that a budget's graph really holds."""
        row = self.layout.row_tokens(self._smallest, axis_keys)
        rows = token_budget // row
        return row * (rows if self._max_rows is None else min(rows, self._max_rows))

    def holds(self, path: str, lengths: list[int]) -> bool:
        """Return whether the graphs of a set hold a batch that fits the budget.

        Args:
            path: `SHORT` or `SINGLE`.
            lengths: Patches of each of its sequences.
        """
        if path == SINGLE:
            return len(lengths) == 1
        return self.short_bound is not None and max(lengths) <= self.short_bound

    def output(self, token_budget: int) -> torch.Tensor:
        """Return what the last replay of a budget's graph wrote."""
        assert self._output is not None
        rows = self._output.shape[0] * min(token_budget, self._most) // self._most
        return self._output[:rows]

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        *args: Any,
    ) -> Any:
        """Return inputs of exactly `token_budget` tokens.

        Those of packed towers are cut into short sequences. vLLM rounds most of them up
        to a whole number of tokens for each frame of each item, which is many times the
        budget where videos are long.
        """
        prepare = self.wrapped.prepare_encoder_cudagraph_capture_inputs
        frames = self.frames(token_budget, max_frames_per_batch)
        tokens = self._tokens = self.tokens(token_budget, *args)
        if self.layout.is_packed:
            one = prepare(1, 1, 0, device, dtype, path, *args)
            sequences = self.sequences(
                token_budget, max_batch_size, max_frames_per_batch
            )
            bound = token_budget * self.unit
            if path == SHORT:
                assert self.short_bound is not None
                bound = self.short_bound
            elif path == SINGLE:
                sequences = 1
            values = {
                key: self._packed(key, value, token_budget, sequences, bound)
                for key, value in one.values.items()
            }
            return type(one)(values=values)
        if not self._sizes:
            self._measure(frames, dtype, path, *args)
        # An item of others than Gemma 4's may have any number of rows.
        own = prepare(tokens, tokens, frames, device, dtype, path, *args)
        for key, value in own.values.items():
            own.values[key] = self._share(key, value, value.shape).copy_(value)
        return own

    def _packed(
        self,
        key: str,
        one: torch.Tensor | None,
        token_budget: int,
        sequences: int,
        bound: int,
    ) -> torch.Tensor | None:
        """Return a buffer of a packed tower's graph, given that of one token."""
        if one is None or key == "max_seqlen_window":
            return one
        if key in ("max_seqlen", "max_seqlen_full"):
            return torch.full_like(one, bound)
        patches = token_budget * self.unit
        if key == "cu_window_seqlens":
            count = max_windows(token_budget, sequences, self._window_side())
            return one.new_tensor(even_split(patches, count))
        if is_cu_seqlens(key):
            filled = min(patches, sequences * bound)
            return one.new_tensor(even_split(filled, sequences))
        self._sizes[key] = self._max_budget * one.numel()
        rows = token_budget * one.shape[0]
        return self._share(key, one, torch.Size((rows, *one.shape[1:])))

    def _window_side(self) -> int:
        visual = self.wrapped.visual
        return visual.window_size // visual.spatial_merge_size // visual.patch_size

    def _measure(self, frames: int, dtype: torch.dtype, path: str, *args: Any) -> None:
        """Note how large a dense tower's buffers are in the largest budget's graphs."""
        meta = torch.device("meta")
        prepare = self.wrapped.prepare_encoder_cudagraph_capture_inputs
        for keys in self.axis_keys:
            # vLLM before 0.29 has no such argument.
            axis_keys = (keys,) if args else ()
            tokens = self.tokens(self._max_budget, *axis_keys)
            largest = prepare(tokens, tokens, frames, meta, dtype, path, *axis_keys)
            for key, value in largest.values.items():
                self._sizes[key] = max(self._sizes.get(key, 0), value.numel())

    def _share(self, key: str, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the first part of a shared buffer, in a graph's shape."""
        if key not in self._inputs:
            self._inputs[key] = like.new_zeros(self._sizes[key])
        return self._inputs[key][: shape.numel()].view(shape)

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        *args: Any,
    ) -> Any:
        """Return the batch's own buffers; `fill` pads them to the graph's.

        Raises:
            ReplayPixelsError: The pixels are floats, as of an image given as such, and
                the graph takes bytes.
        """
        replay = self.wrapped.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, 0, 0, *args
        )
        for key, values in replay.values.items():
            if not key.startswith("pixel_values"):
                continue
            held = self._inputs[key]
            if values.is_floating_point() and not held.is_floating_point():
                raise ReplayPixelsError(
                    f"pixels of this batch are {values.dtype}, the CUDA graph was "
                    f"captured with {held.dtype}; give images of 8 bits"
                )
        if self.layout.by_width and "video_frame_counts" in mm_kwargs:
            # vLLM leaves the padding of frames between them, where prompts have none.
            counts = torch.as_tensor(mm_kwargs["video_frame_counts"], device="cpu")
            side = math.isqrt(self.layout.patches_per_token(self.wrapped))
            replay.values["gather_indices"] = real_first(
                replay.values["pixel_position_ids"], counts.flatten(), side
            )
        return replay

    def encoder_cudagraph_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the tower into the shared output, and leave nothing for vLLM to keep."""
        output = self.wrapped.encoder_cudagraph_forward(*args, **kwargs)
        if self._output is None:
            # ERNIE's has a row for each patch: what merges them is no part of it.
            per_token = -(-output.shape[0] // self._tokens)
            shape = (self._most * per_token, *output.shape[1:])
            self._output = output.new_zeros(shape)
        self._output[: output.shape[0]].copy_(output)
        return output[:0]

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], **kwargs: Any
    ) -> torch.Tensor:
        """Run a batch without a graph, and note that its result is whole."""
        if self.layout.by_width:
            output = self._whole_rows(mm_kwargs)
        else:
            output = self.wrapped.encoder_eager_forward(mm_kwargs, **kwargs)
        # vLLM before 0.27 never asks for it.
        self._eager = weakref.ref(output)
        return output

    def _whole_rows(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        """Encode items, each with zeros at its end for what is padding in its rows.

        The model leaves padding out, by which managers cut items, and ranks gather.
        """
        specs = self.wrapped.get_encoder_cudagraph_item_specs(mm_kwargs)
        items = self.wrapped.embed_multimodal(**mm_kwargs)
        tokens = [spec.output_tokens for spec in specs]
        output = items[0].new_zeros(sum(tokens), items[0].shape[1])
        for rows, item in zip(output.split(tokens), items, strict=True):
            rows[: len(item)].copy_(item)
        return output

    def postprocess_encoder_output(
        self,
        outputs: Any,
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        **kwargs: Any,
    ) -> None:
        """Hand each item its rows.

        After a batch without a graph, vLLM has ERNIE merge patches once more, which are
        merged already: an error of shapes.
        """
        eager = None if self._eager is None else self._eager()
        self._eager = None
        # vLLM 0.25.1 has one tensor here.
        is_dict = isinstance(outputs, dict)
        if is_dict and eager is not None and outputs.get("default") is eager:
            clone = kwargs.get("clone", False)
            scatter_output_slices(eager, indices, per_item_out_tokens, dest, clone)
            return
        self.wrapped.postprocess_encoder_output(
            outputs, indices, per_item_out_tokens, dest, **kwargs
        )


def _short_bound(model: Any, layout: Layout) -> int | None:
    """Return the longest sequence that some layer has another kernel for, or None."""
    if not layout.is_packed:
        return None
    bounds = [
        layer.bounds[-1]
        for layer in getattr(model, layout.tower).modules()
        if isinstance(layer, FlashInferViTAttention) and layer.bounds
    ]
    return max(bounds, default=None)
