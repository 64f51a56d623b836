# SPDX-License-Identifier: Apache-2.0
"""Towers whose layers vLLM itself quantises as it loads them."""

from importlib.metadata import version

import pytest
import torch
from _blocks import SPECS, kinds, programs
from _fp8_layers import Everywhere
from _models import noise
from _towers import cpu_only, small_spec, true_tower
from packaging.version import Version

from cases import relative_error
from vllm_flashinfer_vit.blocks import layers
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.catalog import CUBLASLT
from vllm_flashinfer_vit.towers.config import (
    current_config,
    model_arguments,
    tower_config,
)
from vllm_flashinfer_vit.towers.linear_layers import how_layers_run
from vllm_flashinfer_vit.towers.spec import TowerError
from vllm_flashinfer_vit.towers.tower import Tower, build_tower, check_backend

METHODS = ("fp8", "fp8_per_tensor", "fp8_per_channel")
BLOCKS = "fp8_per_block"
# A wide image, one of a single token, and a square one.
GRIDS = [[1, 24, 60], [1, 2, 2], [1, 32, 32]]


def encode(tower: Tower) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in GRIDS)
    return tower.encode(noise(rows, tower.spec.patch_dim), GRIDS)


def check_error(family: str, served: Tower, method: str) -> None:
    """Compare a quantised tower's error with stock's, and a second run's bits."""
    exact = encode(true_tower(family, "TORCH_SDPA", torch.float32))
    stock = encode(true_tower(family, "FLASH_ATTN", served.dtype, quantization=method))
    found = encode(served)
    assert relative_error(found, exact) <= 1.02 * relative_error(stock, exact)
    assert torch.equal(encode(served), found)


def check_graph_bits(tower: Tower) -> None:
    """Compare a tower's CUDA graph with its eager mode, bit for bit."""
    pixels = noise(sum(t * h * w for t, h, w in GRIDS), tower.spec.patch_dim)
    pixels = pixels.to(tower.device, tower.dtype)
    with tower.running():
        metadata = tower.visual.prepare_encoder_metadata(GRIDS)

        def run() -> torch.Tensor:
            return tower.visual(pixels, None, encoder_metadata=dict(metadata))

        found = run().clone()
        assert torch.equal(capture(run)(), found)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", SPECS)
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def loads(self, family: str, method: str) -> None:
        is_padded = family == "qwen2_5_vl" and method == "fp8_per_channel"
        if is_padded and Version(version("vllm")) < Version("0.26"):
            pytest.skip("vLLM 0.25.1 cannot pad channels that have scales of their own")

    def test_no_less_exact_than_stock(self, family: str, method: str) -> None:
        served = true_tower(family, quantization=method)
        assert kinds(served) == {("Fp8Linear",) * 4}
        check_error(family, served, method)

    def test_graphs_have_the_same_bits(self, family: str, method: str) -> None:
        check_graph_bits(true_tower(family, quantization=method))

    def test_attention_in_fp8_too(self, family: str, method: str) -> None:
        exact = encode(true_tower(family, "TORCH_SDPA", torch.float32))
        stock = encode(true_tower(family, "FLASH_ATTN", quantization=method))
        served = true_tower(family, quantization=method, attn_dtype="fp8")
        assert relative_error(encode(served), exact) <= (
            2 * relative_error(stock, exact)
        )

    def test_layers_that_are_left_out(self, family: str, method: str) -> None:
        if method == "fp8":
            pytest.skip("vLLM takes no list of layers with this name")
        served = true_tower(family, quantization=method, unquantized=["re:.*attn.*"])
        # GLM's layers have no bias that a call with an epilogue would add.
        plain = "Gemm" if family == "glm4v" else "LtGemm"
        assert kinds(served) == {(plain, plain, "Fp8Linear", "Fp8Linear")}
        text = how_layers_run(served)
        assert "4 run in this package's block program" in text and "16 bits" in text
        assert encode(served).isfinite().all()


