# SPDX-License-Identifier: Apache-2.0
"""Any grids, offsets and lengths: prefix sums, what is derived of them, and plans."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from _fuzz import INT32, fuzz
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.seqlens import derive_seqlens
from vllm_flashinfer_vit.models import metadata as module
from vllm_flashinfer_vit.models.metadata import CACHE, SizeCache
from vllm_flashinfer_vit.ops.batch import Batch, ready
from vllm_flashinfer_vit.ops.plan import LEAST_MEAN_LEN, Class, Plan
from vllm_flashinfer_vit.plugin import all_patches
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MERGE = 2
# Of a window of 112 pixels, in tokens of 28.
SIDE = 4

# Frames, rows and columns of patches; rows and columns are of whole tokens.
SIZE = st.integers(1, 12).map(lambda tokens: tokens * MERGE)
GRIDS = st.lists(
    st.tuples(st.integers(1, 4), SIZE, SIZE).map(list), min_size=1, max_size=5
)


def prefix_sums(lengths: Any) -> list[int]:
    return [0, *accumulate(lengths)]


def windows(rows: int, columns: int) -> list[list[int]]:
    """Return the tokens of each window of a frame, cut at the frame's edge."""
    return [
        [
            row * columns + column
            for row in range(top, min(top + SIDE, rows))
            for column in range(left, min(left + SIDE, columns))
        ]
        for top in range(0, rows, SIDE)
        for left in range(0, columns, SIDE)
    ]


@pytest.fixture(scope="module")
def tower() -> Iterator[Tower]:
    """A tower with windows, whose metadata is kept."""
    if DEVICE != "cpu":
        pytest.skip("vLLM has one platform per process, and here it is the GPU")
    config = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 48,
        "patch_size": 14,
        "window_size": 28 * SIDE,
        "fullatt_block_indexes": [1],
    }
    spec = TowerSpec(config, "small", 2, family="qwen2_5_vl")
    tower = build_tower(spec, backend="FLASHINFER", dtype=torch.float32, device=DEVICE)
    patches = {patch.name: patch for patch in all_patches()}
    assert patches["qwen2_5_vl-kept-metadata"].applied
    return tower


class TestTower:
    @given(
        batches=st.lists(GRIDS, min_size=1, max_size=3), kept_blocks=st.integers(0, 64)
    )
    @fuzz(40)
    def test_metadata_is_that_of_the_grids_whatever_is_kept(
        self, tower: Tower, batches: list[list[list[int]]], kept_blocks: int
    ) -> None:
        """Sums are of frames and windows; windows hold each token once."""
        visual: Any = tower.visual
        vars(visual)[CACHE] = SizeCache(kept_blocks * 512)
        # As many rows and columns: what is kept for one must not serve another.
        turned = [[[t, w, h] for t, h, w in grids] for grids in batches]
        longer = [[[t + 1, h, w] for t, h, w in grids] for grids in batches]
        with tower.running():
            for grids in (*batches, *turned, *longer, *batches):
                self._check(visual.prepare_encoder_metadata(grids), grids)

    def _check(self, found: dict[str, Any], grids: list[list[int]]) -> None:
        frames = [(h, w) for t, h, w in grids for _ in range(t)]
        assert found["cu_seqlens"].tolist() == prefix_sums(h * w for h, w in frames)
        assert int(found["max_seqlen_full"]) == max(h * w for h, w in frames)
        order: list[int] = []
        lengths = []
        for h, w in frames:
            first = len(order)
            for tokens in windows(h // MERGE, w // MERGE):
                order += [first + token for token in tokens]
                lengths.append(len(tokens) * MERGE**2)
        assert found["window_index"].tolist() == order
        assert found["cu_window_seqlens"].tolist() == prefix_sums(lengths)
        assert int(found["max_seqlen_window"]) >= max(lengths)
        assert found["window_index"][found["reverse_indices"]].tolist() == list(
            range(len(order))
        )
        assert found["rotary_pos_emb_cos"].shape[0] == sum(lengths)


@given(
    down=st.integers(1, 9),
    right=st.integers(1, 9),
    merge=st.integers(1, 4),
    spare=st.integers(0, 3),
)
@fuzz(60)
def test_a_frames_tables_follow_the_order_of_its_patches(
    down: int, right: int, merge: int, spare: int
) -> None:
    """Patch by patch: the values of its row, then those of its column."""
    rows, columns = down * merge, right * merge
    positions = max(rows, columns) + spare
    tables = torch.arange(2 * positions * 3).view(2, positions, 3)
    expected = [
        [
            table[y * merge + dy].tolist() + table[x * merge + dx].tolist()
            for y, x, dy, dx in product(
                range(down), range(right), range(merge), range(merge)
            )
        ]
        for table in tables
    ]
    found = module._by_patch(tables, rows, columns, merge)
    assert found.tolist() == expected
    assert found.is_contiguous()


@given(
    calls=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=10, max_size=60
    ),
    max_blocks=st.integers(0, 10),
)
@fuzz(150)
def test_what_is_kept_fits_and_the_least_recently_used_goes(
    calls: list[tuple[int, int]], max_blocks: int
) -> None:
    """`held_bytes` is always the sum of what is kept, and never above the limit."""
    cache = SizeCache(max_blocks * 512)
    model: OrderedDict[int, int] = OrderedDict()
    for sizes, blocks in calls:
        found = cache.find(sizes)
        if sizes in model:
            model.move_to_end(sizes)
            assert found is not None
            assert int(found["x"].numel()) == model[sizes] * 128
            continue
        assert found is None
        cache.keep(sizes, {"x": torch.zeros(blocks * 128), "none": None})
        if blocks <= max_blocks:
            model[sizes] = blocks
        while sum(model.values()) > max_blocks:
            model.popitem(last=False)
        assert cache.held_bytes == sum(model.values()) * 512 <= cache.max_bytes


