# SPDX-License-Identifier: Apache-2.0
"""What is installed and what can run, on made-up machines and on this one."""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import (
    ADA,
    AMPERE,
    BLACKWELL,
    BLACKWELL_RTX,
    HOPPER,
    LIBCUDNN,
    STACK,
    TURING,
)

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.lookup import (
    Choice,
    choices_for,
    encode,
    fp8_ranges,
    select,
)
from vllm_flashinfer_vit.choices.table import Table
from vllm_flashinfer_vit.choices.usable import kernel_verdict, usable_choices
from vllm_flashinfer_vit.kernels.catalog import fp8_names
from vllm_flashinfer_vit.machine import support
from vllm_flashinfer_vit.machine.child import run_isolated
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.problems import stack_problems
from vllm_flashinfer_vit.machine.stack import Gpu
from vllm_flashinfer_vit.machine.versions import check_vllm, format_cudnn
from vllm_flashinfer_vit.ops.plan import Class
from vllm_flashinfer_vit.settings import ENV_KERNEL


@pytest.mark.parametrize(
    "version",
    [
        "0.22.1",
        "0.22.1rc2",
        "0.22.1.post1",
        "0.25.1",
        "0.25.1+cu129",
        "0.28.0",
        "0.33.0",
        "0.33.0rc1",
        "0.33.0.dev7+gabc",
        "0.33.1",
    ],
)
def test_supported_vllm(version: str) -> None:
    assert check_vllm(version) is None


@pytest.mark.parametrize(
    "version",
    [
        "0.22.0",
        "0.20.2",
        "0.1.dev1+g0123abc",
        "0.33.1.dev300+gabc",
        "0.34.0",
        "0.34.0rc1",
        "1.0.0",
        "unknown",
    ],
)
def test_unsupported_vllm_is_told_the_window(version: str) -> None:
    problem = check_vllm(version)
    assert problem is not None
    assert version in problem
    assert "0.22.1 to 0.33.0" in problem


def test_window_agrees_with_the_package_metadata() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    lines = requires("vllm-flashinfer-vit") or []
    vllm = next(r for r in map(Requirement, lines) if r.name == "vllm")
    for version in ("0.22.0", "0.22.1", "0.25.1", "0.33.0", "0.33.1", "0.34.0"):
        assert vllm.specifier.contains(version) == (check_vllm(version) is None)


@pytest.mark.parametrize(
    ("number", "text"), [(91900, "9.19.0"), (91002, "9.10.2"), (None, "none")]
)
def test_format_cudnn(number: int | None, text: str) -> None:
    assert format_cudnn(number) == text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("gpu", [AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_RTX])
@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn", "reference"])
def test_a_full_stack_runs_every_kernel(
    kernel: Any, gpu: Gpu, head_dim: int, dtype: str
) -> None:
    verdict = kernel_verdict(kernel, replace(STACK, gpus=(gpu,)), head_dim, dtype)
    assert verdict.ok, verdict.reason
    assert verdict.remedy is None


NO_GPU = {"gpus": (), "driver": None}


