# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel, and those in Gluon, for GPUs that are not here.

A process of its own, since Triton interprets or compiles by how it was imported. The
kernels' own functions run on tensors of the CPU; where they would launch, the kernel is
compiled, with what Triton would know of the arguments, and assembled. Prints a line of
JSON for each: what it is, and what the assembler says that it takes.

    python tests/kernels/compile_kernels.py --capabilities 80 90

A minute for each capability leaves no room for all there is. Left out are:

- fp16 but at 128 and 80, head dims of one part and of two: the instructions are those
  of bf16 with another type.
- Windows without rotary of 32 and 64 tokens: less code than with it.
- Interleaved pairs but at the head dims of towers that have them, with their tables.
- The quantiser in fp16 and fp32 at most head dims: as for fp16.
- Other numbers of heads, and strides that are odd: constants, and single elements.
"""

import argparse
import functools
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, get_args
from unittest import mock

import torch
import triton
from compile_hopper import KERNELS as GLUON
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_flashinfer_vit.kernels import (
    absmax,
    act_bound,
    act_quantize,
    add_norm,
    cudnn_fp8,
    flash,
    flash_fp8,
    gated_gelu,
    norm_add,
    padding,
    quantize,
    quantize_rows,
    redo,
    rope,
    seqlens,
    turn,
    window,
)
from vllm_flashinfer_vit.kernels._launch import Launch, Slot
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS
from vllm_flashinfer_vit.kernels.formats import (
    Bound,
    DeviceScales,
    RowScales,
    num_groups,
)

# The first with e4m3.
FP8 = 89
HOPPER = 90
CAPABILITIES = (80, 86, FP8, HOPPER, 100, 120)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Head dims that are compiled in every dtype.
BOTH_TYPES = (80, 128)
# Of scales of rows in e4m3.
FORMS = get_args(RowScales)
# Of towers with interleaved pairs, whose tables are fp32.
INTERLEAVED = (64, 72, 128)
HEADS, ROWS, LENGTH = 16, 512, 128
E4M3 = torch.float8_e4m3fn
# What a launch is of: the launch, and its tensors.
Found = tuple[Launch, list[torch.Tensor]]
# A name, and what launches.
Case = tuple[str, Callable[[], object]]


def compile_for(capability: int, launch: Any, tensors: list[torch.Tensor]) -> Any:
    """Compile and assemble a launch for tensors like these, aligned to 16 bytes."""
    kernel, constants, scalars = launch._kernel, launch._constants, launch._scalars
    types = [f"*{TYPES[tensor.dtype]}" for tensor in tensors]
    types += ["fp32" if isinstance(value, float) else "i32" for value in scalars]
    names = kernel.arg_names
    rest = names[len(types) :]
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(rest, "constexpr")
    attributes = {}
    for place, parameter in enumerate(kernel.params[: len(types)]):
        value = None if place < len(tensors) else scalars[place - len(tensors)]
        is_known = value is None or (isinstance(value, int) and value % 16 == 0)
        left_open = parameter.do_not_specialize or (
            parameter.do_not_specialize_on_alignment
        )
        if is_known and not left_open:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, {name: constants[name] for name in rest}, attributes
    )
    options = {key: value for key, value in constants.items() if key not in rest}
    return triton.compile(source, GPUTarget("cuda", capability, 32), options)


def resources(compiled: Any) -> dict[str, int]:
    """Return registers of a thread, its bytes of stack, and the block's shared ones."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {key: int(re.search(rf"{key}:(\d+)", said)[1]) for key in ("REG", "STACK")}
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
    }


def launches_of(run: Callable[[], object]) -> list[Found]:
    """Return what a function would launch."""
    found: list[Found] = []

    def settle(launch: Launch, *arguments: Any) -> Callable[..., None]:
        tensors = [x.like if isinstance(x, Slot) else x for x in arguments]
        found.append((launch, tensors))
        return lambda *tensors: None

    with (
        mock.patch.object(Launch, "settle", settle),
        mock.patch.object(Launch, "__call__", lambda self, *x: settle(self, *x)(*x)),
    ):
        run()
    return found


