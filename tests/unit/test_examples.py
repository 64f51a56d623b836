# SPDX-License-Identifier: Apache-2.0
"""The examples run as far as they can without a GPU; vLLM takes what they hand it."""

import importlib
import importlib.util
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from _benchmarks import BENCHMARKS
from _vllm_serve import first_module, serve_arguments
from PIL import Image

from vllm_flashinfer_vit.commands.cli import main as command
from vllm_flashinfer_vit.commands.images import JobError
from vllm_flashinfer_vit.machine.versions import TESTED_VLLM
from vllm_flashinfer_vit.towers import config
from vllm_flashinfer_vit.towers import spec as tower_spec
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

ROOT = BENCHMARKS.parent
EXAMPLES = ROOT / "examples"
MODEL = "Qwen/Qwen3-VL-8B-Instruct"

cpu_only = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="vLLM has one platform per process, and here it is the GPU",
)


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chat_parser() -> Any:
    return first_module(
        "vllm.renderers.chat_utils.chat_message",
        "vllm.renderers.chat_utils",
        "vllm.entrypoints.chat_utils",
    )


@cpu_only
def test_an_engine_takes_the_arguments_and_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from make_checkpoint import make_checkpoint

    use_cpu_platform()
    vllm = importlib.import_module("vllm")
    make_checkpoint(tmp_path, MODEL)

    class Engine:
        """Reads arguments and messages as vLLM does, and answers without a model."""

        def __init__(self, **arguments: Any) -> None:
            engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
            args = engine_args(**arguments)
            # vLLM would start a process to look at the model's class.
            name = tower_spec.FAMILIES["qwen3_vl"].model
            model_cls = getattr(tower_spec.model_module("qwen3_vl"), name)
            with config._inspected_here(name, model_cls):
                self.config = args.create_model_config()
            settings = self.config.multimodal_config
            assert settings.mm_encoder_attn_backend.name == "FLASHINFER"
            assert args.compilation_config.cudagraph_mm_encoder

        def chat(self, conversations: list[Any], sampling: Any) -> list[Any]:
            assert sampling.max_tokens > 0
            answers = []
            for messages in conversations:
                said, data, _ = chat_parser().parse_chat_messages(
                    messages, self.config, "string"
                )
                (image,) = data["image"]
                text = said[0]["content"].rpartition("\n")[2]
                size = getattr(image, "media", image).size
                answers.append(SimpleNamespace(text=f"{text} {size}"))
            return [SimpleNamespace(outputs=[one]) for one in answers]

    monkeypatch.setattr(vllm, "LLM", Engine)
    images = [EXAMPLES / "images" / name for name in ("cat.jpg", "page.png")]
    offline = loaded("offline_inference")
    offline.main([*map(str, images), "--model", str(tmp_path), "--question", "What?"])
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == f"{images[0]}: What? (451, 300)"
    assert second == f"{images[1]}: What? (1240, 1753)"


@cpu_only
@pytest.mark.usefixtures("narrow")
def test_embeddings_of_a_batch_are_those_of_single_images(tmp_path: Path) -> None:
    example = loaded("embed_images")
    spec = example.resolve(MODEL, random_weights=True, depth=1)
    for name, size in (("a.png", (96, 64)), ("b.png", (64, 128))):
        noise = random.Random(name).randbytes(3 * size[0] * size[1])
        Image.frombytes("RGB", size, noise).save(tmp_path / name)
    (tmp_path / "c.png").write_text("no image")
    both = example.embed(spec, [tmp_path], 64 * 64)
    assert list(both) == ["a.png", "b.png"]
    for name, embedding in both.items():
        (alone,) = example.embed(spec, [tmp_path / name], 64 * 64).values()
        assert embedding.shape == alone.shape and embedding.isfinite().all()
        assert (embedding - alone).norm() < 1e-5 * alone.norm()


