# SPDX-License-Identifier: Apache-2.0
"""Any batch in any buffer: padding changes no sequence, or says which one is full."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from _fuzz import INT32, fuzz
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.graphs.layouts import Layout
from vllm_flashinfer_vit.graphs.model import ExactModel
from vllm_flashinfer_vit.graphs.padded import PaddedManager
from vllm_flashinfer_vit.graphs.sizes import ReplaySizeError, fill
from vllm_flashinfer_vit.kernels.padding import mask_padding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = ("pixel_values", "cu_seqlens", "cu_window_seqlens", "window_index")
BUDGET = 16
STALE = -7
EAGER = torch.zeros(1)


class Batch(NamedTuple):
    """Lengths of sequences and of windows, and rows."""

    seqs: list[int]
    windows: list[int]
    rows: int

    def values(self) -> dict[str, torch.Tensor]:
        """Return what vLLM's model prepares; no value of it is zero but the sums'."""
        return {
            "pixel_values": torch.arange(1.0, self.rows * 3 + 1).view(self.rows, 3),
            "cu_seqlens": torch.tensor([0, *self.seqs]).cumsum(0).int(),
            "cu_window_seqlens": torch.tensor([0, *self.windows]).cumsum(0).int(),
            "window_index": torch.arange(1, self.rows + 1),
            "max_seqlen": torch.tensor(max(self.seqs, default=0)),
        }


LENGTHS = st.lists(st.integers(0, 9), max_size=10)
BATCHES = st.builds(Batch, LENGTHS, LENGTHS, st.integers(0, 12))


def manager_of(buffers: dict[str, torch.Tensor], replayed: list[int]) -> Any:
    """Return a manager with one graph, of these buffers."""
    manager: Any = PaddedManager.__new__(PaddedManager)
    manager.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(), model_config=None
    )
    manager.config = SimpleNamespace(buffer_keys=list(buffers), padding_logics={})
    manager.model = SimpleNamespace(
        prepare_encoder_cudagraph_replay_buffers=lambda batch, *_: SimpleNamespace(
            values=batch.values()
        ),
        encoder_eager_forward=lambda batch: EAGER,
    )
    graph = SimpleNamespace(replay=lambda: replayed.append(1))
    meta = SimpleNamespace(input_buffers=buffers, graph=graph, output_buffer=buffers)
    manager.budget_graphs = {"default": {BUDGET: meta}}
    manager.max_batch_size, manager.max_frames_per_batch = 5, 3
    manager.graph_hits = manager.graph_misses = 0
    manager._get_item_specs = lambda batch: [batch]
    manager.adopt(strict=False)
    return manager


@given(batches=st.lists(BATCHES, min_size=1, max_size=5), sizes=st.data())
@fuzz(150)
def test_replays_of_one_graph_hold_their_own_batch_and_nothing_of_the_last(
    batches: list[Batch], sizes: st.DataObject
) -> None:
    """Sums never fall and end where the sequences do; a batch that is larger than a
    buffer runs without a graph, for a reason that names both sizes."""
    room = sizes.draw(st.tuples(*[st.integers(1, 12)] * 3))
    buffers = {
        "pixel_values": torch.full((room[0], 3), float(STALE)),
        "cu_seqlens": torch.full((room[1],), STALE, dtype=torch.int32),
        "cu_window_seqlens": torch.full((room[2],), STALE, dtype=torch.int32),
        "window_index": torch.full((room[0],), STALE),
        "max_seqlen": torch.tensor(STALE),
    }
    replayed: list[int] = []
    manager = manager_of(buffers, replayed)
    for batch in batches:
        replayed.clear()
        values = batch.values()
        full = [key for key in KEYS if len(values[key]) > len(buffers[key])]
        if full:
            what = f"{full[0]} of this batch has {len(values[full[0]])} entries"
            with pytest.raises(ReplaySizeError, match=what) as caught:
                manager._replay(batch, BUDGET, "default")
            assert f"with {len(buffers[full[0]])} " in str(caught.value)
            assert f"budget {BUDGET} tokens, 5 items, 3 video" in str(caught.value)
            assert manager._run_budget_graph(batch, BUDGET) is EAGER
            assert not replayed
            continue
        assert manager._run_budget_graph(batch, BUDGET) is buffers
        assert replayed == [1]
        assert buffers["max_seqlen"] == values["max_seqlen"]
        for key in KEYS:
            count = len(values[key])
            assert torch.equal(buffers[key][:count], values[key])
            rest = buffers[key][count:]
            assert (rest == (values[key][-1] if "cu_" in key else 0)).all()
        for key, lengths in zip(KEYS[1:3], batch[:2], strict=True):
            spare = len(buffers[key]) - len(values[key])
            assert buffers[key].diff().tolist() == [*lengths, *[0] * spare]


@given(key=st.sampled_from(KEYS) | st.text(max_size=12), count=st.integers(0, 8))
@fuzz(100)
def test_one_entry_too_many_changes_nothing(key: str, count: int) -> None:
    buffer = torch.full((count, 2), STALE)
    with pytest.raises(ReplaySizeError) as caught:
        fill(key, buffer, torch.ones(count + 1, 2, dtype=torch.int64))
    assert str(caught.value).startswith(f"{key} of this batch has {count + 1} entries")
    assert (buffer == STALE).all()


class Tower:
    """vLLM's model of a tower with windows, as far as graphs ask it for sizes."""

    def __init__(self, merge: int, side: int) -> None:
        visual = SimpleNamespace(
            spatial_merge_size=merge,
            patch_size=14,
            window_size=side * merge * 14,
            modules=list,
        )
        self.visual = visual

    def prepare_encoder_cudagraph_capture_inputs(self, *_: Any) -> Any:
        unit = self.visual.spatial_merge_size**2
        sums = torch.tensor([0, unit], dtype=torch.int32)
        rows = torch.zeros(unit, 3)
        values = {"pixel_values": rows, "cu_seqlens": sums, "max_seqlen": sums[1]}
        values |= {"cu_window_seqlens": sums, "window_index": rows[:1, 0]}
        return SimpleNamespace(values=values)


