# SPDX-License-Identifier: Apache-2.0
"""What an engine's encoder did in a step, counted once a pass.

Profiling, warm-up and capture are no steps, so they do not count. A pass adds to
integers; the step's end hands them to `metrics`, when all work has been launched. What
FP8 scales cut off is counted on the device, and read now and then.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakValueDictionary

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_flashinfer_vit.engine import warmup
from vllm_flashinfer_vit.engine.clipping import ClipReader
from vllm_flashinfer_vit.engine.metrics import Key, of_process
from vllm_flashinfer_vit.engine.sleep import may_sleep
from vllm_flashinfer_vit.fp8.state import ScaleState
from vllm_flashinfer_vit.machine.per_engine import PerEngine
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan

logger = init_logger("vllm.plugins.flashinfer_vit")

# How the blocks of a pass ran; see `metrics.SERIES`.
RanBy = Literal["graph", "blocks", "attention"]
# Kernel and class of a pass's attention.
Kind = tuple[str, str]

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


class Counting(PerEngine):
    """What one engine counts.

    Attributes:
        is_on: Whether a pass counts now.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Begin with nothing; use `of`."""
        super().__init__(vllm_config)
        self.is_on = False
        self._counts: Counter[Key] = Counter()
        self._noted: dict[Key, int] | None = None
        self._first: Kind | None = None
        self._clips = ClipReader(may_sleep=may_sleep(vllm_config))
        # By tower: dead once its layers are.
        self._last: WeakValueDictionary[str, LayerCounts] = WeakValueDictionary()

    def enroll(
        self, layer_name: str, plan: Plan, scales: ScaleState | None
    ) -> "LayerCounts":
        """Return what counts for a layer: its tower's last one so far.

        Args:
            layer_name: Those of a tower differ by the indices of blocks.
            plan: The layer's.
            scales: Its FP8 scales, or None if it keeps none.
        """
        self._clips.enroll(scales)
        of_process().add(("attention_layers", "vllm-flashinfer-vit"))
        tower = _INDEX.sub("*", layer_name)
        before = self._last.get(tower)
        if before is not None:
            before.is_last = False
        new = self._last[tower] = LayerCounts(self, plan, is_first=before is None)
        return new

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what a step of the engine does, and export it at its end."""
        before = _built()
        self._clips.begin()
        self.is_on = True
        try:
            yield
            # Not after an error: asking a device that failed would raise another one.
            self._counts.update(self._clips.read())
        finally:
            self.is_on = False
            self._export()
            built = _built()
            metrics = of_process()
            if built != before:
                metrics.add(("triton_kernels_after_start",), built[0] - before[0])
                metrics.add(("cudnn_plans_after_start",), built[1] - before[1])
            metrics.say_if_due()

    def end(self) -> None:
        """Count what the device still holds, and log it; call it as the engine ends."""
        try:
            self._counts.update(self._clips.read_last())
        except RuntimeError as error:
            logger.warning("the last counts of FP8 blocks could not be read: %s", error)
        self._export()
        of_process().say()

    def _export(self) -> None:
        metrics = of_process()
        for key, count in self._counts.items():
            metrics.add(key, count)
        self._counts.clear()

    @contextmanager
    def noting(self) -> Iterator[dict[Key, int]]:
        """Note what a CUDA graph captures, which is to count when the graph runs.

        What is captured runs once before, and is noted once.

        Yields:
            What each replay adds, by counter.
        """
        noted: dict[Key, int] = {}
        self._noted, self.is_on = noted, True
        try:
            yield noted
        finally:
            self._noted, self.is_on = None, False

    def passed(self, kind: Kind, path: RanBy, rows: int, is_first: bool) -> None:
        """Count a pass while `is_on`.

        Args:
            kind: Of a block's attention.
            path: How the blocks run.
            rows: The block's, in patches.
            is_first: Whether it is the first block, not the last. The last one counts
                where it is of another kind.
        """
        if is_first:
            self._first = kind
        elif kind == self._first:
            return
        path = path if self._noted is None else "graph"
        self.add(1, "encoder_passes", *kind, path)
        self.add(rows, "encoder_patches", *kind, path)

    def replayed(self, noted: dict[Key, int]) -> None:
        """Count the replay of a graph that captured what is `noted`."""
        for key, amount in noted.items():
            self.add(amount, *key)

    def add(self, amount: int, *key: str) -> None:
        """Add to a counter of `metrics.SERIES`, given its name and labels."""
        if not self.is_on or not amount:
            return
        if self._noted is not None:
            self._noted[key] = amount
        else:
            self._counts[key] += amount


class LayerCounts:
    """Counts passes where a layer is the first one of its tower, or the last.

    Attributes:
        is_first: Whether it is the first one.
        is_last: Whether it is the last one.
        plan: Which kernel serves which batches.
    """

    def __init__(self, engine: Counting, plan: Plan, *, is_first: bool) -> None:
        """Count for an engine; use `Counting.enroll`."""
        self.is_first, self.is_last = is_first, True
        self._engine = engine
        self.plan = plan

    @property
    def is_end(self) -> bool:
        """Whether `passed` is to be called."""
        return self.is_first or self.is_last

    def passed(
        self,
        path: RanBy,
        batch: Batch,
        is_first: bool | None = None,
    ) -> None:
        """Count a pass of the tower, by the kernel that this layer attends by.

        Args:
            path: How its blocks run.
            batch: What it attends over; of q only the rows count.
            is_first: Whether it runs first, as who calls it knows; None if it was built
                first.
        """
        rows = batch.q.shape[0]
        if not self._engine.is_on or not rows:
            return
        found = self.plan.class_for(batch.longest)
        kind = found.kernel_for(batch.mean_len), str(found.max_len or "any")
        if is_first is None:
            is_first = self.is_first
        self._engine.passed(kind, path, rows, is_first)

    def fell_back(self, reason: str) -> None:
        """Count what vLLM serves in its own way."""
        self._engine.add(1, "fallbacks", reason)


def count_stock_layer() -> None:
    """Count a layer that runs vLLM's own kernel, although FLASHINFER was asked for."""
    of_process().add(("attention_layers", "vllm"))


def _built() -> tuple[int, int]:
    """Return this package's Triton kernels and the cuDNN plans that were built."""
    if not current_platform.is_cuda():
        return 0, 0
    return warmup.built()
