# SPDX-License-Identifier: Apache-2.0
"""Times kernels on batches of equal sequences.

What is timed is the layer's whole op, from views of the QKV projection and the rotary
tables to the output. A kernel that is too far from fp32 is not timed.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_flashinfer_vit.choices.clock import Clock, Run
from vllm_flashinfer_vit.choices.compare import compare, relative_error
from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.choices.table import Measurement
from vllm_flashinfer_vit.choices.usable import kernel_verdict
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import KERNELS, Kernel
from vllm_flashinfer_vit.kernels.formats import DeviceScales, dtype_name
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan

if TYPE_CHECKING:
    from vllm_flashinfer_vit.ops.attention import Fp8

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 400, 512, 768, *(2**i for i in range(10, 17)))
COUNTS = (1, 4, 16, 64, 256, 1024)
NUM_HEADS = 16
# Larger batches than these only repeat what smaller ones say.
MAX_TOKENS = 2**17
MAX_FLOPS = 4e12

# Relative errors far above those of kernels with fp32 sums, far below a wrong result.
_GATES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
# e4m3 rounds by 0.026 on average; q, k, v, weights and perhaps the output make 0.06.
_FP8_GATE = 0.1
# Larger batches take the same code paths, and fp32 takes seconds for them.
_GATE_MAX_TOKENS = 8192


class Cell(NamedTuple):
    """A batch of equal sequences.

    Attributes:
        longest: Length of each sequence, in tokens.
        num_seqs: Number of sequences.
    """

    longest: int
    num_seqs: int

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.longest} tokens"


def candidates(
    stack: Stack,
    dtype: torch.dtype,
    head_dim: int,
    attempt: Callable[[str, int, torch.dtype], str | None],
) -> tuple[list[str], list[str]]:
    """Return the kernels to compare; plain PyTorch is no candidate on a GPU.

    For FP8 layers these are the kernels of bf16 and those of FP8.

    Args:
        stack: What the machine has.
        dtype: Activation dtype; e4m3 for FP8 layers, whose activations are bf16.
        head_dim: Head dim in elements.
        attempt: Runs a kernel once, as a layer would before it takes it; says what went
            wrong, or None.

    Returns:
        The kernels, and what is left out for its test run, with the reason.

    Raises:
        TuneError: No kernel can run, or of FP8 layers no FP8 kernel, so that there is
            nothing to choose.
    """
    found, left_out = [], []
    is_fp8 = dtype == torch.float8_e4m3fn
    activations = torch.bfloat16 if is_fp8 else dtype
    for kernel, record in KERNELS.items():
        attends_in = dtype if record.is_fp8 else activations
        if record.is_reference or not (
            kernel_verdict(kernel, stack, head_dim, attends_in).ok
        ):
            continue
        if record.needs_trial and (error := attempt(kernel, head_dim, activations)):
            left_out.append(f"{kernel}: {error}")
        else:
            found.append(kernel)
    if not any(KERNELS[kernel].is_fp8 == is_fp8 for kernel in found):
        what = "FP8 kernel" if is_fp8 else "kernel"
        raise TuneError("; ".join([f"no {what} takes this head dim here", *left_out]))
    return found, left_out


def grid(
    head_dim: int, lengths: Sequence[int] = LENGTHS, counts: Sequence[int] = COUNTS
) -> list[Cell]:
    """Return the batches to measure, shortest sequences first."""
    return [
        Cell(longest, num_seqs)
        for longest in lengths
        for num_seqs in counts
        if num_seqs == counts[0]
        or (
            longest * num_seqs <= MAX_TOKENS
            and 4 * NUM_HEADS * head_dim * longest**2 * num_seqs <= MAX_FLOPS
        )
    ]


def measure(
    dtype: torch.dtype,
    head_dim: int,
    kernels: Sequence[str],
    cells: Sequence[Cell],
    clock: Clock,
    device: torch.device,
    advance: Callable[[str], None] = lambda name: None,
) -> tuple[list[Measurement], list[str]]:
    """Check and time kernels on every batch; see `compare` for those that fail.

    Args:
        dtype: Activation dtype; e4m3 for FP8 layers, whose activations are bf16 here.
        head_dim: Head dim in elements.
        kernels: The kernels to compare.
        cells: Batches, shortest sequences first.
        clock: The clock.
        device: Where to measure.
        advance: Called before each batch, with its name.

    Returns:
        The measurements, and what was left out and why.
    """
    drawn = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    times, left_out = compare(
        kernels,
        {str(cell): cell for cell in cells},
        lambda cell: _Inputs(cell, draw(cell, drawn, head_dim, device)),
        clock,
        device,
        advance,
    )
    name = dtype_name(dtype)
    rows = [Measurement(name, head_dim, *cell, us) for cell, us in times.items()]
    return rows, left_out


class _Inputs:
    """A batch, as `compare` takes it."""

    def __init__(self, cell: Cell, batch: Batch) -> None:
        self._longest, self._batch = cell.longest, batch
        is_small = cell.longest * cell.num_seqs <= _GATE_MAX_TOKENS
        self._expected = _in_fp32(batch) if is_small else None

    def call(self, kernel: str) -> Run | None:
        record = KERNELS[kernel]
        if record.max_len is not None and self._longest > record.max_len:
            return None
        return call(record, self._batch)

    def check(self, kernel: str, out: torch.Tensor) -> None:
        if self._expected is not None:
            is_fp8 = KERNELS[kernel].is_fp8
            limit = _FP8_GATE if is_fp8 else _GATES[self._batch.q.dtype]
            relative_error(out, self._expected, limit)


def draw(cell: Cell, dtype: torch.dtype, head_dim: int, device: torch.device) -> Batch:
    """Draw the inputs of a batch, the same ones in every run.

    q, k and v are views of a projection `[T, 3, H, D]`.
    """
    random = torch.Generator(device).manual_seed(0)
    tokens = cell.longest * cell.num_seqs
    shape = (tokens, 3, NUM_HEADS, head_dim)
    qkv = torch.randn(shape, dtype=dtype, device=device, generator=random)
    angle = torch.rand(tokens, head_dim // 2, device=device, generator=random)
    angle *= 2 * math.pi
    ends = torch.arange(0, tokens + 1, cell.longest, device=device)
    q, k, v = qkv.unbind(1)
    return Batch(
        q,
        k,
        v,
        cos=angle.cos().to(dtype),
        sin=angle.sin().to(dtype),
        cu_seqlens=ends.int(),
        max_seqlen=torch.tensor(cell.longest),
    )


def call(kernel: Kernel, batch: Batch) -> Run:
    """Return the call of the layer's op with a kernel; FP8 has scales of its own."""
    # It imports vLLM, for seconds that `tune` does not need to refuse an option.
    from vllm_flashinfer_vit.ops.attention import attention

    scale, plan = batch.q.shape[2] ** -0.5, Plan.of(kernel.name)
    fp8 = own_scales(kernel, batch.q.device) if kernel.is_fp8 else None
    return lambda: attention(batch, scale, plan, fp8)


def own_scales(kernel: Kernel, device: torch.device) -> "Fp8":
    """Return where an FP8 kernel's scales come from if no file has them."""
    from vllm_flashinfer_vit.ops.attention import Fp8

    if kernel.takes_block_scales:
        return Fp8("block")
    return Fp8("dynamic", state=DeviceScales.on(device))


def _in_fp32(batch: Batch) -> torch.Tensor:
    """Return what every kernel should, `[T, H, D] fp32`."""
    assert batch.cos is not None and batch.sin is not None
    assert batch.cu_seqlens is not None and batch.max_seqlen is not None
    q, k = rope_ref(batch.q.float(), batch.k.float(), batch.cos, batch.sin)
    longest, scale = int(batch.max_seqlen), q.shape[2] ** -0.5
    return attention_ref(q, k, batch.v.float(), batch.cu_seqlens, longest, scale)