OFFSETS = st.lists(INT32 | st.integers(-2, 40), min_size=1, max_size=12)
STRIDES = st.tuples(*[st.integers(0, 2**31 - 1)] * 4)


@given(
    offsets=OFFSETS,
    num_tokens=st.integers(0, 40) | st.integers(0, 2**31 - 1),
    spare=st.integers(0, 6),
    strides=STRIDES,
)
@fuzz(100)
def test_derived_sequences_lie_in_the_tensors_whatever_the_offsets(
    offsets: list[int], num_tokens: int, spare: int, strides: tuple[int, int, int, int]
) -> None:
    """Lengths are never negative, and an offset is the end of all that came before."""
    slots = len(offsets) - 1 + spare
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    derived = derive_seqlens(cu_seqlens, num_tokens, slots, strides)
    clamped = [min(max(x, 0), num_tokens) for x in offsets] + [0] * spare
    ends = list(accumulate(clamped, max))
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    assert derived.lengths.flatten().tolist() == lengths
    for found, stride in zip(derived.offsets, strides, strict=True):
        assert found.flatten().tolist() == [end * stride for end in ends]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    tail=st.integers(0, 4),
    zeros=st.booleans(),
    more=st.integers(0, 50),
    given_bound=st.sampled_from(["none", "cpu", "zero", "device"]),
)
@fuzz(150)
def test_the_hosts_bound_is_never_below_the_longest_sequence(
    lengths: list[int], tail: int, zeros: bool, more: int, given_bound: str
) -> None:
    """Nor above the rows; the mean counts each sequence, empty ones included."""
    sums = prefix_sums(lengths)
    cu_seqlens = torch.tensor(sums + [0 if zeros else sums[-1]] * tail)
    bound = {
        "none": None,
        "cpu": torch.tensor(max(lengths) + more),
        "zero": torch.tensor(0),
        "device": torch.tensor(1, device="meta"),
    }[given_bound]
    q = torch.zeros(sums[-1], 1, 8)
    batch = Batch(q, q, q, cu_seqlens=cu_seqlens, max_seqlen=bound)
    assert max(lengths) <= ready(batch).longest <= sums[-1]
    assert batch.mean_len * (len(lengths) + tail) == pytest.approx(sums[-1])


@given(seq_len=st.integers(1, 50), num_seqs=st.integers(0, 50))
@fuzz(50)
def test_equal_sequences_share_all_rows(seq_len: int, num_seqs: int) -> None:
    q = torch.zeros(seq_len * num_seqs, 1, 8)
    inputs = ready(Batch(q, q, q, seq_len=seq_len))
    assert inputs.cu_seqlens.tolist() == prefix_sums([seq_len] * num_seqs)
    assert inputs.longest == seq_len


NAMES = st.sampled_from(sorted(KERNELS))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    bounds = sorted(draw(st.sets(st.integers(1, 2**20), max_size=5)))
    many = st.none() | NAMES
    return Plan(tuple(Class(x, draw(NAMES), draw(many)) for x in (*bounds, None)))


@given(plan=plans(), data=st.data(), mean_len=st.floats(0, 2**20))
@fuzz(200)
def test_a_plan_serves_each_length_by_the_first_class_that_holds_it(
    plan: Plan, data: st.DataObject, mean_len: float
) -> None:
    """Its text is the same plan."""
    assert Plan.decode(plan.text) == plan
    ends = [bound + more for bound in plan.bounds for more in (0, 1)]
    max_len = data.draw(st.integers(1, 2**20) | st.sampled_from([1, *ends]))
    at = sum(bound < max_len for bound in plan.bounds)
    serving = plan.classes[at]
    few, many = serving.kernel, serving.many or serving.kernel
    assert plan.kernel_for(max_len) == (many if max_len < LEAST_MEAN_LEN else few)
    is_many = mean_len < LEAST_MEAN_LEN
    assert plan.kernel_for(max_len, mean_len) == (many if is_many else few)


@given(text=st.text() | st.text("0123456789*:/,ab\u0663\u00b2 -", max_size=12))
@fuzz(300)
def test_a_text_is_a_plan_or_is_said_to_be_none(text: str) -> None:
    """A plan that is read is written as one that is equal to it."""
    try:
        plan = Plan.decode(text)
    except ValueError as error:
        assert "is no class of a plan such as 128:triton" in str(error)
    else:
        assert Plan.decode(plan.text) == plan
