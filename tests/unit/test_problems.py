# SPDX-License-Identifier: Apache-2.0
"""What is wrong with made-up machines."""

from dataclasses import replace
from typing import Any

import pytest
from _stacks import AMPERE, HOPPER, INSTALL_VLLM, LIBCUDNN, STACK

from vllm_flashinfer_vit.machine.problems import stack_problems

BINDINGS = ("cuda/bindings/__init__.py", "cuda/bindings/runtime.so")


def test_a_sound_stack_has_no_problems() -> None:
    assert stack_problems(STACK) == []


@pytest.mark.parametrize(
    ("changes", "what", "remedy", "fatal"),
    [
        pytest.param(
            {"vllm": None},
            "vllm is not installed",
            INSTALL_VLLM,
            True,
            id="no-vllm",
        ),
        pytest.param(
            {"vllm": "0.20.2"},
            "vLLM 0.20.2 is installed",
            INSTALL_VLLM,
            True,
            id="old-vllm",
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
            {
                "torch": "2.11.0+cu130",
                "import_errors": {"torch": "OSError: broken"},
            },
            "importing torch fails: OSError: broken",
            'pip install --force-reinstall "torch==2.11.0"',
            False,
            id="broken-torch",
        ),
        pytest.param(
            {"damaged_bindings": BINDINGS},
            "2 files of cuda-bindings 13.4.4 are overwritten or missing, the first is "
            "cuda/bindings/__init__.py; cuda-python before 12.8 does that",
            "pip uninstall -y cuda-python cuda-bindings && "
            'pip install "cuda-bindings==13.4.4" "cuda-python>=12.8"',
            False,
            id="damaged-bindings",
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
def test_a_problem_says_what_to_do(
    changes: dict[str, Any], what: str, remedy: str, fatal: bool
) -> None:
    (problem,) = stack_problems(replace(STACK, **changes))
    assert what in problem.what
    assert problem.remedy is not None
    assert remedy in problem.remedy
    assert problem.fatal is fatal


def test_damaged_bindings_are_fatal_where_an_import_needs_them() -> None:
    error = "AttributeError: module 'cuda.bindings.runtime' has no 'cudaLibrary_t'"
    errors = {"flashinfer.cudnn": error}
    stack = replace(STACK, damaged_bindings=BINDINGS, import_errors=errors)
    effect, cause = stack_problems(stack)
    assert error in effect.what
    assert "2 files of cuda-bindings" in cause.what
    assert cause.remedy == effect.remedy
    assert cause.fatal


def test_a_package_that_is_not_there_is_reported_once() -> None:
    errors = {"flashinfer.cudnn": "ModuleNotFoundError: no flashinfer"}
    stack = replace(STACK, flashinfer=None, import_errors=errors)
    (problem,) = stack_problems(stack)
    assert problem.what == "flashinfer-python is not installed"
