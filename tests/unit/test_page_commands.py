# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages that need a GPU are found, and run where their names exist."""

import re
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest
from _benchmarks import BENCHMARKS
from _pages import H100_RESULTS, RESULTS

import chosen_rows
import page_commands

# What no GPU has run as it is written. It merges into a file of another page's command,
# which named the checkpoint otherwise (0faf412).
NOT_RUN = (
    "vllm-flashinfer-vit calibrate IMAGES... --model CHECKPOINT --output wider.json "
    "--merge scales.json"
)
PAGE = """\
First, on a GPU:

    vllm serve MODEL --mm-encoder-attn-backend FLASHINFER \\
        --mm-encoder-attn-dtype fp8

    NAME=$(mktemp -d) vllm serve MODEL    # counted

`vllm-flashinfer-vit doctor` and `vllm-flashinfer-vit encode` <!-- `vllm serve X` -->

```
python examples/embed_images.py IMAGES
```
"""
FOLDER = "PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) "
SERVER = """\
import http.server, json, os

class Answer(http.server.BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        counter = os.environ.get("COUNTER", "")
        models = json.dumps({"object": "list", "data": [{"id": "m"}]})
        self.reply({"/metrics": counter, "/v1/models": models}.get(self.path, ""))

    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        image, text = sent["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/")
        usage = {"completion_tokens": int(os.environ.get("TOKENS", "8"))}
        choices = [{"index": 0, "message": {"role": "assistant", "content": "A"}}]
        self.reply(json.dumps({"id": "1", "choices": choices, "usage": usage}))

print(os.environ.get("SAYS", ""), flush=True)
http.server.HTTPServer(("127.0.0.1", PORT), Answer).serve_forever()
"""


def test_commands_are_found_as_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    programs = ("vllm", "python", "vllm-flashinfer-vit")
    served = "vllm serve MODEL --mm-encoder-attn-backend FLASHINFER"
    assert sorted(page_commands.commands(page, programs)) == [
        "NAME=$(mktemp -d) vllm serve MODEL",
        "python examples/embed_images.py IMAGES",
        f"{served} --mm-encoder-attn-dtype fp8",
        "vllm-flashinfer-vit doctor",
        "vllm-flashinfer-vit encode",
    ]


def test_variables_are_no_words_of_a_command() -> None:
    assert page_commands.words("A=$(mktemp -d) B=1 vllm serve 'a b'") == [
        "vllm",
        "serve",
        "a b",
    ]


def test_those_that_need_a_gpu_are_all_there() -> None:
    found = list(page_commands.gpu_commands())
    assert len(found) > 20
    for beginning in (
        "vllm serve Qwen/Qwen3-VL-8B-Instruct ",
        "PROMETHEUS_MULTIPROC_DIR=",
        "sh examples/serve.sh ",
        "sh examples/calibrate.sh ",
        "python examples/offline_inference.py ",
        "vllm-flashinfer-vit encode IMAGES... ",
        "vllm-flashinfer-vit calibrate IMAGES... ",
    ):
        assert any(line.startswith(beginning) for line in found), beginning
    # A sentence names it, and CI runs this one.
    assert "vllm-flashinfer-vit encode" not in found
    assert not any("make_page" in line for line in found)
    first_table = next(i for i, line in enumerate(found) if " tune" in line)
    assert all(" tune" in line for line in found[first_table:])


def test_a_gpu_has_run_all_but_those_that_are_listed() -> None:
    ran = {
        row["line"]
        for folder in (RESULTS, H100_RESULTS)
        for row in chosen_rows.read(folder / "page_commands.csv")
    }
    assert set(page_commands.gpu_commands()) - ran == {NOT_RUN}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm serve MODEL", True),
        ("A=$(mktemp -d) vllm serve MODEL", True),
        ("sh examples/serve.sh MODEL", True),
        ("sh examples/calibrate.sh IMAGES MODEL", False),
        ("vllm-flashinfer-vit doctor", False),
    ],
)
def test_servers_are_told_from_what_ends(line: str, expected: bool) -> None:
    assert page_commands.is_server(line) is expected


