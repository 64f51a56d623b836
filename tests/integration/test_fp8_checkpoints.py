# SPDX-License-Identifier: Apache-2.0
"""Padded layers of checkpoints in FP8 keep the memory that they were built with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import build
from _fp8_layers import let_vllm_build_kernels, weights_of
from _towers import cpu_only
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.model_loader import reload

from vllm_flashinfer_vit.blocks.mlp import pad_rows
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

OUTPUTS, PADDED = 32, 128
FORMATS = (
    "fp8",
    "fp8-static",
    "compressed-tensors-tensor",
    "compressed-tensors-channel",
    "compressed-tensors-static",
    "modelopt-static",
    "modelopt-channel",
)
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> Tower:
    """A tower, for vLLM's configuration."""
    let_vllm_build_kernels(monkeypatch)
    return build()


def method_of(name: str, layer: Any) -> Any:
    """Return vLLM's method for a layer of a checkpoint's format."""
    kind, _, scales = name.rpartition("-")
    if kind == "compressed-tensors":
        strategy = "channel" if scales == "channel" else "tensor"
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
        layer.scheme = CompressedTensorsW8A8Fp8(args, scales == "static")
        any_config: Any = None
        return CompressedTensorsLinearMethod(any_config)
    if kind == "modelopt":
        config: Any = SimpleNamespace(is_checkpoint_fp8_serialized=True)
        algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if scales == "channel" else "FP8"
        if hasattr(modelopt, "build_linear_method"):
            return modelopt.build_linear_method(config, algorithm, "")
        of_channels = modelopt.ModelOptFp8PcPtLinearMethod
        of_tensors = modelopt.ModelOptFp8LinearMethod
        return (of_channels if scales == "channel" else of_tensors)(config)
    activations = "static" if scales == "static" else "dynamic"
    return Fp8LinearMethod(Fp8Config(True, activations))


def unloaded(name: str, inputs: int) -> Any:
    config: Any = SimpleNamespace(
        get_quant_method=lambda layer, *_, **__: method_of(name, layer),
        online_quantization_config=None,
    )
    return RowParallelLinear(inputs, OUTPUTS, quant_config=config)


def built(name: str, inputs: int) -> nn.Module:
    """Return a model of an MLP's layers, padded and not loaded yet."""
    model = nn.Module()
    model.first, model.second = unloaded(name, 32), unloaded(name, inputs)
    reload.record_metadata_for_reloading(model)
    pad_rows(model.first, nn.GELU(), model.second, runs_fp8=True)
    return model


def load(layer: Any, inputs: int) -> torch.Tensor:
    """Load random values into a layer and return the weight they stand for."""
    weight = torch.randn(OUTPUTS, inputs).to(E4M3)
    scales = layer.weight_scale
    given = {
        "weight": weight,
        "weight_scale": torch.rand(scales.shape) + 0.5,
        "bias": torch.randn(OUTPUTS),
    }
    if getattr(layer, "input_scale", None) is not None:
        given["input_scale"] = torch.tensor([0.02])
    for name, value in given.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, value)
    return weight.float() * given["weight_scale"].reshape(-1, 1)


def process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)


def check_padding(layer: Any, expected: torch.Tensor) -> None:
    assert layer.weight.shape == (PADDED, OUTPUTS) and layer.weight.stride(0) == 1
    assert layer.weight.untyped_storage().nbytes() == PADDED * OUTPUTS
    assert not layer.weight[expected.shape[1] :].float().any()
    torch.testing.assert_close(weights_of(layer), expected)


# vLLM itself pads the latter to 48.
@pytest.mark.parametrize("inputs", [48, 44])
@pytest.mark.parametrize("name", FORMATS)
def test_padding_has_its_room_from_the_start(
    name: str, inputs: int, tower: Tower
) -> None:
    with tower.running():
        layer: Any = built(name, inputs).second
        assert layer.weight.shape == (OUTPUTS, inputs)
        # Held, so that nothing else gets its address.
        room = layer.weight.untyped_storage()
        expected = load(layer, inputs)
        process(layer)
    assert layer.weight.data_ptr() == room.data_ptr()
    check_padding(layer, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_moved_ones_get_a_tensor(name: str, tower: Tower) -> None:
    """As vLLM's offloading moves weights before it loads them: without the room."""
    with tower.running():
        layer: Any = built(name, 48).second
        layer.weight.data = moved = layer.weight.data.clone()
        expected = load(layer, 48)
        process(layer)
    assert layer.weight.data_ptr() != moved.data_ptr()
    check_padding(layer, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_reload_keeps_the_room(name: str, tower: Tower) -> None:
    with tower.running():
        model = built(name, 48)
        layer: Any = model.second
        room = layer.weight.untyped_storage()
        load(layer, 48)
        process(layer)
        for _ in range(2):
            reload.initialize_layerwise_reload(layer)
            expected = load(layer, 48)
            reload.finalize_layerwise_reload(layer, tower.vllm_config.model_config)
            # CUDA graphs hold the address.
            assert layer.weight.data_ptr() == room.data_ptr()
            check_padding(layer, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_whole_tiles_need_no_room(name: str, tower: Tower) -> None:
    with tower.running():
        layer: Any = built(name, PADDED).second
        stock = layer.weight.untyped_storage()
        assert stock.nbytes() == PADDED * OUTPUTS
        expected = load(layer, PADDED)
        process(layer)
    assert layer.weight.data_ptr() == stock.data_ptr()
    check_padding(layer, expected)
