# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own code never runs, and nobody is asked whether it may."""

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import dynamic_module_utils

import vllm_flashinfer_vit
from vllm_flashinfer_vit.commands.images import JobError, image_processor
from vllm_flashinfer_vit.towers.spec import CheckpointError, resolve_spec

CONFIG = {"model_type": "qwen2_5_vl"}
OWN = {
    "auto_map": {
        "AutoConfig": "own.OwnConfig",
        "AutoFeatureExtractor": "own.OwnProcessor",
        "AutoImageProcessor": "own.OwnProcessor",
        "AutoVideoProcessor": "own.OwnProcessor",
    }
}
# With all that Transformers wants of it, so that nothing else stops it.
CODE = """
from pathlib import Path
from transformers import Qwen2_5_VLConfig as OwnConfig
from transformers import Qwen2VLImageProcessor as OwnProcessor
Path({ran!r}).touch()
"""
REFUSED = r" asks for code of the checkpoint's own to run .*; use that file of"


class Checkpoint:
    """A folder with code of its own, and a user who lets it run if asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran = folder / "ran"
        self.questions: list[str] = []
        self.write("config.json", CONFIG)
        (folder / "own.py").write_text(CODE.format(ran=str(self.ran)))

    def write(self, name: str, document: Any) -> None:
        (self.folder / name).write_text(json.dumps(document))

    def answer(self, question: str = "") -> str:
        self.questions.append(question)
        return "y"

    def image_processor(self) -> Any:
        try:
            spec = resolve_spec(str(self.folder), random_weights=True)
            return image_processor(spec, None)
        finally:
            assert self.questions == []
            assert not self.ran.exists()


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    # Where Transformers would put a copy of the code.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    made = Checkpoint(folder)
    monkeypatch.setattr(builtins, "input", made.answer)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "OwnProcessor",
        "OwnImageProcessor",
        # Of Transformers, which would look for code again.
        "AutoFeatureExtractor",
        "AutoFeatureExtractorFast",
        "AutoVideoProcessor",
    ],
)
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_an_image_processor_of_its_own(
    checkpoint: Checkpoint, file: str, name: str
) -> None:
    document: dict[str, Any] = {"image_processor_type": name, **OWN}
    video = {"video_processor_type": "OwnProcessor", **OWN}
    checkpoint.write("video_preprocessor_config.json", video)
    # The classes that look for code again read this one in any case.
    checkpoint.write("preprocessor_config.json", document)
    if file == "processor_config.json":
        checkpoint.write(file, {"image_processor": document})
    with pytest.raises(JobError, match=rf"processor_config\.json,{REFUSED}"):
        checkpoint.image_processor()


def test_an_image_processor_elsewhere(checkpoint: Checkpoint) -> None:
    """Code of another repository is not downloaded, either."""
    own = {"auto_map": {"AutoImageProcessor": "some/repository--own.OwnProcessor"}}
    document = {"image_processor_type": "OwnProcessor", **own}
    checkpoint.write("preprocessor_config.json", document)
    with pytest.raises(JobError, match=REFUSED):
        checkpoint.image_processor()


@pytest.mark.parametrize(
    ("of_images", "of_model"),
    [
        ({"feature_extractor_type": "AutoVideoProcessor"}, {}),
        ({"size": {}}, {"image_processor_type": "AutoVideoProcessor"}),
    ],
)
def test_another_class_where_transformers_also_looks(
    checkpoint: Checkpoint, of_images: dict[str, Any], of_model: dict[str, Any]
) -> None:
    document = {"video_processor_type": "OwnProcessor", **OWN}
    checkpoint.write("video_preprocessor_config.json", document)
    checkpoint.write("preprocessor_config.json", of_images)
    checkpoint.write("config.json", {**CONFIG, **of_model})
    with pytest.raises(JobError, match=r"AutoVideoProcessor is no image processor of"):
        checkpoint.image_processor()


@pytest.mark.parametrize(
    "of_model",
    [
        {"feature_extractor_type": "AutoVideoProcessor"},
        {
            "image_processor_type": "AutoVideoProcessor",
            "configuration_files": ["config.4.0.0.json"],
        },
    ],
)
def test_a_config_that_looks_like_timms(
    checkpoint: Checkpoint, of_model: dict[str, Any]
) -> None:
    """Transformers would read the image processor from it."""
    checkpoint.write("config.json", {**CONFIG, "pretrained_cfg": {}, **of_model})
    checkpoint.write("config.4.0.0.json", CONFIG)
    harmless = {"image_processor_type": "Qwen2VLImageProcessor"}
    checkpoint.write("preprocessor_config.json", harmless)
    video = {"video_processor_type": "OwnProcessor", **OWN}
    checkpoint.write("video_preprocessor_config.json", video)
    assert "Qwen2VLImageProcessor" in type(checkpoint.image_processor()).__name__


def test_a_config_of_its_own(checkpoint: Checkpoint) -> None:
    """It lies where config.json leads those that have read it."""
    files = {"configuration_files": ["config.4.0.0.json"]}
    checkpoint.write("config.json", {**CONFIG, **files})
    checkpoint.write("config.4.0.0.json", {"model_type": "own", **OWN})
    with pytest.raises(CheckpointError, match=rf"config\.json, or one .*{REFUSED}"):
        checkpoint.image_processor()


def test_what_transformers_has_serves_in_its_place(checkpoint: Checkpoint) -> None:
    """Checkpoints name their code even where Transformers has its like by now."""
    document = {"image_processor_type": "Qwen2VLImageProcessor", **OWN}
    checkpoint.write("preprocessor_config.json", document)
    checkpoint.write("config.json", {**CONFIG, **OWN})
    made = checkpoint.image_processor()
    assert isinstance(made, transformers.Qwen2VLImageProcessor)


def test_nothing_is_read_that_could_ask() -> None:
    """Left out, `trust_remote_code` makes Transformers ask at the terminal."""
    found = 0
    for path in Path(vllm_flashinfer_vit.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name not in ("from_pretrained", "ModelConfig"):
                continue
            found += 1
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert said.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
    assert found
