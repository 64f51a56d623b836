# SPDX-License-Identifier: Apache-2.0
"""A request's life from a trace of the engine's worker, by PyTorch's profiler.

With `enable_mm_processor_stats` vLLM waits for the device before the encoder and after
it. Between the ends of these two waits all work of the GPU is the encoder's, and what
comes later is the language model's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

PREPARATION = ("decode", "processor", "around the processor")
# In the order of a request's life; together they are the whole.
TRACED_STAGES = (
    *PREPARATION,
    "transport",
    "copy to the GPU",
    "encoder",
    "encoder, GPU idle",
    "language model",
    "rest",
)
_STEP = "execute_context"
_WAIT = "cudaDeviceSynchronize"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def traced_stages(
    trace: Mapping[str, Any],
    begin_ns: int,
    end_ns: int,
    prepared_ms: Mapping[str, float],
) -> dict[str, float]:
    """Return `TRACED_STAGES` of a request in milliseconds.

    Args:
        trace: As `export_chrome_trace` writes it, with one request's only step.
        begin_ns: When the engine was asked, since the epoch.
        end_ns: When its answer was there.
        prepared_ms: `PREPARATION`, which comes first and in another process.

    Raises:
        RuntimeError: The trace has no step, or no encoder between two waits.
    """
    # From here on times count from the call: a float holds no epoch to the nanosecond.
    base = int(trace["baseTimeNanoseconds"]) - begin_ns
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        _span(event, base)
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(_STEP)
    ]
    if not steps:
        raise RuntimeError(f"the trace has no step: nothing is named {_STEP}")
    step_start = min(start for start, _ in steps)
    waits = sorted(_span(event, base) for event in events if event["name"] == _WAIT)
    waits = [wait for wait in waits if wait[0] >= step_start]
    if len(waits) < 2:
        raise RuntimeError(
            f"the trace has {len(waits)} waits for the device in its step, and not one "
            "on each side of the encoder"
        )
    (_, start), (_, end) = waits[:2]
    on_gpu = [event for event in events if event.get("cat") in _ON_GPU]
    encoder = [event for event in on_gpu if start <= _span(event, base)[0] < end]
    copies = [event for event in encoder if "HtoD" in event["name"]]
    later = [event for event in on_gpu if _span(event, base)[0] >= end]
    copied, busy = _covered(copies, base), _covered(encoder, base)
    language = _covered(later, base)
    nanoseconds = {
        "transport": start - 1e6 * sum(prepared_ms.values()),
        "copy to the GPU": copied,
        "encoder": busy - copied,
        "encoder, GPU idle": end - start - busy,
        "language model": language,
        "rest": end_ns - begin_ns - end - language,
    }
    return {**prepared_ms, **{name: ns / 1e6 for name, ns in nanoseconds.items()}}


def _span(event: Mapping[str, Any], base: int) -> tuple[float, float]:
    """Return an event's start and end in nanoseconds after the call."""
    start = base + 1e3 * float(event["ts"])
    return start, start + 1e3 * float(event["dur"])


def _covered(events: Iterable[Mapping[str, Any]], base: int) -> float:
    """Return in how many nanoseconds at least one of the events was under way."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(_span(event, base) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