@pytest.mark.parametrize(
    ("kernel", "changes", "reason", "remedy"),
    [
        pytest.param("cudnn", NO_GPU, "needs an NVIDIA GPU", None, id="no-gpu"),
        pytest.param("flash_attn", NO_GPU, "needs an NVIDIA GPU", None, id="fa-no-gpu"),
        pytest.param("cudnn", {"gpus": (TURING,)}, "Tesla T4 has 7.5", None, id="sm75"),
        pytest.param(
            "flash_attn", {"gpus": (TURING,)}, "Tesla T4 has 7.5", None, id="fa-sm75"
        ),
        pytest.param(
            "cudnn",
            {"flashinfer": None},
            "flashinfer-python is not installed",
            'pip install "flashinfer-python==0.6.13"',
            id="no-flashinfer",
        ),
        pytest.param(
            "cudnn",
            {"flashinfer": None, "pins": {}},
            "flashinfer-python is not installed",
            'pip install "flashinfer-python<0.8,>=0.6.11"',
            id="no-flashinfer-no-pin",
        ),
        pytest.param(
            "cudnn",
            {"flashinfer": "0.6.8.post1"},
            "0.6.8.post1 is not in the supported range",
            'pip install "flashinfer-python==0.6.13"',
            id="old-flashinfer",
        ),
        pytest.param(
            "cudnn",
            {"flashinfer": "0.8.0"},
            "0.8.0 is not in the supported range",
            'pip install "flashinfer-python==0.6.13"',
            id="new-flashinfer",
        ),
        pytest.param(
            "cudnn",
            {"cudnn_frontend": None},
            "nvidia-cudnn-frontend is not installed",
            'pip install "nvidia-cudnn-frontend>=1.18"',
            id="no-frontend",
        ),
        pytest.param(
            "cudnn",
            {"cudnn_frontend": "1.17.0"},
            "1.17.0 is not in the supported range",
            'pip install "nvidia-cudnn-frontend>=1.18"',
            id="old-frontend",
        ),
        pytest.param(
            "cudnn",
            {"import_errors": {"cudnn": "ImportError: no libcudart"}},
            "importing cudnn fails: ImportError: no libcudart",
            'pip install --force-reinstall "nvidia-cudnn-frontend==1.28.0"',
            id="broken-frontend",
        ),
        pytest.param(
            "cudnn",
            {"import_errors": {"flashinfer.cudnn": "no cuda.bindings.runtime.x"}},
            "importing flashinfer.cudnn fails",
            "pip uninstall -y cuda-python cuda-bindings && pip install cuda-python",
            id="cuda-python-conflict",
        ),
        pytest.param(
            "cudnn",
            {"cudnn_backend": None, "cudnn_wheels": {}, "torch_cuda": "12.9"},
            "finds no cuDNN",
            'pip install "nvidia-cudnn-cu12>=9.17.1"',
            id="no-cudnn-cu12",
        ),
        pytest.param(
            "cudnn",
            {"cudnn_backend": 91001},
            "need cuDNN 9.10.2; 9.10.1 is loaded",
            'pip install "nvidia-cudnn-cu13>=9.17.1"',
            id="old-cudnn",
        ),
        pytest.param(
            "cudnn",
            {"cudnn_backend": 91800, "gpus": (AMPERE,)},
            "compute capability 8.0 need cuDNN 9.18.1; 9.18.0 is loaded",
            'pip install "nvidia-cudnn-cu13>=9.18.1"',
            id="old-cudnn-ampere",
        ),
        pytest.param(
            "cudnn",
            {"cudnn_backend": 91800, "gpus": (BLACKWELL_RTX,)},
            "compute capability 12.0 need cuDNN 9.18.1",
            'pip install "nvidia-cudnn-cu13>=9.18.1"',
            id="old-cudnn-sm120",
        ),
        pytest.param(
            "flash_attn",
            {"vllm": None},
            "vllm is not installed",
            'pip install "vllm>=0.22.1,<=0.33.0"',
            id="fa-no-vllm",
        ),
        pytest.param(
            "flash_attn",
            {"flash_attn": (), "vllm": "0.25.1+cu129"},
            "built without FlashAttention 2",
            'pip install --force-reinstall "vllm==0.25.1"',
            id="fa-no-extension",
        ),
        pytest.param(
            "flash_attn_4",
            {"vllm": None},
            "vllm is not installed",
            'pip install "vllm>=0.22.1,<=0.33.0"',
            id="fa4-no-vllm",
        ),
        pytest.param(
            "flash_attn_4",
            {"flash_attn": (2, 3)},
            "built without FlashAttention 4",
            'pip install --force-reinstall "vllm==0.25.1"',
            id="fa4-not-bundled",
        ),
        pytest.param(
            "flash_attn_4",
            {"gpus": (BLACKWELL,), "flash_attn": (2, 3, 4)},
            "it is for Hopper (9.0) only",
            None,
            id="fa4-blackwell",
        ),
        pytest.param(
            "reference",
            {"torch": None},
            "torch is not installed",
            'pip install --force-reinstall "vllm==0.25.1"',
            id="reference-no-torch",
        ),
    ],
)
def test_a_missing_part_is_named_with_its_remedy(
    kernel: Any, changes: dict[str, Any], reason: str, remedy: str | None
) -> None:
    verdict = kernel_verdict(kernel, replace(STACK, **changes), 80, "bfloat16")
    assert not verdict.ok
    assert reason in verdict.reason
    assert verdict.remedy == remedy


