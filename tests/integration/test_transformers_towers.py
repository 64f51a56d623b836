# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's tower is Transformers' own, and runs by this package's kernels."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _blocks import log_of
from _grid_models import moonvit as build_moonvit
from _models import OpCount, engine, noise
from _towers import DEVICE, HAS_GPU, cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
from vllm_flashinfer_vit.models import gemma4, transformers_towers
from vllm_flashinfer_vit.patches import encoder_graphs
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES, ENV_FIX_GRAPH_PADDING
from vllm_flashinfer_vit.towers.tower import Tower

TOLERANCE = 1e-5
# Patches of each image, of 3 x 3 to a token; rows are padded to the longest.
SIDES = [(6, 6), (9, 3), (3, 3), (6, 6)]
LENGTH = 36
EDGE = 4


def config(**fields: Any) -> Any:
    from transformers import Gemma4VisionConfig

    values: dict[str, Any] = {
        "hidden_size": 144,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 72,
        "patch_size": EDGE,
        "position_embedding_size": 64,
        "pooling_kernel_size": 3,
    }
    return Gemma4VisionConfig(**{**values, **fields})


def audio_config() -> Any:
    from transformers import Gemma4AudioConfig

    return Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=32
    )


def model(tower: Tower, has_audio: bool = False, **fields: Any) -> Any:
    """Build a model of vLLM's kind, within a tower's engine, and fill its weights."""
    from transformers import AutoModel
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.utils.torch_utils import set_default_torch_dtype

    class Model(nn.Module, SupportsMultiModal):
        def __init__(self) -> None:
            super().__init__()
            with self._mark_tower_model(tower.vllm_config, {"image", "video"}):
                self.vision_tower = AutoModel.from_config(config(**fields))
            if has_audio:
                with self._mark_tower_model(tower.vllm_config, "audio"):
                    self.audio_tower = AutoModel.from_config(audio_config())

    with tower.running(), set_default_torch_dtype(tower.dtype), tower.device:
        built = Model()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in built.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm.weight" in name
        parameter.data.copy_(
            1 + 0.3 * drawn if is_norm else drawn * parameter.shape[-1] ** -0.5
        )
    for name, buffer in built.named_buffers():
        # What clipped layers clip by, each its own.
        if name.endswith(("_min", "_max")):
            bound = 0.3 + torch.rand((), generator=generator)
            with torch.inference_mode():
                buffer.copy_(-bound if name.endswith("_min") else bound)
    return built


def runs_our_blocks(built: Any) -> bool:
    return isinstance(built.vision_tower.encoder.forward, gemma4.Encoder)


def encode(built: Any, tower: Tower) -> torch.Tensor:
    """Return the tokens of four images, three of which are padded."""
    pixels = noise(len(SIDES), LENGTH, 3 * EDGE**2).sigmoid()
    places = torch.full((len(SIDES), LENGTH, 2), -1)
    for place, (height, width) in enumerate(SIDES):
        rows, columns = torch.meshgrid(
            torch.arange(height), torch.arange(width), indexing="ij"
        )
        at = torch.stack([columns, rows], -1).view(-1, 2)
        places[place, : len(at)] = at
    with torch.inference_mode():
        out = built.vision_tower(
            pixels.to(tower.device, tower.dtype), places.to(tower.device)
        )
    return out.last_hidden_state.float().cpu()


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[Tower]:
    yield engine("FLASHINFER", device=DEVICE)


