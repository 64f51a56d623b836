# SPDX-License-Identifier: Apache-2.0
"""The check of encoder graphs in real engines: its requests, rows and comparisons."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from _benchmarks import ENVIRONMENT

import chosen_rows
import engine_check
import engines
import graph_check
import graph_encoder
import graph_engine
import graph_requests
from csv_log import CsvLog
from failures import Failures
from simulated_graphs import build_manager, capture, simulated_graphs
from tower_cases import MODELS


def test_mixtures_are_seeded_and_fit() -> None:
    requests = graph_requests.mixtures(300, seed=0)
    assert requests == graph_requests.mixtures(300, seed=0)
    assert requests != graph_requests.mixtures(300, seed=1)
    assert {modality for modality, _ in requests} == {"image", "video"}
    for _, grids in requests:
        assert 0 < graph_requests.patches(grids) <= 4 * graph_requests.MAX_TOKENS
        assert all(h % 2 == w % 2 == 0 for _, h, w in grids)


def test_fine_budgets_pad_the_mixtures_little() -> None:
    from vllm_flashinfer_vit.graphs.sizes import fine_budgets

    tokens = [
        graph_requests.patches(grids) // 4
        for _, grids in graph_requests.mixtures(300, 0)
    ]
    budgets = fine_budgets(64, graph_requests.MAX_TOKENS)
    padded = [next(b for b in budgets if b >= n) for n in tokens]
    assert sum(padded) / sum(tokens) < 1.25
    ratios = [b / n for b, n in zip(padded, tokens, strict=True)]
    assert sum(ratios) / len(ratios) < 1.25


def test_graph_rows_are_judged() -> None:
    row = dict.fromkeys(graph_check.COLUMNS, "")
    assert graph_check.judge(row) == []
    row |= {"rel_err": "2e-2", "same_kernel_rel_err": "9e-3", "triton_kernels": 0}
    assert graph_check.judge(row) == []
    faults = graph_check.judge({**row, "same_kernel_rel_err": "2e-2", "cudnn_plans": 3})
    assert faults == [
        "graph and eager mode with the same kernels differ by 2e-2",
        "3 cudnn_plans built within requests",
    ]
    assert graph_check.judge({**row, "same_kernel_rel_err": "nan"})


def test_compared_requests_are_summed_up() -> None:
    equal = graph_encoder.Found(0.0, True, 0.0, True, 80, 50, 6, 1)
    other = graph_encoder.Found(math.nan, False, 1e-3, False, 20, 20, 1, 0)
    assert graph_engine.summary([equal, equal, other]) == {
        "padded_over_real": "1.5000",
        "graph_hits": 13,
        "graph_misses": 2,
        "rel_err": "nan",
        "bitwise": "0.667",
        "same_kernel_rel_err": "1.00e-03",
        "same_kernel_bitwise": "0.667",
    }
    without_graphs = equal._replace(padded=0, real=0)
    assert graph_engine.summary([without_graphs])["padded_over_real"] == ""


@pytest.fixture
def unpatched() -> Iterator[None]:
    yield
    from vllm_flashinfer_vit import plugin

    plugin.revert_all()


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Let PyTorch fill unwritten memory with NaN, as its deterministic mode does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is the GPU here")
@pytest.mark.usefixtures("unpatched", "nan_memory")
@pytest.mark.parametrize(
    ("first", "tokens"), [((1, 10, 12), 50), ((1, 8, 12), 44)], ids=["long", "short"]
)
@pytest.mark.parametrize("model", MODELS)
def test_graphs_are_compared_by_their_kernels(
    model: str,
    first: tuple[int, ...],
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
    from vllm_flashinfer_vit.ops import attention as ops
    from vllm_flashinfer_vit.ops.plan import Plan

    is_replay = False

    # Another result by kernel, and by the bound and the sequences that it is given.
    # Outside of graphs rows of no sequence stay unwritten, and their NaN reaches the
    # sequences, as by FlashAttention.
    def attend(name, q, k, v, cu_seqlens, max_seqlen, scale):
        factor = 1 + len(name) / 100 + max_seqlen / 10000 + len(cu_seqlens) / 1000
        out = attention_ref(q, k, factor * v, cu_seqlens, max_seqlen, scale)
        if not is_replay:
            end = int(cu_seqlens.max())
            out[:end] += 0 * v[end:].sum()
            out[end:] = torch.empty_like(out)[end:]
        return out

    def prepare(name, *args, is_clean=False):
        return functools.partial(attend, name, *args)

    monkeypatch.setattr(
        ops, "_prepare_kernel", lambda name: functools.partial(prepare, name)
    )
    tower = graph_engine.small_tower(engines.Job(model, "limits", "plugin"))
    for layer in tower.attention_layers().values():
        layer._plan = Plan.decode("20:reference,100:triton,*:flash_attn")
    # Graphs of 64 and 256 patches hold all but the last image, which is too large. Of
    # 256 there are two, one of them for sequences of up to 100.
    grids = [list(first), *[[1, 4, 4]] * 5, [1, 18, 18]]
    with simulated_graphs(), tower.running(), torch.inference_mode():
        manager = build_manager(tower, max_tokens=256, budgets=(16, 64), max_items=4)
        capture(manager, tower)
        encoder = graph_encoder.Encoder(
            manager, manager.model.wrapped, torch.device("cpu")
        )
        inputs = encoder.inputs(("image", grids), 0)
        graph = encoder.graph

        def replay(inputs):
            nonlocal is_replay
            is_replay = True
            try:
                return graph(inputs)
            finally:
                is_replay = False

        monkeypatch.setattr(encoder, "graph", replay)
        with encoder.batches() as batches:
            encoder.graph(inputs)
        found = graph_encoder.compare(encoder, inputs)
        monkeypatch.setattr(encoder, "graph", lambda inputs: replay(inputs).flip(0))
        wrong = graph_encoder.compare(encoder, inputs)
    served = [(batch.items, batch.graph and batch.graph.patches) for batch in batches]
    assert served == [([1, 2, 3, 4], 64), ([5, 0], 256), ([6], None)]
    assert found.rel_err > 1e-4
    assert not found.bitwise
    assert found[2:] == (0.0, True, 80, tokens, 6, 1)
    assert wrong.same_kernel_rel_err > graph_check.GATE


def test_totals_are_of_common_prefixes() -> None:
    assert graph_requests.prefixes(300) == [100, 200, 300]
    assert graph_requests.prefixes(250) == [100, 200, 250]
    assert graph_requests.prefixes(8) == [8]


def test_mixtures_are_timed_when_they_first_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[graph_requests.Request] = []
    encoder = SimpleNamespace(
        device=torch.device("cpu"),
        inputs=lambda request, seed: request,
        graph=served.append,
    )

    def compare(
        encoder: SimpleNamespace, request: graph_requests.Request
    ) -> graph_encoder.Found:
        encoder.graph(request)
        return graph_encoder.Found(0.0, True, 0.0, True, 8, 8, 1, 0)

    monkeypatch.setattr(graph_engine, "compare", compare)
    options = {"mixtures": 5, "requests": 3, "max_tokens": 512}
    budgets = {"budget_s": 60.0, "requests_budget_s": 60.0}
    rows = graph_engine.measure(encoder, {**options, **budgets}, tmp_path / "lock")
    mixed = graph_requests.mixtures(5, seed=0, max_tokens=512)
    # All of them are timed, and only then compared.
    assert served[-10:] == mixed * 2
    assert not any(request in mixed for request in served[:-10])
    assert [row["case"] for row in rows[-2:]] == [
        "first 5 random mixtures",
        "random mixtures",
    ]
    assert [row["requests"] for row in rows[-2:]] == [5, 5]


def test_a_case_that_stops_stocks_engine_is_left_out_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped = "The size of tensor a (129) must match tensor b (161)"

    def compare(
        encoder: SimpleNamespace, request: graph_requests.Request
    ) -> graph_encoder.Found:
        if request == graph_requests.CASES["video 160x4x4"]:
            raise RuntimeError(stopped)
        return graph_encoder.Found(0.0, True, 0.0, True, 8, 8, 1, 0)

    monkeypatch.setattr(graph_engine, "compare", compare)
    encoder = SimpleNamespace(
        device=torch.device("cpu"),
        inputs=lambda request, seed: request,
        graph=lambda request: None,
    )
    options = {"mixtures": 2, "requests": 2, "max_tokens": 16384}
    budgets = {"budget_s": 60.0, "requests_budget_s": 60.0}
    given = encoder, {**options, **budgets}, tmp_path / "lock"
    with pytest.raises(RuntimeError, match="must match"):
        graph_engine.measure(*given)
    rows = graph_engine.measure(*given, is_stock=True)
    job = engines.Job("Qwen/Qwen3-VL-8B-Instruct", "automatic", "stock-flash_attn")
    (tmp_path / f"{job.stem}.json").write_text(json.dumps(rows))
    failures = Failures()
    log = CsvLog(tmp_path / "graphs.csv", graph_check.COLUMNS)
    graph_check.report(job, tmp_path, log, failures, ENVIRONMENT)
    assert failures.lines == [f"{job.stem} video 160x4x4: {stopped}"]
    written = [row["case"] for row in chosen_rows.read(log.path)]
    assert {*written} == {
        *graph_requests.CASES,
        "random requests after start",
        "first 2 random mixtures",
        "random mixtures",
    } - {"video 160x4x4"}


def test_graphs_of_either_runner_are_found() -> None:
    manager = object()
    old = SimpleNamespace(encoder_cudagraph_manager=manager)
    assert engines.manager_of(old) is manager
    encoder_runner = SimpleNamespace(cudagraph_manager=manager)
    state = SimpleNamespace(encoder_runner=encoder_runner)
    new = SimpleNamespace(model_state=state)
    assert engines.manager_of(new) is manager
    encoder_runner.cudagraph_manager = None
    with pytest.raises(RuntimeError, match="SimpleNamespace has no encoder CUDA graph"):
        engines.manager_of(new)


def test_the_encoder_alone_is_checked_where_vllm_has_a_runner_for_it() -> None:
    runner = Path(vllm.__file__).parent / "v1" / "worker" / "mm_encoder_model_runner.py"
    assert ("encoder_only" in graph_engine.CONFIGS) is runner.exists()


def test_vllm_knows_the_arguments_of_engines() -> None:
    from vllm import EngineArgs
    from vllm.config import CompilationConfig

    known, compiling = EngineArgs.__dataclass_fields__, CompilationConfig
    for arguments in (*graph_engine.CONFIGS.values(), *engine_check.CONFIGS.values()):
        assert known.keys() >= arguments.keys()
        of_compiler = arguments.get("compilation_config", {})
        assert compiling.__dataclass_fields__.keys() >= of_compiler.keys()


def test_finished_engines_are_not_started_again(tmp_path: Path) -> None:
    path = tmp_path / "graphs.csv"
    job = engines.Job("Qwen/Qwen3-VL-8B-Instruct", "limits", "plugin")
    log = CsvLog(path, graph_check.COLUMNS)
    row = dict.fromkeys(graph_check.COLUMNS, "") | dataclasses.asdict(ENVIRONMENT)
    row |= {"model": job.model, "config": job.config, "provider": job.provider}
    log.add({**row, "case": "image 16x16"})
    assert graph_check.finished(path, ENVIRONMENT) == set()
    log.add({**row, "case": "random mixtures"})
    assert graph_check.finished(path, ENVIRONMENT) == {job}
    for other in ({"commit": "another"}, {"vllm": "0.99"}, {"quack": "none at all"}):
        changed = dataclasses.replace(ENVIRONMENT, **other)
        assert graph_check.finished(path, changed) == set()
    # Nobody knows whether the changes are those of today.
    dirty = dataclasses.replace(ENVIRONMENT, commit=f"{ENVIRONMENT.commit}+dirty")
    log.add({**row, "commit": dirty.commit, "case": "random mixtures"})
    assert graph_check.finished(path, dirty) == set()
    # What was wrong is to be seen again.
    log.add({**row, "case": "after start", "triton_kernels": 2})
    assert graph_check.finished(path, ENVIRONMENT) == set()
    # What is wrong with stock is a result, and would be so again.
    stock = dataclasses.replace(job, provider="stock-flash_attn")
    row |= {"provider": stock.provider, "same_kernel_rel_err": "nan"}
    log.add({**row, "case": "random mixtures"})
    assert graph_check.finished(path, ENVIRONMENT) == {stock}


def test_stock_is_timed_where_it_is_right() -> None:
    jobs = graph_check.jobs_for(MODELS, tuple(graph_engine.CONFIGS))
    assert len(jobs) == 3 * (len(graph_engine.CONFIGS) + 1)
    assert {j.config for j in jobs if j.provider != "plugin"} == {"automatic"}
