# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of encoder CUDA graphs, with buffers padded as attention needs them.

vLLM fills the unused end of a buffer with zeros. Prefix sums that end in zeros have a
negative length, which kernels for plain batches cannot take.
"""

from functools import partial
from typing import Any

import torch
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_flashinfer_vit.engine.counting import Counting, Kind
from vllm_flashinfer_vit.graphs.sizes import ReplaySizeError, fill


class PaddedManager(EncoderCudaGraphManager):
    """Pads prefix sums with their last value, for every model that says nothing.

    Attributes:
        counting: The engine's counters.
    """

    counting: Counting

    def adopt(self) -> None:
        """Take over a manager that vLLM has just built."""
        self.counting = Counting.of(self.vllm_config)
        # What the graphs hold that vLLM captures by its method, by budget and path.
        self._captured: dict[tuple[int, str], dict[Kind, int]] = {}
        logics = self.config.padding_logics
        for key in self.config.buffer_keys:
            logics.setdefault(key, partial(fill, key))

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Encode items, and count those that a graph served."""
        hits, misses = self.graph_hits, self.graph_misses
        outputs = super().execute(mm_kwargs)
        self.counting.add(self.graph_hits - hits, "graph_hits")
        self.counting.add(self.graph_misses - misses, "graph_misses")
        return outputs

    def _capture_budget_graph(
        self, token_budget: int, path: str = "default", *args: Any, **kwargs: Any
    ) -> None:
        with self.counting.noting() as noted:
            super()._capture_budget_graph(token_budget, path, *args, **kwargs)
        self._captured[token_budget, path] = noted

    def _run_budget_graph(
        self,
        mm_kwargs: dict[str, Any],
        token_budget: int,
        path: str = "default",
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        try:
            output = super()._run_budget_graph(
                mm_kwargs, token_budget, path, *args, **kwargs
            )
        except ReplaySizeError as error:
            raise ReplaySizeError(self._explain(error, token_budget)) from None
        if output is not None:
            self.counting.replayed(self._captured.get((token_budget, path), {}))
        return output

    def _frames(self, token_budget: int) -> int:
        """Return how many video frames a budget's graph was captured for."""
        return self.max_frames_per_batch

    def _model_name(self) -> str:
        return type(self.model).__name__

    def _explain(self, error: ReplaySizeError, token_budget: int) -> str:
        return (
            f"{self._model_name()}: {error} (budget {token_budget} tokens, "
            f"{self.max_batch_size} items, {self._frames(token_budget)} video frames). "
            "Raise encoder_cudagraph_max_frames_per_batch or "
            "encoder_cudagraph_max_vision_items_per_batch in the compilation config"
        )