@pytest.mark.parametrize("cudnn", [91002, 91800])
@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL])
def test_hopper_and_b200_need_no_newer_cudnn(gpu: Gpu, cudnn: int) -> None:
    stack = replace(STACK, gpus=(gpu,), cudnn_backend=cudnn)
    assert kernel_verdict("cudnn", stack, 80, "bfloat16").ok


@pytest.mark.parametrize(
    ("gpu", "built", "version"),
    [
        (AMPERE, (2, 3, 4), 2),
        (HOPPER, (2, 3, 4), 3),
        (HOPPER, (2,), 2),
        (BLACKWELL, (2, 3, 4), 4),
        (BLACKWELL, (2, 3), 2),
        (BLACKWELL_RTX, (2, 3, 4), 2),
    ],
)
def test_flash_attn_version(gpu: Gpu, built: tuple[int, ...], version: int) -> None:
    stack = replace(STACK, gpus=(gpu,), flash_attn=built)
    reason = kernel_verdict("flash_attn", stack, 80, "float16").reason
    assert f"FlashAttention {version} " in reason


@pytest.mark.parametrize("head_dim", [0, 70, 257, 264])
@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
def test_odd_head_dims_are_left_to_the_reference(kernel: Any, head_dim: int) -> None:
    verdict = kernel_verdict(kernel, STACK, head_dim, "bfloat16")
    assert not verdict.ok
    assert f"head dim {head_dim}" in verdict.reason
    assert kernel_verdict("reference", STACK, head_dim, "bfloat16").ok


@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
def test_float32_is_left_to_the_reference(kernel: Any) -> None:
    verdict = kernel_verdict(kernel, STACK, 80, "float32")
    assert not verdict.ok
    assert "float32" in verdict.reason
    assert kernel_verdict("reference", STACK, 80, "float32").ok


@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
def test_a_kernel_of_the_activations_takes_no_fp8(kernel: Any) -> None:
    verdict = kernel_verdict(kernel, STACK, 80, "float8_e4m3fn")
    assert not verdict.ok
    assert "not float8_e4m3fn" in verdict.reason


@pytest.mark.parametrize("kernel", sorted(fp8_names()))
def test_an_fp8_kernel_must_be_asked_for(kernel: Any) -> None:
    verdict = kernel_verdict(kernel, STACK, 80, "bfloat16")
    assert not verdict.ok
    assert verdict.remedy == "--mm-encoder-attn-dtype fp8"


@pytest.mark.parametrize(
    ("kernel", "capability", "reason"),
    [
        ("cudnn_fp8", (9, 0), "illegal instruction"),
        ("cudnn_fp8", (10, 0), None),
        ("cudnn_fp8", (8, 9), "no FP8 attention below Hopper"),
        ("hopper_fp8", (9, 0), None),
        ("hopper_fp8", (10, 0), "for Hopper (9.0) only"),
        ("triton_fp8", (8, 9), None),
        ("triton_fp8", (10, 0), None),
        ("triton_fp8", (8, 6), "FP8 needs compute capability 8.9"),
        ("reference_fp8", (8, 0), None),
    ],
)
def test_fp8_by_compute_capability(
    kernel: Any, capability: tuple[int, int], reason: str | None
) -> None:
    stack = replace(STACK, gpus=(STACK.gpus[0]._replace(capability=capability),))
    verdict = kernel_verdict(kernel, stack, 80, "float8_e4m3fn")
    assert verdict.ok is (reason is None)
    assert reason is None or reason in verdict.reason


