# SPDX-License-Identifier: Apache-2.0
"""Compile what blocks run between their GEMMs for GPUs that are not here.

A process of its own, since Triton interprets or compiles by how it was imported. Prints
a line for each that the assembler took: the compute capability, and what it was.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_flashinfer_vit.kernels import act_quantize, add_norm, turn

TARGETS = (80, 86, 89, 90, 100, 120)
# The first with e4m3.
FP8 = 89
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
ROWS = 64


def compile_for(target: int, launch: Any, tensors: tuple[torch.Tensor, ...]) -> None:
    """Compile and assemble a launch for tensors like these."""
    kernel, constants = launch._kernel, launch._constants
    scalars = [
        "fp32" if isinstance(value, float) else "i32" for value in launch._scalars
    ]
    types = [*(TYPES[tensor.dtype] for tensor in tensors), *scalars]
    rest = kernel.arg_names[len(types) :]
    signature = dict(zip(kernel.arg_names, types, strict=False))
    signature |= dict.fromkeys(rest, "constexpr")
    source = ASTSource(kernel, signature, {name: constants[name] for name in rest})
    options = {key: value for key, value in constants.items() if key not in rest}
    compiled = triton.compile(source, GPUTarget("cuda", target, 32), options)
    assert compiled.asm["cubin"]


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def scales_of(form: str) -> torch.Tensor | None:
    if form == "none":
        return None
    return torch.empty((ROWS, 1) if form == "own" else (1,))


def turns() -> Iterator[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    sizes = ((16, 64), (16, 72), (12, 128))
    options = (False, True)
    for (heads, dim), interleaved, normed in itertools.product(sizes, options, options):
        q, k = bf16(ROWS, 3 * heads, dim).split([heads, 2 * heads], 1)
        k = k[:, :heads]
        cos, sin = torch.empty(2, ROWS, dim // 2)
        weights = (bf16(dim), bf16(dim)) if normed else ()
        launch = turn._launch(q, k, cos, sin, 1e-5, interleaved, *weights)
        name = f"turn {heads}x{dim} interleaved={interleaved} normed={normed}"
        yield name, launch, (q, k, cos, sin, *(weights or (q, k)))


def sums() -> Iterator[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    for width, form, scaled in itertools.product(
        (1024, 1152, 1536), ("none", "own", "one"), (False, True)
    ):
        x, weight = bf16(ROWS, width), bf16(width)
        scales = scales_of(form)
        rows = x if scales is None else x.to(torch.float8_e4m3fn)
        layer_scales = (weight, weight) if scaled else ()
        given = x, x, x, 3, weight, weight, 1e-6, True, rows, scales, *layer_scales
        launch = add_norm._launch(*given)
        last = rows if scales is None else scales
        both = layer_scales or (rows, rows)
        name = f"sum {width} scales={form} layer_scales={scaled}"
        yield name, launch, (x, x, x, weight, weight, x, rows, last, *both)


def acts() -> Iterator[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    for activation, form in itertools.product(
        ("swiglu", "quick_gelu", "tanh_gelu", "gelu"), ("own", "one")
    ):
        width, stacked = 4304, 4304 * (1 + (activation == "swiglu"))
        values, bias, scales = bf16(ROWS, stacked), bf16(stacked), scales_of(form)
        assert scales is not None
        rows = torch.empty(ROWS, width, dtype=torch.float8_e4m3fn)
        launch = act_quantize._launch(values, width, bias, activation, rows, scales)
        yield f"{activation} scales={form}", launch, (values, bias, rows, scales)


def main() -> None:
    for target in TARGETS:
        for name, launch, tensors in (*turns(), *sums(), *acts()):
            in_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors)
            if target >= FP8 or not in_fp8:
                compile_for(target, launch, tensors)
                print(target, name)


if __name__ == "__main__":
    main()
