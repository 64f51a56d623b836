# SPDX-License-Identifier: Apache-2.0
"""When an engine saves the FP8 scales of its layers, and what it saves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from _fp8_engine import NAME, Engine  # noqa: E402

from vllm_flashinfer_vit.choices.lookup import Choice  # noqa: E402
from vllm_flashinfer_vit.fp8 import scale_files as scales  # noqa: E402
from vllm_flashinfer_vit.fp8.policy import Policy  # noqa: E402
from vllm_flashinfer_vit.fp8.scale_files import ScaleError  # noqa: E402
from vllm_flashinfer_vit.fp8.state import logger  # noqa: E402

TEXT_STEP = SimpleNamespace(scheduled_encoder_inputs={})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new.json"


def saving_to(path: Path, margin: float = 1.5) -> Engine:
    """Return an engine whose layers keep no scales but those that they save."""
    choices = (Choice("hopper_fp8", None, ""),)
    return Engine(Policy(choices, "block", save_path=path, save_margin=margin))


def test_a_path_that_cannot_be_written_is_said_with_its_setting(
    tmp_path: Path,
) -> None:
    path = tmp_path / "no folder" / "new.json"
    with pytest.raises(ScaleError, match="scale_save_path: .*folder"):
        saving_to(path)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    found: list[str] = []
    for level in ("info", "error"):
        monkeypatch.setattr(
            logger, level, lambda text, *args: found.append(text % args)
        )
    return found


def test_at_the_16th_pass_and_never_again(path: Path, lines: list[str]) -> None:
    saving = saving_to(path)
    for i in range(16):
        for state in saving.states:
            state.history[i] = torch.tensor([1.0 + i, 2.0, 3.0])
        saving.step(TEXT_STEP)
        assert not path.exists()
        saving.step()
    file = scales.read(path)
    assert file.layers[NAME].amax == (16.0, 2.0, 3.0)
    assert len(file.layers) == 2
    assert file.margin == 1.5
    assert file.made_by["model"] == "some/model"
    assert lines == [f"Saved FP8 scales of 2 layers to {path}"]
    path.unlink()
    for _ in range(32):
        saving.step()
    assert not path.exists()


def test_without_a_path_nothing_is_saved() -> None:
    engine = Engine(Policy((Choice("hopper_fp8", None, ""),), "dynamic"))
    for state in engine.states:
        state.history.fill_(1.0)
    engine.layers.forget_dummies()
    for _ in range(16):
        engine.step()
    assert [bool(state.history.any()) for state in engine.states] == [False] * 2


def test_dummies_do_not_count(path: Path) -> None:
    saving = saving_to(path)
    states = saving.states
    for state in states:
        state.history.fill_(1e6)
        state.position.fill_(5)
    for _ in range(15):
        saving.step()
    buffers = [state.history.data_ptr() for state in states]
    saving.layers.forget_dummies()
    # Captured graphs hold the addresses.
    assert buffers == [state.history.data_ptr() for state in states]
    assert all(not state.position.any() for state in states)
    for state in states:
        state.history[0] = 2.0
    for _ in range(15):
        saving.step()
    assert not path.exists()
    saving.step()
    assert scales.read(path).layers[NAME].amax == (2.0, 2.0, 2.0)


def test_dummies_that_nobody_saw_put_nothing_off(path: Path) -> None:
    saving = saving_to(path)
    for _ in range(16):
        saving.step()
    saving.layers.forget_dummies()
    saving.states[0].history[0] = 2.0
    for _ in range(16):
        saving.step()
    assert list(scales.read(path).layers) == [NAME]


def test_a_layer_that_is_built_after_all_were_saved_is_saved_too(path: Path) -> None:
    saving = saving_to(path)
    for state in saving.states:
        state.history[0] = 2.0
    for _ in range(16):
        saving.step()
    assert len(scales.read(path).layers) == 2
    later = saving.layers.enroll("visual.blocks.5.attn.attn", 72, saving.policy)
    assert later is not None
    later.history[0] = 3.0
    for _ in range(16):
        saving.step()
    amax = {one.amax for one in scales.read(path).layers.values()}
    assert amax == {(2.0, 2.0, 2.0), (3.0, 3.0, 3.0)}


def test_a_rank_without_images_waits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, stack = [], torch.stack

    def counted(tensors: Any) -> Any:
        read.append(passes)
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", counted)
    saving = saving_to(path)
    passes = 0
    while passes < 63:
        passes += 1
        saving.step()
    # Reading waits for the device.
    assert read == [16, 32]
    assert not path.exists()
    saving.states[0].history[0] = 1.0
    saving.step()
    assert list(scales.read(path).layers) == [NAME]


def test_a_tower_that_gets_its_first_input_later_is_added(path: Path) -> None:
    """Of Qwen3-Omni, whose first requests may bring no sound; engines want all."""
    policy = saving_to(path).policy
    sounds = "audio_tower.layers.0.self_attn.attn"
    saving = Engine(policy, (NAME, sounds))
    of_images, of_sounds = saving.states
    of_images.history[0] = 2.0
    for _ in range(16):
        saving.step()
    assert list(scales.read(path).layers) == [NAME]
    of_images.history[0] = 9.0
    of_sounds.history[0] = 3.0
    for _ in range(16):
        saving.step()
    file = scales.read(path)
    # What was saved stays as it was.
    assert file.layers[NAME].amax == (2.0, 2.0, 2.0)
    assert file.layers[sounds].amax == (3.0, 3.0, 3.0)
    path.unlink()
    for _ in range(64):
        saving.step()
    assert not path.exists()


def test_a_later_pipeline_stage_saves_nothing(path: Path) -> None:
    """There vLLM's V2 runner builds towers on no device, and steps still count."""
    with torch.device("meta"):
        saving = saving_to(path)
    assert all(state.history.is_meta for state in saving.states)
    for _ in range(40):
        saving.step()
    assert not path.exists()


def test_ranks_are_merged(path: Path) -> None:
    for rank in range(2):
        saving = saving_to(path)
        for state in saving.states:
            state.history[0] = torch.tensor([1.0 + rank, 2.0 - rank, 1.0])
        for _ in range(16):
            saving.step()
    assert scales.read(path).layers[NAME].amax == (2.0, 2.0, 1.0)


def test_a_path_that_cannot_be_saved_to_is_said_at_once(path: Path) -> None:
    path.write_text('{"a": {"q": 1, "k": 1, "v": 1}}')
    with pytest.raises(ScaleError, match="not written by this package"):
        saving_to(path)


def test_a_margin_of_no_use_is_said_at_once(path: Path) -> None:
    with pytest.raises(ScaleError, match=r"scale_save_margin is 1e\+300: use"):
        saving_to(path, 1e300)


def test_an_engine_outlives_a_full_disk(
    path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = saving_to(path)
    saving.states[0].history[0] = 1.0
    calls = []

    def full(*args: Any) -> None:
        calls.append(args)
        raise OSError("no space left")

    monkeypatch.setattr(scales, "save", full)
    for _ in range(16):
        saving.step()
    # It is not asked again for what others see later.
    saving.states[1].history[0] = 1.0
    for _ in range(48):
        saving.step()
    assert len(calls) == 1
    assert lines == [f"the FP8 scales were not saved to {path}: no space left"]