def test_cudnn_fp8_needs_a_newer_cudnn_on_hopper() -> None:
    verdict = kernel_verdict("cudnn_fp8", STACK, 80, "float8_e4m3fn")
    assert "FP8 on Hopper needs cuDNN 9.23.0; 9.19.0 is loaded" in verdict.reason
    assert verdict.remedy == f"{ENV_KERNEL}=hopper_fp8"
    newer = replace(STACK, cudnn_backend=92300)
    assert kernel_verdict("cudnn_fp8", newer, 80, "float8_e4m3fn").ok
    none = replace(STACK, cudnn_backend=None)
    verdict = kernel_verdict("cudnn_fp8", none, 80, "float8_e4m3fn")
    assert "finds no cuDNN to load" in verdict.reason


def test_cudnn_fp8_needs_a_newer_cudnn_than_cudnn() -> None:
    blackwell = STACK.gpus[0]._replace(capability=(10, 0))
    stack = replace(STACK, cudnn_backend=91002, gpus=(blackwell,))
    assert kernel_verdict("cudnn", stack, 80, "bfloat16").ok
    verdict = kernel_verdict("cudnn_fp8", stack, 80, "float8_e4m3fn")
    assert not verdict.ok
    assert "FP8 needs cuDNN 9.17.1; 9.10.2 is loaded" in verdict.reason
    assert verdict.remedy == 'pip install "nvidia-cudnn-cu13>=9.17.1"'


class TestAttempts:
    """FlashAttention 4, which is compiled on this machine, and what serves without."""

    @pytest.fixture(autouse=True)
    def table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = (
            Choice("triton", 1024, "short"),
            Choice("flash_attn_4", None, "long", "flash_attn"),
        )
        monkeypatch.setattr(support, "choices_for", lambda *_: table)

    def kernels(self, error: str | None, forced: Any = None) -> list[str]:
        stack = replace(STACK, flash_attn=(2, 3, 4))
        choices, refusals = usable_choices(
            stack, 80, "bfloat16", forced, attempt=lambda kernel: error
        )
        text = f"flash_attn_4: {error}"
        assert refusals == ({"flash_attn_4": text} if error else {})
        return ["/".join(choice.kernels) for choice in choices]

    def test_it_runs(self) -> None:
        assert self.kernels(None) == ["triton", "flash_attn_4/flash_attn"]

    def test_it_fails(self) -> None:
        assert self.kernels("a test run fails") == ["triton", "flash_attn"]

    def test_it_is_forced(self) -> None:
        assert self.kernels(None, "flash_attn_4") == ["flash_attn_4"]

    def test_it_fails_and_was_forced(self) -> None:
        assert self.kernels("a test run fails", "flash_attn_4") == []

    def test_nothing_of_it_is_there(self) -> None:
        stack = replace(STACK, flash_attn=())
        choices, refusals = usable_choices(stack, 80, "bfloat16")
        assert [choice.kernel for choice in choices] == ["triton"]
        assert choices[0].max_len is None
        assert list(refusals) == ["flash_attn_4", "flash_attn"]


