# SPDX-License-Identifier: Apache-2.0
"""Compile a kernel for Hopper for a head dim, and print what the assembler says of it.

    python tests/kernels/compile_hopper.py hopper_fp8 80

A process of its own: the tests' interpreter of Triton knows nothing of Gluon.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from vllm_flashinfer_vit.kernels import hopper_bf16, hopper_fp8

Box = tuple[int, int]


def _compile(
    kernel: Any,
    form: dict[str, Any],
    boxes_of_form: tuple[Box, ...],
    dtype: Any,
    type_of: Callable[[str], str],
) -> Any:
    """Compile a kernel for compute capability 9.0, for 16 heads of queries and of keys.

    Args:
        kernel: What `gluon.jit` made of it.
        form: Its constants.
        boxes_of_form: Boxes of its descriptors: two of q, of k and of v.
        dtype: Theirs.
        type_of: Returns the type of another parameter, by name.
    """
    parts = ("q_lo", "q_hi", "k_lo", "k_hi", "v_lo", "v_hi")
    boxes = {
        f"{part}_desc": box for part, box in zip(parts, boxes_of_form, strict=True)
    }
    constants = {name: None for name, box in boxes.items() if 0 in box}
    constants |= {"H": 16, "H_RATIO": 1, **form}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in boxes:
            block = [1, *boxes[name]]
            layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
            signature[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        else:
            signature[name] = type_of(name)
    source = GluonASTSource(kernel, signature, constants)
    return triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def _fp8(head_dim: int) -> Any:
    types = {"cu_ptr": "*i32", "out_ptr": "*bf16", "scale_log2e": "fp32"}
    return _compile(
        hopper_fp8._hopper_fp8_kernel,
        *hopper_fp8._form(head_dim),
        gl.float8e4nv,
        lambda name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32"),
    )


def _bf16(head_dim: int, groups: int | None = None) -> Any:
    types = {"out_ptr": "*bf16", "scale_log2e": "fp32"}
    groups = groups or hopper_bf16._most_groups(head_dim)
    return _compile(
        hopper_bf16._hopper_bf16_kernel,
        *hopper_bf16._form(head_dim, groups),
        gl.bfloat16,
        lambda name: types.get(name, "*i32" if name.endswith("_ptr") else "i32"),
    )


# By kernel, what compiles it for a head dim.
KERNELS = {
    "hopper_bf16": _bf16,
    "hopper_bf16 few": functools.partial(_bf16, groups=hopper_bf16._FEW),
    "hopper_fp8": _fp8,
}


def main() -> None:
    name, head_dim = sys.argv[1:]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(KERNELS[name](int(head_dim)).asm["ptx"])
        ptx.flush()
        ptxas = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a"]
        subprocess.run([*ptxas, ptx.name, "-o", os.devnull], check=True)


if __name__ == "__main__":
    main()
