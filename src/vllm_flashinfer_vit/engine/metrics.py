# SPDX-License-Identifier: Apache-2.0
"""The counters that an operator reads: at vLLM's /metrics, or else in the log.

vLLM's API server answers /metrics, and encoders run in other processes. With
`PROMETHEUS_MULTIPROC_DIR` set, prometheus_client keeps counters in files of a folder,
where the API server finds those of every process, and sums them up.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

PREFIX = "vllm_flashinfer_vit:"
ENV_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
# Between two lines of the log: vLLM's own statistics come every 10 s.
LOG_INTERVAL_S = 60.0

# A counter's name in `SERIES`, and the values of its labels.
Key = tuple[str, ...]


class Series(NamedTuple):
    """A counter.

    Attributes:
        name: Without prefix, and without the `_total` that Prometheus asks for.
        labels: The names of its labels.
        summary: What it counts: its help text, and its line in the documentation.
        known: Values of its only label. They are there from the start, at 0, since
            Prometheus sees no increase in what begins at 1.
    """

    name: str
    labels: tuple[str, ...]
    summary: str
    known: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """Its name at /metrics."""
        return f"{PREFIX}{self.name}_total"


SERIES = (
    Series(
        "attention_layers",
        ("served_by",),
        "Encoder attention layers that were built for FLASHINFER: served by "
        "vllm-flashinfer-vit, or by vLLM's own kernel (vllm).",
        ("vllm-flashinfer-vit", "vllm"),
    ),
    Series(
        "encoder_passes",
        ("kernel", "max_len", "path"),
        "Encoder passes by the attention kernel of the first block, and by that of the "
        "last one if it is of another class. max_len: the class, sequences of up to so "
        "many patches. path: how the blocks ran: graph, a replay; blocks, the block "
        "programs in eager mode; attention, vLLM's own blocks around this attention.",
    ),
    Series(
        "encoder_patches",
        ("kernel", "max_len", "path"),
        "Patches of these passes, before merging; in a graph its padding, too.",
    ),
    Series(
        "graph_hits",
        (),
        "Images and videos that an encoder CUDA graph served.",
    ),
    Series(
        "graph_misses",
        (),
        "Images and videos that ran without one, although the engine has them.",
    ),
    Series(
        "graph_large",
        (),
        "Images and videos of batches that are larger than the largest automatic "
        "graph, where one would only add padding: no misses.",
    ),
    Series(
        "graph_real_tokens",
        (),
        "Tokens, after merging, of what graphs of exact size served.",
    ),
    Series(
        "graph_padded_tokens",
        (),
        "Tokens of the graphs that served them, padding included.",
    ),
    Series(
        "fallbacks",
        ("reason",),
        "What vLLM's own path served instead. key_lengths: calls of a layer whose "
        "query and key lengths differ. block_input: passes that the block programs do "
        "not take. graph_size: batches with more frames than graphs have room for. "
        "graph_pixels: batches whose pixels are floats, where graphs hold bytes. "
        "graph_missing: batches of images of a width that no graph was captured for.",
        ("key_lengths", "block_input", "graph_size", "graph_pixels", "graph_missing"),
    ),
    Series(
        "fp8_blocks",
        ("tensor",),
        "Blocks of q, k and v that layers with static FP8 scales quantised: up to 128 "
        "tokens of a head, in a graph without its padding.",
        ("q", "k", "v"),
    ),
    Series(
        "fp8_clipped_blocks",
        ("tensor",),
        "Those of them whose largest value lies beyond what the scale can hold, by "
        "more than FP8 rounds.",
        ("q", "k", "v"),
    ),
    Series(
        "triton_kernels_after_start",
        (),
        "Variants of this package's Triton kernels that requests waited for: compiled, "
        "or loaded from Triton's cache.",
    ),
    Series(
        "cudnn_plans_after_start",
        (),
        "Plans of cuDNN that requests waited for.",
    ),
)


class Metrics:
    """The counters of a process.

    Attributes:
        is_exported: Whether the API server's process can read them.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        """Make the counters, all at 0; use `of_process`.

        Args:
            registry: What they are registered in, None for the process's own.
        """
        # Only here: vLLM may set the folder after this package was imported.
        from prometheus_client import values

        self.is_exported = values.ValueClass is not values.MutexValue
        self.totals: Counter[Key] = Counter()
        self._exported: dict[str, Any] = {}
        try:
            self._exported = _exported(registry)
        except OSError as error:
            # No counter is worth an engine that does not start.
            self.is_exported = False
            logger.warning(
                "vllm-flashinfer-vit cannot write its counters to the folder that %s "
                "names, so they are in the log only: %s",
                ENV_FOLDER,
                error,
            )
        self._children: dict[Key, Any] = {}
        self._said: Counter[Key] = Counter()
        self._says_next_at_s = 0.0

    def add(self, key: Key, amount: int = 1) -> None:
        """Add to a counter.

        Args:
            key: Its name, and the values of its labels.
            amount: At least 0.
        """
        self.totals[key] += amount
        child = self._children.get(key)
        if child is None:
            name, *labels = key
            child = self._exported.get(name)
            if child is None:
                return
            if labels:
                child = child.labels(*labels)
            self._children[key] = child
        child.inc(amount)

    def say_if_due(self) -> None:
        """Log the counters, once in `LOG_INTERVAL_S` and where nobody exports them."""
        if self.is_exported or time.monotonic() < self._says_next_at_s:
            return
        self.say()

    def say(self) -> None:
        """Log the counters if they changed since the last line; not if exported."""
        if self.is_exported or self.totals == self._said:
            return
        hint = ""
        if not self._said:
            hint = (
                f" To have these counters at /metrics, set {ENV_FOLDER} to an empty "
                "folder before the start."
            )
        logger.info(
            "vllm-flashinfer-vit since the start: %s.%s", summary(self.totals), hint
        )
        self._said = self.totals.copy()
        self._says_next_at_s = time.monotonic() + LOG_INTERVAL_S


def _exported(registry: "CollectorRegistry | None") -> dict[str, Any]:
    from prometheus_client import REGISTRY
    from prometheus_client import Counter as Exported

    made = {}
    for one in SERIES:
        made[one.name] = counter = Exported(
            PREFIX + one.name,
            one.summary,
            one.labels,
            registry=REGISTRY if registry is None else registry,
        )
        for value in one.known:
            counter.labels(value)
    return made


@functools.cache
def of_process() -> Metrics:
    """Return this process's counters, as prometheus_client has one registry of it."""
    return Metrics()


