# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the pages that need a GPU, as they are written.

They run in a folder where their names exist: checkpoints of random weights under the
names of published models and under words such as MODEL, the pictures of the examples
under words such as IMAGES. A server has to say that this package serves and to answer
about two pictures, and to count them if it is told where; of every other command the
exit status counts. A row is a command that did.

    python benchmarks/page_commands.py
    python benchmarks/page_commands.py --match "vllm serve"   # a regular expression
    python benchmarks/page_commands.py --print                # the commands alone
"""

import argparse
import base64
import mimetypes
import os
import re
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, ROOT, Environment
from failures import Failures
from make_checkpoint import make_checkpoint
from server_process import (
    START_TIMEOUT_S,
    GroupProcess,
    ServerProcess,
    check_free,
    stop_as_by_ctrl_c,
)
from soak_checkpoint import write_weights

COLUMNS = ("bench", "page", "line", "outcome", "seconds", *ENVIRONMENT_COLUMNS)
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", ".github/SECURITY.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "examples")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
# What pages write for a checkpoint's folder, and for a folder of images.
CHECKPOINTS = ("MODEL", "CHECKPOINT", "CHECKPOINT_FOLDER", "FOLDER")
IMAGES = ("IMAGES", "IMAGES...", "FOLDER_OF_IMAGES")
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
PICTURES = ("coffee.jpg", "page.png")
SERVES = "serves FLASHINFER for multimodal encoders"
COUNTER = "vllm_flashinfer_vit:attention_layers_total"
# Without it the process that answers /metrics sees no counters of others.
COUNTERS_FOLDER = "PROMETHEUS_MULTIPROC_DIR="
# vLLM's own.
PORT = 8000
# `tune` takes most of it.
TIMEOUT_S = 900.0

_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?:    .*\n)+)")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# Variables in front of a command.
_SET = r"(?:[A-Z_]+=(?:\$\([^)]*\)|\S+)\s+)*"
_SERVE = re.compile(rf"{_SET}(?:vllm serve \S|sh examples/serve\.sh)")
# One that a sentence names, without what it needs, is no command.
_ON_A_GPU = re.compile(
    rf"{_SERVE.pattern}|{_SET}(?:vllm-flashinfer-vit (?:doctor|tune)\b"
    r"|vllm-flashinfer-vit (?:encode|calibrate) \S"
    r"|sh examples/|python examples/(?!make_page))"
)


def commands(page: Path, programs: Sequence[str]) -> Iterator[str]:
    """Give the commands of a page, each as one line, in its order.

    Args:
        page: A Markdown file.
        programs: What a command may begin with, after its variables.
    """
    text = _COMMENT.sub("", page.read_text(encoding="utf-8"))
    lines: list[str] = []
    for block in (*_FENCED.findall(text), *_INDENTED.findall(text)):
        lines += re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    lines += _INLINE.findall(_FENCED.sub("", text))
    begins = re.compile(rf"{_SET}(?:{'|'.join(map(re.escape, programs))})(?:\s|$)")
    for line in dict.fromkeys(line.strip() for line in lines):
        if begins.match(line):
            yield re.sub(r"\s+#.*", "", line)


def words(line: str) -> list[str]:
    """Return the words of a command, without the variables in front of it."""
    return shlex.split(re.sub(f"^{_SET}", "", line))


def gpu_commands() -> dict[str, str]:
    """Return the pages' commands that need a GPU, each with the first page it is on.

    Those that write tables of choices come last: the others would go by these tables.
    """
    programs = ("vllm", "vllm-flashinfer-vit", "sh", "python")
    found: dict[str, str] = {}
    for page in PAGES:
        for line in commands(page, programs):
            if _ON_A_GPU.match(line):
                found.setdefault(line, str(page.relative_to(ROOT)))
    return dict(sorted(found.items(), key=lambda item: " tune" in item[0]))


def is_server(line: str) -> bool:
    """Whether a command ends only when it is stopped."""
    return _SERVE.match(line) is not None


def furnish(folder: Path, lines: Sequence[str]) -> Mapping[str, str]:
    """Make a folder where lines run as they are written.

    Args:
        folder: An empty one.
        lines: Commands; checkpoints that they name are written.

    Returns:
        The environment in which they run.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in IMAGES:
        (folder / name).symlink_to(ROOT / "examples" / "images")
    # Some go without the name of the first one, which is their default.
    for model in sorted({MODEL} | _models(lines)):
        make_checkpoint(folder / model, model)
        write_weights(folder / model, 0)
    for name in CHECKPOINTS:
        (folder / name).symlink_to(folder / MODEL)
    own = "import sys; from {} import main; sys.exit(main())"
    programs = {
        "python": "",
        "vllm": "-m vllm.entrypoints.cli.main",
        "vllm-flashinfer-vit": "-c "
        + shlex.quote(own.format("vllm_flashinfer_vit.commands.cli")),
    }
    (folder / "bin").mkdir()
    for name, arguments in programs.items():
        program = folder / "bin" / name
        python = shlex.quote(sys.executable)
        program.write_text(f'#!/bin/sh\nexec {python} {arguments} "$@"\n')
        program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "VLLM_FLASHINFER_VIT_TUNED_DIR": str(folder / "tuned"),
        "HF_HUB_OFFLINE": "1",
    }


