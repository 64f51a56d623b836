# SPDX-License-Identifier: Apache-2.0
"""What serves attention in the benchmarks of the op: stock vLLM and this package."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from contenders import default_providers
from correctness import FP8_GATE, GATES
from environment import device
from op_problems import Problem
from timing import Run


def layer_plan(
    head_dim: int,
    dtype: torch.dtype,
    forced: str | None,
    *,
    is_fp8: bool,
    turns: bool = True,
) -> Any:
    """Return the plan of a layer on this machine.

    Args:
        head_dim: D, in elements.
        dtype: Activation dtype.
        forced: A kernel's name, or None for the package's own choice.
        is_fp8: Whether the layer attends in FP8.
        turns: Whether its attention turns q and k.
    """
    from vllm_flashinfer_vit.choices.arrival import without_pass
    from vllm_flashinfer_vit.choices.lookup import plan_of
    from vllm_flashinfer_vit.engine.selection import resolve
    from vllm_flashinfer_vit.fp8.policy import resolve_fp8
    from vllm_flashinfer_vit.settings import Settings

    look_up = resolve_fp8 if is_fp8 else resolve
    choices = look_up(head_dim, dtype, forced, Settings.from_env().tuned_dir)
    return plan_of(choices if turns else without_pass(choices))


def stock_attend(backend: str, problem: Problem) -> Callable[..., torch.Tensor]:
    """Return vLLM's own attention with the metadata that it prepares for a backend.

    Args:
        backend: `flash_attn`, `flash_attn4`, `flashinfer` or `torch_sdpa`.
        problem: The case, whose metadata are made here, once, as stock does.

    Returns:
        A call on `[1, T, H, D]` q, k and v.

    Raises:
        ValueError: There is no such backend.
    """
    from vllm.v1.attention.ops import vit_attn_wrappers as wrappers

    if backend == "torch_sdpa":
        return functools.partial(
            wrappers.vit_torch_sdpa_wrapper,
            scale=problem.scale,
            cu_seqlens=problem.cu_seqlens,
        )
    if backend in ("flash_attn", "flash_attn4"):
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        picked = get_flash_attn_version(head_size=problem.q.shape[2])
        return functools.partial(
            wrappers.vit_flash_attn_wrapper,
            batch_size=1,
            is_rocm_aiter=False,
            fa_version=4 if backend == "flash_attn4" else picked,
            scale=problem.scale,
            cu_seqlens=problem.cu_seqlens,
            max_seqlen=problem.max_seqlen,
        )
    if backend != "flashinfer":
        raise ValueError(
            f"stock-{backend} is unknown; use flash_attn, flash_attn4, flashinfer or "
            "torch_sdpa after stock-"
        )
    from vllm.model_executor.layers.attention import mm_encoder_attention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class InTree(mm_encoder_attention.MMEncoderAttention):
        """vLLM looks a replaced layer up by its class name; this name has none."""

    kind = AttentionBackendEnum.FLASHINFER
    prefix_sums = problem.cu_seqlens.cpu().numpy()
    on = problem.q.device
    hidden_size = problem.q.shape[1] * problem.q.shape[2]
    max_seqlen = InTree.compute_max_seqlen(kind, prefix_sums)
    return functools.partial(
        wrappers.vit_flashinfer_wrapper,
        scale=problem.scale,
        workspace_buffer=mm_encoder_attention._get_flashinfer_workspace_buffer(),
        cu_seqlens=InTree.maybe_recompute_cu_seqlens(
            kind, prefix_sums, hidden_size, 1, on
        ),
        max_seqlen=torch.tensor(max_seqlen, dtype=torch.int32),
        sequence_lengths=InTree.maybe_compute_seq_lens(kind, prefix_sums, on),
    )


@functools.cache
def stock_rotary() -> torch.nn.Module:
    """Return the rotary operator of vLLM's vision attention."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    with set_current_vllm_config(VllmConfig()):
        return ApplyRotaryEmb(enforce_enable=True)


def stock_run(backend: str, bench: str, problem: Problem) -> Run:
    """Return the call of a stock provider; it gives `[1, T, H, D]`."""
    attend = stock_attend(backend, problem)
    if bench == "attention":
        q, k, v = (x.unsqueeze(0) for x in (problem.q, problem.k, problem.v))
        return lambda: attend(q=q, k=k, v=v)

    rotary = stock_rotary()
    tokens, heads, head_dim = problem.q.shape

    def run() -> torch.Tensor:
        # The steps of vLLM's Qwen2.5-VL and Qwen3-VL: one copy of q and k, rotation of
        # both in one call, v left where it is.
        qkv = problem.qkv.view(1, tokens, 3, heads, head_dim)
        both = qkv[:, :, :2].permute(2, 0, 1, 3, 4).flatten(0, 1).contiguous()
        q, k = rotary(both, problem.cos, problem.sin).unsqueeze(1).unbind(0)
        return attend(q=q, k=k, v=qkv[:, :, 2])

    return run


def plugin_run(kernel: str | None, bench: str, problem: Problem) -> Run:
    """Return the call of this package's op; it gives `[T, H, D]`.

    Args:
        kernel: A kernel's name, or None for the package's own choice; `fp8` for its
            choice of FP8 attention.
        bench: `attention` or `qkv_attention`.
        problem: The case.
    """
    from vllm_flashinfer_vit.choices.measure import own_scales
    from vllm_flashinfer_vit.kernels.catalog import KERNELS
    from vllm_flashinfer_vit.ops.attention import attention, kernel_for
    from vllm_flashinfer_vit.ops.batch import Batch

    is_fp8 = is_fp8_provider(f"plugin-{kernel}")
    forced = None if kernel == "fp8" else kernel
    if bench == "attention":
        q, k, v, cos, sin = problem.q, problem.k, problem.v, None, None
    else:
        (q, k, v), cos, sin = problem.parts(), problem.cos, problem.sin
    layer = problem.q.shape[2], problem.q.dtype, forced
    plan = layer_plan(*layer, is_fp8=is_fp8, turns=cos is not None)
    batch = Batch(q, k, v, cos, sin, problem.cu_seqlens, problem.max_seqlen)
    fp8 = None
    if is_fp8:
        # Of a graph's batch its room decides, not its sequences.
        fp8 = own_scales(KERNELS[kernel_for(batch, plan)], q.device)
    return lambda: attention(batch, problem.scale, plan, fp8)


def is_fp8_provider(provider: str) -> bool:
    """Whether a provider may attend in FP8."""
    return provider.endswith("fp8")


def provider_names() -> list[str]:
    """Return the providers that this machine offers."""
    from vllm_flashinfer_vit.kernels.catalog import KERNELS

    if device().type == "cpu":
        # By its own choice, FP8 serves longer sequences than the smoke test has.
        return ["stock-torch_sdpa", "plugin", "plugin-reference_fp8"]
    forced = [f"plugin-{name}" for name, k in KERNELS.items() if not k.is_reference]
    return [*default_providers(on_gpu=True), "plugin-fp8", *forced]


def setup(provider: str, bench: str, problem: Problem) -> Run:
    """Return the call that a provider is timed by."""
    origin, _, kernel = provider.partition("-")
    if origin == "stock":
        return stock_run(kernel, bench, problem)
    return plugin_run(kernel or None, bench, problem)


def gate(provider: str, dtype: str) -> float:
    """Return the relative error beyond which a provider is not timed."""
    return FP8_GATE if is_fp8_provider(provider) else GATES[dtype]
