# SPDX-License-Identifier: Apache-2.0
"""QuACK's kernels of QKV projections: which layers share one, from how many rows on."""

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_flashinfer_vit.blocks import quack_quantize, quack_turn  # noqa: E402
from vllm_flashinfer_vit.blocks.layers import Layers  # noqa: E402
from vllm_flashinfer_vit.blocks.linear import BlockWeights, Weights  # noqa: E402
from vllm_flashinfer_vit.blocks.quack_turn import MIN_ROWS, MIN_ROWS_WIDE  # noqa: E402
from vllm_flashinfer_vit.blocks.tower_pass import TowerProgram  # noqa: E402
from vllm_flashinfer_vit.gemms import (  # noqa: E402
    epilogue_gemm,
    quantizing_gemm,
    turning_gemm,
)
from vllm_flashinfer_vit.gemms.turning_gemm import Heads  # noqa: E402

HEADS = Heads(64, 2, 2, False)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a Hopper GPU on which QuACK runs."""
    monkeypatch.setattr(epilogue_gemm, "is_available", lambda: True)
    for module in (turning_gemm, quantizing_gemm):
        monkeypatch.setattr(module, "build", lambda *given: None)
        monkeypatch.setattr(module, "compiled", lambda *given: given)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def kernels_of(
    module: ModuleType,
    tower: TowerProgram,
    heads: Heads = HEADS,
    table: Any = torch.float32,
    bias: bool = True,
    width: int = 128,
) -> Any:
    """Return what runs a projection of a block of the tower."""
    outputs = (heads.queries + 2 * heads.keys) * heads.head_dim
    layer: Any = torch.nn.Linear(width, outputs, bias, dtype=torch.bfloat16)
    layer.params_dtype = torch.bfloat16
    block = torch.nn.ModuleDict({"qkv": layer})
    steps = {"qkv": "cuBLAS"}
    layers = Layers(block, tower, frozenset(), False, BlockWeights(), steps, 0)
    found = module.resolve(layers, "qkv", Weights(layer), (heads, table))
    assert (found is not None) is ("QuACK" in steps["qkv"])
    return found and found.kernels


@pytest.mark.parametrize("module", [quack_turn, quack_quantize])
def test_projections_that_differ_have_kernels_of_their_own(module: ModuleType) -> None:
    tower = TowerProgram()
    kernels = kernels_of(module, tower)
    assert kernels_of(module, tower) is kernels
    others: tuple[dict[str, Any], ...] = (
        {"heads": HEADS._replace(is_interleaved=True)},
        {"table": torch.bfloat16},
        {"bias": False},
        {"width": 256},
    )
    for other in others:
        assert kernels_of(module, tower, **other) is not kernels


@pytest.mark.parametrize(
    ("module", "gemm"), [(quack_turn, turning_gemm), (quack_quantize, quantizing_gemm)]
)
def test_a_kernel_that_cannot_be_had_is_tried_once(
    module: ModuleType, gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = mock.Mock(side_effect=ImportError("no such QuACK"))
    monkeypatch.setattr(gemm, "build", build)
    tower = TowerProgram()
    for _ in range(2):
        assert kernels_of(module, tower) is None
    build.assert_called_once()
    assert list(tower.trials.values()) == ["ImportError: no such QuACK"]


@pytest.mark.parametrize(
    ("head_dim", "rows"), [(64, MIN_ROWS), (80, MIN_ROWS), (128, MIN_ROWS_WIDE)]
)
def test_heads_as_wide_as_a_tile_are_turned_from_more_rows_on(
    head_dim: int, rows: int
) -> None:
    heads = HEADS._replace(head_dim=head_dim)
    kernels = kernels_of(quack_turn, TowerProgram(), heads)
    for count in (rows - 1, rows):
        table = torch.zeros(count, head_dim // 2)
        assert kernels.turns(count, table, table) is (count == rows)
