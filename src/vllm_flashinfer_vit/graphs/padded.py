# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of encoder CUDA graphs, with buffers padded as attention needs them.

vLLM fills the unused end of a buffer with zeros. Prefix sums that end in zeros have a
negative length, which kernels for plain batches cannot take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_flashinfer_vit.engine.counting import Counting
from vllm_flashinfer_vit.engine.metrics import Key
from vllm_flashinfer_vit.graphs.sizes import (
    ReplayError,
    ReplayMissingError,
    ReplaySizeError,
    fill,
    fill_by,
)
from vllm_flashinfer_vit.settings import ENV_STRICT

logger = init_logger("vllm.plugins.flashinfer_vit")

# What models get in place of pixels, by the names of `--enable-mm-embeds`.
_EMBEDDINGS = frozenset({"image_embeds", "video_embeds"})
# Of batches that a graph cannot hold, by the label of their counter.
_REMEDIES = {
    "graph_size": "raise encoder_cudagraph_max_frames_per_batch or "
    "encoder_cudagraph_max_vision_items_per_batch in the compilation config",
    "graph_pixels": "give images of 8 bits",
    "graph_missing": "start the engine with the mm_processor_kwargs that requests "
    "bring: graphs are captured for the images of those",
}


class PaddedManager(EncoderCudaGraphManager):
    """Pads prefix sums with their last value, for every model that says nothing.

    Attributes:
        counting: The engine's counters.
        strict: Whether a batch that no graph holds is an error.
    """

    counting: Counting
    strict: bool

    def adopt(self, strict: bool) -> None:
        """Take over a manager that vLLM has just built.

        Args:
            strict: As in `Settings`.
        """
        self.counting = Counting.of(self.vllm_config)
        self.strict = strict
        # What the graphs hold that vLLM captures by its method, by what it names them.
        self._captured: dict[tuple[Any, ...], dict[Key, int]] = {}
        logics = self.config.padding_logics
        for key in self.config.buffer_keys:
            own = logics.get(key)
            logics[key] = (
                partial(fill, key) if own is None else partial(fill_by, own, key)
            )

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Encode items, and count those that a graph served.

        None for those that are embeddings already, for those that are faster without a
        graph, and for those that ranks cannot gather: runners have the model take them.
        """
        if not _EMBEDDINGS.isdisjoint(mm_kwargs):
            return None
        if self.use_dp and self._has_endless(mm_kwargs):
            self._leave(mm_kwargs, "graph_misses")
            return None
        if self._is_large(mm_kwargs):
            self._leave(mm_kwargs, "graph_large")
            return None
        hits, misses = self.graph_hits, self.graph_misses
        outputs = super().execute(mm_kwargs)
        self.counting.add(self.graph_hits - hits, "graph_hits")
        self.counting.add(self.graph_misses - misses, "graph_misses")
        return outputs

    def _leave(self, mm_kwargs: dict[str, Any], counter: str) -> None:
        """Count items that the model is to take."""
        # Ranks with items of their own would each count all of them.
        if not self.use_dp or get_tensor_model_parallel_rank() == 0:
            self.counting.add(len(self._get_item_specs(mm_kwargs)), counter)

    def _has_endless(self, mm_kwargs: dict[str, Any]) -> bool:
        """Return whether an item is said to have more tokens than any prompt.

        So are Kimi-K2.5's videos, of which it captures none: ranks that encode items of
        their own would gather as many tokens.
        """
        most = self.vllm_config.model_config.max_model_len
        specs = self._get_item_specs(mm_kwargs)
        return any(spec.output_tokens > most for spec in specs)

    def _is_large(self, mm_kwargs: dict[str, Any]) -> bool:
        """Return whether a graph would only pad a batch."""
        return False

    @cached_property
    def _sharding(self) -> list[Any]:
        """Return the modules that give each rank a part of a batch, and gather."""
        model: Any = self.model
        return [m for m in model.modules() if getattr(m, "use_data_parallel", False)]

    @contextmanager
    def _one_rank(self) -> Iterator[None]:
        """Have the model encode all that it is given.

        Ranks have a share each already. Collectives within wait for ranks that have
        none, or another number of batches.
        """
        sharding = self._sharding if self.use_dp else []
        for module in sharding:
            module.use_data_parallel = False
        try:
            yield
        finally:
            for module in sharding:
                module.use_data_parallel = True

    def _execute_local(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        with self._one_rank():
            return super()._execute_local(mm_kwargs)

    def _capture_budget_graph(
        self, token_budget: int, path: str = "default", *args: Any, **kwargs: Any
    ) -> None:
        with self._one_rank(), self.counting.noting() as noted:
            super()._capture_budget_graph(token_budget, path, *args, **kwargs)
        self._captured[graph_name(token_budget, path, *args, **kwargs)] = noted

    def _run_budget_graph(
        self,
        mm_kwargs: dict[str, Any],
        token_budget: int,
        path: str = "default",
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        try:
            output = self._replay(mm_kwargs, token_budget, path, *args, **kwargs)
        except ReplayError as error:
            self.graph_misses += len(self._get_item_specs(mm_kwargs))
            return self._run_eager(mm_kwargs, path, error)
        if output is not None:
            return output
        # vLLM has counted the miss, and would stop the engine.
        name = graph_name(token_budget, path, *args, **kwargs)
        text = f"{self._model_name()}: there is no graph {name}; "
        missing = ReplayMissingError(text + _REMEDIES["graph_missing"])
        return self._run_eager(mm_kwargs, path, missing)

    def _replay(
        self,
        mm_kwargs: dict[str, Any],
        token_budget: int,
        path: str,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Run the graph of a budget, or return None if there is none.

        Raises:
            ReplayError: The batch does not fit it.
        """
        try:
            output = super()._run_budget_graph(
                mm_kwargs, token_budget, path, *args, **kwargs
            )
        except ReplaySizeError as error:
            raise ReplaySizeError(self._explain(error, token_budget)) from None
        if output is not None:
            name = graph_name(token_budget, path, *args, **kwargs)
            self.counting.replayed(self._captured.get(name, {}))
        return output

    def _run_eager(
        self, mm_kwargs: dict[str, Any], path: str, error: ReplayError
    ) -> torch.Tensor:
        """Serve a batch that no graph holds, such as a long video of small frames."""
        if self.strict:
            raise type(error)(f"{error}, or unset {ENV_STRICT}") from None
        kind = error.kind
        # No sizes, which would make it another line for each of them.
        logger.warning_once(
            "%s: a batch did not fit its encoder CUDA graph (%s) and ran without one; "
            "others of its kind are not said, but counted. If there are many, %s.",
            self._model_name(),
            kind,
            _REMEDIES[kind],
        )
        logger.debug("%s. The batch runs without a CUDA graph.", error)
        self.counting.add(1, "fallbacks", kind)
        # Most models have one path, and some of them know none.
        of_path = {} if path == "default" else {"path": path}
        with torch.inference_mode():
            return self.model.encoder_eager_forward(mm_kwargs, **of_path)

    def _frames(self, token_budget: int) -> int:
        """Return how many video frames a budget's graph was captured for."""
        return self.max_frames_per_batch

    def _model_name(self) -> str:
        return type(self.model).__name__

    def _explain(self, error: ReplaySizeError, token_budget: int) -> str:
        return (
            f"{self._model_name()}: {error} (budget {token_budget} tokens, "
            f"{self.max_batch_size} items, {self._frames(token_budget)} video frames); "
            + _REMEDIES["graph_size"]
        )


def graph_name(
    token_budget: int, path: str, axis_keys: tuple[Any, ...] = ()
) -> tuple[Any, ...]:
    """Name a graph; from vLLM 0.33 on there may be several for a budget."""
    return token_budget, path, axis_keys
