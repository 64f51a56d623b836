# SPDX-License-Identifier: Apache-2.0
"""Which set of graphs serves a batch: one image, short sequences, or any."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from _graphs import LIMITS, metas, patched, run  # noqa: F401
from _towers import FAMILIES, pixels, small_tower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.ops.plan import Plan  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("plain_kernel"),
    pytest.mark.parametrize("family", FAMILIES),
]


def test_short_sequences_have_graphs_of_their_own(family: str) -> None:
    tower = small_tower(family)
    for layer in tower.attention_layers().values():
        layer._plan = Plan.decode("100:reference,*:reference")  # type: ignore[assignment]
    with simulated_graphs():
        # Three frames of 100 patches are more than the smaller budget holds.
        sizes = {"budgets": (64, 160), "max_items": 1, "frames_per_video": 3}
        video = build_manager(tower, max_tokens=160, **sizes)
        assert video._more_budgets["short"] == [64, 160]
        # One image of 100 patches is all that there can be: 64 tokens hold it.
        sizes |= {"frames_per_video": 1, "allow_video": False}
        image = build_manager(tower, max_tokens=160, **sizes)
        assert image._more_budgets["short"] == [64]
        manager = build_manager(tower, max_tokens=160, **LIMITS)
        capture(manager, tower)
        assert manager.get_num_graphs_to_capture() == 3 + 3 + 2
        assert sorted(manager.budget_graphs["short"]) == [64, 128]
        for meta in manager.budget_graphs["short"].values():
            longest = [v for k, v in meta.input_buffers.items() if "max_seqlen" in k]
            assert max(int(x) for x in longest) == 100
        for grids, path in (
            ([[1, 8, 8], [1, 10, 10]], "short"),
            # One image, which has a graph of its own, too.
            ([[1, 10, 10]], "short"),
            ([[1, 8, 8], [1, 4, 26]], "default"),
        ):
            graph = manager.budget_graphs[path][64].graph
            with mock.patch.object(graph, "run", wraps=graph.run) as replayed:
                got = run(manager, tower, "image", grids)
            replayed.assert_called_once()
            expected = tower.encode(pixels(tower.spec, grids), grids)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_one_image_has_graphs_of_its_own(family: str) -> None:
    tower = small_tower(family)
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=160, **LIMITS)
        capture(manager, tower)
        assert sorted(manager.budget_graphs["single"]) == [16, 64, 128]
        for meta in metas(manager, "single"):
            bounds = {
                key: buffer.tolist()
                for key, buffer in meta.input_buffers.items()
                if key in ("cu_seqlens", "max_seqlen", "max_seqlen_full")
            }
            filled = 4 * meta.token_budget
            # So the layers choose a kernel for one sequence, not for many.
            assert bounds.pop("cu_seqlens") == [0, filled]
            assert set(bounds.values()) == {filled}
        for modality, grids, path in (
            ("image", [[1, 12, 20]], "single"),
            ("video", [[1, 16, 16]], "single"),
            # As many windows as one image may have.
            ("image", [[1, 2, 122]], "single"),
            ("video", [[2, 12, 10]], "default"),
            ("image", [[1, 12, 18], [1, 2, 2]], "default"),
        ):
            graph = manager.budget_graphs[path][64].graph
            with mock.patch.object(graph, "run", wraps=graph.run) as replayed:
                got = run(manager, tower, modality, grids)
            replayed.assert_called_once()
            expected = tower.encode(pixels(tower.spec, grids), grids)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_limit_of_one_image_needs_no_second_graphs(family: str) -> None:
    limits = {"budgets": (16, 64), "max_items": 1, "allow_video": False}
    manager = build_manager(small_tower(family), max_tokens=64, **limits)
    assert manager._more_budgets["single"] == []
    assert manager.get_num_graphs_to_capture() == 2


def test_vllm_speaks_of_its_own_set_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import encoder_cudagraph as module

    threshold = "_CAPTURE_GRAPH_COUNT_WARNING_THRESHOLD"
    if not hasattr(module, threshold):
        pytest.skip("this vLLM says nothing of many graphs")
    monkeypatch.setattr(module, threshold, 3)
    tower = small_tower(family)
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=160, **LIMITS)
        with mock.patch.object(module.logger, "warning") as warned:
            capture(manager, tower)
    warned.assert_not_called()
    # The estimate of memory counts all.
    assert manager.get_num_graphs_to_capture() == 3 + 3
