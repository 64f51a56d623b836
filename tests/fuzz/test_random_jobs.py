# SPDX-License-Identifier: Apache-2.0
"""Any options of `encode` and `calibrate`: a tower is next, or an option is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _commands import AFTER_CHECKS, COMMANDS, run, says
from _fuzz import WORDS, fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_flashinfer_vit.towers.spec import NAMED_MODELS
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

KNOWN = "Qwen/Qwen2-VL-2B-Instruct"
FILES = ["", ".", "a.png", "folder", "empty", "new", "missing/new", "loop", "/dev/null"]
PATHS = st.sampled_from([*FILES, "scales.json", "b.svg"]) | WORDS
VALUES = {
    "--model": st.sampled_from([*NAMED_MODELS, *WHOLE_MODELS, "checkpoint", *FILES]),
    "--depth": st.sampled_from(["1", "2", "24", "33", "9" * 4000]),
    "--max-pixels": st.sampled_from(["1", "50000", "9" * 4000]),
    "--backend": st.sampled_from(["FLASHINFER", "torch_sdpa", "FLASH"]),
    "--attn-dtype": st.sampled_from(["fp8", "fp8", "fp16"]),
    "--quantization": st.sampled_from(["fp8", "fp8_per_tensor", "online"]),
    "--unquantized": st.sampled_from(["re:.*attn.*", "re:[", "blocks.0"]),
    "--dtype": st.sampled_from(["auto", "bf16", "fp16", "fp32", "fp64"]),
    "--device": st.sampled_from(["cpu", "auto", "cpu:1", "cuda:x", "meta", "cpu:-1"]),
    "--margin": st.sampled_from(["1.5", "1e-300", "1e300", "0", "nan", "inf"]),
}


@st.composite
def jobs(draw: st.DrawFn) -> list[str]:
    """Draw a command line that can be parsed, mostly of a tower that is known."""
    command = draw(st.sampled_from(["encode", "calibrate"]))
    model = draw(st.sampled_from([*NAMED_MODELS, *WHOLE_MODELS]))
    words = [command, "--random-weights", f"--model={model}"]
    for option in draw(st.lists(st.sampled_from(COMMANDS[command]), max_size=4)):
        if option.kind is bool:
            words.append(option.flag)
            continue
        usual = PATHS if option.kind is Path else VALUES[option.flag]
        is_word = option.kind is str and draw(st.sampled_from([False, False, True]))
        words.append(f"{option.flag}={draw(WORDS if is_word else usual)}")
    # An empty one is refused with the usage, before the job begins.
    images = st.sampled_from(["a.png", "a.png", "folder", *FILES[1:]])
    images |= WORDS.filter(bool)
    return [*words, "--", *draw(st.lists(images, min_size=1, max_size=3))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the process is, with files of all sorts."""
    path = tmp_path_factory.mktemp("here")
    for name in ("folder", "empty", "checkpoint"):
        (path / name).mkdir()
    for name in ("a.png", "folder/b.png", "b.svg"):
        (path / name).write_bytes(b"no image")
    (path / "checkpoint" / "config.json").write_text('{"model_type": "bert"}')
    layer = '{"q": 1.0, "k": 1.0, "v": 1.0}'
    (path / "scales.json").write_text(f'{{"visual.blocks.0.attn": {layer}}}')
    (path / "loop").symlink_to(path / "loop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@given(words=jobs())
@example(words=["encode", "--random-weights", f"--model={KNOWN}", "--", "\x1f\\"])
@fuzz(150)
def test_a_job_comes_to_its_tower_or_a_line_names_what_cannot_be(
    folder: Path, words: list[str]
) -> None:
    """One line, with an option of the command or what was given for it; no file is
    written, changed or left, whether it is refused or ends early."""
    before = contents(folder)
    outcome = run(words, AFTER_CHECKS)
    assert contents(folder) == before
    if outcome.work is not None:
        return
    assert outcome.status == 2
    message = outcome.message.lstrip("\n")
    assert message.startswith("error: ") and message[:-1].isprintable()
    flags = [option.flag.strip("-").replace("-", "_") for option in COMMANDS[words[0]]]
    end = words.index("--")
    given = [word.partition("=")[2] for word in words[1:end] if "=" in word]
    # No path of an option is the folder here.
    named = [text or "." for text in (*flags, *given, *words[end + 1 :])]
    assert any(says(message, name) for name in named)
