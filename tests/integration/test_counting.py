# SPDX-License-Identifier: Apache-2.0
"""What is counted: passes of real towers, replays of simulated graphs, fall-backs."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from _encoders import PACKED
from _models import encode as run
from _models import engine
from _towers import FAMILIES, cpu_only, pixels, small_spec, small_tower
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.engine import counting, warmup  # noqa: E402
from vllm_flashinfer_vit.engine.counting import Counting  # noqa: E402
from vllm_flashinfer_vit.engine.metrics import Metrics  # noqa: E402
from vllm_flashinfer_vit.graphs.padded import PaddedManager  # noqa: E402
from vllm_flashinfer_vit.ops.plan import Plan  # noqa: E402
from vllm_flashinfer_vit.patches import counters  # noqa: E402
from vllm_flashinfer_vit.settings import (  # noqa: E402
    ENV_DISABLE_PATCHES,
    ENV_STRICT,
)
from vllm_flashinfer_vit.towers.tower import Tower, build_tower  # noqa: E402

pytestmark = cpu_only

GRIDS = [[1, 8, 8], [1, 4, 4]]
PATCHES = 80
LIMITS = {"budgets": (16, 64, 128), "max_items": 8, "frames_per_video": 4}


def of_series(metrics: Metrics, name: str) -> dict[tuple[str, ...], int]:
    """Return a counter's values by its labels."""
    return {key[1:]: n for key, n in metrics.totals.items() if key[0] == name}


def encode(tower: Tower, grids: Any = GRIDS) -> torch.Tensor:
    return tower.encode(pixels(tower.spec, grids), grids)


def two_classes(tower: Tower, bound: int) -> None:
    """Give layers a class for short sequences, as on a GPU."""
    plan = Plan.decode(f"{bound}:reference,*:reference")
    for layer in tower.attention_layers().values():
        layer._plan = layer.counts.plan = plan


