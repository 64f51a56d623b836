# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs that are right with any batch, sized exactly, and share memory.

vLLM's manager stays in charge: which items go into a batch, which budget it takes, when
graphs are captured. `PaddedManager` mends what it leaves in the unused end of a graph's
buffers. `ExactManager` also captures the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL
with exactly as many tokens as the budget says, at finer budgets, in one set of buffers.
"""

import inspect
import itertools
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

from vllm_flashinfer_vit.graphs.sizes import (
    ReplaySizeError,
    even_split,
    fill,
    fine_budgets,
    is_cu_seqlens,
    max_sequences,
    max_windows,
    usual_frames,
)
from vllm_flashinfer_vit.settings import ENV_STRICT, Settings

logger = init_logger("vllm.plugins.flashinfer_vit")

# vLLM 0.23.0 and later let a model, and so this package, say how a buffer is padded.
_HAS_PADDING_LOGICS = "padding_logics" in EncoderCudaGraphConfig.__dataclass_fields__
# vLLM 0.24.0 and later keep several sets of graphs, by a name that models may ignore.
_HAS_PATHS = (
    "path"
    in inspect.signature(EncoderCudaGraphManager._capture_budget_graph).parameters
)
# The set of graphs for batches of short sequences; see `ExactManager.capture`.
_SHORT = "short"
_EXACT = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    }
)
_STATS_INTERVAL = 100


class PaddedManager(EncoderCudaGraphManager):
    """Pads prefix sums with their last value, for every model that says nothing."""

    def adopt(self) -> None:
        """Take over a manager that vLLM has just built."""
        if not _HAS_PADDING_LOGICS:
            return
        logics = self.config.padding_logics
        for key in self.config.buffer_keys:
            logics.setdefault(key, partial(fill, key))

    def _run_budget_graph(
        self, mm_kwargs: dict[str, Any], token_budget: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor | None:
        try:
            if not _HAS_PADDING_LOGICS and token_budget in self.budget_graphs:
                args = (self._padded(mm_kwargs, token_budget, args[0]),)
            return super()._run_budget_graph(mm_kwargs, token_budget, *args, **kwargs)
        except ReplaySizeError as error:
            raise ReplaySizeError(self._explain(error, token_budget)) from None

    def _padded(
        self,
        mm_kwargs: dict[str, Any],
        token_budget: int,
        replay: dict[str, torch.Tensor | None],
    ) -> dict[str, torch.Tensor | None]:
        """Return replay buffers of full size, and clear the end of the pixels.

        vLLM 0.22.1 pads with zeros, and leaves the pixels of earlier batches.
        """
        graph = self.budget_graphs[token_budget]
        modality = self.model.get_input_modality(mm_kwargs)
        pixels = mm_kwargs[self.config.input_key_by_modality[modality]]
        graph.input_buffer[pixels.shape[0] :].zero_()
        padded = dict(replay)
        for key in filter(is_cu_seqlens, self.config.buffer_keys):
            values = replay.get(key)
            if values is not None:
                buffer = torch.empty_like(graph.metadata_buffers[key])
                fill(key, buffer, values)
                padded[key] = buffer
        return padded

    def _frames(self, token_budget: int) -> int:
        """Return how many video frames a budget's graph was captured for."""
        return self.max_frames_per_batch

    def _explain(self, error: ReplaySizeError, token_budget: int) -> str:
        return (
            f"{type(_unwrap(self.model)).__name__}: {error} (budget {token_budget} "
            f"tokens, {self.max_batch_size} items, {self._frames(token_budget)} video "
            "frames). Raise encoder_cudagraph_max_frames_per_batch or "
            "encoder_cudagraph_max_vision_items_per_batch in the compilation config"
        )