class TestManySequences:
    """A kernel that another one leaves many sequences to must run on the machine."""

    STACK = replace(STACK, flash_attn=(4,))

    @pytest.fixture
    def tuned_dir(self, tmp_path: Path) -> Path:
        """A table that names FlashAttention 4 alone of FlashAttention."""
        gpu = STACK.gpus[0].name
        few = Class(None, "flash_attn_4", "flash_attn")
        rows = (Class(1024, "triton"), few._replace(max_len=4096))
        classes = {
            "bfloat16/80": (rows[0], few),
            "float8_e4m3fn/80": (*rows, Class(None, "hopper_fp8")),
        }
        table = Table({"gpu": gpu, "vllm": "0.25.1"}, classes)
        tuned.write(table, tmp_path / tuned.file_name(gpu))
        return tmp_path

    @pytest.mark.parametrize("fp8", [False, True])
    def test_it_runs(self, fp8: bool, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            STACK, 80, "bfloat16", tuned_dir=tuned_dir, fp8=fp8
        )
        assert select(encode(choices), 4096, 16) == "flash_attn"
        assert refusals == {}

    @pytest.mark.parametrize("fp8", [False, True])
    def test_it_cannot(self, fp8: bool, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            self.STACK, 80, "bfloat16", tuned_dir=tuned_dir, fp8=fp8
        )
        plan = encode(choices)
        assert select(plan, 4096) == select(plan, 4096, 16) == "flash_attn_4"
        (refusal,) = refusals.values()
        assert "flash_attn: vLLM 0.25.1 was built without FlashAttention" in refusal

    def test_nor_can_the_other(self, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            self.STACK,
            80,
            "bfloat16",
            tuned_dir=tuned_dir,
            attempt=lambda kernel: "a test run fails",
        )
        assert encode(choices) == "*:triton"
        assert list(refusals) == ["flash_attn_4", "flash_attn"]


class TestUsableFp8Choices:
    @pytest.fixture
    def tuned_dir(self, tmp_path: Path) -> Path:
        """A table by which long sequences run on the Hopper kernel."""
        gpu = STACK.gpus[0].name
        classes = (Class(4096, "triton"), Class(None, "hopper_fp8"))
        table = Table({"gpu": gpu, "vllm": "0.25.1"}, {"float8_e4m3fn/80": classes})
        tuned.write(table, tmp_path / tuned.file_name(gpu))
        return tmp_path

    def test_another_kernel_stands_in_for_one_that_fails(self, tuned_dir: Path) -> None:
        tried = []

        def attempt(kernel: str) -> str | None:
            tried.append(kernel)
            return "a test run fails" if kernel == "hopper_fp8" else None

        choices, refusals = usable_choices(
            STACK, 80, "bfloat16", tuned_dir=tuned_dir, fp8=True, attempt=attempt
        )
        assert tried == ["hopper_fp8", "triton_fp8"]
        assert choices[-1].kernel == "triton_fp8"
        assert "in place of hopper_fp8" in choices[-1].reason
        assert refusals == {"hopper_fp8": "hopper_fp8: a test run fails"}

    def test_no_kernel_is_left(self, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            STACK,
            80,
            "bfloat16",
            tuned_dir=tuned_dir,
            fp8=True,
            attempt=lambda kernel: "no",
        )
        assert not fp8_ranges(choices)
        assert len(refusals) == 2

    def test_a_kernel_that_is_refused_does_not_run(self, tuned_dir: Path) -> None:
        ampere = replace(STACK, gpus=(STACK.gpus[0]._replace(capability=(8, 0)),))

        def attempt(kernel: str) -> str | None:
            raise AssertionError(kernel)

        choices, refusals = usable_choices(
            ampere, 80, "bfloat16", tuned_dir=tuned_dir, fp8=True, attempt=attempt
        )
        assert not fp8_ranges(choices)
        assert "compute capability 8.9" in list(refusals.values())[-1]

    def test_a_kernel_that_would_end_the_context_does_not_run_if_forced(self) -> None:
        tried: list[str] = []
        choices, refusals = usable_choices(
            STACK, 80, "bfloat16", "cudnn_fp8", fp8=True, attempt=tried.append
        )
        assert choices == () and tried == []
        assert "ends the CUDA context" in list(refusals.values())[0]

    def test_a_forced_kernel_takes_every_length(self) -> None:
        choices, _ = usable_choices(STACK, 80, "bfloat16", "triton_fp8", fp8=True)
        assert [choice.kernel for choice in choices] == ["triton_fp8"]

    def test_a_forced_kernel_has_no_stand_in(self) -> None:
        choices, _ = usable_choices(
            STACK, 80, "bfloat16", "hopper_fp8", fp8=True, attempt=lambda kernel: "no"
        )
        assert choices == ()