def _models(lines: Sequence[str]) -> set[str]:
    """Return the published models of which commands need weights."""
    named = (line.split() for line in lines if "--random-weights" not in line)
    return {word for words in named for word in words if word.startswith("Qwen/")}


def run(line: str, folder: Path, environment: Mapping[str, str], log: Path) -> str:
    """Run a command that ends by itself; return what it ended with.

    Args:
        line: The command.
        folder: Where.
        environment: See `furnish`.
        log: The file that gets all it prints.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    process = GroupProcess(["/bin/sh", "-c", line], log, environment, folder)
    try:
        status = process.wait_for_end(TIMEOUT_S)
    finally:
        process.stop()
    if status is None:
        raise RuntimeError(f"no end in {TIMEOUT_S:.0f} s, see {log}")
    if status:
        said = process.log().strip().splitlines() or [""]
        raise RuntimeError(f"exit status {status}: {said[-1]}")
    return "exit status 0"


def serve(line: str, folder: Path, environment: Mapping[str, str], log: Path) -> str:
    """Start a server, ask it about pictures, and stop it; return what it did.

    Args:
        line: The command.
        folder: Where.
        environment: See `furnish`.
        log: The file that gets all it prints.

    Raises:
        RuntimeError: It does not come up, does not answer, or another backend serves;
            or something else has its port.
    """
    check_free(PORT)
    server = ServerProcess(["/bin/sh", "-c", line], PORT, log, environment, folder)
    try:
        server.wait(time.monotonic() + START_TIMEOUT_S)
        for name in PICTURES:
            ask(server.url, ROOT / "examples" / "images" / name)
        if SERVES not in server.log():
            raise RuntimeError(f"it does not say that it {SERVES}, see {log}")
        if COUNTERS_FOLDER in line and COUNTER not in metrics(server.url):
            raise RuntimeError(f"no {COUNTER} at /metrics, see {log}")
    finally:
        server.stop()
    return f"{len(PICTURES)} images answered"


def metrics(url: str) -> str:
    """Return what a server says at /metrics."""
    # Its address begins with http.
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:  # noqa: S310
        return str(reply.read(), "utf-8")


def ask(url: str, image: Path) -> None:
    """Ask a server about an image.

    Raises:
        RuntimeError: There is no answer.
    """
    # vLLM brings it along.
    import openai

    kind, _ = mimetypes.guess_type(image.name)
    data = base64.b64encode(image.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
        {"type": "text", "text": "What is this?"},
    ]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    if answer.usage is None or answer.usage.completion_tokens != 8:
        raise RuntimeError(f"no answer about {image.name}: {answer}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="regular expression of commands")
    parser.add_argument("--print", action="store_true", help="the commands alone")
    parser.add_argument("--logs", help="folder to keep what they print in")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args(argv)


def main() -> None:
    """Run the commands."""
    args = parse_args()
    lines = {k: v for k, v in gpu_commands().items() if re.search(args.match, k)}
    if args.print:
        for line, page in lines.items():
            print(f"{page}: {line}")
        return
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: these commands need one")
    stop_as_by_ctrl_c()
    environment = Environment.probe()
    log = CsvLog(results_path("page_commands", environment.gpu, args.output), COLUMNS)
    failures = Failures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = Path(args.logs or folder).absolute()
        logs.mkdir(parents=True, exist_ok=True)
        variables = furnish(folder, list(lines))
        for number, (line, page) in enumerate(lines.items()):
            print(f"{page}: {line}", flush=True)
            start = time.monotonic()
            with failures.noted(line):
                do = serve if is_server(line) else run
                outcome = do(line, folder, variables, logs / f"command-{number}.log")
                seconds = time.monotonic() - start
                log.add(
                    {
                        "bench": "page_commands",
                        "page": page,
                        "line": line,
                        "outcome": outcome,
                        "seconds": f"{seconds:.0f}",
                        **asdict(environment),
                    }
                )
                print(f"  {outcome} after {seconds:.0f} s", flush=True)
    failures.end(log.path)


if __name__ == "__main__":
    main()
