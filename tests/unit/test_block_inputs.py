# SPDX-License-Identifier: Apache-2.0
"""When a block's program clears a graph's padding for all its blocks at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_flashinfer_vit.blocks.inputs import Inputs
from vllm_flashinfer_vit.blocks.spec import ANGLES
from vllm_flashinfer_vit.kernels import padding

OFFSETS = torch.tensor([0, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "given", "is_capturing", "expected"),
    [
        (torch.bfloat16, {"cu_seqlens": OFFSETS}, True, True),
        (torch.bfloat16, {"cu_seqlens": OFFSETS, "sequence_lengths": None}, True, True),
        # What follows from zeros may overflow.
        (torch.float16, {"cu_seqlens": OFFSETS}, True, False),
        # There is no padding outside of graphs, nor in equal sequences.
        (torch.bfloat16, {"cu_seqlens": OFFSETS}, False, False),
        (torch.bfloat16, {}, True, False),
        # These offsets count elements.
        (
            torch.bfloat16,
            {"cu_seqlens": OFFSETS, "sequence_lengths": OFFSETS},
            True,
            False,
        ),
    ],
)
def test_which_passes_are_clean(
    dtype: torch.dtype,
    given: dict[str, Any],
    is_capturing: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared: list[tuple[Any, ...]] = []
    monkeypatch.setattr(padding, "clear_padding", lambda *args: cleared.append(args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    stream: Any = SimpleNamespace(is_cuda=True, dtype=dtype, view=lambda shape: shape)
    now: Any = SimpleNamespace(normed=torch.zeros(4, 2), is_clean=False)
    block: Any = None
    spec: Any = SimpleNamespace(key_mask=None)
    Inputs(spec, block).clear_padding(now, stream, given)
    assert now.is_clean is expected
    assert cleared == ([(OFFSETS, (4, 2))] if expected else [])


def test_a_longest_length_that_is_told_stays() -> None:
    """It may be far below the rows that a mask pads all images to."""
    spec: Any = SimpleNamespace(is_packed=False)
    block: Any = None
    x, told = torch.zeros(2, 9, 4), torch.tensor(3)
    assert Inputs(spec, block).lengths(x, OFFSETS, told) == (OFFSETS, told, 0)
    _, found, _ = Inputs(spec, block).lengths(x, OFFSETS, None)
    assert found is not None and int(found) == 9


def test_a_block_that_is_given_no_angles_turns_nothing() -> None:
    spec: Any = SimpleNamespace(rotary=ANGLES)
    block: Any = None
    inputs, angles = Inputs(spec, block), torch.zeros(3, 2)
    assert inputs.tables_in({}) is None
    assert inputs.tables_in({"rotary_pos_emb": None}) is None
    (found,) = inputs.tables_in({"rotary_pos_emb": angles}) or ()
    assert found is angles
