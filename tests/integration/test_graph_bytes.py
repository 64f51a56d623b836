# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs of towers that normalise their own pixels, and the V2 runner."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from _graphs import BATCHES, LIMITS, metas, patched, request, run  # noqa: F401
from _towers import DEVICE, FAMILIES, pixels, small_tower, tower_of_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from engines import random_pixels  # noqa: E402
from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.graphs.sizes import ReplayPixelsError  # noqa: E402
from vllm_flashinfer_vit.towers.tower import Tower  # noqa: E402

pytestmark = pytest.mark.usefixtures("plain_kernel")


def random_request(tower: Tower, modality: str, grids: Any) -> dict[str, Any]:
    patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(0)
    values = random_pixels(tower.visual, patches, generator)
    return request(modality, values.to(DEVICE), grids)


@pytest.mark.parametrize("family", FAMILIES)
class TestBytes:
    """Pixels that the tower normalises itself."""

    def test_graphs_take_them(self, family: str) -> None:
        tower = tower_of_bytes(family)
        with simulated_graphs(), tower.running():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            for modality, grids in BATCHES:
                inputs = random_request(tower, modality, grids)
                got = torch.cat(manager.execute(inputs))
                expected = tower.encode(next(iter(inputs.values())), grids)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert manager.graph_misses == 0
        for meta in metas(manager):
            assert meta.input_buffers["pixel_values"].dtype == torch.uint8

    def test_a_batch_that_no_graph_holds(self, family: str) -> None:
        tower = tower_of_bytes(family)
        grids = [[30, 2, 2], [10, 2, 2]]
        with simulated_graphs(), tower.running():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            inputs = random_request(tower, "video", grids)
            got = torch.cat(manager.execute(inputs))
        assert manager.graph_misses == 2
        expected = tower.encode(inputs["pixel_values_videos"], grids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    def test_images_of_floats_run_without_a_graph(self, family: str) -> None:
        tower = tower_of_bytes(family)
        modality, grids = BATCHES[0]
        inputs = random_request(tower, modality, grids)
        inputs["pixel_values"] = inputs["pixel_values"] / 256
        with simulated_graphs(), tower.running():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            got = torch.cat(manager.execute(inputs))
            assert (manager.graph_hits, manager.graph_misses) == (0, 1)
            manager.strict = True
            with pytest.raises(
                ReplayPixelsError, match=r"float32, .*uint8; give images of"
            ):
                manager.execute(inputs)
            expected = tower.visual(inputs["pixel_values"], grid_thw=grids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    def test_a_model_that_normalises_before_its_tower(self, family: str) -> None:
        # As in vLLM 0.28 and 0.29, whose graphs forget it.
        def norm(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return (values / 127.5 - 1).to(dtype)

        tower = small_tower(family)
        if hasattr(tower.visual, "input_norm"):
            pytest.skip("this vLLM's tower normalises itself")
        batches = [*BATCHES, ("video", [[30, 2, 2], [10, 2, 2]])]
        inputs, expected = [], []
        for modality, grids in batches:
            values = torch.randint_like(
                pixels(tower.spec, grids), 256, dtype=torch.uint8, device=DEVICE
            )
            inputs.append(request(modality, values, grids))
            expected.append(tower.encode(norm(values, tower.dtype), grids))
        with simulated_graphs(), tower.running():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            manager.model.wrapped.input_norm = norm
            capture(manager, tower)
            found = [torch.cat(manager.execute(one)) for one in inputs]
        for got, embeddings in zip(found, expected, strict=True):
            torch.testing.assert_close(got, embeddings, rtol=1e-5, atol=1e-6)

    def test_a_model_and_a_tower_that_both_normalise(self, family: str) -> None:
        tower = small_tower(family)
        if not hasattr(tower.visual, "input_norm"):
            tower.visual.input_norm = torch.nn.Identity()
        modality, grids = BATCHES[1]
        with simulated_graphs(), tower.running():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            manager.model.wrapped.input_norm = mock.Mock(side_effect=AssertionError)
            capture(manager, tower)
            got = run(manager, tower, modality, grids)
        expected = tower.encode(pixels(tower.spec, grids), grids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalizes", [True, False], ids=["bytes", "normalised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_v2_runner(family: str, normalizes: bool) -> None:
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    if not hasattr(EncoderRunner, "has_cudagraph"):
        pytest.skip("this vLLM's V2 runner has no encoder graphs")
    tower = tower_of_bytes(family) if normalizes else small_tower(family)
    batches = [("video", [[4, 8, 8], [2, 4, 4]]), ("image", [[1, 12, 20], [1, 4, 4]])]
    items: list[Any] = []
    expected: list[torch.Tensor] = []
    for modality, grids in batches:
        inputs = random_request(tower, modality, grids)
        fields = _create_qwen2vl_field_factory(tower.spec.merge_size)(inputs)
        cut = MultiModalKwargsItems.from_hf_inputs(inputs, fields)[modality]
        items += [(modality, one) for one in cut]
        tokens = [t * h * w // tower.spec.merge_size**2 for t, h, w in grids]
        values = next(iter(inputs.values()))
        expected += tower.encode(values, grids).split(tokens)
    # The runner sorts by modality, and puts the outputs back in order.
    order = [2, 0, 3, 1]
    with simulated_graphs(), tower.running():
        manager = build_manager(tower, max_tokens=160, **LIMITS)
        model = manager.model.wrapped
        model.use_data_parallel = False
        if not hasattr(tower.visual, "input_norm"):
            # vLLM 0.28's models normalise before their tower; these pixels are.
            model.input_norm = lambda values, dtype: values.to(dtype)
        runner = EncoderRunner(
            model, 160, 48, EncoderCache(), tower.dtype, tower.device, manager
        )

        def served() -> int:
            """Return how many items graphs served."""
            before = manager.graph_hits
            got = runner.execute_mm_encoder([items[i] for i in order])
            for i, embedding in zip(order, got, strict=True):
                torch.testing.assert_close(embedding, expected[i], rtol=1e-4, atol=1e-5)
            return manager.graph_hits - before

        assert served() == 0
        # Once to measure memory, and once for good.
        for _ in range(2):
            manager.capture(object())
            assert served() == len(items)
            runner.clear()
            assert not manager.model._inputs
            assert served() == 0
    assert manager.graph_misses == 0
