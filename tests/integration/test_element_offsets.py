# SPDX-License-Identifier: Apache-2.0
"""Batches in the form of vLLM's own FLASHINFER, as its classes compute it.

The cases are those of vLLM's test of its FLASHINFER backend: q, k and v are views of
one projection, 16 heads of 72 values.
"""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from _models import engine

from cases import Case, attention_eager, relative_error
from vllm_flashinfer_vit.engine.element_offsets import token_offsets
from vllm_flashinfer_vit.settings import ENV_KERNEL

HAS_GPU = torch.cuda.is_available()
HEADS, HEAD_DIM = 16, 72
HIDDEN = HEADS * HEAD_DIM
# What an FP8 head is padded to by vLLM, and by some cuDNN.
PADDED = (80, 128)

# Fewer sequences than a bucket, a whole bucket, more than the smallest one.
LENGTHS = {
    "one": (190,),
    "two": (2, 2),
    "three": (170, 2, 61),
    "bucket": (13, 5, 40, 1, 22, 64, 8, 30),
    "nine": (3, 141, 9, 17, 1, 2, 50, 4, 6),
}


class Packed:
    """A batch in vLLM's form."""

    def __init__(self, lengths: tuple[int, ...], padded: int | None, device: str):
        from vllm.model_executor.layers.attention import MMEncoderAttention
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        backend = AttentionBackendEnum.FLASHINFER
        on = torch.device(device)
        tokens = np.array([0, *accumulate(lengths)], dtype=np.int32)
        self.cu_seqlens = MMEncoderAttention.maybe_recompute_cu_seqlens(
            backend,
            tokens,
            HIDDEN,
            1,
            on,
            fp8_padded_hidden_size=None if padded is None else HEADS * padded,
        )
        self.sequence_lengths = MMEncoderAttention.maybe_compute_seq_lens(
            backend, tokens, on
        )
        longest = MMEncoderAttention.compute_max_seqlen(backend, tokens)
        self.max_seqlen = torch.tensor(longest, dtype=torch.int32, device=on)


@pytest.mark.parametrize("padded", [None, *PADDED])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_offsets_in_tokens_are_found(
    lengths: tuple[int, ...], padded: int | None
) -> None:
    engine("FLASHINFER", device="cuda" if HAS_GPU else "cpu")
    packed = Packed(lengths, padded, "cpu")
    found = token_offsets(packed.cu_seqlens, packed.sequence_lengths)
    assert found is not None and found.dtype == torch.int32
    filled = len(packed.sequence_lengths) - len(lengths)
    assert filled == {1: 7, 2: 6, 3: 5, 8: 0, 9: 7}[len(lengths)]
    ends = list(accumulate(lengths))
    assert found.tolist() == [0, *ends, *[ends[-1]] * filled]


@pytest.mark.parametrize("given", [None, [3, 7], [3, 7, 0, 0, 0, 0, 0, 0]], ids=str)
def test_offsets_in_tokens_stay(given: list[int] | None) -> None:
    cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    lengths = None if given is None else torch.tensor(given, dtype=torch.int32)
    assert token_offsets(cu_seqlens, lengths) is cu_seqlens
    assert token_offsets(None, lengths) is None


@pytest.fixture(params=["ordinary", "fp8"])
def is_fp8(request: pytest.FixtureRequest) -> bool:
    return request.param == "fp8"


def compare(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    is_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare vLLM's form with offsets in tokens, and with plain PyTorch."""
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.utils.torch_utils import set_default_torch_dtype

    tower = engine("FLASHINFER", dtype, device)
    multimodal = tower.vllm_config.model_config.multimodal_config
    if is_fp8:
        monkeypatch.setattr(multimodal, "mm_encoder_attn_dtype", "fp8")
        if HAS_GPU:
            # By itself it would leave sequences of this length in their dtype.
            monkeypatch.setenv(ENV_KERNEL, "triton_fp8")
    with tower.running(), set_default_torch_dtype(dtype), torch.device(device):
        layer = MMEncoderAttention(HEADS, HEAD_DIM, prefix="a.layer")
    case = Case("", lengths)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, case.rows, 3, HEADS, HEAD_DIM, generator=generator)
    q, k, v = qkv.to(device, dtype).unbind(2)
    in_tokens = layer(q, k, v, case.cu_seqlens(device), torch.tensor(case.max_seqlen))
    for padded in PADDED if is_fp8 else (None,):
        packed = Packed(lengths, padded, device)
        out = layer(
            q, k, v, packed.cu_seqlens, packed.max_seqlen, packed.sequence_lengths
        )
        exact = attention_eager(
            *(x[0].float() for x in (q, k, v)), case, HEAD_DIM**-0.5
        )
        eager = attention_eager(q[0], k[0], v[0], case, HEAD_DIM**-0.5)
        limit = 8e-2 if is_fp8 else max(2 * relative_error(eager, exact), 1e-6)
        assert relative_error(out[0], exact) < limit
        # Another bound of the lengths may have another kernel.
        assert relative_error(out, in_tokens) < (8e-2 if is_fp8 else 1e-2)


@pytest.mark.skipif(HAS_GPU, reason="vLLM runs on the GPU in this process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_layer_attends_as_by_offsets_in_tokens(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    is_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare(lengths, dtype, "cpu", is_fp8, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_layer_on_a_gpu_attends_as_by_offsets_in_tokens(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    is_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare(lengths, dtype, "cuda", is_fp8, monkeypatch)


@pytest.mark.parametrize("in_tokens", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_patched_attention(
    batch: int, in_tokens: bool, plain_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2.5-VL's attention hands the lengths on; with B > 1 it is vLLM's own."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionAttention
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = "cuda" if HAS_GPU else "cpu"
    tower = engine("FLASHINFER", device=device)
    lengths = (5, 9, 2)
    with tower.running(), torch.device(device), set_default_torch_dtype(torch.float32):
        attention: Any = Qwen2_5_VisionAttention(HIDDEN, HEADS, HIDDEN)
        torch.manual_seed(0)
        x = torch.randn(16, batch, HIDDEN) / 8
        for parameter in attention.parameters():
            parameter.data.normal_(std=0.03)
        process_weights_after_loading(
            attention, tower.vllm_config.model_config, tower.device
        )
        cos, sin = torch.randn(2, 16, HEAD_DIM // 2).unbind()
        cu_seqlens, given = Case("", lengths * batch).cu_seqlens(device), None
        longest = torch.tensor(9)
        if not in_tokens:
            packed = Packed(lengths * batch, None, device)
            cu_seqlens, given = packed.cu_seqlens, packed.sequence_lengths
            longest = packed.max_seqlen
        out = attention(x, cu_seqlens, cos, sin, longest, given)
        # One image after the other, with offsets in tokens.
        alone = Case("", lengths).cu_seqlens(device)
        for i in range(batch):
            each = x[:, i : i + 1]
            expected = attention(each, alone, cos, sin, torch.tensor(9), None)
            assert relative_error(out[:, i : i + 1], expected) < 1e-5
