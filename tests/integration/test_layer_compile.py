# SPDX-License-Identifier: Apache-2.0
"""The layer under a compiler, and its op."""

from collections.abc import Iterator
from shutil import which
from typing import Any

import pytest
import torch
from _layers import HEAD_DIM, HEADS, SCALE, build
from _models import engine, noise, offsets
from _towers import DEVICE, HAS_GPU

from cases import Case, make_cos_sin, make_qkv, values
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = pytest.mark.usefixtures("plain_kernel", "on_device")


@pytest.fixture(scope="module")
def flashinfer(plain_kernel: None) -> Tower:
    return engine("FLASHINFER", device=DEVICE)


def call(layer: torch.nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """A block around the layer, with work for a compiler before and after it."""
    q, k, v = (x * 2).unflatten(2, (3, HEADS, HEAD_DIM)).unbind(2)
    return layer(q, k, v, *args).flatten(2) + 1


def block_input(tokens: int) -> torch.Tensor:
    x = noise(1, tokens, 3 * HEADS * HEAD_DIM)
    torch._dynamo.mark_dynamic(x, 1)
    return x


def dynamic_offsets(lengths: list[int]) -> torch.Tensor:
    cu_seqlens = offsets(lengths)
    torch._dynamo.mark_dynamic(cu_seqlens, 0)
    return cu_seqlens


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Inductor needs a C++ compiler.
CODE_BACKEND = "inductor" if which("g++") else "aot_eager"


@pytest.mark.skipif(
    HAS_GPU, reason="a default device is a mode through which dynamo cannot trace"
)
@pytest.mark.usefixtures("fresh_dynamo")
class TestCompile:
    @pytest.mark.parametrize("backend", values(["eager"], extended=[CODE_BACKEND]))
    def test_is_compiled_once(self, backend: str, flashinfer: Tower) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        layers = [build(flashinfer, prefix=f"blocks.{i}.attn") for i in range(3)]
        for lengths in ([7, 12, 5], [30, 2], [9] * 6):
            x, cu_seqlens = block_input(sum(lengths)), dynamic_offsets(lengths)
            longest = torch.tensor(max(lengths), dtype=torch.int32)
            for layer in layers:
                out = compiled(layer, x, cu_seqlens, longest)
                torch.testing.assert_close(out, call(layer, x, cu_seqlens, longest))
        assert counter.frame_count == 1

    def test_a_number_for_the_longest_length(self, flashinfer: Tower) -> None:
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        layer, x, cu_seqlens = build(flashinfer), block_input(10), offsets([7, 3])
        expected = call(layer, x, cu_seqlens, 7)
        torch.testing.assert_close(compiled(layer, x, cu_seqlens, 7), expected)

    def test_dense(self, flashinfer: Tower) -> None:
        layer = build(flashinfer)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for tokens in (9, 12):
            x = noise(2, tokens, 3 * HEADS * HEAD_DIM)
            torch.testing.assert_close(compiled(layer, x), call(layer, x))


BATCH = Case("", (7, 12, 5), zeros=1)


@pytest.mark.parametrize("rotary_dim", [0, HEAD_DIM // 2, HEAD_DIM])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_op_is_well_behaved(packed: bool, rotary_dim: int, flashinfer: Tower) -> None:
    from vllm_flashinfer_vit.ops import attention as ops

    q, k, v = make_qkv(BATCH, HEADS, HEAD_DIM, torch.float32, kv_heads=2, device=DEVICE)
    cos, sin = (None, None)
    if rotary_dim:
        cos, sin = make_cos_sin(BATCH, rotary_dim, device=DEVICE)
    cu_seqlens = BATCH.cu_seqlens(DEVICE) if packed else None
    longest = torch.tensor(BATCH.max_seqlen) if packed else None
    length = 0 if packed else BATCH.rows // 2
    batch = Batch(q, k, v, cos, sin, cu_seqlens, longest, length)
    args = (*batch, SCALE, "*:reference")
    torch.library.opcheck(torch.ops.vllm_flashinfer_vit.attention, args)
    assert torch.equal(
        ops.attention(batch, SCALE, Plan.of("reference")),
        torch.ops.vllm_flashinfer_vit.attention(*args),
    )


def test_a_fake_tensor_runs_no_kernel(flashinfer: Tower) -> None:
    from torch._subclasses import FakeTensorMode

    from vllm_flashinfer_vit.ops import attention as ops

    with FakeTensorMode():
        q, k, v = torch.empty(3, 10, HEADS, HEAD_DIM).unbind(0)
        batch = Batch(q, k, v, cu_seqlens=torch.empty(3, dtype=torch.int32))
        out = ops.attention(batch, SCALE, Plan.of("cudnn"))
    assert out.shape == q.shape