@cpu_only
@pytest.mark.parametrize("blocks", ["this package's", "Transformers'"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 1},
        {"use_clipped_linears": True},
        {"hidden_size": 128, "head_dim": 64, "rms_norm_eps": 1e-2},
    ],
    ids=["plain", "GQA", "clipped", "head dim 64"],
)
def test_it_is_the_tower_of_transformers(
    fields: dict[str, Any],
    blocks: str,
    flashinfer: Tower,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if blocks == "Transformers'":
        monkeypatch.setenv(ENV_DISABLE_PATCHES, "gemma4_blocks")
    stock = engine("TORCH_SDPA")
    expected = encode(model(stock, **fields), stock)
    built = model(flashinfer, **fields)
    assert runs_our_blocks(built) == (blocks == "this package's")
    with OpCount() as count:
        found = encode(built, flashinfer)
    assert count.calls == 2
    assert relative_error(found, expected) < TOLERANCE


@cpu_only
def test_clipping_changes_the_outputs(flashinfer: Tower) -> None:
    """The case above would else pass without it."""
    plain, clipped = (
        encode(model(flashinfer, use_clipped_linears=given), flashinfer)
        for given in (False, True)
    )
    assert relative_error(clipped, plain) > 0.01


@cpu_only
def test_no_norm_of_transformers_runs_in_a_block(flashinfer: Tower) -> None:
    built = model(flashinfer)
    calls = []
    for name, module in built.vision_tower.encoder.named_modules():
        if "norm" in name:
            module.register_forward_hook(
                lambda *_, name=name: calls.append(name)  # type: ignore[misc]
            )
    encode(built, flashinfer)
    assert calls == ["layers.0.input_layernorm"]


@cpu_only
def test_weights_may_move(flashinfer: Tower) -> None:
    """As they do in a reload or after sleep."""
    stock = engine("TORCH_SDPA")
    built, other = model(flashinfer), model(stock)
    before = encode(built, flashinfer)
    for module in (*built.modules(), *other.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            with torch.inference_mode():
                moved = nn.Parameter(parameter * 1.25, requires_grad=False)
            setattr(module, name, moved)
    found = encode(built, flashinfer)
    assert relative_error(found, encode(other, stock)) < TOLERANCE
    assert relative_error(found, before) > 0.01


@cpu_only
def test_a_transformers_that_was_not_read(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, why in [
        ("Gemma4VisionAttention.__init__", "is not as it was read"),
        ("rotate_half", "is not as it was read"),
        ("Gemma4VisionMLP.backward", "there is no"),
        ("rotate_third", "there is no"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(gemma4, "_READ", {name: ("0",)})
            built = model(flashinfer)
            reason = gemma4.unfit(built.vision_tower)
        assert reason is not None and why in reason
        assert not runs_our_blocks(built)
        assert built.vision_tower.config._attn_implementation == (
            transformers_towers.NAME
        )


@cpu_only
def test_another_activation(flashinfer: Tower) -> None:
    fields = {"hidden_activation": "silu"}
    built = model(flashinfer, **fields)
    assert not runs_our_blocks(built)
    stock = engine("TORCH_SDPA")
    expected = encode(model(stock, **fields), stock)
    assert relative_error(encode(built, flashinfer), expected) < TOLERANCE


@cpu_only
def test_a_batch_without_images(flashinfer: Tower) -> None:
    encoder = model(flashinfer).vision_tower.encoder
    given = torch.zeros(0, 9, 144), torch.ones(0, 9, dtype=torch.bool)
    with torch.inference_mode():
        out = encoder(*given, pixel_position_ids=torch.zeros(0, 9, 2).long())
    assert out.last_hidden_state.shape == (0, 9, 144)


@cpu_only
def test_padding_is_not_seen(flashinfer: Tower) -> None:
    """An image's tokens are those that it has alone."""
    built = model(flashinfer)
    found = encode(built, flashinfer)
    pixels = noise(len(SIDES), LENGTH, 3 * EDGE**2).sigmoid()[1:2, :27]
    at = torch.tensor([[x, y] for y in range(9) for x in range(3)])[None]
    with torch.inference_mode():
        alone = built.vision_tower(pixels, at).last_hidden_state
    start = 4
    torch.testing.assert_close(found[start : start + 3], alone, rtol=1e-4, atol=1e-4)


@cpu_only
def test_a_tower_beside_an_audio_tower(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = log_of(transformers_towers, monkeypatch)
    built = model(flashinfer, has_audio=True)
    assert [line.partition(",")[0] for line in lines] == [
        "audio_tower is a Gemma4AudioModel"
    ]
    assert runs_our_blocks(built)
    with OpCount() as count:
        encode(built, flashinfer)
    assert count.calls == 2


@cpu_only
def test_a_tower_of_vllm_that_derives_from_transformers(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi-VL's attends by vLLM's layers, so nobody is told that it does not."""
    from vllm.model_executor.models import moonvit
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.utils.torch_utils import set_default_torch_dtype

    class Model(nn.Module, SupportsMultiModal):
        def __init__(self) -> None:
            super().__init__()
            with self._mark_tower_model(flashinfer.vllm_config, "image"):
                self.vision_tower, _ = build_moonvit(moonvit)

    lines = log_of(transformers_towers, monkeypatch)
    with (
        flashinfer.running(),
        set_default_torch_dtype(flashinfer.dtype),
        flashinfer.device,
    ):
        built = Model()
    assert isinstance(built.vision_tower.encoder.blocks[0].attn, FlashInferViTAttention)
    assert lines == []


@cpu_only
def test_other_backends_stay_as_they_are() -> None:
    stock = engine("TORCH_SDPA")
    built = model(stock)
    assert built.vision_tower.config._attn_implementation != transformers_towers.NAME
    with OpCount() as count:
        encode(built, stock)
    assert count.calls == 0


@cpu_only
def test_graphs_are_padded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine builds no layer of vLLM's, which would ask for it."""
    (patch,) = encoder_graphs.PATCHES
    patch.revert()
    stock = engine("TORCH_SDPA")
    model(stock)
    assert not patch.applied
    monkeypatch.setenv(ENV_FIX_GRAPH_PADDING, "1")
    model(stock)
    assert patch.applied
    patch.revert()


@cpu_only
def test_attention_can_be_left_out(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_DISABLE_PATCHES, "transformers-towers")
    built = model(flashinfer)
    assert built.vision_tower.config._attn_implementation != transformers_towers.NAME


@cpu_only
def test_layers_have_names_for_scales(flashinfer: Tower) -> None:
    layers = [
        layer
        for layer in model(flashinfer).modules()
        if type(layer).__name__ == "FlashInferViTAttention"
    ]
    assert [layer.layer_name for layer in layers] == [
        f"vision_tower.encoder.layers.{place}.self_attn" for place in range(2)
    ]
    assert {layer.scale for layer in layers} == {1.0}


@cpu_only
def test_weights_have_the_names_of_the_checkpoint(flashinfer: Tower) -> None:
    stock = engine("TORCH_SDPA")
    names = [list(model(one).state_dict()) for one in (flashinfer, stock)]
    assert names[0] == names[1]


def test_offsets_without_waiting() -> None:
    mask = torch.arange(5) < torch.tensor([[5], [2], [0]])
    found = transformers_towers.offsets(3, 5, attention_mask=mask, kv_length=5)
    assert found is not None and found.dtype == torch.int32
    assert found.tolist() == [0, 5, 5, 7, 10, 10, 15]
    assert transformers_towers.offsets(3, 5) is None


@cpu_only
def test_a_padded_batch_of_a_tower_that_is_not_known(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its padding is, only PyTorch's mask says."""
    monkeypatch.setattr(transformers_towers, "_KNOWN", frozenset())
    built, stock = model(flashinfer), engine("TORCH_SDPA")
    assert built.vision_tower.config._attn_implementation == transformers_towers.MASKED
    expected = encode(model(stock), stock)
    with OpCount() as count:
        found = encode(built, flashinfer)
    assert count.calls == 0
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize("heads", [(1152, 72), (768, 64)])
def test_as_exact_as_stock_on_a_gpu(heads: tuple[int, int]) -> None:
    width, head_dim = heads
    fields = {
        "hidden_size": width,
        "head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "num_key_value_heads": width // head_dim,
        "intermediate_size": 4 * width - 304,
    }
    exact_engine = engine("TORCH_SDPA", torch.float32, "cuda")
    exact = encode(model(exact_engine, **fields), exact_engine)
    errors = []
    for backend in ("FLASHINFER", "FLASH_ATTN"):
        half = engine(backend, torch.bfloat16, "cuda")
        built = model(half, **fields)
        assert runs_our_blocks(built) == (backend == "FLASHINFER")
        errors.append(relative_error(encode(built, half), exact))
    assert errors[0] <= errors[1]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
def test_graph_and_eager_mode_give_the_same_bits() -> None:
    half = engine("FLASHINFER", torch.bfloat16, "cuda")
    encoder = model(half).vision_tower.encoder
    x = noise(4, LENGTH, 144).to("cuda", torch.bfloat16)
    tokens = torch.tensor([[LENGTH], [7], [1], [20]])
    mask = (torch.arange(LENGTH) < tokens).cuda()
    places = torch.arange(LENGTH).repeat(4, 1)
    at = torch.stack([places % 6, places // 6], -1).cuda()

    def run() -> torch.Tensor:
        return encoder(x, mask, pixel_position_ids=at).last_hidden_state

    with torch.inference_mode(), half.running():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = run()
        for factor in (1.0, 1.0, 3.0):
            x.copy_(x * factor)
            graph.replay()
            assert torch.equal(held, run())