@pytest.mark.gpu
class TestScalesOfBlocks:
    """vLLM runs every size by CUTLASS in fp16, and most by DeepGEMM in bf16.

    Stock's kernels assert against the 4304 of Qwen3-VL's MLP, and it is no measure.
    """

    @pytest.fixture(autouse=True)
    def hopper(self) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("other GPUs have scales of blocks in other layouts")

    @pytest.fixture
    def deep_gemm(self) -> None:
        from vllm.utils.deep_gemm import is_deep_gemm_supported

        if not is_deep_gemm_supported():
            pytest.skip("vLLM has no DeepGEMM here")

    @pytest.mark.parametrize("family", ["qwen2_vl", "glm4v"])
    def test_no_less_exact_than_stock(self, family: str) -> None:
        served = true_tower(family, dtype=torch.float16, quantization=BLOCKS)
        assert kinds(served) == {("Fp8Linear",) * 4}
        check_error(family, served, BLOCKS)

    def test_about_as_exact_as_scales_of_channels(self) -> None:
        given = "qwen3_vl", "FLASHINFER", torch.float16
        exact = encode(true_tower("qwen3_vl", "TORCH_SDPA", torch.float32))
        channels = encode(true_tower(*given, quantization="fp8_per_channel"))
        served = true_tower(*given, quantization=BLOCKS)
        assert kinds(served) == {("Fp8Linear",) * 4}
        error = relative_error(encode(served), exact)
        assert error <= 1.2 * relative_error(channels, exact)

    def test_beside_deep_gemm(self, deep_gemm: None) -> None:
        served = true_tower("qwen3_vl", quantization=BLOCKS)
        assert kinds(served) == {("OwnLinear", "OwnLinear", "Fp8Linear", "Fp8Linear")}
        exact = encode(true_tower("qwen3_vl", "TORCH_SDPA", torch.float32))
        channels = encode(true_tower("qwen3_vl", quantization="fp8_per_channel"))
        # DeepGEMM's scales are powers of two, for which weights are rounded anew.
        error = relative_error(encode(served), exact)
        assert error <= 1.5 * relative_error(channels, exact)

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
    def test_graphs_have_the_same_bits(self, family: str) -> None:
        check_graph_bits(true_tower(family, dtype=torch.float16, quantization=BLOCKS))

    def test_graphs_beside_deep_gemm(self, deep_gemm: None) -> None:
        check_graph_bits(true_tower("qwen3_vl", quantization=BLOCKS))

    def test_layers_that_deep_gemm_takes_may_be_left_out(self) -> None:
        unquantized = ["re:.*attn.*"]
        served = true_tower("qwen3_vl", quantization=BLOCKS, unquantized=unquantized)
        assert kinds(served) == {("LtGemm", "LtGemm", "Fp8Linear", "Fp8Linear")}
        assert encode(served).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not cublaslt.takes_fp8(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("method", ["fp8_per_tensor", "fp8_per_channel"])
@pytest.mark.parametrize("family", SPECS)
class TestCublasLtsGemm:
    """With a scale for each row, at any number of rows."""

    @pytest.fixture(autouse=True)
    def chosen(self, family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        is_old = Version(version("vllm")) < Version("0.26")
        if family == "qwen2_5_vl" and method == "fp8_per_channel" and is_old:
            pytest.skip("vLLM 0.25.1 cannot pad channels that have scales of their own")
        table = Everywhere((GemmClass(None, CUBLASLT),))
        monkeypatch.setattr(layers, "gemms_here", lambda folder: table)

    def test_no_less_exact_than_stock(self, family: str, method: str) -> None:
        served = true_tower(family, quantization=method)
        steps = programs(served)[0].steps.values()
        assert sum("FP8 by cuBLASLt" in step for step in steps) == 4
        check_error(family, served, method)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_graphs_have_the_same_bits(
        self, family: str, method: str, dtype: torch.dtype
    ) -> None:
        check_graph_bits(true_tower(family, dtype=dtype, quantization=method))


@cpu_only
@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("method", [*METHODS, BLOCKS])
def test_vllm_takes_the_settings(family: str, method: str) -> None:
    check_backend("FLASHINFER", torch.device("cpu"), torch.bfloat16)
    config, _, _ = tower_config(
        small_spec(family),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        **model_arguments("FLASHINFER", quantization=method),
    )
    with current_config(config):
        assert config.quant_config.get_name() in ("fp8", "online")


@cpu_only
@pytest.mark.parametrize(
    "method, unquantized, reason",
    [
        ("fp8_per_tensor", ["re:["], "'re:\\['.*unterminated character set at"),
        ("fp9", [], "'fp9' quantises no 16-bit weights: use fp8, fp8_per_tensor"),
        ("awq", [], "'awq' quantises no 16-bit weights"),
        ("online", [], "'online' quantises no 16-bit weights"),
        ("fp8", ["visual.blocks.0.mlp.down_proj"], "takes no --unquantized"),
        (None, ["visual.blocks.0.mlp.down_proj"], "needs --quantization"),
        ("fp8_per_tensor", ["re:.*attn.*"], "needs a GPU"),
    ],
)
def test_what_is_refused(
    method: str | None, unquantized: list[str], reason: str
) -> None:
    with pytest.raises(TowerError, match=reason):
        build_tower(
            small_spec("qwen3_vl"),
            backend="FLASHINFER",
            dtype=torch.bfloat16,
            device="cpu",
            quantization=method,
            unquantized=unquantized,
        )