@pytest.mark.parametrize("family", FAMILIES)
class TestEager:
    def test_a_pass_counts_once(self, family: str, metrics: Metrics) -> None:
        tower = small_tower(family)
        depth = len(tower.attention_layers())
        layers = of_series(metrics, "attention_layers")
        assert layers == {("vllm-flashinfer-vit",): depth}
        expected = encode(tower)
        assert not of_series(metrics, "encoder_passes")
        with Counting.of(tower.vllm_config).step():
            found = [encode(tower), encode(tower)]
        kind = ("reference", "any", "blocks")
        assert of_series(metrics, "encoder_passes") == {kind: 2}
        assert of_series(metrics, "encoder_patches") == {kind: 2 * PATCHES}
        assert not of_series(metrics, "fallbacks")
        for one in found:
            assert torch.equal(one, expected)
        encode(tower)
        assert of_series(metrics, "encoder_passes") == {kind: 2}

    def test_without_programs(
        self, family: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_flashinfer_vit.blocks.program import BlockProgram

        # They are right, so strict mode has no error for them.
        monkeypatch.setenv(ENV_STRICT, "1")
        tower = small_tower(family)
        expected = encode(tower)
        with (
            mock.patch.object(BlockProgram, "takes", lambda *_: False),
            Counting.of(tower.vllm_config).step(),
        ):
            found = encode(tower)
        kind = ("reference", "any", "attention")
        assert of_series(metrics, "encoder_passes") == {kind: 1}
        assert of_series(metrics, "encoder_patches") == {kind: PATCHES}
        assert of_series(metrics, "fallbacks") == {("block_input",): 1}
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_tower_of_one_block_counts_once(metrics: Metrics) -> None:
    spec = small_spec("qwen2_vl")
    one = dataclasses.replace(spec, vision_config={**spec.vision_config, "depth": 1})
    tower = build_tower(one, backend="FLASHINFER", dtype=torch.float32, device="cpu")
    with Counting.of(tower.vllm_config).step():
        encode(tower)
    assert set(of_series(metrics, "encoder_passes").values()) == {1}
    assert set(of_series(metrics, "encoder_patches").values()) == {PATCHES}


@pytest.mark.parametrize("name", ["glm_ocr", "exaone4_5"])
def test_blocks_that_take_the_place_of_others(name: str, metrics: Metrics) -> None:
    """The tower that it derives from has built those, which never run."""
    tower = engine("FLASHINFER")
    with Counting.of(tower.vllm_config).step():
        try:
            found = run(PACKED[name], tower)
        except ImportError as error:
            pytest.skip(f"not in this vLLM: {error}")
    assert found.programs == 2
    assert of_series(metrics, "encoder_passes") == {("reference", "any", "blocks"): 1}


def test_a_wrapper_without_a_worker_shuts_down() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    done: list[object] = []
    counters._say_last(done.append)(WorkerWrapperBase.__new__(WorkerWrapperBase))
    assert len(done) == 1


class TestKinds:
    def test_windows_and_whole_images_count_for_themselves(
        self, metrics: Metrics
    ) -> None:
        """A window has 64 patches here, the largest image more."""
        tower = small_tower("qwen2_5_vl")
        two_classes(tower, 64)
        grids = [[1, 16, 16]]
        with Counting.of(tower.vllm_config).step():
            encode(tower, grids)
            encode(tower, grids)
        assert of_series(metrics, "encoder_passes") == {
            ("reference", "64", "blocks"): 2,
            ("reference", "any", "blocks"): 2,
        }

    def test_the_kernel_for_many_sequences(self, metrics: Metrics) -> None:
        tower = small_tower("qwen2_vl")
        plan = Plan.decode("*:flash_attn_4/reference")
        for layer in tower.attention_layers().values():
            layer._plan = layer.counts.plan = plan
        with Counting.of(tower.vllm_config).step():
            encode(tower)
        kernels = {key[0] for key in of_series(metrics, "encoder_passes")}
        assert kernels == {"reference"}

    def test_an_error_leaves_nothing_on(self, metrics: Metrics) -> None:
        engine = Counting.of(small_tower("qwen2_vl").vllm_config)
        with pytest.raises(RuntimeError), engine.step():
            engine.add(1, "fallbacks", "key_lengths")
            raise RuntimeError
        assert not engine.is_on
        assert of_series(metrics, "fallbacks") == {("key_lengths",): 1}

    def test_engines_are_apart(self, metrics: Metrics) -> None:
        one, other = small_tower("qwen2_vl"), small_tower("qwen2_vl")
        with Counting.of(one.vllm_config).step():
            encode(other)
        assert not of_series(metrics, "encoder_passes")


class TestFallBacks:
    def test_key_lengths(self, metrics: Metrics) -> None:
        tower = small_tower("qwen2_vl")
        layer = next(iter(tower.attention_layers().values()))
        query = torch.randn(1, 6, layer.num_heads, layer.head_size)
        key = torch.randn(1, 4, layer.num_heads, layer.head_size)
        with Counting.of(tower.vllm_config).step():
            layer(query, key, key)
        assert of_series(metrics, "fallbacks") == {("key_lengths",): 1}
        assert not of_series(metrics, "encoder_passes")

    def test_layers_of_vllm(
        self, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor.layers.attention import MMEncoderAttention

        from vllm_flashinfer_vit.engine import layer

        tower = small_tower("qwen2_vl")
        metrics.totals.clear()
        monkeypatch.setattr(layer, "served", lambda *_: None)
        with tower.running():
            MMEncoderAttention(num_heads=4, head_size=16)
        assert of_series(metrics, "attention_layers") == {("vllm",): 1}

    def test_other_backends_count_nothing(self, metrics: Metrics) -> None:
        tower = small_tower("qwen2_vl", "TORCH_SDPA")
        assert Counting.find(tower.vllm_config) is None
        assert not metrics.totals


@pytest.mark.parametrize("family", FAMILIES)
class TestGraphs:
    @pytest.fixture
    def tower(self, family: str, monkeypatch: pytest.MonkeyPatch) -> Tower:
        monkeypatch.delenv(ENV_DISABLE_PATCHES, raising=False)
        return small_tower(family)

    @pytest.fixture
    def manager(self, tower: Tower, metrics: Metrics) -> Iterator[Any]:
        with simulated_graphs():
            made = build_manager(tower, max_tokens=160, **LIMITS)
            # One engine has one configuration; here they are two.
            made.counting = Counting.of(tower.vllm_config)
            capture(made, tower)
            yield made

    def run(self, manager: Any, tower: Tower, grids: Any) -> torch.Tensor:
        values = pixels(tower.spec, grids)
        inputs = {"pixel_values": values, "image_grid_thw": torch.tensor(grids)}
        with tower.running(), manager.counting.step():
            return torch.cat(manager.execute(inputs))

    def test_replays(self, tower: Tower, manager: Any, metrics: Metrics) -> None:
        assert not of_series(metrics, "encoder_passes")
        # One image: vLLM may run several by graphs of their own.
        grids = [[1, 10, 10]]
        for _ in range(3):
            found = self.run(manager, tower, grids)
        kind = ("reference", "any", "graph")
        unit = tower.spec.merge_size**2
        assert of_series(metrics, "encoder_passes") == {kind: 3}
        assert of_series(metrics, "encoder_patches") == {kind: 3 * 64 * unit}
        assert metrics.totals["graph_hits",] == 3 == manager.graph_hits
        assert metrics.totals["graph_misses",] == 0
        assert metrics.totals["graph_real_tokens",] == 3 * 100 // unit
        assert metrics.totals["graph_padded_tokens",] == 3 * 64
        expected = encode(tower, grids)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    def test_a_batch_that_no_graph_holds(
        self, tower: Tower, manager: Any, metrics: Metrics
    ) -> None:
        self.run(manager, tower, [[1, 32, 32]])
        assert metrics.totals["graph_misses",] == 1
        assert metrics.totals["graph_hits",] == 0
        kinds = of_series(metrics, "encoder_passes")
        assert kinds == {("reference", "any", "blocks"): 1}
        assert not of_series(metrics, "fallbacks")

    def test_too_many_frames(
        self, tower: Tower, manager: Any, metrics: Metrics
    ) -> None:
        grids = [[30, 2, 2], [10, 2, 2]]
        inputs = {
            "pixel_values_videos": pixels(tower.spec, grids),
            "video_grid_thw": torch.tensor(grids),
        }
        with tower.running(), manager.counting.step():
            manager.execute(inputs)
        assert of_series(metrics, "fallbacks") == {("graph_size",): 1}
        assert metrics.totals["graph_misses",] == 2
        kinds = of_series(metrics, "encoder_passes")
        assert kinds == {("reference", "any", "blocks"): 1}

    def test_each_graph_has_its_kind(self, tower: Tower, metrics: Metrics) -> None:
        two_classes(tower, 100)
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            manager.counting = Counting.of(tower.vllm_config)
            capture(manager, tower)
            self.run(manager, tower, [[1, 8, 8], [1, 10, 10]])
            counts = Counter(of_series(metrics, "encoder_passes"))
            assert counts == {("reference", "100", "graph"): 1}
            assert metrics.totals["graph_real_tokens",] == 164 // 4
            self.run(manager, tower, [[1, 4, 32]])
        counts = Counter(of_series(metrics, "encoder_passes")) - counts
        assert counts["reference", "any", "graph"] == 1


class TestCaptured:
    """What replays add, where vLLM's manager captures and replays something else."""

    @pytest.fixture
    def manager(self, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> Any:
        def capture_graph(manager: Any, *args: Any, axis_keys: Any = ()) -> None:
            # As vLLM: before the capture, and in it.
            for _ in range(2):
                counted(manager.counting, axis_keys)

        for name, method in (
            ("_capture_budget_graph", capture_graph),
            ("_run_budget_graph", lambda *args, **kwargs: torch.zeros(1)),
        ):
            monkeypatch.setattr(EncoderCudaGraphManager, name, method)
        made: Any = PaddedManager.__new__(PaddedManager)
        made.use_dp = False
        made.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(), model_config=None
        )
        made.config = SimpleNamespace(buffer_keys=[], padding_logics={})
        made.adopt(strict=False)

        def counted(engine: Counting, axis_keys: Any) -> None:
            if axis_keys == ("refused",):
                engine.add(1, "fallbacks", "block_input")
            else:
                kind = ("triton", "any") if axis_keys else ("triton_window", "128")
                engine.passed(kind, "blocks", 1000 if axis_keys else 100, True)

        return made

    def replay(self, manager: Any, **keys: Any) -> None:
        with manager.counting.step():
            manager._run_budget_graph({}, 64, **keys)

    def test_graphs_of_one_budget_are_apart(
        self, manager: Any, metrics: Metrics
    ) -> None:
        for keys in ({}, {"axis_keys": (1000,)}):
            manager._capture_budget_graph(64, **keys)
        self.replay(manager)
        assert of_series(metrics, "encoder_patches") == {
            ("triton_window", "128", "graph"): 100
        }
        self.replay(manager, axis_keys=(1000,))
        assert of_series(metrics, "encoder_patches") == {
            ("triton_window", "128", "graph"): 100,
            ("triton", "any", "graph"): 1000,
        }
        assert set(of_series(metrics, "encoder_passes").values()) == {1}

    def test_what_falls_back_counts_in_replays_alone(
        self, manager: Any, metrics: Metrics
    ) -> None:
        refused = {"axis_keys": ("refused",)}
        manager._capture_budget_graph(64, **refused)
        with manager.counting.step():
            pass
        assert not of_series(metrics, "fallbacks")
        self.replay(manager, **refused)
        self.replay(manager, **refused)
        assert of_series(metrics, "fallbacks") == {("block_input",): 2}

    def test_a_graph_that_others_captured(self, manager: Any, metrics: Metrics) -> None:
        self.replay(manager)
        assert not of_series(metrics, "encoder_passes")


class TestBuilt:
    def test_what_a_step_builds(
        self, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = [(5, 2), (5, 2), (5, 2), (7, 3)]
        monkeypatch.setattr(counting, "_built", lambda: built.pop(0))
        engine = Counting.of(small_tower("qwen2_vl").vllm_config)
        for expected in ({}, {("triton_kernels_after_start",): 2}):
            metrics.totals.clear()
            with engine.step():
                pass
            assert metrics.totals.items() >= expected.items()
        assert metrics.totals["cudnn_plans_after_start",] == 1

    def test_only_kernels_of_this_package(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = warmup._TritonCount(None)
        for module in ("vllm_flashinfer_vit.kernels.rope", "vllm.v1.sample", None):
            count(repr="kernel", fn=SimpleNamespace(module=module))
        count(repr="kernel")
        assert (count.count, count.own) == (4, 1)
        monkeypatch.setattr(warmup, "_triton_count", lambda: count)
        assert warmup.built()[0] == 1

    def test_triton_tells_the_module(self) -> None:
        from triton.runtime.jit import JitFunctionInfo

        from vllm_flashinfer_vit.kernels import rope

        assert "module" in JitFunctionInfo.__annotations__
        assert rope.__name__.startswith(warmup._PACKAGE)


class TestWorker:
    """The patches, around a worker of no device."""

    @pytest.fixture
    def wrapper(self) -> Iterator[Any]:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        for patch in counters.PATCHES:
            patch.check()
            patch.apply()
        tower = small_tower("qwen2_vl")
        wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
        wrapper.vllm_config = tower.vllm_config
        wrapper.mm_receiver_cache = None
        wrapper._worker_extension_cls = None
        wrapper.worker = SimpleNamespace(
            execute_model=lambda output: encode(tower), shutdown=lambda: None
        )
        yield wrapper
        for patch in counters.PATCHES:
            patch.revert()

    def test_steps_with_images_count(self, wrapper: Any, metrics: Metrics) -> None:
        for inputs in ({}, {"request": [0]}):
            wrapper.execute_model(
                SimpleNamespace(scheduled_encoder_inputs=inputs, scheduled_new_reqs=[])
            )
        kind = ("reference", "any", "blocks")
        assert of_series(metrics, "encoder_passes") == {kind: 1}

    def test_an_engine_without_this_package(
        self, wrapper: Any, metrics: Metrics
    ) -> None:
        wrapper.vllm_config = SimpleNamespace(compilation_config=object())
        wrapper.execute_model(
            SimpleNamespace(
                scheduled_encoder_inputs={"request": [0]}, scheduled_new_reqs=[]
            )
        )
        wrapper.shutdown()
        assert not of_series(metrics, "encoder_passes")

    def test_the_end_is_said(self, wrapper: Any, metrics: Metrics) -> None:
        with mock.patch.object(metrics, "say") as said:
            wrapper.shutdown()
        said.assert_called_once_with()
