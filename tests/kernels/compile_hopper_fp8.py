# SPDX-License-Identifier: Apache-2.0
"""Compile the Hopper kernel for a head dim, and print what the assembler says of it.

A process of its own: the tests' interpreter of Triton knows nothing of Gluon.
"""

import os
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from vllm_flashinfer_vit.kernels import hopper_fp8


def _source(head_dim: int) -> GluonASTSource:
    form, boxes_of_form = hopper_fp8._form(head_dim)
    parts = ("q_lo", "q_hi", "k_lo", "k_hi", "v_lo", "v_hi")
    boxes = {
        f"{part}_desc": box for part, box in zip(parts, boxes_of_form, strict=True)
    }
    constants = {name: None for name, box in boxes.items() if 0 in box}
    constants |= {"H": 16, "H_RATIO": 1, **form}
    signature = {}
    for name in hopper_fp8._hopper_fp8_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in boxes:
            block = [1, *boxes[name]]
            layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
            signature[name] = f"tensordesc<fp8e4nv{block},{layout!r}>"
        elif name.endswith("_ptr"):
            types = {"cu_ptr": "*i32", "out_ptr": "*bf16"}
            signature[name] = types.get(name, "*fp32")
        else:
            signature[name] = "fp32" if name == "scale_log2e" else "i32"
    return GluonASTSource(hopper_fp8._hopper_fp8_kernel, signature, constants)


def compile_for(head_dim: int) -> Any:
    """Compile it for compute capability 9.0, the only one that has its instructions."""
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(_source(head_dim), target, options={"num_warps": 4})


def main() -> None:
    kernel = compile_for(int(sys.argv[1]))
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(kernel.asm["ptx"])
        ptx.flush()
        ptxas = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a"]
        subprocess.run([*ptxas, ptx.name, "-o", os.devnull], check=True)


if __name__ == "__main__":
    main()
