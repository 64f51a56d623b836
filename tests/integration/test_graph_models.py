# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs of vLLM's whole models: small, with true head dims."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from _graph_models import CASES, DENSE, GRIDS, PACKED, built
from _graphs import as_two_ranks, metas, patched  # noqa: F401
from _towers import cpu_only

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from vllm.model_executor.models import vision  # noqa: E402

from engine_models import graphs_and_eager, record_graph_inputs  # noqa: E402
from simulated_graphs import (  # noqa: E402
    SimulatedGraph,
    build_manager,
    capture,
    simulated_graphs,
)
from vllm_flashinfer_vit.graphs import exact, padded  # noqa: E402
from vllm_flashinfer_vit.graphs.exact import ExactManager  # noqa: E402
from vllm_flashinfer_vit.graphs.sizes import ReplayMissingError  # noqa: E402
from vllm_flashinfer_vit.ops.plan import Plan  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES  # noqa: E402
from vllm_flashinfer_vit.towers.model_tower import ModelTower  # noqa: E402

# Says that a module gives each rank a part of a batch.
FLAG = "use_data_parallel"

pytestmark = [cpu_only, pytest.mark.usefixtures("plain_kernel")]


GEMMA4 = "google/gemma-4-31B-it"


def limits(name: str, rows: int | None = None) -> dict[str, Any]:
    # Of patches: two large images; of rows: fourteen, of large ones what batches are.
    row = CASES[name].row
    rows = rows or (6 if name == GEMMA4 else 14)
    # Of those, only GLM-OCR's graphs take videos.
    is_glm = CASES[name].model.module == "glm_ocr"
    return {"max_tokens": 160 if row == 1 else rows * row, "allow_video": is_glm}


def run(manager: Any, tower: ModelTower, name: str, batch: Any) -> torch.Tensor:
    with tower.running():
        return torch.cat(manager.execute(CASES[name].inputs(batch)))


def eager(tower: ModelTower, name: str, batch: Any) -> torch.Tensor:
    """Encode a batch as vLLM's model does without graphs."""
    with torch.inference_mode():
        return tower.encode(**CASES[name].inputs(batch))


