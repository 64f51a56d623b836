# SPDX-License-Identifier: Apache-2.0
"""Batches that automatic graphs leave to eager mode, since they would only pad them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _graph_models import CASES, built
from _graphs import patched, request  # noqa: F401
from _towers import cpu_only, pixels, small_tower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.engine.metrics import of_process  # noqa: E402
from vllm_flashinfer_vit.graphs import padded, sizes  # noqa: E402
from vllm_flashinfer_vit.graphs.layouts import LAYOUT  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES  # noqa: E402

pytestmark = [cpu_only, pytest.mark.usefixtures("plain_kernel")]

GEMMA4 = "google/gemma-4-31B-it"
# 64, 80 and 96 tokens of four patches hold it.
PATCHES = 384
# 96 tokens, and 97.
FITS, LARGE = [[1, 12, 32]], [[1, 12, 32], [1, 2, 2]]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_MOST_PATCHES", PATCHES)
    monkeypatch.setattr(sizes, "_MOST_PATCHES_SLOW", 2 * PATCHES)


def ask(manager: Any, tower: Any, grids: list[list[int]]) -> list[torch.Tensor] | None:
    with tower.running():
        return manager.execute(request("image", pixels(tower.spec, grids), grids))


def counted() -> dict[str, int]:
    totals = of_process().totals
    names = ("graph_hits", "graph_misses", "graph_large")
    return {name: totals[name,] for name in names}


def test_a_larger_batch_is_left_to_the_model() -> None:
    tower = small_tower("qwen3_vl")
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=256)
        capture(manager, tower)
        before = counted()
        with manager.counting.step():
            assert ask(manager, tower, LARGE) is None
            (served,) = ask(manager, tower, FITS) or ()
    after = counted()
    assert {name: after[name] - before[name] for name in after} == {
        "graph_hits": 1,
        "graph_misses": 0,
        "graph_large": 2,
    }
    expected = tower.encode(pixels(tower.spec, FITS), FITS)
    torch.testing.assert_close(served, expected, rtol=1e-5, atol=1e-6)


def test_an_image_that_fills_a_step_is_one() -> None:
    tower = small_tower("qwen3_vl")
    manager = build_manager(tower, max_tokens=256)
    whole = [[1, 32, 32]]
    assert manager._is_large(request("image", pixels(tower.spec, whole), whole))


def test_nothing_is_captured_or_held_for_it() -> None:
    tower = small_tower("qwen3_vl")
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=256)
        capture(manager, tower)
    assert manager.token_budgets == [64, 80, 96]
    graphs = manager.budget_graphs["default"]
    assert sorted(graphs) == [64, 80, 96]
    held = graphs[96].input_buffers["pixel_values"].untyped_storage()
    assert held.nbytes() == graphs[96].input_buffers["pixel_values"].nbytes


def test_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.plugins.flashinfer_vit")
    build_manager(small_tower("qwen3_vl"), max_tokens=256)
    assert "batches of more than 96 tokens keep the GPU busy without one" in caplog.text


@pytest.mark.parametrize(
    ("limits", "largest"),
    [({"max_tokens": 96}, 96), ({"max_tokens": 256, "budgets": (64, 256)}, 256)],
    ids=["few tokens", "the user's"],
)
def test_graphs_serve_all_where_the_bound_does_not_matter(
    limits: dict[str, Any], largest: int
) -> None:
    tower = small_tower("qwen3_vl")
    with simulated_graphs():
        manager = build_manager(tower, **limits)
        capture(manager, tower)
        assert manager.token_budgets[-1] == largest
        # vLLM cuts them into batches, where they are more than a graph holds.
        assert ask(manager, tower, LARGE) is not None
    assert (manager.graph_hits, manager.graph_misses) == (2, 0)


def test_a_limit_of_items_leaves_the_bound_as_it_is() -> None:
    manager = build_manager(small_tower("qwen3_vl"), max_tokens=256, max_items=4)
    assert (manager.token_budgets[-1], manager.max_batch_size) == (96, 4)


def test_blocks_of_vllms_own_run_a_large_batch_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENV_DISABLE_PATCHES, "qwen3_vl-blocks")
    tower = small_tower("qwen3_vl")
    # 96 tokens each: two in a graph of 192, then one.
    grids = FITS * 3
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=512)
        capture(manager, tower)
        before = manager.graph_hits
        got = torch.cat(ask(manager, tower, grids) or [])
    assert manager.token_budgets[-1] == 192
    assert (manager.graph_hits - before, manager.graph_misses) == (3, 0)
    expected = tower.encode(pixels(tower.spec, grids), grids)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("data_parallel", "largest"), [(False, 192), (True, 96)], ids=["shared", "whole"]
)
def test_two_ranks_take_twice_the_work(data_parallel: bool, largest: int) -> None:
    tower = small_tower("qwen3_vl")
    manager = build_manager(tower, max_tokens=256, data_parallel=data_parallel, ranks=2)
    assert manager.token_budgets[-1] == largest
    # 192 tokens, and 193.
    both, more = FITS * 2, [*FITS * 2, [1, 2, 2]]
    # As many as the first, but in one item.
    whole = [[1, 24, 32]]
    found = [
        manager._is_large(request("image", pixels(tower.spec, grids), grids))
        for grids in (both, more, whole)
    ]
    assert found == [False, True, data_parallel]


@pytest.mark.parametrize(("rank", "count"), [(0, 3), (1, 0)])
def test_ranks_with_items_of_their_own_count_a_large_batch_once(
    rank: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded, "get_tensor_model_parallel_rank", lambda: rank)
    tower = small_tower("qwen3_vl")
    manager = build_manager(tower, max_tokens=256, data_parallel=True)
    before = counted()["graph_large"]
    with manager.counting.step():
        assert ask(manager, tower, [*FITS * 2, [1, 2, 2]]) is None
    assert counted()["graph_large"] - before == count


def test_videos_that_a_model_does_not_capture_leave_images_their_graph() -> None:
    name = "moonshotai/Kimi-K2.5"
    tower, case = built(name), CASES[name]
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=256)
        capture(manager, tower)
        with tower.running():
            assert manager.execute(case.inputs([[1, 8, 8], [2, 4, 4]])) is not None
    assert (manager.token_budgets[-1], manager.graph_hits) == (96, 1)


def test_videos_that_ranks_cannot_gather_are_left_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stock would gather 2**30 tokens of each rank, which no GPU holds."""
    monkeypatch.setattr(padded, "get_tensor_model_parallel_rank", lambda: 0)
    name = "moonshotai/Kimi-K2.5"
    tower, case = built(name), CASES[name]
    manager = build_manager(tower, max_tokens=256, data_parallel=True)
    before = counted()["graph_misses"]
    with tower.running(), manager.counting.step():
        assert manager.execute(case.inputs([[1, 8, 8], [2, 4, 4]])) is None
    assert counted()["graph_misses"] - before == 2