def test_dtype_may_be_a_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    assert kernel_verdict("cudnn", STACK, 80, torch.bfloat16).ok
    assert not kernel_verdict("cudnn", STACK, 80, torch.float32).ok


def test_unknown_kernel_raises() -> None:
    with pytest.raises(ValueError, match="no kernel is named 'xformers'"):
        kernel_verdict("xformers", STACK, 80, "bfloat16")  # type: ignore[arg-type]


def test_choices_are_those_of_the_table_where_all_run() -> None:
    choices, refusals = usable_choices(STACK, 80, "bfloat16")
    assert choices == choices_for(HOPPER.name, (9, 0), "bfloat16", 80)
    assert refusals == {}


def test_choices_drop_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (Choice("cudnn", 1024, "short"), Choice("flash_attn", None, "long"))
    monkeypatch.setattr(support, "choices_for", lambda *_: table)
    stack = replace(STACK, flashinfer=None)
    choices, refusals = usable_choices(stack, 80, "bfloat16")
    assert choices == table[1:]
    (refusal,) = refusals.values()
    assert refusal.startswith("cudnn: flashinfer-python is not installed")
    assert refusal.endswith('(pip install "flashinfer-python==0.6.13")')


def test_a_forced_kernel_replaces_the_table() -> None:
    choices, refusals = usable_choices(STACK, 80, "bfloat16", "reference")
    assert choices == (Choice("reference", None, f"forced by {ENV_KERNEL}"),)
    assert refusals == {}


def test_a_forced_kernel_that_cannot_run_leaves_nothing() -> None:
    stack = replace(STACK, gpus=())
    choices, refusals = usable_choices(stack, 80, "bfloat16", "cudnn")
    assert choices == ()
    assert len(refusals) == 1


def test_no_gpu_is_served_by_the_reference() -> None:
    choices, _ = usable_choices(replace(STACK, gpus=()), 80, "bfloat16")
    assert [choice.kernel for choice in choices] == ["reference"]


def test_a_sound_stack_has_no_problems() -> None:
    assert stack_problems(STACK) == []


@pytest.mark.parametrize(
    ("changes", "what", "remedy", "fatal"),
    [
        pytest.param(
            {"vllm": None},
            "vllm is not installed",
            'pip install "vllm>=0.22.1,<=0.33.0"',
            True,
            id="no-vllm",
        ),
        pytest.param(
            {"vllm": "0.20.2"},
            "vLLM 0.20.2 is installed",
            'pip install "vllm>=0.22.1,<=0.33.0"',
            True,
            id="old-vllm",
        ),
        pytest.param(
            {"vllm": "0.34.0"},
            "vLLM 0.34.0 is installed",
            'pip install "vllm>=0.22.1,<=0.33.0"',
            True,
            id="new-vllm",
        ),
        pytest.param(
            {"cudnn_backend": 91300, "torch_cudnn": 91300, "cudnn_libraries": ("/x",)},
            "loads cuDNN 9.13.0 from /x, not nvidia-cudnn-cu13 9.19.0.56",
            "LD_LIBRARY_PATH",
            False,
            id="loaded-is-not-the-wheel",
        ),
        pytest.param(
            {"torch_cudnn": 91300},
            f"torch 9.13.0, cudnn-frontend 9.19.0 ({LIBCUDNN})",
            "LD_LIBRARY_PATH",
            False,
            id="torch-runs-another",
        ),
        pytest.param(
            {
                "cudnn_wheels": {
                    "nvidia-cudnn-cu13": "9.19.0.56",
                    "nvidia-cudnn-cu12": "9.19.0.56",
                }
            },
            "each overwrites the other's files",
            "pip uninstall -y nvidia-cudnn-cu12 && "
            "pip install --force-reinstall --no-deps nvidia-cudnn-cu13",
            False,
            id="two-wheels",
        ),
        pytest.param(
            {"import_errors": {"flashinfer.cudnn": "OSError: broken"}},
            "importing flashinfer.cudnn fails: OSError: broken",
            'pip install --force-reinstall "flashinfer-python==0.6.13"',
            False,
            id="broken-flashinfer",
        ),
        pytest.param(
            {"gpus": (HOPPER, AMPERE)},
            "differ in compute capability",
            "CUDA_VISIBLE_DEVICES",
            False,
            id="mixed-gpus",
        ),
    ],
)
def test_problems(changes: dict[str, Any], what: str, remedy: str, fatal: bool) -> None:
    (problem,) = stack_problems(replace(STACK, **changes))
    assert what in problem.what
    assert problem.remedy is not None
    assert remedy in problem.remedy
    assert problem.fatal is fatal


