# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles, and fits, on GPUs that are not here.

`doctor` says yes to GPUs that nobody measured: what it promises there is compiled and
assembled for each compute capability. `compile_kernels.py` says what it leaves out.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_flashinfer_vit
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE, HALF_DTYPES, judge

# CUDA Programming Guide, "Technical Specifications per Compute Capability": maximum
# amount of shared memory per thread block, in KiB.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Of a thread, on each of them.
REGISTERS = 255

# Registers spill to a thread's stack. None has one but these, by the start of a name,
# of which the longest counts: bytes for each compute capability, the larger of what
# vLLM 0.25.1's Triton takes and 0.33.0's, rounded up to 16.
STACK_BYTES = {
    # Two blocks share a multiprocessor, so a thread has 128 registers, of which the
    # fp32 sums over v of a wide head take most.
    "triton": (96, 128, 128, 80, 256, 272),
    "triton 128": (272, 272, 272, 96, 432, 336),
    "triton_window": (80, 128, 128, 48, 32, 144),
    "triton_window 128": (96, 176, 176, 448, 80, 144),
    # Tables in fp32 take twice the registers of those in 16 bits.
    "triton_window 128 interleaved": (208, 512, 512, 320, 96, 208),
    # It has 255, and a sum over v of each block beside that of all.
    "triton_fp8": (0, 0, 80, 0, 1040, 112),
    "triton_fp8 128": (0, 0, 240, 80, 688, 272),
    # Scalars; two of them once a step at head dim 128.
    "hopper_bf16": (0, 0, 0, 16, 0, 0),
    "hopper_bf16 128": (0, 0, 0, 32, 0, 0),
    "hopper_bf16 few 128": (0, 0, 0, 64, 0, 0),
    "quantize_rows 128": (0, 0, 16, 0, 0, 0),
    # Two values that no head changes are read again for each.
    "quantize 72 interleaved": (0, 0, 16, 16, 16, 32),
    # Twice the bytes of a value; towers run in 16 bits.
    "quantize 80 fp32": (0, 0, 96, 96, 176, 144),
    "quantize 128 fp32": (0, 0, 0, 0, 16, 16),
}

FIRST_FP8, HOPPER = 89, 90
SOURCES = Path(vllm_flashinfer_vit.__file__).parent


def compiled(capability: int, cache: Path) -> list[dict[str, Any]]:
    """Compile all in a process of its own, with nothing compiled before."""
    script = Path(__file__).with_name("compile_kernels.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(script), "--capabilities", str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def jit_functions() -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions that Triton or Gluon compiles, and which of the two does."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                name = ast.unparse(getattr(mark, "func", mark))
                if name in ("triton.jit", "gluon.jit"):
                    yield node, name.partition(".")[0]


def kernels_of_the_sources(capability: int) -> set[str]:
    """Return the names of what is launched: no function on the device calls it.

    Gluon's instructions are those of one generation. The package's are for Hopper, and
    their imports are of `gluon.language.nvidia.hopper`.
    """
    found = list(jit_functions())
    called = {
        node.id
        for function, _ in found
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }
    assert len(found) > 40
    kernels = {(f.name, of) for f, of in found if f.name not in called}
    gluon = {name for name, of in kernels if of == "gluon"}
    assert gluon == {"_hopper_bf16_kernel", "_hopper_fp8_kernel"}
    names = {name for name, _ in kernels}
    if capability != HOPPER:
        names -= gluon
    if capability < FIRST_FP8:
        names -= FP8_KERNELS
    return names


# What reads or writes e4m3, which begins with 8.9.
FP8_KERNELS = {
    "_absmax_kernel",
    "_act_quantize_kernel",
    "_factors_kernel",
    "_finish_kernel",
    "_flash_fp8_kernel",
    "_quantize_blocks_kernel",
    "_quantize_rows_kernel",
    "_update_kernel",
}


def promised(capability: int) -> set[tuple[str, str]]:
    """Return the kernels on Triton that `doctor` says yes to, each with a head dim."""
    gpu = Gpu("this one", divmod(capability, 10), 0)
    stack = Stack("3.12", triton="3", gpus=(gpu,))
    return {
        (name, str(head_dim))
        for name, kernel in KERNELS.items()
        if kernel.needs.library == "triton"
        for head_dim in HEAD_DIMS
        for dtype in (*HALF_DTYPES, FP8_DTYPE)
        if judge(kernel.needs, stack, head_dim, dtype).ok
    }


def stack_limit(capability: int, name: str) -> int:
    words = name.split()
    for end in range(len(words), 0, -1):
        limits = STACK_BYTES.get(" ".join(words[:end]))
        if limits is not None:
            return limits[list(SHARED_KIB).index(capability)]
    return 0


@pytest.mark.extended
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_all_kernels_compile_and_fit(capability: int, tmp_path: Path) -> None:
    lines = compiled(capability, tmp_path)
    assert {line["kernel"] for line in lines} == kernels_of_the_sources(capability)
    assert promised(capability) <= {tuple(line["name"].split()[:2]) for line in lines}
    assert {line["capability"] for line in lines} == {capability}
    too_much = [
        line
        for line in lines
        if line["shared"] > 1024 * SHARED_KIB[capability]
        or line["registers"] > REGISTERS
        or line["stack"] > stack_limit(capability, line["name"])
    ]
    assert too_much == []
    # Two values of 16 bits in a register, and one multiplication for both.
    packed = {
        line["packed"] == ("fp32" not in line["name"])
        for line in lines
        if line["kernel"] == "_quantize_blocks_kernel"
    }
    assert packed == ({True} if capability >= FIRST_FP8 else set())


def test_the_page_has_these_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    for name, limits in STACK_BYTES.items():
        kernel, _, head_dim = name.partition(" ")
        columns = (f"`{kernel}`", head_dim or "to 96", *map(str, limits))
        assert f"| {' | '.join(columns)} |" in page
