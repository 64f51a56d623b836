# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs that hold exactly their budget, at finer budgets, in one memory.

For the models that `models.exact_graphs` lists: vLLM rounds most of their buffers up,
to many times the budget where videos are long, and has each graph keep its own.
"""

import functools
import itertools
from collections.abc import Hashable
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_flashinfer_vit.blocks.attach import has_programs
from vllm_flashinfer_vit.graphs.layouts import Layout, lengths
from vllm_flashinfer_vit.graphs.model import SHORT, SINGLE, ExactModel
from vllm_flashinfer_vit.graphs.padded import PaddedManager, graph_name
from vllm_flashinfer_vit.graphs.sizes import fill, fine_budgets, largest_budget

logger = init_logger("vllm.plugins.flashinfer_vit")


class ExactManager(PaddedManager):
    """Captures towers without padding of its own, and shares the buffers."""

    model: ExactModel
    token_budgets: list[int]
    # While vLLM captures its own set of graphs.
    _captures_vllms = False

    def adopt_exact(self, layout: Layout, strict: bool) -> None:
        """Take over a manager that vLLM has just built.

        Args:
            layout: What the buffers of its model are.
            strict: As in `Settings`.
        """
        self.adopt(strict)
        if layout.is_packed:
            # In place of vLLM's own for Qwen2.5-VL and Kimi, too, which look at no
            # size.
            for key in self.config.buffer_keys:
                self.config.padding_logics[key] = functools.partial(fill, key)
        smallest, _ = self.model.get_encoder_cudagraph_budget_range(self.vllm_config)
        compilation = self.vllm_config.compilation_config
        # None where graphs serve every batch.
        self._most_tokens: int | None = None
        self._step_tokens = self.token_budgets[-1]
        if not compilation.encoder_cudagraph_token_budgets:
            self._choose_budgets(layout, layout.row_tokens(smallest, ()))
        has_frames = compilation.encoder_cudagraph_max_frames_per_batch is not None
        self.model = ExactModel(
            self.model,
            layout,
            smallest,
            self.token_budgets[-1],
            has_frames,
            getattr(self, "_capture_axes", ()),
            # An image is one row, and so is a frame.
            max(self.max_batch_size, self.max_frames_per_batch)
            if layout.by_width
            else None,
        )
        # Of dense towers: the budget of a graph, by the tokens that it really holds.
        self._of_tokens: dict[tuple[Any, ...], int] = {}
        self._say_what_is_captured()

    def _choose_budgets(self, layout: Layout, step: int) -> None:
        first, last = self.token_budgets[0], self.token_budgets[-1]
        # Ranks have items of their own, as wholes, or share the work on each.
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        whole, shared = (ranks, 1) if self.use_dp else (1, ranks)
        is_quick = has_programs(self.model.modules())
        unit = layout.patches_per_token(self.model)
        useful = largest_budget(first, last, unit, shared, is_quick)
        # Other blocks take the host several times as long: vLLM cuts larger batches.
        if is_quick and useful < last:
            self._most_tokens = useful * whole
        self.token_budgets = fine_budgets(first, useful, step)
        # vLLM 0.25.1 has `token_budgets` only.
        if hasattr(self, "path_token_budgets"):
            self.path_token_budgets = {"default": list(self.token_budgets)}

    def _say_what_is_captured(self) -> None:
        text = f"one for each budget of {self.token_budgets} tokens"
        if widths := list(itertools.chain(*self.model.axis_keys)):
            text = (
                f"one for each number of images of {widths} tokens that budgets of "
                f"{self.token_budgets} tokens hold"
            )
        if budgets := self._more_budgets[SINGLE]:
            text += f", another one for {budgets}, for batches of one image"
        if budgets := self._more_budgets[SHORT]:
            text += (
                f", another one for {budgets}, for batches without a sequence of more "
                f"than {self.model.short_bound} patches"
            )
        if self._most_tokens is not None:
            text += (
                f"; batches of more than {self._most_tokens} tokens keep the GPU busy "
                "without one, and need no padding then"
            )
        logger.info(
            "vllm-flashinfer-vit captures %d encoder CUDA graphs: %s",
            self.get_num_graphs_to_capture(),
            text,
        )
        unused = [b for b in self.token_budgets if not self._holds_a_row(b)]
        if unused:
            logger.warning(
                "%s: encoder_cudagraph_token_budgets of %s hold not one image, and are "
                "not captured",
                self._model_name(),
                unused,
            )

    def _is_large(self, mm_kwargs: dict[str, Any]) -> bool:
        if self._most_tokens is None:
            return False
        # Kimi-K2.5 gives videos, of which it captures none, more than any step has.
        tokens = [n for n in self._tokens(mm_kwargs) if n <= self._step_tokens]
        return (
            sum(tokens) > self._most_tokens
            # One rank would have it to itself.
            or max(tokens, default=0) > self.token_budgets[-1]
        )

    def _tokens(self, mm_kwargs: dict[str, Any]) -> list[int]:
        return [spec.output_tokens for spec in self._get_item_specs(mm_kwargs)]

    def _holds_a_row(self, token_budget: int) -> bool:
        return any(self.model.tokens(token_budget, k) for k in self.model.axis_keys)

    def _frames(self, token_budget: int) -> int:
        return self.model.frames(token_budget, self.max_frames_per_batch)

    def _model_name(self) -> str:
        return type(self.model.wrapped).__name__

    @functools.cached_property
    def _more_budgets(self) -> dict[str, list[int]]:
        """Budgets that are captured once more, by the set of graphs."""
        budgets: dict[str, list[int]] = {SHORT: [], SINGLE: []}
        if not self.model.layout.is_packed:
            return budgets
        bound = self.model.short_bound
        for smaller, budget in itertools.pairwise([0, *self.token_budgets]):
            sequences = self.model.sequences(
                budget, self.max_batch_size, self.max_frames_per_batch
            )
            if sequences > 1:
                budgets[SINGLE].append(budget)
            if bound is None:
                continue
            # If the most that there can be fit a smaller graph, none comes here.
            is_reached = smaller * self.model.unit < sequences * bound
            if is_reached and bound < budget * self.model.unit:
                budgets[SHORT].append(budget)
        return budgets

    def get_num_graphs_to_capture(self) -> int:
        """Count the graphs, for vLLM's estimate of their memory."""
        sizes = (
            {self.model.tokens(budget, keys) for budget in self.token_budgets} - {0}
            for keys in self.model.axis_keys
        )
        vllms = sum(map(len, sizes))
        if self._captures_vllms:
            return vllms
        return vllms + sum(map(len, self._more_budgets.values()))

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture all graphs, and those for one image and for short sequences.

        A graph holds one kernel for all its replays, which must cope with a sequence
        that fills the budget, and starts blocks for each sequence that there may be.
        Short sequences have a faster kernel; so has a single one, which also needs no
        room for others.
        """
        # vLLM says how many, and warns above 64 that capture axes are too many.
        self._captures_vllms = True
        try:
            super().capture(*args, **kwargs)
        finally:
            self._captures_vllms = False
        for path, budgets in self._more_budgets.items():
            for budget in reversed(budgets):
                self._capture_budget_graph(budget, path=path)

    def _capture_budget_graph(
        self,
        token_budget: int,
        path: str = "default",
        *args: Any,
        axis_keys: tuple[Hashable, ...] = (),
        **kwargs: Any,
    ) -> None:
        tokens = self.model.tokens(token_budget, axis_keys)
        # vLLM 0.25.1 counts what is in it after the capture.
        graphs = self._get_graph_set(path)
        if not tokens:
            # A row of this width needs a larger budget: nothing would run in it.
            return
        keys = {"axis_keys": axis_keys} if axis_keys else {}
        name = (tokens, path, axis_keys)
        other = self._of_tokens.setdefault(name, token_budget)
        if other == token_budget:
            super()._capture_budget_graph(token_budget, path, *args, **keys, **kwargs)
            return
        # A larger budget was captured with as many rows.
        graphs[graph_key(token_budget, axis_keys)] = graphs[graph_key(other, axis_keys)]
        self._captured[graph_name(token_budget, path, axis_keys)] = self._captured[
            graph_name(other, path, axis_keys)
        ]

    def _execute_local(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Encode items, after normalising pixels where only the model would."""
        wrapped = self.model.wrapped
        # In 0.28 and 0.29 the model normalises in `_process_image_input`, which graphs
        # do not pass.
        visual = getattr(wrapped, "visual", None)
        if hasattr(wrapped, "input_norm") and not hasattr(visual, "input_norm"):
            mm_kwargs = {
                key: wrapped.input_norm(value, self.dtype)
                if key.startswith("pixel_values")
                else value
                for key, value in mm_kwargs.items()
            }
        return super()._execute_local(mm_kwargs)

    def clear(self) -> None:
        """Release the graphs and the shared buffers."""
        super().clear()
        self.model.clear()
        self._of_tokens.clear()

    def _replay(
        self,
        mm_kwargs: dict[str, Any],
        token_budget: int,
        path: str,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        path = self._path_of(mm_kwargs, token_budget) or path
        real = sum(self._tokens(mm_kwargs))
        output = super()._replay(mm_kwargs, token_budget, path, *args, **kwargs)
        if output is None:
            return None
        padded = self.model.tokens(token_budget, kwargs.get("axis_keys", ()))
        self.counting.add(real, "graph_real_tokens")
        self.counting.add(padded, "graph_padded_tokens")
        return self.model.output(token_budget)

    def _path_of(self, mm_kwargs: dict[str, Any], token_budget: int) -> str | None:
        """Return the set of a batch's graph; None if it is vLLM's own."""
        further = [
            p for p, budgets in self._more_budgets.items() if token_budget in budgets
        ]
        if not further:
            return None
        # Grids may lie on the device: reading them there waits, after a replay for it.
        with gpu_sync_allowed():
            of_batch = lengths(mm_kwargs)
        return next((p for p in further if self.model.holds(p, of_batch)), None)


def graph_key(token_budget: int, axis_keys: tuple[Hashable, ...]) -> Any:
    """Return what vLLM keeps a graph under."""
    return (token_budget, axis_keys) if axis_keys else token_budget