@pytest.mark.parametrize("name", CASES)
class TestExact:
    def test_equals_eager(self, name: str) -> None:
        tower, case = built(name), CASES[name]
        with simulated_graphs():
            manager = build_manager(tower, **limits(name))
            capture(manager, tower)
            assert type(manager) is ExactManager
            for batch in case.batches:
                got = run(manager, tower, name, batch)
                assert got.shape[0] == case.tokens(batch)
                expected = eager(tower, name, batch)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert (manager.graph_hits > 0, manager.graph_misses) == (True, 0)

    def test_engine_check_compares_the_two(self, name: str) -> None:
        tower, case = built(name), CASES[name]
        with simulated_graphs():
            manager = build_manager(tower, **limits(name))
            capture(manager, tower)
            runner = SimpleNamespace(
                encoder_cudagraph_manager=manager, get_model=lambda: tower.visual
            )
            worker = SimpleNamespace(model_runner=runner)
            record_graph_inputs(worker)
            run(manager, tower, name, case.batches[0])
            with tower.running():
                found = graphs_and_eager(worker)
                execute = manager.execute
                # As Gemma 4's graphs do with an image that does not fill its row.
                manager.execute = lambda inputs: [
                    torch.cat([item, item[:2]]) for item in execute(inputs)
                ]
                with_padding = graphs_and_eager(worker)
                output = manager.model.output(manager.token_budgets[-1])
                for meta in metas(manager):
                    meta.graph.run = output.zero_
                wrong = graphs_and_eager(worker)
        assert found["graph_hits"] > 0
        assert float(found["graph_rel_err"]) < 1e-5
        assert float(with_padding["graph_rel_err"]) < 1e-5
        assert float(wrong["graph_rel_err"]) > 0.1 and not wrong["graph_bitwise"]

    def test_budgets_are_fine(self, name: str) -> None:
        manager = build_manager(built(name), **limits(name, rows=14))
        if CASES[name].row == 1:
            expected = [64, 80, 96, 112, 128, 160]
        else:
            rows = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]
            expected = [CASES[name].row * count for count in rows]
        assert manager.token_budgets == expected

    def test_inputs_and_output_are_one_memory(self, name: str) -> None:
        tower = built(name)
        with simulated_graphs():
            manager = build_manager(tower, **limits(name))
            capture(manager, tower)
        held = metas(manager)
        pixels = [key for key in held[0].input_buffers if key.startswith("pixel")]
        for key in pixels:
            buffers = [meta.input_buffers[key].untyped_storage() for meta in held]
            assert len({storage.data_ptr() for storage in buffers}) == 1
        assert not any(meta.output_buffer.numel() for meta in held)
        # Of the output no more than what the largest graph writes.
        whole = manager.model.output(manager.token_budgets[-1])
        assert whole.untyped_storage().nbytes() == whole.nbytes

    def test_a_batch_that_no_graph_holds(self, name: str) -> None:
        tower, case = built(name), CASES[name]
        row = case.row
        budgets = (32,) if row == 1 else (row,)
        batch = case.batches[2]
        with simulated_graphs():
            manager = build_manager(tower, **limits(name), budgets=budgets)
            capture(manager, tower)
            got = run(manager, tower, name, batch)
        assert (manager.graph_hits, manager.graph_misses > 0) == (0, True)
        expected = eager(tower, name, batch)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("batch", "is_small"),
        [(0, False), (1, False), (1, True)],
        ids=["empty-rank", "both", "no-graph"],
    )
    def test_data_parallel(self, name: str, batch: int, is_small: bool) -> None:
        tower, case = built(name), CASES[name]
        items = case.batches[batch]
        expected = eager(tower, name, items)
        sharding = [m for m in tower.visual.modules() if hasattr(m, FLAG)]
        for module in sharding:
            setattr(module, FLAG, True)
        smallest = 2 if case.row == 1 else case.row
        sizes = {"budgets": (smallest,)} if is_small else {}
        waiting = mock.Mock(side_effect=AssertionError("ranks wait for one another"))
        with (
            simulated_graphs(),
            mock.patch.object(vision, "tensor_model_parallel_all_gather", waiting),
        ):
            manager = build_manager(tower, **limits(name), **sizes, data_parallel=True)
            capture(manager, tower)
            got = as_two_ranks(manager, tower, case.inputs(items))
        assert (manager.graph_misses > 0) == is_small
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        # Profiling passes the manager by, with the same batch on each rank. A module
        # that shards nothing is left as it was.
        modules = list(tower.visual.modules())
        assert [m for m in modules if getattr(m, FLAG, False)] == sharding

    def test_grids_are_read_before_the_replay(self, name: str) -> None:
        tower, case = built(name), CASES[name]
        calls: list[str] = []

        def noting(what: str, original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(what)
                return original(*args, **kwargs)

            return call

        counts: Counter[str] = Counter()

        def add(amount: int, *key: str) -> None:
            counts[key[0]] += amount

        with simulated_graphs():
            manager = build_manager(tower, **limits(name))
            capture(manager, tower)
            replay = noting("replay", SimulatedGraph.replay)
            specs = noting("specs", manager._get_item_specs)
            with (
                mock.patch.object(SimulatedGraph, "replay", replay),
                mock.patch.object(manager, "_get_item_specs", specs),
                mock.patch.object(manager.counting, "add", add),
            ):
                run(manager, tower, name, case.batches[0])
        # The last read of a batch is before its replay: grids may lie on the device.
        assert calls[-1] == "replay" and "specs" in calls
        real, held = counts["graph_real_tokens"], counts["graph_padded_tokens"]
        assert case.tokens(case.batches[0]) == real <= held

    def test_vllms_own_without_its_patch(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = CASES[name].model.module
        # GLM-OCR's derives from GLM-4.xV's.
        family = {"glm_ocr": "glm4_1v"}.get(module, module)
        monkeypatch.setenv(ENV_DISABLE_PATCHES, f"{family}-exact-graphs")
        manager = build_manager(built(name), **limits(name))
        assert type(manager) is padded.PaddedManager


class TestWithoutIt:
    """What vLLM's own graphs do, as this package finds it."""

    def stock(self, name: str, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> Any:
        monkeypatch.setenv(
            ENV_DISABLE_PATCHES,
            "encoder-graphs,glm_ocr-prepared,glm_ocr-no-positions",
        )
        tower = built(name)
        manager = build_manager(tower, **{**limits(name), **sizes})
        assert type(manager).__name__ == "EncoderCudaGraphManager"
        return tower, manager

    def test_glm_ocr_is_not_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with simulated_graphs():
            tower, manager = self.stock("zai-org/GLM-OCR", monkeypatch)
            with pytest.raises(AttributeError, match="embeddings"):
                capture(manager, tower)

    def test_glm_ocr_is_without_glm_4xvs_patches(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "zai-org/GLM-OCR"
        monkeypatch.setenv(
            ENV_DISABLE_PATCHES, "glm4_1v-summed-positions,glm4_1v-kept-metadata"
        )
        tower = built(name)
        with simulated_graphs():
            manager = build_manager(tower, **limits(name))
            capture(manager, tower)
            got = run(manager, tower, name, GRIDS[1])
        assert manager.graph_hits == len(GRIDS[1])
        expected = eager(tower, name, GRIDS[1])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    def test_ernies_large_images_stop_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "baidu/ERNIE-4.5-VL-28B-A3B-PT"
        with simulated_graphs():
            tower, manager = self.stock(name, monkeypatch, budgets=(32,))
            capture(manager, tower)
            with pytest.raises(RuntimeError, match="shape"):
                run(manager, tower, name, CASES[name].batches[2])

    def test_kimi_vls_bound_is_too_low(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "moonshotai/Kimi-VL-A3B-Instruct"
        with simulated_graphs():
            tower, manager = self.stock(name, monkeypatch)
            with pytest.raises(ValueError, match="more than max_seqlen=160"):
                capture(manager, tower)


@pytest.mark.parametrize("name", PACKED)
class TestPacked:
    def test_graphs_hold_their_budget_and_no_more(self, name: str) -> None:
        tower = built(name)
        with simulated_graphs():
            manager = build_manager(tower, **limits(name))
            capture(manager, tower)
        assert metas(manager)
        for meta in metas(manager):
            held = meta.input_buffers
            assert held["pixel_values"].shape[0] == meta.token_budget * 4
            assert held["cu_seqlens"][-1] == meta.token_budget * 4
            # One image may fill it; Kimi-VL's own says a quarter of that.
            assert int(held["max_seqlen"]) == meta.token_budget * 4

    def test_too_many_images_run_without_a_graph(self, name: str) -> None:
        tower = built(name)
        batch = [[1, 2, 2]] * 6
        with simulated_graphs():
            sizes = {**limits(name), "allow_video": False, "max_items": 4}
            manager = build_manager(tower, **sizes)
            capture(manager, tower)
            # As vLLM would, were a limit and a buffer not the same.
            manager.max_batch_size = 6
            with mock.patch.object(padded.logger, "warning_once") as warned:
                got = run(manager, tower, name, batch)
        assert (manager.graph_hits, manager.graph_misses) == (0, 6)
        warned.assert_called_once()
        expected = eager(tower, name, batch)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    def test_short_sequences_have_graphs_of_their_own(self, name: str) -> None:
        tower = built(name)
        for layer in tower.attention_layers().values():
            layer._plan = Plan.decode("100:reference,*:reference")  # type: ignore[assignment]
        with simulated_graphs():
            sizes = {"max_tokens": 160, "budgets": (64, 160), "allow_video": False}
            # Two short ones are never more than the second holds.
            few = build_manager(tower, **sizes, max_items=2)
            assert few._more_budgets["short"] == [64]
            with mock.patch.object(exact.logger, "info") as said:
                manager = build_manager(tower, **sizes, max_items=8)
            assert "another one for [64, 160]" in said.call_args.args[-1]
            assert "more than 100 patches" in said.call_args.args[-1]
            capture(manager, tower)
            assert manager._more_budgets["short"] == [64, 160]
            assert manager.get_num_graphs_to_capture() == len(metas(manager)) == 6
            for batch, is_short in ((GRIDS[0], True), (GRIDS[1], False)):
                with mock.patch.object(
                    manager, "_get_graph_set", wraps=manager._get_graph_set
                ) as looked:
                    got = run(manager, tower, name, batch)
                paths = {call.args[0] for call in looked.call_args_list if call.args}
                assert ("short" in paths) == is_short
                expected = eager(tower, name, batch)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DENSE)
def test_dense_graphs_hold_the_rows_of_a_batch(name: str) -> None:
    tower, row = built(name), CASES[name].row
    with simulated_graphs():
        manager = build_manager(
            tower, **limits(name), budgets=(2 * row + 1, 5 * row), max_items=1
        )
        capture(manager, tower)
        # A limit of items says nothing of how many tiles or crops an item has.
        is_bounded = name == GEMMA4
        assert len({id(meta) for meta in metas(manager)}) == 2
        assert manager.get_num_graphs_to_capture() == 2
        for meta in metas(manager):
            rows = next(iter(meta.input_buffers.values())).shape[0]
            width = meta.axis_keys[0] if getattr(meta, "axis_keys", ()) else row
            assert rows == (1 if is_bounded else meta.token_budget // width)
            assert rows * width == manager.model.tokens(
                meta.token_budget, getattr(meta, "axis_keys", ())
            )
        batch = [CASES[name].batches[0][0]]
        got = run(manager, tower, name, batch)
    assert (manager.graph_hits, manager.graph_misses) == (1, 0)
    torch.testing.assert_close(got, eager(tower, name, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("frames", "is_held"), [(2, True), (4, False)])
def test_frames_above_the_limit_run_without_a_graph(frames: int, is_held: bool) -> None:
    name = GEMMA4
    tower = built(name)
    images = CASES[name].inputs([70] * frames)
    video = {f"{key}_videos": value for key, value in images.items()}
    inputs = {**video, "video_frame_counts": torch.tensor([frames])}
    with simulated_graphs():
        sizes = {"max_tokens": 980, "max_items": 1, "max_frames": 3}
        manager = build_manager(tower, **sizes)
        capture(manager, tower)
        with tower.running():
            (got,) = manager.execute(dict(inputs))
    assert (manager.graph_hits, manager.graph_misses) == (is_held, not is_held)
    with torch.inference_mode():
        expected = tower.encode(**inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DENSE)
def test_budgets_below_a_row_hold_nothing(name: str) -> None:
    tower = built(name)
    with simulated_graphs():
        with mock.patch.object(exact.logger, "warning") as warned:
            manager = build_manager(tower, **limits(name), budgets=(2, 3))
        assert warned.call_args.args[-1] == [2, 3]
        assert manager.get_num_graphs_to_capture() == 0
        capture(manager, tower)
        batch = CASES[name].batches[0]
        got = run(manager, tower, name, batch)
    assert not metas(manager) and manager.graph_hits == 0
    torch.testing.assert_close(got, eager(tower, name, batch), rtol=1e-5, atol=1e-5)


def test_a_width_without_a_graph() -> None:
    # As of a request whose `max_soft_tokens` is above the engine's.
    name = GEMMA4
    tower = built(name)
    counts: Counter[tuple[str, ...]] = Counter()
    with simulated_graphs():
        manager = build_manager(tower, **limits(name, rows=8))
        capture(manager, tower)
        with (
            mock.patch.object(padded.logger, "warning_once") as warned,
            mock.patch.object(
                manager.counting, "add", lambda n, *key: counts.update({key: n})
            ),
        ):
            got = run(manager, tower, name, [280, 280])
        assert (manager.graph_hits, manager.graph_misses) == (0, 2)
        assert counts["fallbacks", "graph_missing"] == 1
        assert counts["graph_misses",] == 2
        assert warned.call_args.args[2] == "graph_missing"
        assert "mm_processor_kwargs" in warned.call_args.args[3]
        manager.strict = True
        with pytest.raises(ReplayMissingError, match="mm_processor_kwargs"):
            run(manager, tower, name, [280])
    expected = eager(tower, name, [280, 280])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_widths_share_graphs_where_they_hold_as_many_rows() -> None:
    name = GEMMA4
    tower = built(name)
    with simulated_graphs():
        with mock.patch.object(exact.logger, "info") as said:
            manager = build_manager(tower, **limits(name, rows=14))
        capture(manager, tower)
    assert "number of images of [70, 140] tokens" in said.call_args.args[-1]
    graphs = manager.budget_graphs["default"]
    of_width = {
        width: {key: meta for key, meta in graphs.items() if key[1] == (width,)}
        for width in (70, 140)
    }
    # Of 70: each budget has another number of rows. Of 140: one to seven.
    assert len({id(meta) for meta in of_width[70].values()}) == 11
    assert len(of_width[140]) == 10
    assert len({id(meta) for meta in of_width[140].values()}) == 7
    assert manager.get_num_graphs_to_capture() == 18
    # Replays of each count as what it shares does.
    names = {(budget, "default", keys) for budget, keys in graphs}
    assert names == manager._captured.keys()