class ExactManager(PaddedManager):
    """Captures the Qwen towers without padding of its own, and shares the buffers."""

    model: "_ExactModel"
    token_budgets: list[int]

    def adopt(self) -> None:
        """Take over a manager that vLLM has just built."""
        if _HAS_PADDING_LOGICS:
            for key in self.config.buffer_keys:
                self.config.padding_logics[key] = partial(fill, key)
        self.replays = self.real_tokens = self.padded_tokens = 0
        compilation = self.vllm_config.compilation_config
        # Before 0.23.0 each graph has a memory pool of its own: more cost too much.
        if not compilation.encoder_cudagraph_token_budgets and _HAS_PADDING_LOGICS:
            budgets = fine_budgets(self.token_budgets[0], self.token_budgets[-1])
            self.token_budgets = budgets
            if hasattr(self, "path_token_budgets"):
                self.path_token_budgets = {"default": list(budgets)}
        has_frames = compilation.encoder_cudagraph_max_frames_per_batch is not None
        self.model = _ExactModel(self.model, self.token_budgets[-1], has_frames)
        logger.info(
            "vllm-flashinfer-vit captures %d encoder CUDA graphs: budgets %s, and of "
            "these %s again for sequences of up to %s patches",
            self.get_num_graphs_to_capture(),
            self.token_budgets,
            self._short_budgets(),
            self.model.short_bound,
        )

    def _frames(self, token_budget: int) -> int:
        return self.model.frames(token_budget, self.max_frames_per_batch)

    def _short_budgets(self) -> list[int]:
        bound = self.model.short_bound
        if bound is None or not _HAS_PATHS:
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

    def clear(self) -> None:
        """Release the graphs and the shared buffers."""
        super().clear()
        self.model.clear()

    def _run_budget_graph(
        self, mm_kwargs: dict[str, Any], token_budget: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor | None:
        grids = self.model.grids(mm_kwargs)
        longest = max(h * w for _, h, w in grids)
        if token_budget in self._short_budgets() and self.model.is_short(longest):
            args, kwargs = (), {**kwargs, "path": _SHORT}
        try:
            output = super()._run_budget_graph(mm_kwargs, token_budget, *args, **kwargs)
        except ReplaySizeError as error:
            return self._run_eager(mm_kwargs, error)
        if output is None:
            return None
        self._count(sum(t * h * w for t, h, w in grids), token_budget)
        assert self.model.output is not None
        return self.model.output[:token_budget]

    def _run_eager(
        self, mm_kwargs: dict[str, Any], error: ReplaySizeError
    ) -> torch.Tensor:
        """Serve a batch that no graph holds, such as a long video of small frames."""
        if Settings.from_env().strict:
            raise ReplaySizeError(f"{error}, or unset {ENV_STRICT}") from None
        logger.warning_once("%s. The batch runs without a CUDA graph.", error)
        self.graph_misses += len(self._get_item_specs(mm_kwargs))
        with torch.inference_mode():
            return self.model.encoder_eager_forward(mm_kwargs)

    def _count(self, patches: int, token_budget: int) -> None:
        self.real_tokens += patches // self.model.unit
        self.padded_tokens += token_budget
        self.replays += 1
        if self.replays % _STATS_INTERVAL == 0:
            logger.debug(
                "Encoder CUDA graphs: %d replays, %.3f padded over real tokens",
                self.replays,
                self.padded_tokens / self.real_tokens,
            )


class _ExactModel:
    """A Qwen model as a manager sees it: exact buffers, all in the largest budget's.

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
        *args: Any,
    ) -> Any:
        """Return inputs of exactly `token_budget` tokens, cut into short sequences.

        vLLM rounds up to a whole number of tokens for each frame of each item, which
        is many times the budget where videos are long.
        """
        capture = self.wrapped.prepare_encoder_cudagraph_capture_inputs(
            1, 1, 0, device, dtype, *args
        )
        max_frames = self.frames(token_budget, max_frames_per_batch)
        frames = max_sequences(token_budget, max_batch_size, max_frames)
        patches = token_budget * self.unit
        bound = patches
        if args[:1] == (_SHORT,):
            bound = self.short_bound
        values = capture.values if _HAS_PADDING_LOGICS else capture.buffers
        exact: dict[str, torch.Tensor | None] = {}
        for key, one in values.items():
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
        if _HAS_PADDING_LOGICS:
            return type(capture)(values=exact)
        pixels = capture.mm_kwargs["pixel_values"]
        pixels = self._share("pixel_values", pixels, token_budget)
        mm_kwargs = {**capture.mm_kwargs, "pixel_values": pixels}
        return type(capture)(mm_kwargs=mm_kwargs, buffers=exact)

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
        """Return the batch's own buffers; `fill` pads them to the graph's."""
        replay = self.wrapped.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, 0, 0, *args
        )
        if not _HAS_PADDING_LOGICS and "cu_window_seqlens" in replay.buffers:
            # 0.22.1 pads it to the longest prompt's tokens.
            side = self._window_side() * self.wrapped.visual.spatial_merge_size
            count = sum(
                t * -(-h // side) * -(-w // side) for t, h, w in self.grids(mm_kwargs)
            )
            cu_seqlens = replay.buffers["cu_window_seqlens"]
            replay.buffers["cu_window_seqlens"] = cu_seqlens[: count + 1]
        return replay

    def encoder_cudagraph_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the tower into the shared output, and leave nothing for vLLM to keep."""
        output = self.wrapped.encoder_cudagraph_forward(*args, **kwargs)
        if self.output is None:
            self.output = output.new_zeros((self._max_budget, *output.shape[1:]))
        self.output[: output.shape[0]].copy_(output)
        return output[:0]


def adopt(manager: EncoderCudaGraphManager, flashinfer: bool) -> None:
    """Turn a manager that vLLM has just built into one of this package's.

    Args:
        manager: Nothing is captured yet.
        flashinfer: Whether the engine asks for FLASHINFER.
    """
    names = {cls.__name__ for cls in type(manager.model).__mro__}
    is_exact = flashinfer and manager.config.modalities and names & _EXACT
    manager.__class__ = ExactManager if is_exact else PaddedManager
    manager.adopt()


def _unwrap(model: Any) -> Any:
    return model.wrapped if isinstance(model, _ExactModel) else model


def _short_bound(model: Any) -> int | None:
    """Return the longest sequence that some layer has another kernel for, or None."""
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    bounds = [
        layer.bounds[-1]
        for layer in model.visual.modules()
        if isinstance(layer, FlashInferViTAttention) and layer.bounds
    ]
    return max(bounds, default=None)
