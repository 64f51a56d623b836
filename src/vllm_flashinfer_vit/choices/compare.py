# SPDX-License-Identifier: Apache-2.0
"""Times candidates on one case after another; drops those that fail or are wrong."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from vllm_flashinfer_vit.choices.clock import Clock, Run

_Case = TypeVar("_Case")


class WrongResultError(RuntimeError):
    """A candidate's output is too far from fp32."""


class GpuLostError(RuntimeError):
    """No call of this process to the GPU works any more."""


class Inputs(Protocol):
    """What the candidates of a case are called with."""

    def call(self, candidate: str) -> Run | None:
        """Return a candidate's call, or None if it takes no such case."""

    def check(self, candidate: str, out: torch.Tensor) -> None:
        """Compare a candidate's output with fp32.

        Raises:
            WrongResultError: It is too far off.
        """


def compare(
    candidates: Sequence[str],
    cases: Mapping[str, _Case],
    draw: Callable[[_Case], Inputs],
    clock: Clock,
    device: torch.device,
    advance: Callable[[str], None] = lambda name: None,
) -> tuple[dict[_Case, dict[str, float]], list[str]]:
    """Check and time candidates on every case.

    A candidate that fails to run is not tried any more; one whose output is wrong loses
    the times that it has, too. A case that the memory does not hold is skipped.

    Args:
        candidates: Names of what is compared.
        cases: What `draw` takes, by its name for people.
        draw: Makes the inputs of a case.
        clock: The clock.
        device: Where to measure.
        advance: Called before each case, with its name.

    Returns:
        Median microseconds by case and candidate, without cases that nobody runs, and
        what was left out and why.

    Raises:
        GpuLostError: A candidate failed, and so does everything after it.
    """
    times: dict[_Case, dict[str, float]] = {}
    left_out: list[str] = []
    trusted = list(candidates)
    for name, case in cases.items():
        advance(name)
        try:
            failures, times[case] = _compare_one(trusted, draw(case), clock, device)
        except torch.OutOfMemoryError:
            left_out.append(f"{name}: out of memory")
            failures = []
        except GpuLostError as error:
            raise GpuLostError(f"{name}: {error}") from error
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for failure in failures:
            trusted.remove(failure.candidate)
            left_out.append(f"{failure.candidate} from {name} on: {failure.reason}")
            if failure.is_wrong:
                for taken in times.values():
                    taken.pop(failure.candidate, None)
    return {case: taken for case, taken in times.items() if taken}, left_out


def check_gpu(candidate: str, reason: str, device: torch.device) -> None:
    """Check that the GPU still answers after a candidate failed.

    Raises:
        GpuLostError: It does not, as after an access to memory that is not there.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise GpuLostError(
            f"{candidate}: {reason}, and after it nothing runs on the GPU in this "
            "process"
        ) from error


def relative_error(out: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    """Return how far an output is from fp32, in relation to the norm of that.

    Raises:
        WrongResultError: Further than the limit, or not a number.
    """
    error = float((out.float() - expected).norm() / expected.norm())
    if not error <= limit:
        raise WrongResultError(
            f"wrong result, relative error {error:.2g} against fp32, allowed "
            f"{limit:.2g}"
        )
    return error


class _Failure(NamedTuple):
    candidate: str
    reason: str
    is_wrong: bool


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def _compare_one(
    candidates: Sequence[str], inputs: Inputs, clock: Clock, device: torch.device
) -> tuple[list[_Failure], dict[str, float]]:
    """Check and time a case; the graphs and their memory go when it returns."""
    runs: dict[str, Run] = {}
    failures = []
    for candidate in candidates:
        try:
            call = inputs.call(candidate)
            if call is None:
                continue
            ready = clock.prepare(call)
            inputs.check(candidate, ready())
            runs[candidate] = ready
        except torch.OutOfMemoryError:
            raise
        # A candidate may fail in any way; the others are measured without it.
        except Exception as error:
            reason = _in_a_line(error)
            is_wrong = isinstance(error, WrongResultError)
            failures.append(_Failure(candidate, reason, is_wrong))
            check_gpu(candidate, reason, device)
    try:
        times = clock.median_us(runs) if runs else {}
    except RuntimeError as error:
        # A kernel may fail only where it runs again.
        check_gpu(" or ".join(runs), _in_a_line(error), device)
        raise
    return failures, {candidate: round(us, 2) for candidate, us in times.items()}