@cpu_only
@pytest.mark.usefixtures("narrow")
def test_nothing_but_bad_images_to_embed(tmp_path: Path) -> None:
    example = loaded("embed_images")
    spec = example.resolve(MODEL, random_weights=True, depth=1)
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(JobError, match=r"no image can be used\. Left out: .*a\.png"):
        example.embed(spec, [tmp_path], None)


def test_the_script_of_embeddings_says_what_it_cannot_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["a.png", "--model", "zai-org/GLM-OCR", "--random-weights"]
    with pytest.raises(SystemExit):
        loaded("embed_images").main(given)
    assert "use `vllm-flashinfer-vit encode`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [["nowhere", "--random-weights"], [".", "--model", "nowhere/at/all"]],
)
def test_the_script_of_embeddings_says_what_is_missing(
    given: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = loaded("embed_images")
    # Said before a tower is built.
    monkeypatch.setattr(example, "build", None)
    with pytest.raises(SystemExit):
        example.main(given)
    assert "nowhere" in capsys.readouterr().err


@cpu_only
@pytest.mark.usefixtures("narrow")
def test_the_script_of_embeddings_says_their_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = str(EXAMPLES / "images" / "cat.jpg")
    options = ["--random-weights", "--depth", "1", "--max-pixels", "65536"]
    loaded("embed_images").main([images, *options])
    found = re.fullmatch(
        rf"{images}: (\d+) tokens of 4096 values\n", capsys.readouterr().out
    )
    assert found and 0 < int(found[1]) <= 64


SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
NOTE = """import json, os, sys
with open(os.environ["CALLED"], "w") as file:
    json.dump(sys.argv[1:], file)
"""
RUN = """from vllm_flashinfer_vit.commands.cli import main
main()
"""


def run_script(
    name: str, *arguments: str, folder: Path, body: str = NOTE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a shell script, with stand-ins for the commands that it calls.

    Args:
        name: Of the script.
        arguments: Its own.
        folder: Where the stand-ins are.
        body: What they run; to write down how they were called, unless given.
        environment: Variables to set.
    """
    for tool in ("vllm", "vllm-flashinfer-vit"):
        path = folder / tool
        path.write_text(f"#!{sys.executable}\n{body}")
        path.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", EXAMPLES / name, *arguments],
        env={**os.environ, **environment, "PATH": path, "CALLED": f"{folder}/called"},
        capture_output=True,
        text=True,
    )


def called(folder: Path) -> list[str]:
    return json.loads((folder / "called").read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_those_of_a_plain_shell(path: Path) -> None:
    subprocess.run(["sh", "-n", path], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/sh" and "set -eu" in lines


@cpu_only
@pytest.mark.parametrize(
    "given", [[], ["some/model"], ["some/model", "--port", "9", "--seed", "1"]]
)
def test_a_server_starts_with_what_vllm_knows(given: list[str], tmp_path: Path) -> None:
    assert run_script("serve.sh", *given, folder=tmp_path).returncode == 0
    serve, *rest = called(tmp_path)
    assert serve == "serve"
    args = serve_arguments(rest)
    assert args.model_tag == (given[0] if given else MODEL)
    assert args.mm_encoder_attn_backend == "FLASHINFER"
    assert args.compilation_config.cudagraph_mm_encoder
    assert args.port == (9 if len(given) > 1 else 8000)


def test_readme_starts_the_same_server(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", "")
    found = re.search(r"^vllm (serve .+)$", text, re.MULTILINE)
    run_script("serve.sh", folder=tmp_path)
    assert found and shlex.split(found[1]) == called(tmp_path)


@cpu_only
def test_calibrate_calls_the_command_and_says_how_to_serve(tmp_path: Path) -> None:
    import typer

    done = run_script(
        "calibrate.sh", "pictures", "a model", "--margin", "2", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    group = typer.main.get_command(command)
    name, *rest = called(tmp_path)
    calibrate = group.commands[name]  # type: ignore[attr-defined]
    parsed = calibrate.make_context(name, rest).params
    assert parsed["images"] == [Path("pictures")]
    assert (parsed["model"], parsed["margin"]) == ("a model", 2.0)
    assert parsed["output"] == Path("fp8_scales.json")

    # The command that it prints, run as it stands.
    printed = done.stdout.partition("\n")[2].replace("\\\n", "")
    _, script, *options = shlex.split(printed)
    assert script == "examples/serve.sh"
    run_script("serve.sh", *options, folder=tmp_path)
    args = serve_arguments(called(tmp_path)[1:])
    assert args.model_tag == "a model"
    assert args.mm_encoder_attn_dtype == "fp8"
    assert str(args.mm_encoder_fp8_scale_path) == "fp8_scales.json"


def test_calibrate_says_what_it_needs_and_where_it_writes(tmp_path: Path) -> None:
    done = run_script("calibrate.sh", "pictures", folder=tmp_path)
    assert done.returncode == 2 and "CHECKPOINT_FOLDER" in done.stderr
    assert not (tmp_path / "called").exists()
    run_script("calibrate.sh", "pictures", "m", folder=tmp_path, SCALES="s.json")
    assert called(tmp_path)[-2:] == ["--output", "s.json"]


@cpu_only
@pytest.mark.extended
def test_calibrate_writes_scales(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    model = "Qwen/Qwen2.5-VL-3B-Instruct"
    options = ["--random-weights", "--depth", "1", "--max-pixels", "12544"]
    images = str(EXAMPLES / "images")
    done = run_script(
        "calibrate.sh",
        *(images, model, *options),
        folder=tmp_path,
        body=RUN,
        SCALES=str(scales),
    )
    assert done.returncode == 0, done.stderr
    assert str(scales) in done.stdout.splitlines()[-1]
    (layer,) = json.loads(scales.read_text())["layers"]
    assert layer.startswith("visual.blocks.0")


def instructions() -> list[tuple[str, str]]:
    text = (EXAMPLES / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    lines = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, rest.strip()) for name, _, rest in lines]


def test_the_image_is_vllms_newest_tested_one() -> None:
    found = instructions()
    order = ["ARG", "FROM", "COPY", "COPY", "RUN", "ENTRYPOINT", "CMD"]
    assert [name for name, _ in found] == order
    assert found[0][1] == f"VLLM_VERSION={TESTED_VLLM[-1]}"
    assert found[1][1] == "vllm/vllm-openai:v${VLLM_VERSION}"


def test_the_image_copies_what_a_build_needs() -> None:
    found = instructions()
    copies = [rest.split() for name, rest in found if name == "COPY"]
    sources = {source for *given, _ in copies for source in given}
    for source in sources:
        assert (ROOT / source).exists(), source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = project["tool"]["hatch"]
    readme = hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    needed = {
        "pyproject.toml",
        *project["project"]["license-files"],
        *(fragment["path"] for fragment in readme),
        hatch["version"]["path"],
        *hatch["build"]["targets"]["wheel"]["packages"],
    }
    for name in needed:
        parents = {str(parent) for parent in (Path(name), *Path(name).parents)}
        assert parents & sources, name
    folders = {target.rstrip("/").removesuffix("/src") for *_, target in copies}
    (run,) = (rest for name, rest in found if name == "RUN")
    (folder,) = folders
    assert f"install --system --no-cache {folder} " in run


def test_the_container_starts_the_server_of_the_script(tmp_path: Path) -> None:
    found = dict(instructions())
    run_script("serve.sh", folder=tmp_path)
    start = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    assert start == ["vllm", *called(tmp_path)]


def test_every_example_is_explained() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"`{path.name}`" in text or f"examples/{path.name}" in text
    config = (ROOT / "mkdocs.yml").read_text()
    assert "examples.md" in str(yaml.safe_load(config)["nav"])
