# SPDX-License-Identifier: Apache-2.0
"""The longest length that Qwen3-Omni's audio blocks get, and what is chosen by it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _blocks import without
from _encoders import PACKED
from _length_models import audio_encoder
from _models import Call, Result, choices, encode, engine, noise
from _towers import cpu_only
from torch import nn

from cases import relative_error

NAME = "qwen3_omni_audio-longest"
# Frames of each clip, of 10 ms. 800 of them are a window, of 8 times 13 tokens.
CLIPS = {
    "one-frame": [1],
    "13-tokens": [100],
    "short": [30, 70, 4],
    "window": [800],
    "window-and-a-frame": [801],
    "30s": [3000],
    "several": [801, 3000, 1, 250],
}
# Half of a chunk's frames, the frames of a window, and the most tokens in one.
WINDOWS = {"multiple": (50, 800, 104), "rest": (50, 880, 104), "odd": (7, 50, 6)}
TOLERANCE = 1e-5

pytestmark = cpu_only

Ready = Callable[[Any], object]


def run(
    backend: str,
    frames: list[int],
    window: tuple[int, int] = (50, 800),
    ready: Ready = lambda tower: None,
) -> Result:
    """Encode clips.

    Args:
        backend: Attention by it.
        frames: Of each clip.
        window: Half of a chunk's frames, and the frames of a window.
        ready: Called with the tower in front of its call.
    """

    def build(m: Any) -> tuple[nn.Module, Call]:
        tower = audio_encoder(m, *window)
        lengths = torch.tensor(frames)
        tokens = tower._get_cnn_output_lengths(lengths % (chunk := 2 * window[0]))
        tokens += lengths // chunk * tower._get_cnn_output_lengths(chunk)

        def call() -> torch.Tensor:
            ready(tower)
            return tower(noise(16, sum(frames)), lengths, tokens)

        return tower, call

    try:
        return encode(replace(PACKED["qwen3_omni-audio"], build=build), engine(backend))
    except NotImplementedError as error:
        pytest.skip(f"in this vLLM it {error}")


def noted(seen: list[Any]) -> Ready:
    """Collect what the blocks get beside the stream."""

    def ready(tower: Any) -> None:
        for layer in tower.layers:
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[1:]))

    return ready


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("clips", CLIPS)
def test_it_bounds_all_sequences_and_the_output_is_stocks(
    clips: str, window: str
) -> None:
    *sizes, most = WINDOWS[window]
    frames, seen = CLIPS[clips], []
    found = run("FLASHINFER", frames, tuple(sizes), noted(seen))
    assert found.programs == len(seen) == 2
    for cu_seqlens, longest in seen:
        assert (longest.device.type, longest.dtype) == ("cpu", torch.int32)
        assert cu_seqlens.diff().max() <= longest == most
    stock = run("TORCH_SDPA", frames, tuple(sizes))
    assert relative_error(found.out, stock.out) < TOLERANCE


@pytest.mark.parametrize("is_patched", [True, False])
def test_a_kernel_is_chosen_by_it_and_not_by_the_tokens_of_all(
    is_patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ready(tower: Any) -> None:
        nonlocal asked
        compute = tower.compute_attn_mask_seqlen
        # Stock's is where the offsets are: as on a GPU, where nothing reads it.
        tower.compute_attn_mask_seqlen = lambda ends: compute(ends.to("meta"))
        asked = choices(monkeypatch)

    with without(*(() if is_patched else (NAME,))):
        run("FLASHINFER", [3000, 3000], ready=ready)
    assert set(asked) == {104 if is_patched else 780}


@pytest.mark.parametrize(
    ("told", "expected"), [("FLASH_ATTN", 33), ("TORCH_SDPA", None)]
)
def test_other_backends_get_stocks(told: str, expected: int | None) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Patches are applied by a layer of this package.
    engine("FLASHINFER")
    seen: list[Any] = []

    def ready(tower: Any) -> None:
        noted(seen)(tower)
        tower.attn_backend = AttentionBackendEnum[told]

    run("TORCH_SDPA", [250], ready=ready)
    assert [longest for _, longest in seen] == [expected] * 2