@pytest.fixture
def furnished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, str]]:
    """A folder with everything but weights, and the environment of commands in it."""
    monkeypatch.setattr(page_commands, "write_weights", lambda *_: None)
    by_name = "encode A --model Qwen/Qwen2.5-VL-3B-Instruct --random-weights"
    lines = ["vllm serve Qwen/Qwen2-VL-7B-Instruct", f"vllm-flashinfer-vit {by_name}"]
    return tmp_path, dict(page_commands.furnish(tmp_path, lines))


def test_the_names_of_the_pages_exist(furnished: tuple[Path, dict[str, str]]) -> None:
    folder, _ = furnished
    for name in page_commands.CHECKPOINTS:
        assert (folder / name / "config.json").is_file()
    for name in page_commands.IMAGES:
        assert (folder / name / "coffee.jpg").is_file()
    # The one that is named, and the one that is the default; the third has no weights.
    assert sorted(path.name for path in (folder / "Qwen").iterdir()) == [
        "Qwen2-VL-7B-Instruct",
        "Qwen3-VL-8B-Instruct",
    ]


def test_programs_are_those_of_this_python(
    furnished: tuple[Path, dict[str, str]],
) -> None:
    folder, environment = furnished
    log = folder / "log"
    for line, said in (
        ("python -c 'import sys; print(sys.executable)'", sys.executable),
        ("vllm-flashinfer-vit --help", "calibrate"),
    ):
        assert page_commands.run(line, folder, environment, log) == "exit status 0"
        assert said in log.read_text()


def test_a_command_that_fails_says_why(
    furnished: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, environment = furnished
    with pytest.raises(RuntimeError, match="exit status 3: no such thing"):
        page_commands.run(
            "echo no such thing; exit 3", folder, environment, folder / "log"
        )
    monkeypatch.setattr(page_commands, "TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match="no end in 0 s"):
        page_commands.run("sleep 60", folder, environment, folder / "log")


def is_running(pid: str) -> bool:
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nothing_stays_of_a_command_that_takes_too_long(
    furnished: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, environment = furnished
    monkeypatch.setattr(page_commands, "TIMEOUT_S", 1.0)
    with pytest.raises(RuntimeError, match="no end in 1 s"):
        page_commands.run(
            "sleep 60 & echo $! > child; wait", folder, environment, folder / "log"
        )
    child = (folder / "child").read_text().strip()
    until = time.monotonic() + 10
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(child)


@pytest.mark.parametrize(
    ("variables", "change", "expected"),
    [
        ("", {}, None),
        ("", {"SAYS": "stock"}, "does not say that it serves FLASHINFER"),
        ("", {"TOKENS": "0"}, "no answer about coffee.jpg"),
        ("", {"COUNTER": ""}, None),
        (FOLDER, {}, None),
        (FOLDER, {"COUNTER": ""}, f"no {page_commands.COUNTER} at /metrics"),
    ],
)
def test_a_server_has_to_serve(
    furnished: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    variables: str,
    change: dict[str, str],
    expected: str | None,
) -> None:
    folder, environment = furnished
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr(page_commands, "PORT", port)
    script = folder / "server.py"
    script.write_text(textwrap.dedent(SERVER).replace("PORT", str(port)))
    says = {"SAYS": f"it {page_commands.SERVES}", "COUNTER": page_commands.COUNTER}
    environment |= says | change
    arguments = f"{variables}python {script}", folder, environment, folder / "log"
    if expected is None:
        assert page_commands.serve(*arguments) == "2 images answered"
    else:
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            page_commands.serve(*arguments)


def test_without_a_gpu_there_is_nothing_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_commands.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "page_commands.py")])
    with pytest.raises(SystemExit, match="no GPU here"):
        page_commands.main()
    monkeypatch.setattr(sys, "argv", ["page_commands.py", "--print", "--match", "tune"])
    page_commands.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed and all(" tune" in line for line in printed)