def summary(totals: Mapping[Key, int]) -> str:
    """Return what the log says of counters; those of layers are left out."""
    passes = [
        f"{count} by {kernel} ({path}, {_class_text(max_len)})"
        for (name, *labels), count in totals.items()
        if name == "encoder_passes"
        for kernel, max_len, path in [labels]
    ]
    parts = ["encoder passes: " + (", ".join(passes) or "none")]
    hits, misses = totals.get(("graph_hits",), 0), totals.get(("graph_misses",), 0)
    if hits or misses:
        parts.append(f"graphs served {hits} of {hits + misses} items")
    if large := totals.get(("graph_large",), 0):
        parts.append(f"{large} items were in batches that need none")
    if real := totals.get(("graph_real_tokens",), 0):
        padded = totals.get(("graph_padded_tokens",), 0)
        parts.append(f"{padded / real:.3f} padded over real tokens")
    fallbacks = [
        f"{count} {labels[0]}"
        for (name, *labels), count in totals.items()
        if name == "fallbacks"
    ]
    parts.append("fall-backs: " + (", ".join(fallbacks) or "none"))
    blocks, clipped = (
        sum(totals.get((name, tensor), 0) for tensor in "qkv")
        for name in ("fp8_blocks", "fp8_clipped_blocks")
    )
    if blocks:
        parts.append(f"FP8 scales cut off {clipped} of {blocks} blocks")
    triton = totals.get(("triton_kernels_after_start",), 0)
    cudnn = totals.get(("cudnn_plans_after_start",), 0)
    parts.append(f"built after the start: {triton} Triton kernels, {cudnn} cuDNN plans")
    return "; ".join(parts)


def _class_text(max_len: str) -> str:
    return "any length" if max_len == "any" else f"up to {max_len} patches"
