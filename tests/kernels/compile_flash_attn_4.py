# SPDX-License-Identifier: Apache-2.0
"""Compile vLLM's FlashAttention 4 for Hopper without a GPU, and print how often.

A process of its own: CuTe DSL reads its settings when it is imported.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ |= {
    # Where there is a GPU, nothing may be launched on fake tensors.
    "CUDA_VISIBLE_DEVICES": "",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
}

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_flashinfer_vit.kernels import flash_attn


def leave_out_extensions() -> None:
    """Have vLLM's package imported without its extensions, which need a driver."""
    vllm = importlib.util.find_spec("vllm")
    package = ModuleType("vllm.vllm_flash_attn")
    package.__path__ = [str(Path(vllm.origin).parent / "vllm_flash_attn")]
    sys.modules[package.__name__] = package


def compile_for(head_dim: int, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        on = {"dtype": dtype, "device": "cuda"}
        qkv = torch.empty(300, 3, 16, head_dim, **on)
        q, k, v = qkv.unbind(1)
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        flash_attn._run_4(
            q.contiguous(),
            k.contiguous(),
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=200,
            max_seqlen_k=200,
            softmax_scale=0.1,
            causal=False,
            out=torch.empty_like(q, memory_format=torch.contiguous_format),
        )


def main() -> None:
    leave_out_extensions()
    for head_dim, dtype in (
        (80, torch.bfloat16),
        (72, torch.bfloat16),
        (64, torch.float16),
    ):
        compile_for(head_dim, dtype)
    print(len(flash_attn._forward_4().compile_cache.cache))


if __name__ == "__main__":
    main()
