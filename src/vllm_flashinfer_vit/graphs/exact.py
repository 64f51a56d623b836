# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs that hold exactly their budget, at finer budgets, in one memory.

For the towers that `manager` lists: vLLM rounds their buffers up, to
many times the budget where videos are long, and has each graph keep its own.
"""

import itertools
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
from vllm_flashinfer_vit.graphs.padded import PaddedManager
from vllm_flashinfer_vit.graphs.sizes import (
    ReplayError,
    even_split,
    fill,
    fine_budgets,
    is_cu_seqlens,
    max_sequences,
    max_windows,
    usual_frames,
)

logger = init_logger("vllm.plugins.flashinfer_vit")

# The set of graphs for batches of short sequences; see `ExactManager.capture`.
_SHORT = "short"


class ExactManager(PaddedManager):
    """Captures towers without padding of its own, and shares the buffers."""

    model: "ExactModel"
    token_budgets: list[int]

    def adopt(self) -> None:
        """Take over a manager that vLLM has just built."""
        super().adopt()
        # In place of vLLM's own for Qwen2.5-VL, too, which look at no size.
        for key in self.config.buffer_keys:
            self.config.padding_logics[key] = partial(fill, key)
        compilation = self.vllm_config.compilation_config
        if not compilation.encoder_cudagraph_token_budgets:
            budgets = fine_budgets(self.token_budgets[0], self.token_budgets[-1])
            self.token_budgets = budgets
            # vLLM 0.25.1 has `token_budgets` only.
            if hasattr(self, "path_token_budgets"):
                self.path_token_budgets = {"default": list(budgets)}
        has_frames = compilation.encoder_cudagraph_max_frames_per_batch is not None
        self.model = ExactModel(self.model, self.token_budgets[-1], has_frames)
        logger.info(
            "vllm-flashinfer-vit captures %d encoder CUDA graphs: one for each budget "
            "of %s tokens%s",
            self.get_num_graphs_to_capture(),
            self.token_budgets,
            self._short_graphs_text(),
        )

    def _short_graphs_text(self) -> str:
        budgets = self._short_budgets()
        if not budgets:
            return ""
        return (
            f", and another one for {budgets}, for batches without a sequence of more "
            f"than {self.model.short_bound} patches"
        )

    def _frames(self, token_budget: int) -> int:
        return self.model.frames(token_budget, self.max_frames_per_batch)

    def _model_name(self) -> str:
        return type(self.model.wrapped).__name__

    def _short_budgets(self) -> list[int]:
        bound = self.model.short_bound
        if bound is None:
            return []
        return [b for b in self.token_budgets if b * self.model.unit > bound]

    def get_num_graphs_to_capture(self) -> int:
        """Count the graphs, for vLLM's estimate of their memory."""
        return len(self.token_budgets) + len(self._short_budgets())

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture all graphs, large budgets twice.

        A graph holds one kernel for all its replays, which must cope with a sequence
        that fills the budget. Short sequences have a faster one: graphs of their own.
        """
        super().capture(*args, **kwargs)
        for budget in reversed(self._short_budgets()):
            self._capture_budget_graph(budget, path=_SHORT)
        self._warm_up_positions()

    def _warm_up_positions(self) -> None:
        """Compile vLLM's kernel for Qwen3-VL's positions, which no graph holds.

        It has variants by whether 16 divides the rows and columns.
        """
        visual = self.model.visual
        if not hasattr(visual, "fast_pos_embed_interpolate"):
            return
        with torch.inference_mode():
            for rows, columns in itertools.product(
                (visual.spatial_merge_size, 16), repeat=2
            ):
                visual.fast_pos_embed_interpolate([[1, rows, columns]])

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Encode items, after normalising pixels where only the model would."""
        wrapped = self.model.wrapped
        # In 0.28 and 0.29 the model normalises in `_process_image_input`, which graphs
        # do not pass.
        if hasattr(wrapped, "input_norm") and not hasattr(wrapped.visual, "input_norm"):
            mm_kwargs = {
                key: wrapped.input_norm(value, self.dtype)
                if key.startswith("pixel_values")
                else value
                for key, value in mm_kwargs.items()
            }
        return super().execute(mm_kwargs)

    def clear(self) -> None:
        """Release the graphs and the shared buffers."""
        super().clear()
        self.model.clear()

    def _replay(
        self,
        mm_kwargs: dict[str, Any],
        token_budget: int,
        path: str,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        grids = self.model.grids(mm_kwargs)
        longest = max(h * w for _, h, w in grids)
        if token_budget in self._short_budgets() and self.model.is_short(longest):
            path = _SHORT
        output = super()._replay(mm_kwargs, token_budget, path, *args, **kwargs)
        if output is None:
            return None
        patches = sum(t * h * w for t, h, w in grids)
        self.counting.add(patches // self.model.unit, "graph_real_tokens")
        self.counting.add(token_budget, "graph_padded_tokens")
        assert self.model.output is not None
        return self.model.output[:token_budget]


class ExactModel:
    """A model as a manager sees it: exact buffers, all in the largest budget's.

    Graphs run one after another, and every replay fills what it reads, so the graphs of
    smaller budgets use the first rows of the largest one's inputs and output.
    """

    def __init__(self, model: Any, max_budget: int, has_frames: bool) -> None:
        """Wrap a model.

        Args:
            model: What the manager was built with.
            max_budget: Tokens of the largest graph.
            has_frames: Whether the user has said how many frames a graph should hold.
        """
        self.wrapped = model
        self.unit = model.visual.spatial_merge_size**2
        self.short_bound = _short_bound(model)
        self.output: torch.Tensor | None = None
        self._max_budget = max_budget
        self._has_frames = has_frames
        self._inputs: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def clear(self) -> None:
        """Release the shared buffers."""
        self.output = None
        self._inputs.clear()

    def frames(self, token_budget: int, max_frames: int) -> int:
        """Return how many of a manager's frames a budget's graph is captured for."""
        if self._has_frames:
            return max_frames
        return min(max_frames, usual_frames(token_budget))

    def is_short(self, longest: int) -> bool:
        """Return whether the graphs for short sequences hold one of this length."""
        return self.short_bound is not None and longest <= self.short_bound

    def grids(self, mm_kwargs: dict[str, Any]) -> list[list[int]]:
        """Return frames, rows and columns of patches of each item."""
        return self.wrapped._get_grid_thw_by_modality(mm_kwargs)

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
        """Return inputs of exactly `token_budget` tokens, cut into short sequences.

        vLLM rounds up to a whole number of tokens for each frame of each item, which
        is many times the budget where videos are long.
        """
        capture = self.wrapped.prepare_encoder_cudagraph_capture_inputs(
            1, 1, 0, device, dtype, path, *args
        )
        max_frames = self.frames(token_budget, max_frames_per_batch)
        frames = max_sequences(token_budget, max_batch_size, max_frames)
        patches = token_budget * self.unit
        bound = patches
        if path == _SHORT:
            assert self.short_bound is not None
            bound = self.short_bound
        exact: dict[str, torch.Tensor | None] = {}
        for key, one in capture.values.items():
            if one is None or key == "max_seqlen_window":
                exact[key] = one
            elif key in ("max_seqlen", "max_seqlen_full"):
                exact[key] = torch.full_like(one, bound)
            elif is_cu_seqlens(key):
                count = frames
                if key == "cu_window_seqlens":
                    count = max_windows(token_budget, frames, self._window_side())
                exact[key] = one.new_tensor(even_split(patches, count))
            else:
                exact[key] = self._share(key, one, token_budget)
        return type(capture)(values=exact)

    def _window_side(self) -> int:
        visual = self.wrapped.visual
        return visual.window_size // visual.spatial_merge_size // visual.patch_size

    def _share(self, key: str, one: torch.Tensor, token_budget: int) -> torch.Tensor:
        """Return the budget's rows of a shared buffer, given those of one token."""
        rows = one.shape[0]
        if key not in self._inputs:
            self._inputs[key] = one.new_zeros((self._max_budget * rows, *one.shape[1:]))
        return self._inputs[key][: token_budget * rows]

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        *args: Any,
    ) -> Any:
        """Return the batch's own buffers; `fill` pads them to the graph's.

        Raises:
            ReplayError: The pixels are floats, as of an image given as such, and the
                graph takes bytes.
        """
        replay = self.wrapped.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, 0, 0, *args
        )
        pixels = replay.values["pixel_values"]
        held = self._inputs["pixel_values"]
        if pixels.is_floating_point() and not held.is_floating_point():
            raise ReplayError(
                f"pixels of this batch are {pixels.dtype}, the CUDA graph was captured "
                f"with {held.dtype}; give images of 8 bits"
            )
        return replay

    def encoder_cudagraph_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the tower into the shared output, and leave nothing for vLLM to keep."""
        output = self.wrapped.encoder_cudagraph_forward(*args, **kwargs)
        if self.output is None:
            self.output = output.new_zeros((self._max_budget, *output.shape[1:]))
        self.output[: output.shape[0]].copy_(output)
        return output[:0]


def _short_bound(model: Any) -> int | None:
    """Return the longest sequence that some layer has another kernel for, or None."""
    bounds = [
        layer.bounds[-1]
        for layer in model.visual.modules()
        if isinstance(layer, FlashInferViTAttention) and layer.bounds
    ]
    return max(bounds, default=None)
