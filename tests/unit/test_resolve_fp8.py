# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve FP8 layers where some cannot run, or one is forced."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_flashinfer_vit.choices import resolve  # noqa: E402
from vllm_flashinfer_vit.choices.lookup import Choice  # noqa: E402
from vllm_flashinfer_vit.choices.usable import NotServedError  # noqa: E402
from vllm_flashinfer_vit.fp8 import policy as fp8  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_KERNEL  # noqa: E402


class TestResolve:
    """What is an error where some kernels cannot run."""

    def resolve(
        self, monkeypatch: pytest.MonkeyPatch, refused: str, *left: Any
    ) -> tuple[Choice, ...]:
        choices = tuple(Choice(kernel, None, "") for kernel in left)
        refusals = {refused: f"{refused}: it cannot"}
        monkeypatch.setattr(
            resolve, "usable_choices", lambda *_, **__: (choices, refusals)
        )
        return fp8.resolve_fp8.__wrapped__(96, torch.bfloat16, None, None)

    def test_no_fp8_kernel_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotServedError, match="triton_fp8: it cannot"):
            self.resolve(monkeypatch, "triton_fp8", "triton")

    def test_nothing_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotServedError, match="flash_attn: it cannot"):
            self.resolve(monkeypatch, "flash_attn")

    def test_there_was_none_to_be_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (choice,) = self.resolve(monkeypatch, "flash_attn", "flash_attn_4")
        assert choice.kernel == "flash_attn_4"


class TestForcedKernel:
    def test_must_be_one_of_fp8(self) -> None:
        with pytest.raises(NotServedError, match=f"{ENV_KERNEL}=triton contradicts"):
            fp8.resolve_fp8(72, torch.bfloat16, "triton", None)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_that_cannot_run_says_why(self) -> None:
        with pytest.raises(
            NotServedError, match=r"triton_fp8: it needs an NVIDIA GPU.*Leave"
        ):
            fp8.resolve_fp8(72, torch.bfloat16, "triton_fp8", None)