def test_a_package_that_is_not_there_is_reported_once() -> None:
    errors = {"flashinfer.cudnn": "ModuleNotFoundError: no flashinfer"}
    stack = replace(STACK, flashinfer=None, import_errors=errors)
    (problem,) = stack_problems(stack)
    assert problem.what == "flashinfer-python is not installed"


def _fake_nvml(gpus: list[Gpu]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.65.06",
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda i: gpus[i],
        nvmlDeviceGetHandleByUUID=lambda uuid: gpus[int(uuid.removeprefix("GPU-"))],
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(
            total=gpu.memory_bytes
        ),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu.capability,
        nvmlDeviceGetName=lambda gpu: gpu.name,
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (HOPPER, AMPERE)),
        ("1", (AMPERE,)),
        ("1, 0", (AMPERE, HOPPER)),
        ("GPU-1", (AMPERE,)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (HOPPER,)),
    ],
)
def test_gpus_follow_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[Gpu, ...]
) -> None:
    monkeypatch.setattr(support, "_load_nvml", lambda: _fake_nvml([HOPPER, AMPERE]))
    monkeypatch.setattr(support, "report_libraries", lambda emit: None)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    stack = probe()
    assert stack.gpus == expected
    assert stack.driver == "580.65.06"
    assert stack.capability == (expected[0].capability if expected else None)


def test_a_broken_driver_is_a_stated_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> types.ModuleType:
        raise OSError("driver/library version mismatch")

    monkeypatch.setattr(support, "_load_nvml", broken)
    (problem,) = [p for p in probe().problems if "driver" in p.what]
    assert "driver/library version mismatch" in problem.what
    assert problem.remedy is not None
    assert "nvidia-smi" in problem.remedy


def test_libraries_are_read_only_where_a_gpu_can_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = []
    facts = {"cudnn_backend": 92400, "import_errors": {}}

    def report(emit: Callable[[dict[str, Any]], object]) -> None:
        read.append(True)
        emit(facts)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(support, "report_libraries", report)
    for gpus, count in (([], 0), ([TURING], 0), ([HOPPER], 1)):
        monkeypatch.setattr(support, "_load_nvml", lambda gpus=gpus: _fake_nvml(gpus))
        stack = probe()
        assert len(read) == count
        assert stack.inspected is bool(count)
    assert stack.cudnn_backend == 92400


@pytest.mark.parametrize(
    ("kernel", "is_inspected"),
    [("triton", False), ("flash_attn", False), ("cudnn", True)],
)
def test_libraries_wait_for_a_kernel_that_needs_them(
    monkeypatch: pytest.MonkeyPatch, kernel: str, is_inspected: bool
) -> None:
    read = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(support, "_load_nvml", lambda: _fake_nvml([HOPPER]))
    monkeypatch.setattr(support, "report_libraries", lambda emit: read.append(True))
    assert probe(libraries=False).inspected is None
    assert not read
    monkeypatch.setattr(support, "probe", lambda: read.append(True) or STACK)
    bare = replace(STACK, cudnn_backend=None, inspected=None)
    choices, refusals = usable_choices(bare, 80, "bfloat16", kernel)
    assert [choice.kernel for choice in choices] == [kernel]
    assert refusals == {}
    assert bool(read) is is_inspected


