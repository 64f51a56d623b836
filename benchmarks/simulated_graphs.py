# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of encoder CUDA graphs on a machine without a GPU.

A simulated graph runs the captured forward again, on the very buffers that a real one
would read and write: what a replay leaves in them shows as it does on a GPU. What the
host read at capture, bounds of the sequence lengths, stays what it was then.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from vllm_flashinfer_vit.engine.counting import LayerCounts
from vllm_flashinfer_vit.towers.built import Built
from vllm_flashinfer_vit.towers.spec import FAMILIES, model_module
from vllm_flashinfer_vit.towers.tower import Tower


class SimulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`; `run` is what a replay does."""

    run: Callable[[], None] | None = None

    def replay(self) -> None:
        """Do what was captured, on what the buffers hold now."""
        assert self.run is not None
        with torch.inference_mode():
            self.run()


@contextmanager
def simulated_graphs() -> Iterator[None]:
    """Let vLLM's manager capture and replay on the CPU."""
    from vllm.v1.worker import encoder_cudagraph

    original = encoder_cudagraph.EncoderCudaGraphManager._capture_budget_graph

    @functools.wraps(original)
    def capture(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for path, graphs in self.budget_graphs.items():
            for meta in graphs.values():
                if meta.graph.run is None:
                    meta.graph.run = _forward(self.model, meta, path)

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", SimulatedGraph),
        mock.patch.object(torch.cuda, "graph", lambda *_, **__: nullcontext()),
        mock.patch.object(
            encoder_cudagraph, "current_stream", lambda: None, create=True
        ),
        mock.patch.object(
            encoder_cudagraph.EncoderCudaGraphManager, "_capture_budget_graph", capture
        ),
    ):
        yield


def _forward(model: Any, meta: Any, path: str) -> Callable[[], None]:
    # Those without a dimension are on the host on a GPU machine, too.
    captured = {
        key: buffer if buffer is None or buffer.dim() else buffer.clone()
        for key, buffer in meta.input_buffers.items()
    }

    def run() -> None:
        # A replay runs no Python that could count.
        with mock.patch.object(LayerCounts, "passed", lambda *_: None):
            output = model.encoder_cudagraph_forward({**captured}, path=path)
        meta.output_buffer.copy_(output)

    return run


def model_around(tower: Tower, frames_per_video: int) -> Any:
    """Return vLLM's model of a tower, without a language model.

    Args:
        tower: From `build_tower`.
        frames_per_video: What the processor would say of the longest video.
    """
    family = tower.spec.family
    cls = getattr(model_module(family), FAMILIES[family].model)
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.visual = tower.visual
    model.vllm_config = tower.vllm_config
    model.model_config = tower.vllm_config.model_config
    model.multimodal_config = tower.vllm_config.model_config.multimodal_config
    model.is_multimodal_pruning_enabled = False
    model.get_max_frames_per_video = lambda: frames_per_video
    return model


def build_manager(
    tower: Built,
    *,
    max_tokens: int,
    budgets: Sequence[int] = (),
    max_items: int = 0,
    max_frames: int | None = None,
    frames_per_video: int = 2,
    allow_video: bool = True,
    data_parallel: bool = False,
    ranks: int = 1,
) -> Any:
    """Return vLLM's manager for a tower, nothing captured yet.

    Args:
        tower: From `build_tower`, or a whole model of `build_model`.
        max_tokens: The scheduler's tokens a step, which bound automatic budgets.
        budgets: `encoder_cudagraph_token_budgets`, empty for automatic ones.
        max_items: `encoder_cudagraph_max_vision_items_per_batch`, 0 for automatic.
        max_frames: `encoder_cudagraph_max_frames_per_batch`, None for automatic.
        frames_per_video: As for `model_around`.
        allow_video: Whether a prompt may hold a video.
        data_parallel: Whether each of two ranks encodes a part of a batch.
        ranks: How many share the heads of a tower otherwise.
    """
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    multimodal = SimpleNamespace(
        mm_encoder_attn_backend=(
            tower.vllm_config.model_config.multimodal_config.mm_encoder_attn_backend
        ),
        mm_encoder_tp_mode="data" if data_parallel else "weights",
        get_limit_per_prompt=lambda modality: int(allow_video or modality != "video"),
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            encoder_cudagraph_token_budgets=list(budgets),
            encoder_cudagraph_max_vision_items_per_batch=max_items,
            encoder_cudagraph_max_frames_per_batch=max_frames,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
        model_config=SimpleNamespace(
            multimodal_config=multimodal, max_model_len=max_tokens
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2 if data_parallel else ranks
        ),
    )
    model: Any = tower.visual
    if isinstance(tower, Tower):
        model = model_around(tower, frames_per_video)
    model.vllm_config, model.model_config = config, config.model_config
    with tower.running():
        return EncoderCudaGraphManager(config, tower.device, tower.dtype, model)


def capture(manager: Any, tower: Built) -> None:
    """Capture all graphs of a manager; call it within `simulated_graphs`."""
    with tower.running():
        manager.capture(None)
