# SPDX-License-Identifier: Apache-2.0
"""QKV projections that write what FP8 attention reads: who gets one, for which batches.

A plain stand-in computes on the CPU what QuACK's kernel computes on a Hopper GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    GRIDS,
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
from _encoders import DENSE
from _fp8_layers import SCHEMES, in_16_bits, served
from _models import CONTEXT, Call, encode, noise
from _towers import cpu_only

from cases import relative_error
from vllm_flashinfer_vit.blocks import quack_quantize
from vllm_flashinfer_vit.gemms import epilogue_gemm, quantizing_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer, project
from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.kernels.formats import DeviceScales, QuantizedQKV
from vllm_flashinfer_vit.ops.attention import Fp8, taken_by
from vllm_flashinfer_vit.settings import ENV_FP8_SCALES
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

# Of e4m3 that was rounded from other sums; the towers' two differ by as much.
TOLERANCE = 0.05


@pytest.fixture
def calls(direct: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there is a Hopper GPU; collect the rows that are quantised."""
    seen: list[int] = []

    def compiled(like: Layer, heads: Heads, *rest: Any) -> Heads:
        return heads

    def prepare(
        kernel: Heads,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
        out: QuantizedQKV,
    ) -> Callable[[Layer], None]:
        def launch(layer: Layer) -> None:
            seen.append(len(x))
            found = quantizing_gemm.quantized(
                project(x, layer), cos, sin, cu_seqlens, kernel
            )
            for one, right in zip(out, found, strict=True):
                one.view(torch.uint8).copy_(right.view(torch.uint8))

        return launch

    monkeypatch.setattr(epilogue_gemm, "is_available", lambda: True)
    monkeypatch.setattr(turning_gemm, "build", lambda *given: "there is no GPU")
    monkeypatch.setattr(quantizing_gemm, "compiled", compiled)
    monkeypatch.setattr(quantizing_gemm, "prepare", prepare)
    monkeypatch.setattr(quack_quantize, "MIN_MEAN_ROWS", 128)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return seen


