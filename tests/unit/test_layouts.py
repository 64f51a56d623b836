# SPDX-License-Identifier: Apache-2.0
"""What graphs of exact size ask of a model's layout and of a batch's grids."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_flashinfer_vit.graphs.layouts import Layout, lengths  # noqa: E402


@pytest.mark.parametrize(
    ("merge", "patches"), [(2, 4), (3, 9), ((1, 3), 3), ([4, 2], 8)]
)
def test_patches_of_a_token_are_rows_by_columns(merge: Any, patches: int) -> None:
    model = SimpleNamespace(visual=SimpleNamespace(spatial_merge_size=merge))
    assert Layout(tower="visual").patches_per_token(model) == patches


def test_a_packed_graph_holds_any_tokens_and_a_dense_one_whole_rows() -> None:
    assert Layout(tower="visual").row_tokens(64, ()) == 1
    assert Layout().row_tokens(64, ()) == 64
    assert Layout(by_width=True).row_tokens(64, (280,)) == 280


def test_each_frame_is_a_sequence() -> None:
    grids = [[2, 4, 6], [1, 2, 2]]
    for given in (grids, torch.tensor(grids)):
        assert lengths({"video_grid_thw": given}) == [24, 24, 4]
    # As Kimi-VL's, whose images have no frames.
    assert lengths({"image_grid_hws": torch.tensor([[4, 6], [2, 2]])}) == [24, 4]
    with pytest.raises(KeyError, match="a batch has pixel_values, none of"):
        lengths({"pixel_values": None})
