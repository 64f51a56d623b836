# SPDX-License-Identifier: Apache-2.0
"""The kernels: one record for each, with everything that is known of it.

The op, the choices, `tune`, `doctor`, the warm-up, the trial run, the tests and the
table in docs/kernels.md read it. A record names its function, and imports nothing.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from vllm_flashinfer_vit.kernels.formats import MAX_WINDOW
from vllm_flashinfer_vit.machine.verdicts import ADA, FP8_DTYPE, Needs


@dataclass(frozen=True)
class Kernel:
    """What is known of one kernel.

    Attributes:
        name: As settings, tables and logs have it.
        summary: What it is, for people.
        sequences: Which sequences it is for, for people.
        entry: `module:function` in the folder of kernels. The function takes `(q, k, v,
            cu_seqlens, max_seqlen, scale)`, with `rotates` also `(cos, sin,
            interleaved)`. With `quantized` blocks it takes `(quantized, cu_seqlens,
            num_tokens, max_seqlen, scale, head_dim, dtype)`, with rows `(q, k, v,
            scales, cu_seqlens, max_seqlen, scale, head_dim, dtype)`.
        settles: Whether the function returns a call, which runs the kernel on what the
            tensors hold by then, rather than the output.
        needs: What it needs of the machine, the dtype and the head dim.
        max_len: Longest sequence that it takes, in tokens; None for any.
        rotates: Whether it turns q and k itself, if the whole head dim is turned.
        quantized: For FP8, how q, k and v are laid out: `blocks` has a scale for each
            block of 128 tokens and head; `rows` keeps tokens as rows, with one scale
            for each tensor. None without FP8.
        pads: `module:function` like `entry`, or None. For rows, it returns of head dim
            and device the head dim that they are padded to.
        fallback: The kernel that takes its classes where it cannot run, and no
            measurement says which should. None: the neighbouring class's.
        needs_trial: Whether it runs once, and is compared with plain PyTorch, before a
            layer is promised to it.
        builds_plans: Whether the host builds a plan for each new bucket of shapes.
        for_few: Whether batches of many sequences, most of which may be empty, have
            another kernel.
        clears: Whether it clears a graph's padding in front of each call, unless a
            further argument, `is_clean`, says that none has to be.
        is_batch_invariant: Whether the bits of a row depend on its own sequence alone,
            of any length, as `VLLM_BATCH_INVARIANT` asks. Of several the first serves.
        is_reference: Whether it is plain PyTorch: no candidate on a GPU.
        decides: `module:function` like `entry`, or None. It is called with the head dim
            while a layer is built: what it decides follows vLLM's configuration, which
            is in force then.
    """

    name: str
    summary: str
    sequences: str
    entry: str
    needs: Needs
    settles: bool = False
    max_len: int | None = None
    rotates: bool = False
    quantized: Literal["blocks", "rows"] | None = None
    pads: str | None = None
    fallback: str | None = None
    needs_trial: bool = False
    builds_plans: bool = False
    for_few: bool = False
    clears: bool = False
    is_batch_invariant: bool = False
    is_reference: bool = False
    decides: str | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether it attends in FP8."""
        return self.quantized is not None

    @property
    def takes_block_scales(self) -> bool:
        """Whether it can do without state, by a scale for each block and head."""
        return self.quantized == "blocks"

    def load_prepare(self) -> Callable[..., Callable[[], Any]]:
        """Import what returns a call; of a kernel that does not settle, a plain one."""
        entry = _load(self.entry)
        return entry if self.settles else functools.partial(functools.partial, entry)

    def padded_head_dim(self, head_dim: int, device: Any) -> int:
        """Return the head dim that rows of q, k and v are padded to with zeros."""
        return head_dim if self.pads is None else _load(self.pads)(head_dim, device)

    def decide(self, head_dim: int) -> None:
        """Decide what depends on vLLM's configuration; call it while a layer is built.

        Raises:
            RuntimeError: The kernel cannot run, and only now that is known.
        """
        if self.decides is not None:
            _load(self.decides)(head_dim)


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    folder = __name__.rpartition(".")[0]
    return getattr(import_module(f"{folder}.{module}"), function)


# What `tune` measures, in this order, unless `--head-dims` names others, and what
# `doctor` reports; the Qwen towers' come first. A layer of another head dim takes the
# choices of the next larger one.
HEAD_DIMS = (80, 72, 64, 96, 128)