@pytest.fixture(autouse=True)
def attends_in_fp8(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have this package's towers in a test attend in FP8."""

    def built(spec: TowerSpec, *, backend: str, **options: Any) -> Tower:
        attn_dtype = "fp8" if backend == "FLASHINFER" else None
        return build_tower(spec, backend=backend, attn_dtype=attn_dtype, **options)

    if "calls" in request.fixturenames:
        monkeypatch.setattr("_blocks.build_tower", built)


def build_bf16(family: str, **vision: Any) -> Tower:
    return build(family, dtype=torch.bfloat16, **vision)


def without_it(family: str, **vision: Any) -> Tower:
    with without("quack_quantize"):
        return build_bf16(family, **vision)


def long_blocks(tower: Tower) -> int:
    """How many blocks attend to more than windows."""
    config = tower.spec.vision_config
    windowed = "fullatt_block_indexes" in config
    return 1 if windowed else len(programs(tower))


@cpu_only
@pytest.mark.parametrize("family", SPECS)
class TestQuantizing:
    def test_large_batches_are_quantised(self, family: str, calls: list[int]) -> None:
        tower = build_bf16(family)
        # One kernel for all blocks, tried while weights are loaded.
        assert calls == [16]
        calls.clear()
        found = outputs(tower)
        assert calls == long_blocks(tower) * [264]
        apart = without_it(family)
        calls.clear()
        expected = outputs(apart)
        assert not calls
        assert not found.isnan().any()
        assert relative_error(found, expected) < TOLERANCE
        exact = build_tower(
            tower.spec, backend="TORCH_SDPA", dtype=torch.float32, device="cpu"
        )
        right = outputs(exact)
        assert relative_error(found, right) < 1.1 * relative_error(expected, right)

    def test_rows_to_a_sequence_decide(
        self, family: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quack_quantize, "MIN_MEAN_ROWS", 133)
        tower = build_bf16(family)
        calls.clear()
        assert not outputs(tower).isnan().any() and not calls  # two images of 264 rows
        for rows in (128, 136):
            calls.clear()
            image(tower, rows)
            assert bool(calls) is (rows == 136)

    def test_short_sequences_run_as_they_did(
        self, family: str, calls: list[int]
    ) -> None:
        tower, apart = build_bf16(family), without_it(family)
        calls.clear()
        grids = [[1, 8, 8]] * 5
        pixels = noise(320, tower.spec.patch_dim)
        assert torch.equal(tower.encode(pixels, grids), apart.encode(pixels, grids))
        assert not calls

    def test_a_pass_that_is_kept(self, family: str, calls: list[int]) -> None:
        """Its settled projection reads the tables of the batch that it is used for."""
        tower, apart = build_bf16(family), without_it(family)
        calls.clear()
        for shape in ([1, 16, 20], [1, 20, 16], [1, 16, 20]):
            pixels = noise(320, tower.spec.patch_dim)
            found = tower.encode(pixels, [shape])
            assert relative_error(found, apart.encode(pixels, [shape])) < TOLERANCE
        assert len(calls) == 3 * long_blocks(tower)

    def test_images_stay_apart(self, family: str, calls: list[int]) -> None:
        tower = build_bf16(family)
        pixels = noise(264, tower.spec.patch_dim)
        expected = tower.encode(pixels, GRIDS)
        pixels[:240] = float("nan")
        calls.clear()
        found = tower.encode(pixels, GRIDS)
        assert calls and found[:60].isnan().all()
        assert torch.equal(found[60:], expected[60:])

    def test_weights_that_are_loaded_later(self, family: str, calls: list[int]) -> None:
        tower, other = build_bf16(family), build(family, seed=1, dtype=torch.bfloat16)
        before = outputs(tower)
        state = dict(other.visual.named_parameters())
        for name, parameter in tower.visual.named_parameters():
            parameter.data = state[name].data.clone()
        assert torch.equal(outputs(tower), outputs(other))
        assert relative_error(before, outputs(other)) > TOLERANCE

    def test_scales_of_a_layer_need_what_was_projected(
        self, family: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_FP8_SCALES, "dynamic")
        tower = build_bf16(family)
        assert not any(one._attention.qkv.quantizing for one in programs(tower))
        assert not outputs(tower).isnan().any() and not calls

    def test_who_watches_a_layer_sees_q_k_and_v(
        self, family: str, calls: list[int]
    ) -> None:
        tower, apart = build_bf16(family), without_it(family)
        layers = list(tower.attention_layers().values())
        calls.clear()
        seen = []

        def watch(layer: Any, attend: Callable[[Any], Any], batch: Any) -> Any:
            seen.append(batch)
            return attend(batch)

        for layer in layers:
            layer._watch = watch
        assert torch.equal(outputs(tower), outputs(apart))
        assert len(seen) == len(layers) and not calls
        assert all(batch.cos is not None for batch in seen)

    def test_results_that_are_wrong(
        self, family: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = log_of(quack_quantize, monkeypatch)
        right = quantizing_gemm.prepare

        def prepare(*args: Any) -> Callable[[Layer], None]:
            launch, out = right(*args), args[-1]

            def other(layer: Layer) -> None:
                launch(layer)
                out.v_scale.neg_()

            return other

        monkeypatch.setattr(quantizing_gemm, "prepare", prepare)
        tower = build_bf16(family)
        assert len(set(said)) == 1 and "results are wrong" in said[0]
        path = programs(tower)[0].spec.qkv
        assert path in said[0] and "quantises" not in programs(tower)[0].steps[path]
        calls.clear()
        assert torch.equal(outputs(tower), outputs(without_it(family)))
        assert not calls

    def test_who_gets_one(
        self, family: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def has(dtype: torch.dtype = torch.bfloat16, **vision: Any) -> bool:
            one = programs(build(family, dtype=dtype, **vision))[0]
            return one._attention.qkv.quantizing is not None

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
        with monkeypatch.context() as context:
            context.setattr("_blocks.build_tower", build_tower)
            assert not has()

    def test_other_tables_are_left_to_attention(
        self, family: str, calls: list[int]
    ) -> None:
        """The kernel was built for one dtype; another is not compiled in a request."""
        tower, apart = build_bf16(family), without_it(family)
        for one in programs(tower):
            assert one._attention.qkv.quantizing is not None
            one._attention.qkv.quantizing.kernels._table = torch.float16
        calls.clear()
        assert torch.equal(outputs(tower), outputs(apart))
        assert not calls


@cpu_only
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SPECS)
def test_projections_in_fp8(
    family: str, scheme: str, fp8: None, calls: list[int]
) -> None:
    """Their rows come quantised, by a scale that is given or each by its own."""
    tower = served(family, scheme, dtype=torch.bfloat16)
    steps = [one._attention.qkv.quantizing for one in programs(tower)]
    assert all(steps)
    calls.clear()
    found = outputs(tower)
    assert len(calls) == long_blocks(tower)
    for one in programs(tower):
        one._attention.qkv.quantizing = None
        one._tower.forget()
    calls.clear()
    expected = outputs(tower)
    assert not calls
    exact = outputs(in_16_bits(family, tower))
    assert relative_error(found, expected) < 2 * TOLERANCE
    assert relative_error(found, exact) < 1.1 * relative_error(expected, exact)


ROWS = 256


def run_blocks(tower: Tower, **given: Any) -> torch.Tensor:
    """Return what a tower's blocks make of one sequence, or of what is given."""
    random = torch.Generator().manual_seed(0)
    layer = next(iter(tower.attention_layers().values()))
    width = tower.visual.get_submodule("blocks.0").norm1.weight.shape[0]
    x = torch.randn(ROWS, 1, width, generator=random).bfloat16()
    angles = torch.rand(ROWS, layer.head_size // 2, generator=random)
    inputs = {
        "cu_seqlens": torch.tensor([0, ROWS], dtype=torch.int32),
        "rotary_pos_emb_cos": angles.cos().bfloat16(),
        "rotary_pos_emb_sin": angles.sin().bfloat16(),
        "max_seqlen": torch.tensor(ROWS, dtype=torch.int32),
    }
    with tower.running(), torch.inference_mode():
        for block in tower.visual.get_submodule("blocks"):
            x = block(x, **(inputs | given))
    return x


def perception_encoder(module: Any) -> tuple[torch.nn.Module, Call]:
    tower = module.PerceptionEncoderVisionTransformer(
        192,
        layers=2,
        heads=2,
        max_grid_height=16,
        max_grid_width=16,
        mlp_ratio=1.0,
        act_layer=module.get_act_fn("quick_gelu"),
        use_cls_token=False,
        ls_init_value=0.1,
    )
    return tower, lambda: [tower(noise(3, 256, 192), grid_hw=(16, 16))]


@cpu_only
def test_a_dense_batch_is_quantised(calls: list[int]) -> None:
    def encoded() -> torch.Tensor:
        options = {"backend": "FLASHINFER", "device": "cpu", "attn_dtype": "fp8"}
        tower = build_tower(CONTEXT, dtype=torch.bfloat16, **options)
        calls.clear()
        encoder = replace(DENSE["step_vl"], build=perception_encoder)
        return encode(encoder, tower).out

    found = encoded()
    # A trial as it is built, and three images in each of two blocks.
    assert calls == [16, 768, 768]
    with without("quack_quantize"):
        expected = encoded()
    assert not calls
    assert relative_error(found, expected) < TOLERANCE


@cpu_only
@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0, ROWS]),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, 0, ROWS, ROWS], dtype=torch.int32)[::2],
    ],
    ids=["int64", "no sequence", "strided"],
)
def test_nothing_is_projected_by_offsets_that_attention_refuses(
    offsets: torch.Tensor, calls: list[int]
) -> None:
    tower = build_bf16("qwen2_vl")
    calls.clear()
    with pytest.raises(ValueError, match="cu_seqlens"):
        run_blocks(tower, cu_seqlens=offsets)
    assert not calls


STATE = DeviceScales.on("cpu")


@pytest.mark.parametrize(
    ("kernel", "fp8", "expected"),
    [
        ("flash_attn", None, "turned"),
        ("flash_attn", Fp8("block"), "turned"),
        ("triton_window", None, None),
        ("hopper_fp8", Fp8("block"), "quantized"),
        ("triton_fp8", Fp8("block"), "quantized"),
        # Passes count for scales that are saved.
        ("hopper_fp8", Fp8("block", True, STATE), None),
        ("hopper_fp8", Fp8("static", False, STATE), None),
        ("hopper_fp8", Fp8("dynamic", False, STATE), None),
        ("cudnn_fp8", Fp8("dynamic", False, STATE), None),
    ],
)
def test_what_kernels_take(kernel: str, fp8: Fp8 | None, expected: str | None) -> None:
    assert taken_by(kernel, fp8) == expected
