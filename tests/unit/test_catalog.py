# SPDX-License-Identifier: Apache-2.0
"""The records of kernels agree with each other, and with the functions they name."""

import inspect

import pytest
import torch

from vllm_flashinfer_vit.kernels import catalog
from vllm_flashinfer_vit.kernels.catalog import KERNELS, Kernel, fp8_names

_HALF = ["q", "k", "v", "cu_seqlens", "max_seqlen", "scale"]
_BLOCKS = [
    "quantized",
    "cu_seqlens",
    "num_tokens",
    "max_seqlen",
    "scale",
    "head_dim",
    "dtype",
]
_ROWS = [*_HALF[:3], "scales", *_HALF[3:], "head_dim", "dtype"]
_RECORDS = [pytest.param(kernel, id=name) for name, kernel in KERNELS.items()]


def test_names_are_in_order() -> None:
    assert list(KERNELS) == sorted(KERNELS)
    assert all(name == kernel.name for name, kernel in KERNELS.items())


@pytest.mark.parametrize("kernel", _RECORDS)
def test_the_entry_takes_what_the_op_hands_over(kernel: Kernel) -> None:
    expected = {"blocks": _BLOCKS, "rows": _ROWS, None: _HALF}[kernel.quantized]
    if kernel.rotates:
        expected = [*expected, "cos", "sin", "interleaved"]
    if kernel.clears:
        expected = [*expected, "is_clean"]
    assert list(inspect.signature(catalog._load(kernel.entry)).parameters) == expected


def test_a_kernel_that_does_not_settle_is_called_as_it_is(monkeypatch) -> None:
    calls = []

    def entry(*args: object) -> str:
        calls.append(args)
        return "output"

    monkeypatch.setattr(catalog, "_load", lambda name: entry)
    call = KERNELS["reference"].load_prepare()("q", "k", 3)
    assert not calls
    assert call() == call() == "output"
    assert calls == [("q", "k", 3)] * 2
    assert KERNELS["triton"].load_prepare() is entry


@pytest.mark.parametrize("kernel", _RECORDS)
def test_fallbacks_serve_the_same_layers(kernel: Kernel) -> None:
    if kernel.fallback is None:
        return
    other = KERNELS[kernel.fallback]
    assert other.is_fp8 == kernel.is_fp8
    assert other.max_len is None
    assert other.fallback is None, "a fallback that fails falls to another class"


@pytest.mark.parametrize("kernel", _RECORDS)
def test_needs_and_layout_agree(kernel: Kernel) -> None:
    assert kernel.needs.is_fp8 == kernel.is_fp8 == (kernel.name in fp8_names())
    assert kernel.is_reference == (kernel.needs.capability is None)
    assert kernel.builds_plans == kernel.needs.on_cudnn


@pytest.mark.parametrize("head_dim", [32, 128])
def test_cudnn_fp8_takes_the_head_dims_of_its_quantiser(head_dim: int) -> None:
    from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows

    assert KERNELS["cudnn_fp8"].needs.head_dims == (32, 128)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=device)
    scales = torch.ones(3, device=device)

    def quantize(width: int) -> None:
        qkv = torch.randn(3, 2, 1, width, dtype=torch.float16, device=device).unbind()
        quantize_rows(*qkv, cu_seqlens, scales, 128)

    quantize(head_dim)
    with pytest.raises(ValueError, match="head dim"):
        quantize(head_dim - 8 if head_dim == 32 else head_dim + 8)


def test_every_fp8_kernel_on_a_gpu_is_tried_first() -> None:
    untried = {
        name
        for name in fp8_names()
        if not KERNELS[name].needs_trial and not KERNELS[name].is_reference
    }
    assert not untried