_FP8 = (FP8_DTYPE,)
_HALF_ON_TRITON = Needs("triton", head_dims=(32, 128))

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="cudnn",
            summary="FlashInfer's cuDNN prefill: bucketed plans, int64 offsets, any "
            "strides",
            sequences="any",
            entry="cudnn:prepare",
            settles=True,
            # The support matrix on docs.nvidia.com/cudnn/operations/Attention.
            needs=Needs("cudnn", head_dims=(8, 256)),
            builds_plans=True,
        ),
        Kernel(
            name="cudnn_fp8",
            summary="FP8 by cuDNN, one scale for each tensor",
            sequences="long",
            entry="cudnn_fp8:attention",
            needs=Needs(
                "cudnn_fp8",
                dtypes=_FP8,
                # Of cuDNN's 8 to 128, what the quantiser takes.
                head_dims=(32, 128),
                capability=(9, 0),
                instead="VLLM_FLASHINFER_VIT_KERNEL=hopper_fp8",
            ),
            quantized="rows",
            pads="cudnn_fp8:padded_head_dim",
            fallback="triton_fp8",
            needs_trial=True,
            builds_plans=True,
        ),
        Kernel(
            name="flash_attn",
            summary="FlashAttention as vLLM picks it (3 on Hopper), after one rotary "
            "pass",
            sequences="any",
            entry="flash_attn:prepare",
            settles=True,
            # `supports_head_size` of vLLM's FlashAttention backend.
            needs=Needs("flash_attn", head_dims=(8, 256)),
            clears=True,
            decides="flash_attn:fa_version",
        ),
        Kernel(
            name="flash_attn_4",
            summary="FlashAttention 4's kernel for Hopper as bundled with vLLM, after "
            "one rotary pass",
            sequences="any; best above 512 tokens where `hopper_bf16` is not measured, "
            "and to 8192 at head dim 128, with 512 rows and more to a sequence",
            entry="flash_attn:prepare_4",
            settles=True,
            needs=Needs("flash_attn_4", head_dims=(64, 128), major=9),
            needs_trial=True,
            # It starts blocks for all sequences, and each looks through all. In
            # Qwen2-VL's CUDA graph a 64x64 image took 23.0 ms, with FlashAttention 3
            # 16.2; no measurement of `tune` has batches of mostly empty sequences.
            for_few=True,
            clears=True,
        ),
        Kernel(
            name="hopper_bf16",
            summary="bf16 without a running maximum, its warps specialised for Hopper, "
            "after one rotary pass",
            sequences="above 256 tokens; above 512 at head dim 64, above 8192 at 128",
            entry="hopper_bf16:prepare",
            settles=True,
            needs=Needs(
                "triton",
                dtypes=("bfloat16",),
                head_dims=(64, 128),
                major=9,
                instead="VLLM_FLASHINFER_VIT_KERNEL=flash_attn_4",
            ),
            fallback="flash_attn_4",
            needs_trial=True,
        ),
        Kernel(
            name="hopper_fp8",
            summary="FP8 with block scales, its warps specialised for Hopper",
            sequences="long",
            entry="hopper_fp8:prepare",
            settles=True,
            needs=Needs(
                "triton",
                dtypes=_FP8,
                head_dims=(32, 128),
                capability=ADA,
                major=9,
            ),
            quantized="blocks",
            fallback="triton_fp8",
            needs_trial=True,
            is_batch_invariant=True,
        ),
        Kernel(
            name="reference",
            summary="plain PyTorch, fp32 accumulation",
            sequences="any; slow",
            entry="attention_ref:attention_ref",
            needs=Needs("torch", dtypes=None, capability=None),
            is_reference=True,
        ),
        Kernel(
            name="reference_fp8",
            summary="what `triton_fp8` computes, in plain PyTorch",
            sequences="any; slow",
            entry="flash_fp8_ref:attention_fp8_ref",
            needs=Needs("torch", dtypes=_FP8, capability=None),
            quantized="blocks",
            fallback="triton_fp8",
            is_reference=True,
        ),
        Kernel(
            name="triton",
            summary="one Triton pass, the head dim cut into a power of two and a rest, "
            "after one rotary pass",
            sequences="any; on Hopper most of 129 to 256 tokens",
            entry="flash:prepare",
            settles=True,
            needs=_HALF_ON_TRITON,
            is_batch_invariant=True,
        ),
        Kernel(
            name="triton_fp8",
            summary="FP8 with block scales, in Triton",
            sequences="long",
            entry="flash_fp8:prepare",
            settles=True,
            needs=Needs("triton", dtypes=_FP8, head_dims=(32, 128), capability=ADA),
            quantized="blocks",
            needs_trial=True,
            is_batch_invariant=True,
        ),
        Kernel(
            name="triton_window",
            summary="one pass from the QKV projection to the output, rotary inside",
            sequences="up to 128 tokens",
            entry="window:prepare",
            settles=True,
            needs=_HALF_ON_TRITON,
            max_len=MAX_WINDOW,
            rotates=True,
        ),
    )
}


def fp8_names() -> frozenset[str]:
    """Return the names of the kernels that attend in FP8."""
    return frozenset(name for name, kernel in KERNELS.items() if kernel.is_fp8)
