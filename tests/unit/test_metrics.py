# SPDX-License-Identifier: Apache-2.0
"""Counters as an operator reads them: at /metrics, in the log, in the documentation."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

from vllm_flashinfer_vit.engine import metrics as module  # noqa: E402
from vllm_flashinfer_vit.engine.metrics import SERIES, Metrics, summary  # noqa: E402
from vllm_flashinfer_vit.graphs.sizes import ReplayError  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
PASSES = ("encoder_passes", "triton", "1024", "graph")

# What an engine's process does, the counters apart.
CHILD = """
from vllm_flashinfer_vit.engine.metrics import of_process
metrics = of_process()
assert metrics.is_exported
metrics.add(("encoder_passes", "triton", "1024", "graph"), 3)
metrics.add(("graph_hits",))
"""


def child(code: str, folder: Path | None) -> None:
    env = {k: v for k, v in os.environ.items() if k != module.ENV_FOLDER}
    if folder is not None:
        env[module.ENV_FOLDER] = str(folder)
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_another_process_reads_what_two_engines_count(tmp_path: Path) -> None:
    for _ in range(2):
        child(CHILD, tmp_path)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    labels = {"kernel": "triton", "max_len": "1024", "path": "graph"}
    name = "vllm_flashinfer_vit:encoder_passes_total"
    assert registry.get_sample_value(name, labels) == 6
    assert registry.get_sample_value("vllm_flashinfer_vit:graph_hits_total") == 2
    # What may stay at 0 is there before the first request.
    name = "vllm_flashinfer_vit:fallbacks_total"
    assert registry.get_sample_value(name, {"reason": "graph_size"}) == 0
    assert registry.get_sample_value("vllm_flashinfer_vit:graph_misses_total") == 0


HIT = "vllm_flashinfer_vit:graph_hits_total 1.0"


def test_vllms_metrics_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of vLLM's API server counts nothing itself."""
    pytest.importorskip("httpx")
    instrumentator = "vllm.entrypoints.serve.instrumentator.metrics"
    vllms = pytest.importorskip(instrumentator)
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    child(CHILD, tmp_path)
    monkeypatch.setenv(module.ENV_FOLDER, str(tmp_path))
    app = FastAPI()
    vllms.attach_router(app)
    text = TestClient(app).get("/metrics").text
    assert HIT in text


def test_processes_that_start_after_vllm_made_a_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several API servers: their parent imports prometheus_client before that."""
    prometheus = pytest.importorskip("vllm.v1.metrics.prometheus")
    # What vLLM sets is taken back.
    monkeypatch.setenv(module.ENV_FOLDER, "")
    monkeypatch.delenv(module.ENV_FOLDER)
    prometheus.setup_multiprocess_prometheus()
    child(CHILD, Path(os.environ[module.ENV_FOLDER]))
    assert HIT in generate_latest(prometheus.get_prometheus_registry()).decode()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    child(
        "from vllm_flashinfer_vit.engine.metrics import of_process\n"
        "metrics = of_process()\n"
        "assert not metrics.is_exported\n"
        "metrics.add(('graph_hits',))\n"
        "assert metrics.totals['graph_hits',] == 1\n",
        tmp_path / "missing",
    )


def test_vllms_own_clean_up_leaves_them() -> None:
    """It goes by the prefix `vllm:`."""
    assert not any(one.exported.startswith("vllm:") for one in SERIES)


def test_without_the_folder_the_log_has_them() -> None:
    child(
        "from vllm_flashinfer_vit.engine.metrics import of_process\n"
        "assert of_process() is of_process()\n"
        "assert not of_process().is_exported\n",
        None,
    )


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    made = Metrics(CollectorRegistry())
    made.is_exported = False
    return made


class TestLog:
    def test_says_what_changed_and_no_more(
        self,
        metrics: Metrics,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: now)
        monkeypatch.setattr(module.logger, "propagate", True)
        with caplog.at_level(logging.INFO, module.logger.name):
            metrics.say_if_due()
            assert not caplog.messages
            metrics.add(PASSES, 2)
            metrics.say_if_due()
            assert len(caplog.messages) == 1
            assert module.ENV_FOLDER in caplog.messages[0]
            metrics.add(PASSES)
            metrics.say_if_due()
            assert len(caplog.messages) == 1
            now = module.LOG_INTERVAL_S
            metrics.say_if_due()
            assert len(caplog.messages) == 2
            assert "3 by triton" in caplog.messages[1]
            assert module.ENV_FOLDER not in caplog.messages[1]
            now *= 3
            metrics.say_if_due()
            metrics.say()
            assert len(caplog.messages) == 2

    def test_says_nothing_where_they_are_exported(
        self, metrics: Metrics, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics.is_exported = True
        metrics.add(PASSES)
        with caplog.at_level(logging.INFO, module.logger.name):
            metrics.say_if_due()
            metrics.say()
        assert not caplog.messages

    def test_is_a_sentence(self) -> None:
        totals = {
            ("attention_layers", "vllm-flashinfer-vit"): 32,
            PASSES: 12,
            ("encoder_passes", "flash_attn", "any", "blocks"): 1,
            ("encoder_patches", "triton", "1024", "graph"): 9000,
            ("graph_hits",): 12,
            ("graph_misses",): 1,
            ("graph_large",): 3,
            ("graph_real_tokens",): 1000,
            ("graph_padded_tokens",): 1090,
            ("fallbacks", "graph_size"): 1,
            ("fp8_blocks", "q"): 700,
            ("fp8_blocks", "v"): 300,
            ("fp8_clipped_blocks", "v"): 3,
            ("triton_kernels_after_start",): 2,
        }
        assert summary(totals) == (
            "encoder passes: 12 by triton (graph, up to 1024 patches), 1 by flash_attn "
            "(blocks, any length); graphs served 12 of 13 items; 3 items were in "
            "batches that need none; 1.090 padded over real tokens; fall-backs: 1 "
            "graph_size; FP8 scales cut off 3 of 1000 blocks; built after the start: "
            "2 Triton kernels, 0 cuDNN plans"
        )
        assert summary({}) == (
            "encoder passes: none; fall-backs: none; built after the start: 0 Triton "
            "kernels, 0 cuDNN plans"
        )


class TestDocumentation:
    def test_every_counter_is_in_the_page(self) -> None:
        registry = CollectorRegistry()
        Metrics(registry)
        text = generate_latest(registry).decode()
        names = set(re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE))
        assert names == {one.exported for one in SERIES}
        rows = re.findall(r"^\| `(vllm_flashinfer_vit:\w+)` \|", PAGE.read_text(), re.M)
        assert sorted(rows) == sorted(names)

    def test_the_page_names_no_other_counter(self) -> None:
        named = set(re.findall(r"vllm_flashinfer_vit:\w+", PAGE.read_text()))
        assert named == {one.exported for one in SERIES}

    def test_every_reason_and_path_is_documented(self) -> None:
        summaries = {one.name: one.summary for one in SERIES}
        package = ROOT / "src" / "vllm_flashinfer_vit"
        code = "".join(path.read_text() for path in package.rglob("*.py"))
        reasons = set(re.findall(r'fell_back\("(\w+)"\)', code))
        reasons |= {error.kind for error in ReplayError.__subclasses__()}
        known = {one.name: one.known for one in SERIES}
        assert reasons == {*known["fallbacks"]}
        for reason in reasons:
            assert f"{reason}:" in summaries["fallbacks"]
        for path in ("graph", "blocks", "attention"):
            assert f"{path}, " in summaries["encoder_passes"]
