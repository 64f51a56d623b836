# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' block stacks: the same blocks for stock and for the package."""

import sys
from pathlib import Path

import pytest
import torch
from _models import noise
from _towers import cpu_only

from cases import relative_error, values

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from block_stacks import StackTower, build_stack  # noqa: E402
from known_stacks import STACKS  # noqa: E402
from vllm_flashinfer_vit.blocks.attach import program_of  # noqa: E402
from vllm_flashinfer_vit.models import gemma4  # noqa: E402

GRIDS = [[1, 4, 6], [1, 4, 6], [1, 4, 6]]
RAGGED = [[1, 4, 6], [2, 2, 4]]
# At their true width they take seconds each.
FAST = {"Kimi-K2.5", "SigLIP-So400m"}


def build(name: str, backend: str) -> StackTower:
    device = torch.device("cpu")
    kinds = {"depth": 2, "dtype": torch.float32, "device": device}
    try:
        tower = build_stack(name, backend=backend, **kinds)  # type: ignore[arg-type]
    except ImportError as error:
        pytest.skip(f"not in this vLLM, or its transformers: {error}")
    if not tower.attention_layers():
        pytest.skip("this vLLM has no MMEncoderAttention in these blocks")
    return tower


def run(tower: StackTower, grids: list[list[int]]) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    with tower.running():
        metadata = tower.visual.prepare_encoder_metadata(grids)
        x = noise(rows, tower.spec.patch_dim)
        return tower.visual(x, grids, encoder_metadata=metadata)


@cpu_only
@pytest.mark.parametrize("name", values(sorted(FAST), sorted(set(STACKS) - FAST)))
def test_blocks_run_as_programs_and_equal_stocks(name: str, ran: list[int]) -> None:
    served = build(name, "FLASHINFER")
    assert all(program_of(block) for block in served.visual.blocks)
    assert served.kernels(GRIDS) == {"all": "reference"}
    stock = build(name, "TORCH_SDPA")
    batches = [GRIDS] if STACKS[name].shape == "BSC" else [GRIDS, RAGGED]
    for grids in batches:
        found, expected = run(served, grids), run(stock, grids)
        assert relative_error(found, expected) < 1e-5
        assert relative_error(found, noise(*found.shape)) > 0.1
    assert ran == [0, 1] * len(batches)


@cpu_only
@pytest.mark.parametrize("name", values(["Gemma-4-768"], ["Gemma-4-1152"]))
def test_gemma_4_runs_by_this_package_and_equals_transformers(name: str) -> None:
    served = build(name, "FLASHINFER")
    assert isinstance(served.visual.encoder.forward, gemma4.Encoder)
    assert served.kernels(GRIDS) == {"all": "reference"}
    stock = build(name, "TORCH_SDPA")
    assert not isinstance(stock.visual.encoder.forward, gemma4.Encoder)
    sizes = [
        (layer.num_heads, layer.head_size)
        for tower in (served, stock)
        for layer in tower.attention_layers().values()
    ]
    assert len(set(sizes)) == 1
    found, expected = run(served, GRIDS), run(stock, GRIDS)
    assert relative_error(found, expected) < 1e-5
    assert relative_error(found, noise(*found.shape)) > 0.1


@cpu_only
def test_gemma_4_takes_images_of_one_size() -> None:
    tower = build("Gemma-4-768", "FLASHINFER")
    with pytest.raises(ValueError, match="one size"):
        tower.visual.prepare_encoder_metadata(RAGGED)


@cpu_only
def test_dense_batches_have_one_size() -> None:
    tower = build("SigLIP-So400m", "FLASHINFER")
    with pytest.raises(ValueError, match="one size"):
        tower.visual.prepare_encoder_metadata(RAGGED)
