# SPDX-License-Identifier: Apache-2.0
"""Derives the classes of a table from its measurements; `docs/choices.md` says how."""

import math
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmMeasurement
from vllm_flashinfer_vit.choices.table import Measurement, Table
from vllm_flashinfer_vit.gemms.catalog import HOST_US
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.ops.plan import Class

# Kernels this close are equal, so that noise makes no classes.
_TIE = 1.02
# A kernel that builds plans must win by 5 %: each new shape costs tens of milliseconds
# on the host.
_PLAN_HANDICAP = 1.05


class TuneError(ValueError):
    """Nothing can be tuned; the message says what to change."""


def derive_classes(measurements: Sequence[Measurement]) -> tuple[Class, ...]:
    """Choose the fewest classes whose kernel is nowhere noticeably slower than another.

    Kernels are compared at each measured length by the geometric mean over the numbers
    of sequences; those of FP8, which cost precision, by the number that suits them
    least. A length between two measured ones takes the longer one's kernel. Where a
    class has a kernel for few sequences, many sequences have the fastest of the others.

    Args:
        measurements: Of one dtype and head dim.

    Raises:
        TuneError: No kernel was measured that takes sequences of any length.
    """
    slowdowns: dict[int, dict[str, float]] = {}
    for longest, means in _means_by_length(measurements):
        best = min(means.values())
        slowdowns[longest] = {k: us / best for k, us in means.items()}
    # What serves the longest measured sequences serves all longer ones.
    while slowdowns:
        longest, last = slowdowns.popitem()
        unbounded = {k: s for k, s in last.items() if KERNELS[k].max_len is None}
        if unbounded:
            best = min(unbounded.values())
            slowdowns[longest] = {k: s / best for k, s in unbounded.items()}
            break
    if not slowdowns:
        raise TuneError("no kernel that takes sequences of any length was measured")

    def largest_tie(kernel: str) -> float:
        return 1 if KERNELS[kernel].builds_plans else _TIE

    return tuple(_class(*part) for part in _fewest_parts(slowdowns, largest_tie))


def derive_gemm_classes(
    measurements: Sequence[GemmMeasurement],
) -> tuple[GemmClass, ...]:
    """Choose the fewest classes whose GEMM is nowhere noticeably slower than another.

    A number of rows between two measured ones takes the larger one's GEMM; numbers
    above the last take its. A GEMM takes a graph as long as the device needs, and eager
    mode at least as long as the host: the geometric mean of both counts.

    Args:
        measurements: Of one layer, see `GemmLayer`. A number of rows that no GEMM ran
            has none.

    Raises:
        TuneError: Nothing was measured.
    """
    slowdowns: dict[int, dict[str, float]] = {}
    for row in sorted(measurements, key=lambda m: m.rows):
        times = {
            gemm: math.sqrt(us * max(us, HOST_US[gemm])) for gemm, us in row.us.items()
        }
        best = min(times.values())
        slowdowns[row.rows] = {gemm: us / best for gemm, us in times.items()}
    if not slowdowns:
        raise TuneError("no GEMM was measured")
    parts = _fewest_parts(slowdowns, lambda gemm: _TIE)
    return tuple(GemmClass(end, _fastest(shared)) for end, shared, _ in parts)


class _Part(NamedTuple):
    """Sizes that one kernel can serve.

    Attributes:
        end: The largest of them; None for any above the part before.
        shared: The kernels that can, with their slowdowns over all of the sizes.
        members: The slowdowns of all kernels, by size.
    """

    end: int | None
    shared: Mapping[str, float]
    members: Sequence[Mapping[str, float]]


def _fewest_parts(
    slowdowns: Mapping[int, Mapping[str, float]], largest_tie: Callable[[str], float]
) -> list[_Part]:
    """Part sizes into the fewest ranges that a kernel serves nearly fastest throughout.

    Args:
        slowdowns: Times of kernels over the fastest one's, by size, ascending.
        largest_tie: The slowdown up to which a kernel is as good as the fastest.
    """
    parts: list[_Part] = []
    # Kernels that serve every size since the last part, with their slowdowns, and the
    # slowdowns of all kernels at these sizes.
    shared: dict[str, float] = {}
    members: list[Mapping[str, float]] = []
    end = 0
    for size, by_kernel in slowdowns.items():
        near = {
            kernel: slowdown
            for kernel, slowdown in by_kernel.items()
            if slowdown <= largest_tie(kernel)
        }
        both = {k: shared[k] * near[k] for k in shared if k in near}
        if shared and not both:
            parts.append(_Part(end, shared, members))
            members = []
        shared, end = both or near, size
        members.append(by_kernel)
    return [*parts, _Part(None, shared, members)]


def derive_without(
    table: Table, dtype: str, head_dim: int, refused: Container[str]
) -> tuple[Class, ...] | None:
    """Choose classes of a table's entry again, of the kernels that are not refused.

    Args:
        table: The table.
        dtype: Name of the entry's dtype.
        head_dim: The entry's head dim, in elements.
        refused: Names of kernels.

    Returns:
        The classes; None if the table has no measurements that give any.
    """
    # A table that another version of the package wrote may have kernels of its own.
    kernels = {name for name in KERNELS if name not in refused}
    left = [
        row._replace(us={name: us for name, us in row.us.items() if name in kernels})
        for row in table.measurements
        if (row.dtype, row.head_dim) == (dtype, head_dim)
    ]
    try:
        return derive_classes(left)
    except TuneError:
        return None


def _class(
    max_len: int | None,
    shared: Mapping[str, float],
    members: Sequence[Mapping[str, float]],
) -> Class:
    kernel = _fastest(shared)
    if not KERNELS[kernel].for_few:
        return Class(max_len, kernel)
    others = {
        other: math.prod(slowdowns[other] for slowdowns in members)
        for other in members[0]
        if not (KERNELS[other].for_few or KERNELS[other].is_fp8)
        and all(other in slowdowns for slowdowns in members)
    }
    return Class(max_len, kernel, _fastest(others) if others else None)


def _fastest(slowdowns: Mapping[str, float]) -> str:
    return min(slowdowns, key=slowdowns.__getitem__)


def _means_by_length(
    measurements: Sequence[Measurement],
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield lengths, ascending, with the mean times of kernels that ran every batch."""
    ordered = sorted(measurements, key=lambda m: m.longest)
    for longest, group in groupby(ordered, key=lambda m: m.longest):
        times = [m.us for m in group]
        ran = [name for name in times[0] if all(name in us for us in times)]
        rows = [{name: us[name] * _handicap(name) for name in ran} for us in times]
        means = {
            name: statistics.geometric_mean(row[name] for row in rows) for name in ran
        }
        others = means.keys() - fp8_names()
        for name in means.keys() & fp8_names() if others else ():
            worst = max(row[name] / min(row[o] for o in others) for row in rows)
            means[name] = max(means[name], worst * min(means[o] for o in others))
        if means:
            yield longest, means


def _handicap(kernel: str) -> float:
    return _PLAN_HANDICAP if KERNELS[kernel].builds_plans else 1.0
