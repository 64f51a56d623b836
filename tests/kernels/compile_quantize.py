# SPDX-License-Identifier: Apache-2.0
"""Compile the quantiser for GPUs that are not here.

A process of its own, since Triton interprets or compiles by how it was imported. Prints
a line for each that the assembler took: the compute capability, the dtype, whether
scales are given, and whether two values lie in a register.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_flashinfer_vit.kernels.quantize import _plan

TARGETS = (89, 90, 100)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_for(target: int, dtype: torch.dtype, has_scales: bool) -> str:
    """Return the PTX of a head dim of 72 with rotary, as the assembler took it."""
    qkv = torch.empty(256, 3 * 2, 72, dtype=dtype)
    angles = torch.empty(256, 36, dtype=dtype)
    scales = torch.empty(3) if has_scales else None
    offsets = torch.zeros(2, dtype=torch.int32)
    launch, _ = _plan(*qkv.split(2, dim=1), offsets, angles, angles, scales)
    kernel, constants = launch._kernel, launch._constants
    name = DTYPES[dtype]
    pointers = [name] * 5 + ["fp32", "i32"] + ["fp8e4nv"] * 3 + ["fp32"] * 3
    types = [f"*{pointer}" for pointer in pointers] + ["i32"] * len(launch._scalars)
    rest = kernel.arg_names[len(types) :]
    signature = dict(zip(kernel.arg_names, types, strict=False))
    signature |= dict.fromkeys(rest, "constexpr")
    source = ASTSource(kernel, signature, {arg: constants[arg] for arg in rest})
    options = {key: value for key, value in constants.items() if key not in rest}
    compiled = triton.compile(source, GPUTarget("cuda", target, 32), options)
    return compiled.asm["ptx"]


def main() -> None:
    for target in TARGETS:
        for dtype, name in DTYPES.items():
            for has_scales in (False, True):
                ptx = compile_for(target, dtype, has_scales)
                is_packed = any(op in ptx for op in ("fma.rn.bf16x2", "fma.rn.f16x2"))
                print(target, name, has_scales, is_packed)


if __name__ == "__main__":
    main()
