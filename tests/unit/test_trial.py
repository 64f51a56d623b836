# SPDX-License-Identifier: Apache-2.0
"""What a test run of a kernel says of it."""

import math
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the ops are vLLM's custom ops")

from vllm_flashinfer_vit.choices.trial import attempt  # noqa: E402
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref  # noqa: E402
from vllm_flashinfer_vit.ops import attention as ops  # noqa: E402

KERNELS = ["triton_fp8", "cudnn_fp8", "flash_attn_4"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_fails_says_so(kernel: Any) -> None:
    error = attempt(kernel, 72, torch.bfloat16)
    assert error is not None
    assert error.startswith("a test run fails with")


@pytest.mark.parametrize("kernel", KERNELS)
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
    def attend(q: Any, k: Any, v: Any, *args: Any) -> Any:
        _, _, cu_seqlens, max_seqlen, _, scale, plan, *_ = args
        assert plan == f"*:{kernel}"
        out = attention_ref(q, k, v, cu_seqlens, int(max_seqlen), scale)
        if head is not None:
            out[:, head] = value
        return out

    name = "fp8_attention" if kernel.endswith("fp8") else "attention"
    monkeypatch.setattr(ops, name, attend)
    error = attempt(kernel, 64, torch.bfloat16, "cpu")
    assert (error is None) if answer is None else re.search(answer, error or "")


@pytest.mark.parametrize("kernel", ["reference", "reference_fp8"])
def test_the_reference_needs_no_test_run(kernel: Any) -> None:
    assert attempt(kernel, 64, torch.bfloat16, "no device") is None
