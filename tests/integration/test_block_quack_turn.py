# SPDX-License-Identifier: Apache-2.0
"""QKV projections that turn q and k: who gets one, for which batches, and the results.

A plain stand-in computes on the CPU what QuACK's kernel computes on a Hopper GPU.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    SPECS,
    allow_lora,
    build,
    image,
    log_of,
    outputs,
    programs,
    quantized,
    without,
)
from _fp8_layers import SCHEMES, in_16_bits, served
from _models import noise
from _towers import HAS_GPU, cpu_only

from cases import relative_error
from vllm_flashinfer_vit.blocks import quack_turn
from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
from vllm_flashinfer_vit.gemms import epilogue_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer, project
from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.ops.attention import kernel_for, taken_by
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.towers.resolve import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps
# Rows, and which table was read.
Call = tuple[int, torch.dtype]


@pytest.fixture
def calls(direct: None, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Pretend that there is a Hopper GPU; collect what turns q and k."""
    seen: list[Call] = []

    def compiled(like: Layer, heads: Heads, *rest: Any) -> Heads:
        return heads

    def prepare(
        kernel: Heads,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[[Layer], None]:
        def launch(layer: Layer) -> None:
            seen.append((len(x), cos.dtype))
            out.copy_(turning_gemm.turned(project(x, layer), cos, sin, kernel))

        return launch

    monkeypatch.setattr(epilogue_gemm, "is_available", lambda: True)
    monkeypatch.setattr(turning_gemm, "compiled", compiled)
    monkeypatch.setattr(turning_gemm, "prepare", prepare)
    monkeypatch.setattr(quack_turn, "MIN_ROWS", 256)
    monkeypatch.setattr(quack_turn, "MIN_ROWS_FP8", 264)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return seen


def build_bf16(family: str, **vision: Any) -> Tower:
    return build(family, dtype=torch.bfloat16, **vision)


def layers_of(tower: Tower) -> list[FlashInferViTAttention]:
    modules = tower.visual.modules()
    return [m for m in modules if isinstance(m, FlashInferViTAttention)]


@cpu_only
@pytest.mark.parametrize("family", SPECS)
class TestTurning:
    def test_large_batches_are_turned(self, family: str, calls: list[Call]) -> None:
        served = build_bf16(family)
        # A kernel of each tile for all blocks, tried while weights are loaded.
        assert [rows for rows, _ in calls] == [16, 16]
        calls.clear()
        found = outputs(served)
        assert [rows for rows, _ in calls] == len(programs(served)) * [264]
        assert all(layer.gets_turned for layer in layers_of(served))
        with without("quack_turn"):
            apart = build_bf16(family)
        calls.clear()
        expected = outputs(apart)
        assert not calls
        assert not any(layer.gets_turned for layer in layers_of(apart))
        exact = outputs(build(family))
        assert relative_error(found, expected) < TOLERANCE
        assert relative_error(found, exact) < 1.1 * relative_error(expected, exact)

    def test_rows_decide(self, family: str, calls: list[Call]) -> None:
        served = build_bf16(family)
        for rows in (252, 256):
            calls.clear()
            image(served, rows)
            assert bool(calls) is (rows == 256)

    def test_a_pass_that_is_kept(self, family: str, calls: list[Call]) -> None:
        """Its settled projection reads the tables of the batch that it is used for."""
        served = build_bf16(family)
        with without("quack_turn"):
            apart = build_bf16(family)
        for shape in ([1, 16, 20], [1, 20, 16], [1, 16, 20]):
            pixels = noise(320, served.spec.patch_dim)
            found = served.encode(pixels, [shape])
            expected = apart.encode(pixels, [shape])
            assert relative_error(found, expected) < TOLERANCE

    def test_weights_that_are_loaded_later(
        self, family: str, calls: list[Call]
    ) -> None:
        served, other = build_bf16(family), build(family, seed=1, dtype=torch.bfloat16)
        before = outputs(served)
        state = dict(other.visual.named_parameters())
        for name, parameter in served.visual.named_parameters():
            parameter.data = state[name].data.clone()
        assert relative_error(outputs(served), outputs(other)) < TOLERANCE
        assert relative_error(before, outputs(other)) > TOLERANCE

    def test_a_kernel_that_turns_itself_does(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = build_bf16(family)
        with without("quack_turn"):
            expected = outputs(build_bf16(family))
        calls.clear()
        monkeypatch.setattr(FlashInferViTAttention, "taken", lambda self, batch: None)
        assert torch.equal(outputs(served), expected)
        assert not calls

    def test_results_that_are_wrong(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = log_of(quack_turn, monkeypatch)
        right = turning_gemm.prepare

        def prepare(*args: Any) -> Callable[[Layer], None]:
            launch, out = right(*args), args[-1]

            def negated(layer: Layer) -> None:
                launch(layer)
                out.neg_()

            return negated

        monkeypatch.setattr(turning_gemm, "prepare", prepare)
        served = build_bf16(family)
        assert len(set(said)) == 1 and "192 rows are wrong" in said[0]
        path = programs(served)[0].spec.qkv
        assert path in said[0] and "turns" not in programs(served)[0].steps[path]
        calls.clear()
        assert not outputs(served).isnan().any()
        assert not calls

    def test_who_gets_one(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def has(dtype: torch.dtype = torch.bfloat16, **vision: Any) -> bool:
            one = programs(build(family, dtype=dtype, **vision))[0]
            return one._attention.qkv.turning is not None

        assert has() and has(torch.float16)
        assert not has(torch.float32)
        with monkeypatch.context() as context:
            allow_lora(True, context)
            assert not has()
        with monkeypatch.context() as context:
            quantized("qkv", context)
            assert not has()
        with monkeypatch.context() as context:
            context.setattr(epilogue_gemm, "is_available", lambda: False)
            assert not has()


@cpu_only
@pytest.mark.parametrize("family", SPECS)
def test_other_tables_are_left_to_attention(family: str, calls: list[Call]) -> None:
    """The kernel was built for one dtype: another would be compiled in a request."""
    served = build_bf16(family)
    with without("quack_turn"):
        expected = outputs(build_bf16(family))
    for one in programs(served):
        assert one._attention.qkv.turning is not None
        one._attention.qkv.turning.kernels._table = torch.float16
    calls.clear()
    assert torch.equal(outputs(served), expected)
    assert not calls


@cpu_only
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SPECS)
def test_projections_in_fp8(
    family: str, scheme: str, fp8: None, calls: list[Call]
) -> None:
    """Their rows come quantised, by a scale that is given or each by its own."""
    tower = served(family, scheme, dtype=torch.bfloat16)
    turning = [one._attention.qkv.turning for one in programs(tower)]
    assert all(turning)
    calls.clear()
    # In 16 bits it would be faster from fewer rows on here.
    image(tower, 260)
    assert not calls
    found = outputs(tower)
    assert len(calls) == len(turning)
    for one in programs(tower):
        one._attention.qkv.turning = None
        one._tower.forget()
    calls.clear()
    expected = outputs(tower)
    assert not calls
    exact = outputs(in_16_bits(family, tower))
    # One rounding less may tip values of the layers after it.
    assert relative_error(found, expected) < 0.05
    assert relative_error(found, exact) < 1.1 * relative_error(expected, exact)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("*:flash_attn", (True, True)),
        ("128:triton_window,*:triton", (False, True)),
        ("300:triton,*:hopper_fp8", (True, False)),
        ("*:cudnn_fp8", (False, False)),
        # Many sequences have a kernel of their own.
        ("*:hopper_fp8/flash_attn", (True, False)),
    ],
)
def test_which_kernels_read_turned(plan: str, expected: tuple[bool, bool]) -> None:
    def reads_turned(batch: Batch) -> bool:
        return taken_by(kernel_for(batch, Plan.decode(plan)), None) == "turned"

    q = torch.zeros(600, 1, 8)
    many = torch.arange(0, 601, 100, dtype=torch.int32)
    one = torch.tensor([0, 600], dtype=torch.int32)
    found = tuple(
        reads_turned(Batch(q, q, q, None, None, offsets, longest))
        for offsets, longest in ((many, 100), (one, 600))
    )
    assert found == expected
    equal = Batch(q, q, q, seq_len=100), Batch(q, q, q, seq_len=600)
    assert tuple(map(reads_turned, equal)) == expected


HAS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen2-VL-7B-Instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen3-VL-8B-Instruct",
    ],
)
class TestOnAGpu:
    GRIDS = [[1, 60, 38], [1, 32, 32]]

    @staticmethod
    def build(model: str, dtype: torch.dtype = torch.bfloat16) -> Tower:
        spec = resolve_spec(model, random_weights=True, depth=8)
        return build_tower(spec, backend="FLASHINFER", dtype=dtype, device="cuda")

    def test_errors(self, model: str) -> None:
        served = self.build(model)
        if not epilogue_gemm.is_available():
            pytest.skip("needs QuACK 0.6")
        assert programs(served)[0]._attention.qkv.turning is not None
        with without("quack_turn"):
            apart = self.build(model)
        with without("quack_turn", "quack_mlp", "quack_qkv"):
            spec = resolve_spec(model, random_weights=True, depth=8)
            exact = build_tower(
                spec, backend="TORCH_SDPA", dtype=torch.float32, device="cuda"
            )
        rows = sum(t * h * w for t, h, w in self.GRIDS)
        pixels = noise(rows, served.spec.patch_dim)
        found, other, right = (
            tower.encode(pixels, self.GRIDS) for tower in (served, apart, exact)
        )
        assert not torch.equal(found, other)
        assert relative_error(found, right) <= 1.03 * relative_error(other, right)

    def test_padding_of_a_graph(self, model: str) -> None:
        """NaN of an earlier batch lies there; nothing of it reaches an image."""
        tower = self.build(model)
        blocks = tower.visual.get_submodule("blocks")
        layer = layers_of(tower)[0]
        rows, half = 2048, layer.head_size // 2
        width = blocks[0].norm1.weight.shape[0]
        on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        x = torch.randn(rows, 1, width, **on)
        angles = torch.rand(rows, half, device="cuda")
        cu_seqlens = torch.zeros(5, dtype=torch.int32, device="cuda")
        given = {
            "cu_seqlens": cu_seqlens,
            "rotary_pos_emb_cos": angles.cos().to(torch.bfloat16),
            "rotary_pos_emb_sin": angles.sin().to(torch.bfloat16),
            "max_seqlen": torch.tensor(rows, dtype=torch.int32),
        }
        if "Qwen2-VL" not in model:
            given["sequence_lengths"] = None

        def run(stream: torch.Tensor, with_: dict[str, Any]) -> torch.Tensor:
            for block in blocks:
                stream = block(stream, **with_)
            return stream

        held = x.clone()
        with tower.running(), torch.inference_mode():
            cu_seqlens[1:] = rows
            run(x.clone(), given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(held, given)
            for lengths in ((1024, 500), (1500,), (2048,), (700, 9, 30, 41)):
                tokens = sum(lengths)
                ends = torch.tensor(lengths, device="cuda").cumsum(0)
                cu_seqlens.zero_()
                cu_seqlens[1 : 1 + len(lengths)] = ends
                held.copy_(x)
                held[tokens:] = float("nan")
                graph.replay()
                assert not out.isnan().any()
                exact = {
                    **given,
                    "cu_seqlens": cu_seqlens[: 1 + len(lengths)].clone(),
                    "rotary_pos_emb_cos": given["rotary_pos_emb_cos"][:tokens],
                    "rotary_pos_emb_sin": given["rotary_pos_emb_sin"][:tokens],
                }
                expected = run(x[:tokens].clone(), exact)
                error = relative_error(out[:tokens], expected)
                assert error < 0.02
