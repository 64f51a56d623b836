# SPDX-License-Identifier: Apache-2.0
"""What a test run of a kernel says of it."""

import math
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the ops are vLLM's custom ops")

from vllm_flashinfer_vit.choices import trial  # noqa: E402
from vllm_flashinfer_vit.choices.trial import attempt  # noqa: E402
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref  # noqa: E402
from vllm_flashinfer_vit.kernels.catalog import KERNELS  # noqa: E402
from vllm_flashinfer_vit.ops.batch import Batch  # noqa: E402
from vllm_flashinfer_vit.ops.plan import Plan  # noqa: E402

TRIED = [name for name, kernel in KERNELS.items() if kernel.needs_trial]


_SEEN: list[torch.Tensor] = []


def _remembered(q: Any, k: Any, v: Any, *args: Any) -> torch.Tensor:
    """Return what the reference does; every test run here has the same inputs."""
    if not _SEEN:
        _SEEN.extend((q, attention_ref(q, k, v, *args)))
    assert torch.equal(q, _SEEN[0])
    return _SEEN[1].clone()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kernel", TRIED)
def test_a_kernel_that_fails_says_so(kernel: Any) -> None:
    error = attempt(kernel, 72, torch.bfloat16)
    assert error is not None
    assert error.startswith("a test run fails with")


@pytest.mark.parametrize("kernel", TRIED)
@pytest.mark.parametrize(
    ("head", "value", "answer"),
    [
        (None, 0.0, None),
        (0, 0.0, "is wrong.* 1 for values around 0"),
        (1, 1.9, "is wrong.* for values around 2"),
        (2, math.nan, "is wrong.* nan for large scores"),
    ],
)
def test_a_kernel_that_is_wrong_says_where(
    kernel: Any,
    head: int | None,
    value: float,
    answer: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(batch: Batch, scale: float, plan: Plan, fp8: Any) -> torch.Tensor:
        assert plan == Plan.of(kernel)
        assert bool(fp8) == KERNELS[kernel].is_fp8
        longest = int(batch.max_seqlen)
        out = _remembered(*batch[:3], batch.cu_seqlens, longest, scale)
        if head is not None:
            out[:, head] = value
        return out

    monkeypatch.setattr(trial, "attention", attend)
    monkeypatch.setattr(trial, "attention_ref", _remembered)
    error = attempt(kernel, 64, torch.bfloat16, "cpu")
    assert (error is None) if answer is None else re.search(answer, error or "")