def test_ranks_gather_an_image_as_long_as_the_longest_prompt() -> None:
    tower = small_tower("qwen3_vl")
    manager = build_manager(tower, max_tokens=256, data_parallel=True)
    for columns, is_endless in ((32, False), (34, True)):
        grids = [[1, 32, columns]]
        inputs = request("image", pixels(tower.spec, grids), grids)
        assert manager._has_endless(inputs) is is_endless


@pytest.mark.parametrize("name", CASES)
def test_every_layout_knows_its_patches(name: str) -> None:
    tower, case = built(name), CASES[name]
    manager = build_manager(tower, max_tokens=4096)
    model = manager.model.wrapped
    inputs = case.inputs(case.batches[0])
    pixel_values = next(inputs[key] for key in inputs if key.startswith("pixel_values"))
    patches = pixel_values.shape[0]
    if name == GEMMA4:
        # Images of as many patches.
        patches *= pixel_values.shape[1]
    elif case.row > 1:
        # Images, where the others have patches.
        config = model.config.vision_config
        patches *= (config.image_size // config.patch_size) ** 2
    unit = patches // case.tokens(case.batches[0])
    assert getattr(manager.config, LAYOUT).patches_per_token(model) == unit
    # Gemma 4's blocks are no programs.
    most = PATCHES * (1 + (name == GEMMA4))
    assert manager.token_budgets[-1] == max(case.row, most // unit)
