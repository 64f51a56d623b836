# SPDX-License-Identifier: Apache-2.0
"""Towers on a Hopper GPU whose QKV projections write what FP8 attention reads."""

from typing import Any

import pytest
import torch
from _blocks import programs, without
from _models import noise
from _towers import HAS_GPU

from cases import relative_error
from vllm_flashinfer_vit.gemms import epilogue_gemm
from vllm_flashinfer_vit.settings import ENV_KERNEL
from vllm_flashinfer_vit.towers.resolve import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

HAS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
# Images in turns: blocks that are not full, and more rows than the kernel needs.
RAGGED = [
    [[1, 60, 38], [1, 32, 32]],
    [[1, 2, 2], [1, 64, 66], [1, 4, 6], [3, 24, 22]],
    [[1, 96, 128]],
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen2-VL-7B-Instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen3-VL-8B-Instruct",
    ],
)
class TestOnAGpu:
    @staticmethod
    def build(model: str, **options: Any) -> Tower:
        spec = resolve_spec(model, random_weights=True, depth=2)
        given = {"backend": "FLASHINFER", "dtype": torch.bfloat16, "attn_dtype": "fp8"}
        tower = build_tower(spec, device="cuda", **(given | options))
        if not epilogue_gemm.is_available():
            pytest.skip("needs QuACK 0.6")
        return tower

    @pytest.fixture(autouse=True)
    def everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have one kernel serve all lengths, windows, too."""
        monkeypatch.setenv(ENV_KERNEL, "hopper_fp8")

    def test_errors(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tower = self.build(model)
        assert all(one._attention.qkv.quantizing for one in programs(tower))
        with without("quack_quantize"):
            apart = self.build(model)
        monkeypatch.delenv(ENV_KERNEL)
        options = {"dtype": torch.float32, "attn_dtype": None}
        exact = self.build(model, backend="TORCH_SDPA", **options)
        for grids in RAGGED:
            rows = sum(t * h * w for t, h, w in grids)
            pixels = noise(rows, tower.spec.patch_dim)
            found, other, right = (
                one.encode(pixels, grids) for one in (tower, apart, exact)
            )
            assert not torch.equal(found, other)
            assert relative_error(found, right) <= 1.05 * relative_error(other, right)

    def test_linear_layers_in_fp8(self, model: str) -> None:
        tower = self.build(model, quantization="fp8")
        assert all(one._attention.qkv.quantizing for one in programs(tower))
        with without("quack_quantize"):
            apart = self.build(model, quantization="fp8")
        pixels = noise(3304, tower.spec.patch_dim)
        found, other = (one.encode(pixels, RAGGED[0]) for one in (tower, apart))
        assert not torch.equal(found, other)
        assert relative_error(found, other) < 0.1

    def test_lengths_choose(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Windows are not in FP8, blocks between them are."""
        monkeypatch.delenv(ENV_KERNEL)
        tower = self.build(model)
        with without("quack_quantize"):
            apart = self.build(model)
        grids = [[1, 128, 160]]
        pixels = noise(128 * 160, tower.spec.patch_dim)
        found, other = (one.encode(pixels, grids) for one in (tower, apart))
        assert not torch.equal(found, other)
        assert relative_error(found, other) < 0.05

    def test_images_stay_apart(self, model: str) -> None:
        tower = self.build(model)
        pixels = noise(3304, tower.spec.patch_dim)
        expected = tower.encode(pixels, RAGGED[0])
        pixels[:2280] = float("nan")
        found = tower.encode(pixels, RAGGED[0])
        with without("quack_quantize"):
            apart = self.build(model)
        assert not torch.equal(apart.encode(pixels, RAGGED[0])[570:], expected[570:])
        assert found[:570].isnan().all() and not expected.isnan().any()
        assert torch.equal(found[570:], expected[570:])

    @pytest.mark.parametrize("rows", [1024, 2048, 6000])
    def test_graphs(self, model: str, rows: int) -> None:
        """NaN of an earlier batch lies in a graph's padding, and in no image."""
        tower = self.build(model)
        with without("quack_quantize"):
            apart = self.build(model)
        layer = next(iter(tower.attention_layers().values()))
        width = tower.visual.get_submodule("blocks.0").norm1.weight.shape[0]
        on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        x = torch.randn(rows, 1, width, **on)
        angles = torch.rand(rows, layer.head_size // 2, device="cuda")
        cu_seqlens = torch.zeros(5, dtype=torch.int32, device="cuda")
        given = {
            "cu_seqlens": cu_seqlens,
            "rotary_pos_emb_cos": angles.cos().to(torch.bfloat16),
            "rotary_pos_emb_sin": angles.sin().to(torch.bfloat16),
            "max_seqlen": torch.tensor(rows, dtype=torch.int32),
        }
        if "Qwen2-VL" not in model:
            given["sequence_lengths"] = None

        def run(of: Tower, stream: torch.Tensor) -> torch.Tensor:
            for block in of.visual.get_submodule("blocks"):
                stream = block(stream, **given)
            return stream

        held = x.clone()
        with tower.running(), torch.inference_mode():
            cu_seqlens[1:] = rows
            run(tower, x.clone())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(tower, held)
            half = rows // 2
            for lengths in (
                (half, 300),
                (rows - 7,),
                (rows,),
                (half - 9, 9, 30, 41),
                (1,),
                (),
            ):
                tokens = sum(lengths)
                ends = torch.tensor(lengths, device="cuda").cumsum(0)
                cu_seqlens.zero_()
                cu_seqlens[1 : 1 + len(lengths)] = ends
                held.copy_(x)
                held[tokens:] = float("nan")
                graph.replay()
                assert not out[:tokens].isnan().any()
                assert torch.equal(out[:tokens], run(tower, held.clone())[:tokens])
                expected = run(apart, held.clone())
                if tokens:
                    assert relative_error(out[:tokens], expected[:tokens]) < 0.03
                if tokens == rows or rows == 1024:
                    # There is room for four, so 1024 rows are many sequences.
                    assert torch.equal(out[:tokens], expected[:tokens]) is (
                        rows == 1024
                    )