def test_a_library_that_fails_to_import_does_not_hide_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no libcudart")

    libraries = {"torch": broken, "cudnn": lambda: {"cudnn_backend": 91900}}
    monkeypatch.setattr(support, "_LIBRARIES", libraries)
    facts: dict[str, Any] = {}
    support.report_libraries(facts.update)
    assert facts["cudnn_backend"] == 91900
    assert facts["import_errors"] == {"torch": "RuntimeError: no libcudart"}


CHILD = """
import os, sys, time

def fine(emit):
    print("noise without an end", end="")
    emit({"a": 1})
    emit({"b": [2]})

def crash(emit):
    emit({"importing": "cudnn"})
    os.abort()

def fail(emit):
    emit({"a": 1})
    raise RuntimeError("no such thing")

def hang(emit):
    emit({"a": 1})
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("report", "facts", "error"),
    [
        ("fine", {"a": 1, "b": [2]}, None),
        ("crash", {"importing": "cudnn"}, f"crashed with signal {signal.SIGABRT:d}"),
        ("fail", {"a": 1}, "failed: RuntimeError: no such thing"),
        ("missing", {}, "failed: AttributeError"),
    ],
)
def test_run_isolated(
    tmp_path: Path, report: str, facts: dict[str, Any], error: str | None
) -> None:
    (tmp_path / "child_module.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found, what = run_isolated(report, module="child_module", env=env)
    assert found == facts
    assert what == error if error is None else str(what).startswith(error)


def test_run_isolated_kills_a_child_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "child_module.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # Long enough for a busy machine to start Python, far below the child's sleep.
    found, what = run_isolated("hang", module="child_module", env=env, timeout_s=15)
    assert found == {"a": 1}
    assert what == "did not finish in 15 s"


def test_a_crash_is_blamed_on_the_module_that_was_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"torch_cuda": "13.0", "importing": "cudnn"}
    monkeypatch.setattr(
        support, "run_isolated", lambda report: (facts, "crashed with signal 11")
    )
    stack = probe(isolated=True)
    assert stack.torch_cuda == "13.0"
    assert stack.import_errors == {"cudnn": "crashed with signal 11"}
    assert any("crashed with signal 11" in problem.what for problem in stack.problems)


def test_importing_is_inert() -> None:
    code = (
        "import sys, vllm_flashinfer_vit, vllm_flashinfer_vit.config, "
        "vllm_flashinfer_vit.machine.support, vllm_flashinfer_vit.commands.cli; "
        "print([m for m in ('vllm', 'torch', 'triton', 'flashinfer', 'cudnn') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_probing_imports_nothing_and_starts_no_cuda() -> None:
    code = (
        "import sys; from vllm_flashinfer_vit.support import probe; stack = probe(); "
        "loaded = [m for m in ('vllm', 'triton') if m in sys.modules]; "
        "torch = sys.modules.get('torch'); "
        "print(loaded, torch is not None and torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.strip() == "[] False"


def test_probing_works_without_any_of_the_packages() -> None:
    # -S leaves site-packages out, so that nothing is installed.
    root = Path(support.__file__).parents[1]
    packaging = Path(__import__("packaging").__file__).parents[1] / "packaging"
    code = (
        "import sys, importlib.util, types; "
        f"spec = importlib.util.spec_from_file_location('packaging', "
        f"{str(packaging / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(packaging)!r}]); "
        "sys.modules['packaging'] = importlib.util.module_from_spec(spec); "
        f"sys.path.insert(0, {str(root)!r}); "
        "from vllm_flashinfer_vit.support import probe; stack = probe(); "
        "print(stack.vllm, stack.torch, stack.gpus, len(stack.problems))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None None ()")
