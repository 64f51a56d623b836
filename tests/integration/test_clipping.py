# SPDX-License-Identifier: Apache-2.0
"""What an engine counts of static FP8 scales: on small towers, and how it is read."""

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _towers import DEVICE, cpu_only, pixels, small_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.engine import clipping  # noqa: E402
from vllm_flashinfer_vit.engine.clipping import READ_INTERVAL_S, ClipReader  # noqa: E402
from vllm_flashinfer_vit.engine.counting import Counting  # noqa: E402
from vllm_flashinfer_vit.engine.metrics import Metrics  # noqa: E402
from vllm_flashinfer_vit.fp8 import scale_files  # noqa: E402
from vllm_flashinfer_vit.fp8.scale_files import QKV  # noqa: E402
from vllm_flashinfer_vit.fp8.state import ScaleState, made_by_engine  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_FP8_SCALES, ENV_KERNEL  # noqa: E402
from vllm_flashinfer_vit.towers.tower import Tower, build_tower  # noqa: E402

FAMILY = "qwen2_vl"
HEADS, LAYERS = 4, 2
# Two blocks of a head, and one.
GRIDS = [[1, 16, 12], [1, 4, 4]]
BLOCKS = 3 * HEADS * LAYERS
NAMES = [f"visual.blocks.{i}.attn.attn" for i in range(LAYERS)]
ALL = {("q",): BLOCKS, ("k",): BLOCKS, ("v",): BLOCKS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time in seconds, which stands still."""
    made = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda s: made.wait(s))
    monkeypatch.setattr(clipping, "time", fake)
    return made


def of_series(metrics: Metrics, name: str) -> dict[tuple[str, ...], int]:
    return {key[1:]: n for key, n in metrics.totals.items() if key[0] == name}


def tower_of(path: Path | None) -> Tower:
    return build_tower(
        small_spec(FAMILY),
        backend="FLASHINFER",
        dtype=torch.float32,
        device="cpu",
        attn_dtype="fp8",
        fp8_scale_path=path,
    )


def encode(tower: Tower) -> torch.Tensor:
    return tower.encode(pixels(tower.spec, GRIDS), GRIDS)


def scales_up_to(path: Path, largest: QKV) -> Path:
    file = path / "scales.json"
    amax = {name: (largest, 16) for name in NAMES}
    made_by = {**made_by_engine("some/model"), "command": "test"}
    scale_files.write(scale_files.from_amax(amax, 1.0, made_by), file)
    return file


@cpu_only
class TestEngine:
    @pytest.fixture(autouse=True)
    def every_length_in_fp8(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_KERNEL, "reference_fp8")

    def test_scales_that_are_too_small(self, tmp_path: Path, metrics: Metrics) -> None:
        """Those of v alone: each tensor has its own numbers."""
        tower = tower_of(scales_up_to(tmp_path, QKV(1e4, 1e4, 1e-4)))
        # What profiling and warm-up encode is no traffic.
        encode(tower)
        with Counting.of(tower.vllm_config).step():
            encode(tower)
        assert of_series(metrics, "fp8_blocks") == ALL
        assert of_series(metrics, "fp8_clipped_blocks") == {("v",): BLOCKS}

    def test_scales_that_are_wide_enough(
        self, tmp_path: Path, metrics: Metrics
    ) -> None:
        tower = tower_of(scales_up_to(tmp_path, QKV(1e4, 1e4, 1e4)))
        with Counting.of(tower.vllm_config).step():
            encode(tower)
        assert of_series(metrics, "fp8_blocks") == ALL
        assert not of_series(metrics, "fp8_clipped_blocks")

    @pytest.mark.parametrize("method", ["block", "dynamic"])
    def test_scales_of_the_values_themselves_cut_nothing_off(
        self, method: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_FP8_SCALES, method)
        tower = tower_of(None)
        with Counting.of(tower.vllm_config).step():
            encode(tower)
        assert of_series(metrics, "encoder_passes")
        assert not of_series(metrics, "fp8_blocks")
        for layer in tower.attention_layers().values():
            if layer._fp8_state is not None:
                assert not layer._fp8_state.clip_counts.any()

    def test_replays_count_without_their_padding(
        self, tmp_path: Path, metrics: Metrics
    ) -> None:
        tower = tower_of(scales_up_to(tmp_path, QKV(1e4, 1e-4, 1e4)))
        engine = Counting.of(tower.vllm_config)
        grids = [[1, 10, 10]]
        inputs = {
            "pixel_values": pixels(tower.spec, grids),
            "image_grid_thw": torch.tensor(grids),
        }
        limits = {"budgets": (64,), "max_items": 8, "frames_per_video": 4}
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=64, **limits)
            # One engine has one configuration; here they are two.
            manager.counting = engine
            capture(manager, tower)
            with tower.running(), engine.step():
                manager.execute(inputs)
        # 256 rows, of which 100 are the image's.
        blocks = HEADS * LAYERS
        assert of_series(metrics, "fp8_blocks") == dict.fromkeys(ALL, blocks)
        assert of_series(metrics, "fp8_clipped_blocks") == {("k",): blocks}
        assert {path for *_, path in of_series(metrics, "encoder_passes")} == {"graph"}

    def test_counts_are_read_now_and_then_and_at_the_end(
        self, tmp_path: Path, metrics: Metrics, clock: SimpleNamespace
    ) -> None:
        tower = tower_of(scales_up_to(tmp_path, QKV(1e4, 1e4, 1e4)))
        engine = Counting.of(tower.vllm_config)
        found = []
        for seconds in (0.0, 1.0, READ_INTERVAL_S, 1.0):
            clock.now += seconds
            with engine.step():
                encode(tower)
            found.append(metrics.totals["fp8_blocks", "q"] // BLOCKS)
        assert found == [1, 1, 3, 3]
        engine.end()
        engine.end()
        assert metrics.totals["fp8_blocks", "q"] == 4 * BLOCKS

    def test_an_engine_without_a_step_counts_nothing(
        self, tmp_path: Path, metrics: Metrics
    ) -> None:
        """As where the patch `counters` is left out, and only the end is told."""
        tower = tower_of(scales_up_to(tmp_path, QKV(1e4, 1e4, 1e-4)))
        encode(tower)
        Counting.of(tower.vllm_config).end()
        assert not of_series(metrics, "fp8_blocks")

    def test_a_step_that_fails_asks_the_device_nothing(
        self, tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tower = tower_of(scales_up_to(tmp_path, QKV(1.0, 1.0, 1.0)))
        engine = Counting.of(tower.vllm_config)

        def fail(*args: Any) -> None:
            raise RuntimeError("the device failed")

        monkeypatch.setattr(ClipReader, "_start", fail)
        with pytest.raises(ValueError, match="of the step"), engine.step():
            raise ValueError("of the step")
        # Nor does it keep a worker from ending.
        engine.end()

    def test_compiled_layers_count(self, tmp_path: Path) -> None:
        tower = tower_of(scales_up_to(tmp_path, QKV(1e4, 1e-4, 1e4)))
        layer = next(iter(tower.attention_layers().values()))
        qkv = torch.randn(3, 1, 130, HEADS, 16).unbind()
        compiled = torch.compile(layer.forward_cuda, fullgraph=True, backend="eager")
        torch._dynamo.reset()
        for _ in range(2):
            compiled(*qkv)
        torch._dynamo.reset()
        counts = layer._fp8_state.clip_counts.tolist()
        assert counts == [[4 * HEADS] * 3, [0, 4 * HEADS, 0]]


class FakeEvent:
    """What the device has not passed yet."""

    is_over = False

    def query(self) -> bool:
        return self.is_over


class TestReader:
    """A device that is behind the host."""

    @pytest.fixture
    def events(self, monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
        made: list[FakeEvent] = []

        def mark(device: torch.device) -> FakeEvent:
            made.append(FakeEvent())
            return made[-1]

        monkeypatch.setattr(clipping, "_mark", mark)
        return made

    @pytest.fixture
    def reader(self) -> ClipReader:
        reader = ClipReader()
        self.states = [ScaleState(name, 16, QKV(1.0, 1.0, 1.0)) for name in NAMES]
        # Without a file there is nothing to read.
        self.dynamic = ScaleState("dynamic", 16, None)
        for state in (*self.states, None, self.dynamic):
            reader.enroll(state)
        # Of a tower that another stage of a pipeline runs.
        elsewhere = ScaleState("elsewhere", 16, QKV(1.0, 1.0, 1.0)).to("meta")
        reader.enroll(elsewhere)
        return reader

    def count(self, blocks: int, clipped: int = 0) -> None:
        for state in (*self.states, self.dynamic):
            state.clip_counts += torch.tensor([[blocks] * 3, [clipped, 0, 0]])

    def test_what_is_not_there_yet_comes_later(
        self,
        reader: ClipReader,
        clock: SimpleNamespace,
        events: list[FakeEvent],
    ) -> None:
        reader.begin()
        self.count(5, 1)
        assert not reader.read()
        self.count(7)
        clock.now += READ_INTERVAL_S
        # One reading at a time.
        assert not reader.read() and len(events) == 1
        events[0].is_over = True
        assert reader.read() == {
            ("fp8_blocks", "q"): 10,
            ("fp8_blocks", "k"): 10,
            ("fp8_blocks", "v"): 10,
            ("fp8_clipped_blocks", "q"): 2,
        }
        assert not reader.read() and len(events) == 2
        events[1].is_over = True
        assert reader.read()["fp8_blocks", "k"] == 14

    def test_the_end_waits_for_a_while(
        self,
        reader: ClipReader,
        clock: SimpleNamespace,
        events: list[FakeEvent],
    ) -> None:

        def wait(seconds: float) -> None:
            clock.now += seconds
            for event in events:
                event.is_over |= clock.now > 1000.5

        clock.wait = wait
        reader.begin()
        self.count(5)
        assert not reader.read()
        self.count(7)
        assert reader.read_last()["fp8_blocks", "v"] == 2 * 12
        # A device that hangs is not waited for.
        self.count(1)
        clock.wait = lambda seconds: setattr(clock, "now", clock.now + seconds)
        clock.now = 2000.0
        assert not reader.read_last()
        assert clock.now < 2010.0

    @pytest.mark.parametrize("by", ["enable_sleep_mode", "enable_cumem_allocator"])
    def test_the_end_does_not_touch_memory_that_may_be_asleep(
        self, by: str, clock: SimpleNamespace, events: list[FakeEvent]
    ) -> None:
        from vllm.config import ModelConfig

        assert by in {field.name for field in fields(ModelConfig)}
        config = SimpleNamespace(
            compilation_config=object(),
            model_config=SimpleNamespace(**{by: True}),
        )
        reader = Counting(config)._clips
        self.states = [ScaleState("layer", 16, QKV(1.0, 1.0, 1.0))]
        self.dynamic = ScaleState("dynamic", 16, None)
        reader.enroll(self.states[0])
        reader.begin()
        self.count(5)
        assert not reader.read()
        self.count(7)
        events[0].is_over = True
        # What was copied before is on the host.
        assert reader.read_last()["fp8_blocks", "v"] == 5
        assert len(events) == 1 and self.states[0].clip_counts[0].tolist() == [7] * 3

    def test_an_engine_without_such_scales_does_nothing(
        self, events: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = ClipReader()
        monkeypatch.setattr(torch, "stack", None)
        monkeypatch.setattr(torch, "_foreach_zero_", None)
        reader.begin()
        assert not reader.read() and not reader.read_last() and not events


@pytest.mark.gpu
def test_replays_are_read_without_waiting() -> None:
    """A graph of FP8 attention, replayed while the device is busy."""
    from cases import Case, make_qkv
    from vllm_flashinfer_vit.ops.attention import Fp8, attention
    from vllm_flashinfer_vit.ops.batch import Batch
    from vllm_flashinfer_vit.ops.plan import Plan

    with torch.device(DEVICE):
        state = ScaleState("layer", 64, QKV(3.8 / 448, 4 / 448, 6 / 448))
    reader = ClipReader()
    reader.enroll(state)
    case = Case("", (4100, 700), zeros=2, pad_rows=200)
    q, k, v = make_qkv(case, 4, 64, torch.bfloat16, device=DEVICE)
    k.clamp_(-3.9, 3.9)
    k[600, 1, 5], v[4800:] = 50.0, 1e4
    longest, cu_seqlens = torch.tensor(case.max_seqlen), case.cu_seqlens(DEVICE)
    batch = Batch(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=longest)
    given = batch, 0.125, Plan.of("triton_fp8")
    fp8 = Fp8("static", state=state.scales_on_device)
    attention(*given, fp8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(*given, fp8)
    reader.begin()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for _ in range(3):
        graph.replay()
    assert not reader.read()
    assert reader._reading is not None and reader._reading.counts.is_pinned()
    found = reader.read_last()
    # 33 blocks and 6 of each head.
    assert found["fp8_blocks", "q"] == found["fp8_blocks", "v"] == 3 * 4 * (33 + 6)
    assert (
        found["fp8_clipped_blocks", "k"] == 3 and not found["fp8_clipped_blocks", "v"]
    )
    assert 0 < found["fp8_clipped_blocks", "q"] < 3 * 4 * (33 + 6)
    assert not reader.read_last()
