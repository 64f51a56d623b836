# SPDX-License-Identifier: Apache-2.0
"""An engine's encoder as one call, by its graphs and in eager mode, compared."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from correctness import relative_error
from engines import random_pixels
from graph_requests import MERGE, Request, patches
from vllm_flashinfer_vit.graphs.sizes import is_cu_seqlens

# Functions whose tensors hold whatever was in their memory before.
_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class Captured(NamedTuple):
    """What a graph was captured for, or served a batch with.

    Attributes:
        patches: Patches that it computes, padding included.
        metadata: By vLLM's names: the bounds of the sequence lengths, in patches, on
            the CPU, as vLLM's models hand them over; of a graph that has served a
            batch also the offsets that it read, of empty sequences, too.
    """

    patches: int
    metadata: dict[str, torch.Tensor]


class Batch(NamedTuple):
    """A part of a request, as a manager cut it.

    Attributes:
        items: Its items, by their place in the request.
        inputs: Their pixels and grids.
        graph: What served them, or None if that was eager mode.
    """

    items: list[int]
    inputs: dict[str, Any]
    graph: Captured | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of each item."""
        name = next(key for key in self.inputs if key.endswith("_grid_thw"))
        return [patches([grid]) // MERGE**2 for grid in self.inputs[name]]


def captured(manager: Any) -> dict[tuple[str, int], Captured]:
    """Return each graph by the name of its set and its budget.

    Nothing may have been replayed: a replay writes its own lengths over the bounds in
    the buffers, although the graph keeps the kernels that were chosen by them.
    """
    found = {}
    for path, graphs in manager.budget_graphs.items():
        for budget, graph in graphs.items():
            buffers = graph.input_buffers
            bounds = {
                key: torch.tensor(int(buffer), dtype=torch.int32)
                for key, buffer in buffers.items()
                if key.startswith("max_seqlen") and buffer is not None
            }
            # Stock's graphs compute more than their budget.
            found[path, budget] = Captured(buffers["pixel_values"].shape[0], bounds)
    return found


def offsets_of(manager: Any, path: str, budget: int) -> dict[str, torch.Tensor]:
    """Return copies of what the last replay of a graph read of its sequences."""
    buffers = manager.budget_graphs[path][budget].input_buffers
    return {
        key: buffer.clone()
        for key, buffer in buffers.items()
        if buffer is not None and (is_cu_seqlens(key) or key == "sequence_lengths")
    }


class Encoder:
    """A manager and its model, as one call."""

    def __init__(self, manager: Any, model: Any, device: torch.device) -> None:
        self.manager = manager
        self._model = model
        self.device = device
        self._is_qwen2_5 = type(model).__name__.startswith("Qwen2_5")
        self._captured = captured(manager)

    def inputs(self, request: Request, seed: int) -> dict[str, Any]:
        """Return random pixels and the grids, as the engine batches them."""
        modality, grids = request
        generator = torch.Generator(self.device).manual_seed(seed)
        pixels = random_pixels(self._model.visual, patches(grids), generator)
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        inputs = {name: pixels, f"{modality}_grid_thw": torch.tensor(grids)}
        if modality == "video" and self._is_qwen2_5:
            inputs["second_per_grid_ts"] = torch.ones(len(grids))
        return inputs

    def graph(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the embeddings by way of the manager."""
        items = self.manager.execute(dict(inputs))
        # It leaves a large batch to the model, as a runner then does.
        return self.eager(inputs) if items is None else torch.cat(list(items))

    @contextmanager
    def batches(self) -> Iterator[list[Batch]]:
        """Collect the batches that the manager runs within the context."""
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        found: list[Batch] = []
        select = self._model.select_encoder_cudagraph_items
        # Below this package's manager, which chooses the set of graphs.
        run = EncoderCudaGraphManager._run_budget_graph

        def note_batch(inputs: dict[str, Any], items: list[int]) -> dict[str, Any]:
            batch = select(inputs, items)
            found.append(Batch(list(items), batch))
            return batch

        def note_graph(
            manager: Any,
            batch: dict[str, Any],
            budget: int,
            path: str = "default",
            *args: Any,
            **kw: Any,
        ) -> torch.Tensor | None:
            output = run(manager, batch, budget, path, *args, **kw)
            if output is not None:
                graph = self._captured[path, budget]
                told = graph.metadata | offsets_of(manager, path, budget)
                found[-1] = found[-1]._replace(graph=graph._replace(metadata=told))
            return output

        with (
            mock.patch.object(
                self._model, "select_encoder_cudagraph_items", note_batch
            ),
            mock.patch.object(EncoderCudaGraphManager, "_run_budget_graph", note_graph),
        ):
            yield found

    def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the embeddings without graphs."""
        kwargs = {k: v for k, v in inputs.items() if k != "second_per_grid_ts"}
        return self._model.encoder_eager_forward(kwargs)

    def eager_as(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return a request's embeddings in eager mode, batch by batch as served.

        For a batch that a graph served, eager mode takes the graph's kernels. Attention
        layers choose one by the bound of the sequence lengths, which also sets the
        blocks of `triton_window` and cuDNN's bucket, and by the rows to a sequence.
        FA3 splits keys by how many sequences there are. cuBLAS, and who runs a GEMM, go
        by the number of rows. So eager mode gets the bounds that the graph was captured
        with, the sequences that it read, and as many rows.

        Rows of no sequence are for graphs alone, which clear them in each layer. In
        eager mode a kernel leaves them as they are, and a NaN from unwritten memory
        would reach the sequences. So all memory begins as zeros here.
        """
        items: dict[int, torch.Tensor] = {}
        for batch in batches:
            if batch.graph is None:
                output = self.eager(batch.inputs)
            else:
                inputs = _filled(batch.inputs, batch.graph.patches)
                with self._told(batch.graph.metadata), _Zeros():
                    output = self.eager(inputs)
            output = output[: sum(batch.tokens)]
            items |= zip(batch.items, output.split(batch.tokens), strict=True)
        return torch.cat([items[i] for i in range(len(items))])

    @contextmanager
    def _told(self, metadata: dict[str, torch.Tensor]) -> Iterator[None]:
        """Tell the layers a graph's bounds and sequences, not those of the batch."""
        visual = self._model.visual
        prepare = visual.prepare_encoder_metadata

        def told(*args: Any, **kw: Any) -> dict[str, Any]:
            return prepare(*args, **kw) | metadata

        with mock.patch.object(visual, "prepare_encoder_metadata", told):
            yield


class _Zeros(TorchFunctionMode):
    """Within it no tensor holds what was in its memory before."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


def _filled(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Return inputs of `count` patches: frames of one token after the batch's own.

    The offsets that a graph read leave these frames out.
    """
    pixels = next(key for key in inputs if key.startswith("pixel_values"))
    grids = next(key for key in inputs if key.endswith("_grid_thw"))
    rest = count - inputs[pixels].shape[0]
    if not rest:
        return inputs
    return {
        pixels: torch.nn.functional.pad(inputs[pixels], (0, 0, 0, rest)),
        grids: [*inputs[grids], [rest // MERGE**2, MERGE, MERGE]],
    }


class Found(NamedTuple):
    """What one request's graphs returned, and how many tokens they computed.

    Attributes:
        rel_err: Relative error against eager mode.
        bitwise: Whether all bits are eager mode's.
        same_kernel_rel_err: Relative error against eager mode with the graphs' kernels.
            0 where `bitwise` is true: then it is not computed.
        same_kernel_bitwise: As `bitwise`, of the same.
        padded: Tokens that the graphs computed.
        real: Tokens of the batches in them.
        hits: Items that graphs served.
        misses: Items that ran without a graph, but for those of batches that need none.
    """

    rel_err: float
    bitwise: bool
    same_kernel_rel_err: float
    same_kernel_bitwise: bool
    padded: int
    real: int
    hits: int
    misses: int


def compare(encoder: Encoder, inputs: dict[str, Any]) -> Found:
    """Compare what graphs return for one request with eager mode."""
    manager = encoder.manager
    hits, misses = manager.graph_hits, manager.graph_misses
    with encoder.batches() as batches:
        ours = encoder.graph(inputs)
    counts = manager.graph_hits - hits, manager.graph_misses - misses
    plain = same_kernel = difference(ours, encoder.eager(inputs))
    if not plain[1]:
        same_kernel = difference(ours, encoder.eager_as(batches))
    padded = sum(b.graph.patches for b in batches if b.graph) // MERGE**2
    real = sum(sum(b.tokens) for b in batches if b.graph)
    return Found(*plain, *same_kernel, padded, real, *counts)


def difference(ours: torch.Tensor, eager: torch.Tensor) -> tuple[float, bool]:
    """Return the relative error, and whether all bits are equal."""
    error = relative_error(ours.float(), eager.float())
    return error, bool(torch.equal(ours, eager))