GRID = st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))


@given(
    grids=st.lists(GRID, min_size=1, max_size=5),
    merge=st.integers(1, 3),
    side=st.integers(1, 6),
    spare=st.tuples(*[st.integers(0, 9)] * 3),
    has_frames=st.booleans(),
)
@fuzz(150)
def test_a_graph_holds_every_batch_of_its_tokens_items_and_frames(
    grids: list[tuple[int, int, int]],
    merge: int,
    side: int,
    spare: tuple[int, int, int],
    has_frames: bool,
) -> None:
    """Grids are of tokens here. Captured sums ascend from 0 to the budget's patches."""
    tokens = sum(t * h * w for t, h, w in grids)
    frames = sum(t for t, _, _ in grids)
    windows = sum(t * -(-h // side) * -(-w // side) for t, h, w in grids)
    budget, items, max_frames = (
        size + more
        for size, more in zip((tokens, len(grids), frames), spare, strict=True)
    )
    model = ExactModel(Tower(merge, side), Layout("visual"), 1, budget, has_frames)
    capture = model.prepare_encoder_cudagraph_capture_inputs(
        budget, items, max_frames, torch.device("cpu"), torch.float32
    ).values
    patches = budget * merge**2
    assert capture["pixel_values"].shape == (patches, 3)
    assert capture["window_index"].shape == (budget,)
    assert int(capture["max_seqlen"]) == patches
    for key, count in (("cu_seqlens", frames), ("cu_window_seqlens", windows)):
        assert (int(capture[key][0]), int(capture[key][-1])) == (0, patches)
        assert (capture[key].diff() >= 0).all()
        assert len(capture[key]) > count


OFFSETS = st.lists(st.integers(-3, 50) | INT32, min_size=1, max_size=10)


# Triton's interpreter takes 50 ms for one.
@given(
    offsets=OFFSETS,
    rows=st.integers(1, 45),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    gap=st.integers(0, 2),
)
@fuzz(60)
def test_only_rows_of_no_sequence_are_cleared(
    offsets: list[int], rows: int, heads: tuple[int, int], gap: int
) -> None:
    """Whatever the offsets: they are mended as far as rows go, and never fall."""
    heads_q, heads_kv = heads
    # A projection with something of others beside each row of v.
    memory = torch.ones(rows, heads_kv + gap, 8, device=DEVICE)
    v = memory[:, :heads_kv]
    out = torch.ones(rows, heads_q, 8, device=DEVICE)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    before = cu_seqlens.clone()
    mended = mask_padding(cu_seqlens, v, out)
    assert torch.equal(cu_seqlens, before)
    assert torch.equal(mended, before.clamp(0, rows).cummax(0).values)
    end = int(mended[-1])
    for x in (v, out):
        assert (x[:end] == 1).all()
        assert (x[end:] == 0).all()
    assert (memory[:, heads_kv:] == 1).all()
