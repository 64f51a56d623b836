# SPDX-License-Identifier: Apache-2.0
"""What can run, on made-up machines: reasons and remedies."""

from dataclasses import replace
from typing import Any

import pytest
from _stacks import (
    ADA,
    AMPERE,
    BLACKWELL,
    BLACKWELL_RTX,
    HOPPER,
    INSTALL_VLLM,
    STACK,
    TURING,
)

from vllm_flashinfer_vit.choices.usable import kernel_verdict
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.machine.stack import Gpu
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE, Needs, judge
from vllm_flashinfer_vit.settings import ENV_KERNEL


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("gpu", [AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_RTX])
@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn", "reference"])
def test_a_full_stack_runs_every_kernel(
    kernel: str, gpu: Gpu, head_dim: int, dtype: str
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
            "pip uninstall -y cuda-python cuda-bindings && "
            'pip install "cuda-bindings==13.4.4" "cuda-python>=12.8"',
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
            INSTALL_VLLM,
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
            INSTALL_VLLM,
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
            "it is for compute capability 9.0 (Hopper) only",
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
    kernel: str, changes: dict[str, Any], reason: str, remedy: str | None
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
def test_odd_head_dims_are_left_to_the_reference(kernel: str, head_dim: int) -> None:
    verdict = kernel_verdict(kernel, STACK, head_dim, "bfloat16")
    assert not verdict.ok
    assert verdict.reason == "it takes head dims of 8 to 256 that are multiples of 8"
    assert kernel_verdict("reference", STACK, head_dim, "bfloat16").ok


@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
def test_float32_is_left_to_the_reference(kernel: str) -> None:
    verdict = kernel_verdict(kernel, STACK, 80, "float32")
    assert not verdict.ok
    assert "float32" in verdict.reason
    assert kernel_verdict("reference", STACK, 80, "float32").ok


@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
def test_a_kernel_of_the_activations_takes_no_fp8(kernel: str) -> None:
    verdict = kernel_verdict(kernel, STACK, 80, "float8_e4m3fn")
    assert not verdict.ok
    assert "not float8_e4m3fn" in verdict.reason


@pytest.mark.parametrize("kernel", sorted(fp8_names()))
def test_an_fp8_kernel_must_be_asked_for(kernel: str) -> None:
    verdict = kernel_verdict(kernel, STACK, 80, "bfloat16")
    assert not verdict.ok
    assert verdict.remedy == "--mm-encoder-attn-dtype fp8"


@pytest.mark.parametrize(
    ("kernel", "capability", "reason"),
    [
        ("cudnn_fp8", (9, 0), "illegal instruction"),
        ("cudnn_fp8", (10, 0), None),
        ("cudnn_fp8", (8, 9), "it needs compute capability 9.0 (Hopper) or newer"),
        ("hopper_fp8", (9, 0), None),
        ("hopper_fp8", (10, 0), "for compute capability 9.0 (Hopper) only"),
        ("triton_fp8", (8, 9), None),
        ("triton_fp8", (10, 0), None),
        ("triton_fp8", (8, 6), "FP8 needs compute capability 8.9 (Ada)"),
        ("reference_fp8", (8, 0), None),
    ],
)
def test_fp8_by_compute_capability(
    kernel: str, capability: tuple[int, int], reason: str | None
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


def test_dtype_may_be_a_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    assert kernel_verdict("cudnn", STACK, 80, torch.bfloat16).ok
    assert not kernel_verdict("cudnn", STACK, 80, torch.float32).ok


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bounds_of_the_catalog_are_those_of_the_verdict(kernel: str) -> None:
    needs = KERNELS[kernel].needs
    if needs.head_dims is None:
        return
    stack = replace(STACK, cudnn_backend=92300)
    dtype = FP8_DTYPE if needs.is_fp8 else "bfloat16"
    least, most = needs.head_dims
    found = {d for d in range(0, 300) if kernel_verdict(kernel, stack, d, dtype).ok}
    assert found == set(range(least, most + 1, 8))


def test_what_to_do_instead_is_said_only_where_nothing_mends_it() -> None:
    needs = Needs("cudnn_fp8", dtypes=(FP8_DTYPE,), instead="another setting")
    assert judge(needs, STACK, 80, FP8_DTYPE).remedy == "another setting"
    old = replace(STACK, gpus=(BLACKWELL,), cudnn_backend=91002)
    assert "pip install" in str(judge(needs, old, 80, FP8_DTYPE).remedy)
    assert judge(needs, replace(STACK, gpus=()), 80, FP8_DTYPE).remedy is None


def test_a_capability_without_a_name_is_a_number() -> None:
    needs = Needs("triton", capability=(12, 1))
    reason = judge(needs, STACK, 80, "bfloat16").reason
    assert "compute capability 12.1 or newer; NVIDIA H200 has 9.0" in reason