def heads(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return list(torch.empty(ROWS, 3 * HEADS, head_dim, dtype=dtype).split(HEADS, 1))


def offsets() -> torch.Tensor:
    return torch.arange(0, ROWS + 1, LENGTH, dtype=torch.int32)


def angles(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(ROWS, head_dim // 2, dtype=dtype) for _ in range(2)]


def run_absmax(*given: Any) -> None:
    absmax.prepare(*given)(given[4])


def of_attention(dim: int, dtype: torch.dtype) -> Iterator[Case]:
    """All kernels, in each class of lengths that has a configuration of its own."""
    q, k, v = heads(dim, dtype)
    tables = angles(dim, dtype)
    scale, name = dim**-0.5, TYPES[dtype]
    for length in (512, 2048):
        yield (
            f"triton {dim} {name} {length}",
            functools.partial(flash.prepare, q, k, v, offsets(), length, scale),
        )
    if dtype == torch.bfloat16 and dim >= 64:
        marks, out = torch.empty(redo.MARKS, dtype=torch.int32), torch.empty_like(q)
        given = q, k, v, offsets(), marks, out, 4, scale
        yield f"triton {dim} redo", functools.partial(redo.prepare, *given)
    for length, turns in ((16, 1), (32, 1), (64, 1), (128, 1), (16, 0), (128, 0)):
        given = tables if turns else ()
        yield (
            f"triton_window {dim} {name} {length} rope={bool(turns)}",
            functools.partial(
                window.prepare, q, k, v, offsets(), length, scale, *given
            ),
        )


def of_rotary(dim: int) -> Iterator[Case]:
    q, k, _ = heads(dim)
    cos, sin = angles(dim)
    yield f"rope {dim}", functools.partial(rope.prepare, q, k, cos, sin)
    weights, tables = (q.new_empty(dim),) * 2, angles(dim, torch.float32)
    yield f"turn {dim}", functools.partial(turn.turn, q, k, *tables, weights, 1e-5)


def of_interleaved(dim: int, capability: int) -> Iterator[Case]:
    """What turns q and k, by fp32 tables of interleaved pairs."""
    q, k, v = heads(dim)
    tables = angles(dim, torch.float32)
    run = functools.partial(rope.prepare, q, k, *tables, True)
    yield f"rope {dim} interleaved", run
    for length in (16, 32, 64, 128):
        yield (
            f"triton_window {dim} interleaved {length}",
            functools.partial(
                *(window.prepare, q, k, v, offsets(), length, dim**-0.5),
                *(*tables, True),
            ),
        )
    if capability < FP8:
        return
    for name, scales, counts in given_scales():
        yield (
            f"quantize {dim} interleaved scales={name}",
            functools.partial(
                quantize.prepare, q, k, v, offsets(), *tables, scales, True, counts
            ),
        )
    yield (
        f"absmax {dim} interleaved",
        functools.partial(
            run_absmax, q, k, v, offsets(), torch.empty(3), *tables, True
        ),
    )
    yield (
        f"quantize_rows {dim} interleaved",
        functools.partial(
            *(quantize_rows.quantize_rows, q, k, v, offsets(), torch.empty(3)),
            *(-(-dim // 16) * 16, *tables, True),
        ),
    )


def given_scales() -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    """Scales and counts as the quantiser takes them, and what to call them."""
    scales, counts = torch.empty(3), torch.empty(2, 3, dtype=torch.int64)
    return [("none", None, None), ("given", scales, None), ("counted", scales, counts)]


def of_gemma4() -> Iterator[Case]:
    """What lies between the linear layers of both of its towers."""
    for width, dim, inner in ((768, 64, 3072), (1152, 72, 4304)):
        q, k, v = heads(dim)
        weights, tables = (q.new_empty(dim),) * 2, angles(dim, torch.float32)
        yield (
            f"turn {dim} axial",
            functools.partial(
                turn.turn, q, k, *tables, weights, 1e-6, span=dim // 4, v=v
            ),
        )
        x, weight = q.new_empty(ROWS, width), q.new_empty(width)
        for following in (weight, None):
            given = x, x, weight, 1e-6, following
            yield (
                f"norm_add {width} next={following is not None}",
                functools.partial(norm_add.norm_add, *given),
            )
        gate = q.new_empty(ROWS, inner)
        yield (
            f"gated_gelu {inner}",
            functools.partial(gated_gelu.gated_gelu, gate, gate),
        )


def of_fp8_attention(dim: int) -> Iterator[Case]:
    """The quantisers, by block and by tensor, and what attends to their rows."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes if dim in BOTH_TYPES else dtypes[:1]:
        q, k, v = heads(dim, dtype)
        tables = angles(dim, dtype)
        for name, scales, counts in given_scales():
            rest = *tables, scales, False, counts
            yield (
                f"quantize {dim} {TYPES[dtype]} scales={name}",
                functools.partial(quantize.prepare, q, k, v, offsets(), *rest),
            )
    q, k, v = heads(dim)
    tables = angles(dim)

    def triton_fp8() -> None:
        _, rows = quantize.prepare(q, k, v, offsets(), *tables)
        rest = ROWS, LENGTH, dim**-0.5, dim, torch.bfloat16
        flash_fp8.prepare(rows, offsets(), *rest)

    yield f"triton_fp8 {dim}", triton_fp8
    state = DeviceScales.on("cpu")
    yield (
        f"absmax {dim}",
        functools.partial(run_absmax, q, k, v, offsets(), state.amax, *tables),
    )
    padded = -(-dim // 16) * 16
    for counts in (None, state.clip_counts):
        yield (
            f"quantize_rows {dim} counts={counts is not None}",
            functools.partial(
                *(quantize_rows.quantize_rows, q, k, v, offsets(), state.scales),
                *(padded, None, None, False, counts),
            ),
        )
    for dtype in (E4M3, torch.bfloat16):
        out = torch.empty(ROWS, HEADS, padded, dtype=dtype)
        ends = torch.zeros(5, 1, 1, 1, dtype=torch.int64)
        yield (
            f"finish {dim} {TYPES[dtype]}",
            functools.partial(
                cudnn_fp8._finish, out, state.scales, ends, dim, torch.bfloat16
            ),
        )


def of_batches() -> Iterator[Case]:
    """What follows from a batch's sizes, a padded one's rows, and constants."""
    yield (
        "seqlens",
        functools.partial(seqlens.derive_seqlens, offsets(), ROWS, 8, (64, 64, 64, 64)),
    )
    cu, v = offsets(), torch.empty(ROWS, HEADS, 80, dtype=torch.bfloat16)
    sizes = {"H": HEADS, "H_KV": HEADS, "D": 80}
    blocks = {"BLOCK": padding._BLOCK}
    scalars = (4, ROWS, *v.stride()[:2])
    launch = Launch(padding._mask_padding_kernel, 1, *scalars, **sizes, **blocks)
    yield "mask_padding", functools.partial(launch, cu, cu, v, v)
    for width in (1152, 1280):
        rows = torch.empty(ROWS, width, dtype=torch.bfloat16)
        launch = Launch(padding._clear_kernel, 1, 4, ROWS, ROW=width)
        yield f"clear_padding {width}", functools.partial(launch, cu, rows)
    yield "constants", functools.partial(cudnn_fp8._constants, v.device)


def sums(width: int, form: str) -> Iterator[Case]:
    for normed, scaled in itertools.product(("rms", "layer"), (False, True)):
        x, weight = (
            torch.empty(s, dtype=torch.bfloat16) for s in ((ROWS, width), width)
        )
        scales = scales_of(form, width)
        bias = weight if normed == "layer" else None
        given = [[x, x, x], weight, bias, 1e-6, True, scales]
        layer_scales = (weight, weight) if scaled else ()
        yield (
            f"sum {width} {normed} scales={form} layer_scales={scaled}",
            functools.partial(add_norm.sum_norm, *given, layer_scales),
        )
        if not scaled:
            bound = Bound(torch.empty(2), torch.empty(ROWS, 1))
            yield (
                f"sum {width} {normed} scales={form} bound",
                functools.partial(add_norm.sum_norm, *given, bound=bound),
            )


def scales_of(form: str, columns: int) -> torch.Tensor | None:
    if form == "none":
        return None
    if form == "groups":
        return torch.empty(num_groups(columns), ROWS).t()
    return torch.empty((ROWS, 1) if form == "own" else (1,))


def of_streams() -> Iterator[Case]:
    for width in (1024, 1152, 1280, 1536):
        yield from sums(width, "none")


def of_fp8_streams() -> Iterator[Case]:
    """What writes rows in e4m3 beside attention, and what ends a pass with scales."""
    yield "update", functools.partial(absmax.update, DeviceScales.on("cpu"))
    for width, form in itertools.product((1152, 1280), FORMS):
        yield from sums(width, form)
    activations = ("swiglu", "quick_gelu", "tanh_gelu", "gelu")
    sizes = ((3420, 3424), (4304, 4304), (5120, 5120))
    for activation, form, (width, padded) in itertools.product(
        activations, FORMS, sizes
    ):
        columns = width * (1 + (activation == "swiglu"))
        values, bias = (
            torch.empty(shape, dtype=torch.bfloat16)
            for shape in ((ROWS, columns), columns)
        )
        rows = torch.empty(ROWS, padded, dtype=E4M3)
        yield (
            f"{activation} {width} scales={form}",
            functools.partial(
                act_quantize.act_quantize,
                *(values, width, bias, activation, rows, scales_of(form, padded)),
            ),
        )
    for form, width in itertools.product(FORMS, (1152, 1280)):
        values = torch.empty(ROWS, width, dtype=torch.bfloat16)
        given = values, width, None, None, values.to(E4M3), scales_of(form, width)
        run = functools.partial(act_quantize.act_quantize, *given)
        yield f"context {width} scales={form}", run
    table, factors = torch.empty(2, 4, dtype=torch.int64), torch.empty(2, 2)
    for bias, has_scales in itertools.product((None, torch.bfloat16), (False, True)):
        given = table, factors, 4304, 1152, bias, has_scales
        run = functools.partial(act_bound.prepare, *given)
        yield f"bound bias={bias} scales={has_scales}", run


def cases(capability: int) -> Iterator[Case]:
    for dim in HEAD_DIMS:
        yield from of_attention(dim, torch.bfloat16)
        if dim in BOTH_TYPES:
            yield from of_attention(dim, torch.float16)
        yield from of_rotary(dim)
        if dim in INTERLEAVED:
            yield from of_interleaved(dim, capability)
        if capability >= FP8:
            yield from of_fp8_attention(dim)
    yield from of_batches()
    yield from of_streams()
    yield from of_gemma4()
    if capability >= FP8:
        yield from of_fp8_streams()


def compiled_for(capability: int) -> Iterator[tuple[str, str, Any]]:
    """Yield what each is, its kernel's name, and what Triton made of it."""
    for name, run in cases(capability):
        for launch, tensors in launches_of(run):
            kernel = launch._kernel.fn.__name__
            yield name, kernel, compile_for(capability, launch, tensors)
    if capability == HOPPER:
        for name, dim in itertools.product(GLUON, HEAD_DIMS):
            compiled = GLUON[name](dim)
            yield f"{name} {dim}", compiled.metadata.name, compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--capabilities", nargs="+", type=int, default=CAPABILITIES, metavar="CC"
    )
    for capability in parser.parse_args().capabilities:
        for name, kernel, compiled in compiled_for(capability):
            found = {"capability": capability, "name": name, "kernel": kernel}
            found |= resources(compiled)
            found["packed"] = any(
                op in compiled.asm["ptx"] for op in ("fma.rn.bf16x2", "fma.rn.f16x2")
            )
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
