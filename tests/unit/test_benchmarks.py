# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic, files and cases; nothing here is timed."""

import argparse
import csv
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _benchmarks import BENCHMARKS, ENVIRONMENT, make_row
from hypothesis import given
from hypothesis import strategies as st

import chosen_rows
import op_problems
import op_providers
import timing
from correctness import (
    FP8_GATE,
    GATES,
    WrongResultError,
    attention_fp32,
    check_error,
    relative_error,
)
from csv_log import COLUMNS, CsvLog, attention_flops, percentiles, results_path
from environment import (
    STACK_COLUMNS,
    Environment,
    command_line,
    commit,
    gpus_to_use,
)
from failures import Failures
from model_names import any_model
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS


def test_columns_are_the_published_ones():
    assert ",".join(COLUMNS) == (
        "bench,case,provider,model,head_dim,dtype,mode,p20_ms,p50_ms,p80_ms,tflops,"
        "rel_err,gpu,vllm,torch,triton,flashinfer,quack,cudnn,commit,command"
    )
    assert tuple(make_row()) == COLUMNS


@pytest.mark.parametrize(
    ("reason", "said"),
    [("no room\nhere", "no room"), (" \n", "no reason was given")],
)
def test_a_failure_is_one_line(reason, said):
    failures = Failures()
    failures.add("a case", reason)
    assert failures.lines == [f"a case: {said}"]


# Each script whose option names what it runs; those that read rows have their own test.
NAMING = [
    (path.stem, option)
    for path in sorted(BENCHMARKS.glob("*.py"))
    for option in re.findall(r'"(--models|--cases|--case)"', path.read_text())
    if path.stem not in ("plot", "table")
]


@pytest.mark.parametrize(("script", "option"), NAMING)
def test_an_unknown_name_is_refused_with_those_that_are_known(
    script, option, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", [script, option, "nope"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).parse_args()
    assert ended.value.code == 2
    known = "Qwen/Qwen3-VL-8B-Instruct" if option == "--models" else "1x256"
    error = capsys.readouterr().err
    assert f"argument {option}: " in error
    assert "'nope'" in error.splitlines()[-1] and known in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "name"),
    [("bench_encoder", "dots.ocr"), ("waterfall", "GLM-OCR"), ("bits", ".")],
)
def test_what_can_be_built_is_taken(script, name, monkeypatch):
    monkeypatch.setattr("sys.argv", [script, "--models", name])
    assert importlib.import_module(script).parse_args().models == [name]


def test_models_that_are_built_whole_are_refused():
    # A process of a tower calls it with patches and grids.
    for name in WHOLE_MODELS:
        with pytest.raises(argparse.ArgumentTypeError, match=r"none of .*, GLM-OCR"):
            any_model(name)


def test_fp8_has_a_gate_of_its_own():
    assert op_providers.gate("plugin-cudnn_fp8", "bf16") == FP8_GATE
    assert op_providers.gate("plugin-fp8", "fp16") == FP8_GATE
    assert op_providers.gate("plugin-cudnn", "bf16") == GATES["bf16"]


@pytest.mark.parametrize("is_supported", [True, False])
def test_stock_attends_by_all_that_this_package_may_pick(monkeypatch, is_supported):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(
        fa_utils, "is_fa_version_supported", lambda version: is_supported
    )
    monkeypatch.setattr(op_providers, "device", lambda: torch.device("cuda"))
    found = op_providers.provider_names()
    assert {"stock-flash_attn", "stock-flashinfer", "plugin", "plugin-fp8"} < {*found}
    assert "plugin-flash_attn_4" in found
    assert ("stock-flash_attn4" in found) is is_supported
    assert len(set(found)) == len(found)


def test_percentiles_of_a_known_list():
    assert percentiles([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == (2.0, 3.5, 5.0)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


@given(st.lists(st.floats(0.001, 1e4), min_size=2, max_size=50))
def test_percentiles_are_ordered_and_inside(samples):
    p20, p50, p80 = percentiles(samples)
    inside = (min(samples), p20, p50, p80, max(samples))
    assert all(a <= b + 1e-9 * abs(b) for a, b in zip(inside, inside[1:], strict=False))


def test_tflops_are_operations_over_the_median():
    flops = attention_flops([16384], num_heads=16, head_dim=80)
    assert flops == 4 * 16 * 80 * 16384 * 16384
    # 2.44 ms for one sequence of 16384 tokens are 563 TFLOP/s.
    row = make_row(samples_ms=[2.44, 2.44, 9.0], flops=flops)
    assert float(row["tflops"]) == pytest.approx(563.2, rel=1e-3)
    assert row["p50_ms"] == "2.4400"


def test_sequences_do_not_attend_to_each_other_in_the_flops():
    one = attention_flops([128], 16, 80)
    assert attention_flops([64, 64], 16, 80) == one // 2


def test_relative_error_is_of_norms():
    ref = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    off = ref + torch.tensor([[0.0, 0.3], [0.4, 0.0]])
    assert relative_error(off, ref) == pytest.approx(0.1, rel=1e-5)
    assert relative_error(ref.bfloat16(), ref) == 0.0
    with pytest.raises(WrongResultError, match=r"\(1, 2\).*\(2, 2\)"):
        relative_error(ref[:1], ref)


@pytest.mark.parametrize("rel_err", [0.3, math.nan, math.inf])
def test_gate_refuses_wrong_and_undefined_results(rel_err):
    with pytest.raises(WrongResultError):
        check_error(rel_err, 0.2)
    check_error(0.2, 0.2)


def test_fp32_reference_attends_within_each_sequence():
    lens = (5, 0, 1, 18)
    problem = op_problems.make_problem(lens, 16, torch.bfloat16, torch.device("cpu"))
    q, k, v = problem.parts()
    out = attention_fp32(q, k, v, lens, problem.scale)
    heads = [x.double().transpose(0, 1) for x in (q, k, v)]
    mask = torch.block_diag(*(torch.ones(n, n) for n in lens if n)).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=problem.scale
    )
    torch.testing.assert_close(out, expected.transpose(0, 1).float())


def test_v_is_a_view_of_the_projection():
    problem = op_problems.make_problem((4,), 8, torch.float16, torch.device("cpu"))
    assert problem.v.data_ptr() > problem.qkv.data_ptr()
    assert problem.v.stride() == (3 * 16 * 8, 8, 1)
    assert problem.q.is_contiguous()


def test_a_room_holds_padding_and_empty_sequences():
    ((lens, room),) = op_problems.SMOKE_ROOMS.values()
    cpu = torch.device("cpu")
    problem = op_problems.make_problem(lens, 16, torch.float32, cpu, room)
    assert problem.q.shape[0] == problem.max_seqlen == 40
    assert problem.cu_seqlens.tolist() == [0, 16, 32, 32, 32]
    assert op_problems.reference("attention", problem).shape[0] == sum(lens) == 32
    for batch, held in op_problems.ROOMS.values():
        assert sum(batch) <= held.rows and len(batch) <= held.sequences


def test_csv_rows_are_on_disk_at_once_and_appended(tmp_path):
    path = tmp_path / "new" / "encoder.csv"
    CsvLog(path).add(make_row(case="1x256"))
    log = CsvLog(path)
    log.add(make_row(case="1x1024"))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["1x256", "1x1024"]
    assert rows[0]["command"] == ENVIRONMENT.command


def test_csv_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("bench,case\nencoder,1x256\n")
    with pytest.raises(ValueError, match="bench,case"):
        CsvLog(path)
    assert path.read_text() == "bench,case\nencoder,1x256\n"


def test_a_csv_that_another_process_begins_meanwhile_keeps_its_rows(
    tmp_path, monkeypatch
):
    path = tmp_path / "rows.csv"
    opened = Path.open

    def open_later(self, *args, **options):
        monkeypatch.setattr(Path, "open", opened)
        CsvLog(path).add(make_row())
        return self.open(*args, **options)

    monkeypatch.setattr(Path, "open", open_later)
    CsvLog(path).add(make_row(provider="stock-flash_attn"))
    rows = chosen_rows.read(path)
    assert [row["provider"] for row in rows] == ["plugin", "stock-flash_attn"]


def test_csv_row_must_have_all_columns(tmp_path):
    log = CsvLog(tmp_path / "a.csv")
    row = make_row()
    del row["rel_err"]
    with pytest.raises(ValueError, match="rel_err"):
        log.add(row)
    with pytest.raises(ValueError, match="speed"):
        log.add({**make_row(), "speed": 1})


def test_command_line_leaves_out_where_rows_go():
    argv = ["/somewhere/bench_encoder.py", "--output", "/x/a.csv", "--cases", "1x256"]
    expected = "python benchmarks/bench_encoder.py --cases 1x256"
    assert command_line(argv) == expected
    argv[1:3] = ["--output=/x/a.csv", "--logs", "/x/logs"]
    assert command_line(argv) == expected


def test_command_line_has_the_variables_that_decide_what_runs(monkeypatch):
    monkeypatch.setenv("VLLM_FLASHINFER_VIT_KERNEL", "triton")
    monkeypatch.setenv("VLLM_FLASHINFER_VIT_TUNED_DIR", "my tables")
    assert command_line(["bench_host.py"]) == (
        "VLLM_FLASHINFER_VIT_KERNEL=triton VLLM_FLASHINFER_VIT_TUNED_DIR='my tables' "
        "python benchmarks/bench_host.py"
    )


def test_cpu_times_do_not_become_results():
    with pytest.raises(SystemExit, match="--output"):
        results_path("encoder", "none", None)
    assert results_path("encoder", "none", "a.csv") == Path("a.csv")
    path = results_path("encoder", "NVIDIA H200", None)
    assert path == BENCHMARKS / "results" / "h200" / "encoder.csv"


def test_rows_name_the_stack_that_is_installed():
    from importlib.metadata import version

    found = Environment.probe()
    packages = {"vllm": "vllm", "triton": "triton", "quack": "quack-kernels"}
    packages["flashinfer"] = "flashinfer-python"
    for name, package in packages.items():
        assert getattr(found, name) == version(package), name
    assert found.torch == torch.__version__
    assert "quack" in STACK_COLUMNS and "commit" not in STACK_COLUMNS


def test_commit_can_be_told(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    assert commit() == "0123abc"


def test_a_failure_is_noted_and_the_rest_goes_on(capsys):
    failures = Failures()
    with failures.noted("1x256 plugin"):
        raise AssertionError("no metadata\nand more")
    with failures.noted("1x1024 plugin"):
        pass
    assert failures.lines == ["1x256 plugin: AssertionError: no metadata"]
    with pytest.raises(SystemExit, match="1"):
        failures.end(Path("rows.csv"))
    out = capsys.readouterr().out
    assert out.count("no metadata") == 2 and out.endswith("rows in rows.csv\n")
    Failures().end(Path("rows.csv"))


class FakeClock:
    """Gives each provider a constant time and remembers who was asked."""

    def __init__(self):
        self.asked = []

    def sample_ms(self, run, mode):
        self.asked.append((run(), mode))
        return {"a": 1.0, "b": 2.0, "c": 4.0}[run()]


def test_providers_take_turns():
    clock = FakeClock()
    runs = {name: (lambda name=name: name) for name in "abc"}
    samples = timing.take_turns(clock, runs, "graph", budget_s=0.0, least=5)
    # An even number of rounds.
    assert samples == {"a": [1.0] * 6, "b": [2.0] * 6, "c": [4.0] * 6}
    order = "".join(name for name, _ in clock.asked)
    # One warm-up round, then each provider once a round, and first and last twice.
    assert order == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac"
    assert {mode for _, mode in clock.asked} == {"graph"}


def test_rounds_follow_the_budget_within_bounds():
    assert timing.rounds_within(10.0, budget_s=0.5) == 50
    assert timing.rounds_within(1000.0, budget_s=0.5) == 7
    assert timing.rounds_within(0.001, budget_s=0.5) == 100


def test_host_time_ends_when_the_last_call_returns(monkeypatch):
    now, events = [0.0], []

    def run():
        events.append("run")
        now[0] += 0.002

    def wait():
        events.append("wait")
        now[0] += 1.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_wait_for_device", wait)
    assert timing.host_ms(run, calls=3) == pytest.approx(2.0)
    assert events == ["wait", "run", "run", "run", "wait"]


def test_scales_are_those_of_the_kernel_that_a_graph_holds(monkeypatch):
    """Its room is what kernels are chosen by, however short the sequences are."""
    from vllm_flashinfer_vit.choices import measure
    from vllm_flashinfer_vit.ops.plan import Plan

    plan = Plan.decode("128:reference,*:reference_fp8")
    monkeypatch.setattr(op_providers, "layer_plan", lambda *args, **kwargs: plan)
    asked = []
    monkeypatch.setattr(measure, "own_scales", lambda kernel, on: asked.append(kernel))
    lens = (16, 16)
    for room in (None, op_problems.Room(200, 4)):
        problem = op_problems.make_problem(
            lens, 32, torch.bfloat16, torch.device("cpu"), room
        )
        op_providers.plugin_run("fp8", "attention", problem)
    assert [kernel.name for kernel in asked] == ["reference", "reference_fp8"]


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has real cases")
def test_attention_benchmark_runs_on_the_cpu(tmp_path):
    output = tmp_path / "attention.csv"
    script = [sys.executable, str(BENCHMARKS / "bench_attention.py"), "--smoke"]
    options = ["--head-dims", "72", "--output", str(output)]
    subprocess.run([*script, "--cases", "ragged", *options], check=True, timeout=300)
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["bench"], row["provider"]) for row in rows] == [
        ("attention", "stock-torch_sdpa"),
        ("attention", "plugin"),
        ("attention", "plugin-reference_fp8"),
        ("qkv_attention", "stock-torch_sdpa"),
        ("qkv_attention", "plugin"),
        ("qkv_attention", "plugin-reference_fp8"),
    ]
    for row in rows:
        limit = FP8_GATE if "fp8" in row["provider"] else 0.01
        assert 0 < float(row["rel_err"]) < limit
    assert all(0 < float(row["p20_ms"]) <= float(row["p80_ms"]) for row in rows)
    script += ["--rooms", "--providers", "plugin"]
    subprocess.run([*script, *options], check=True, timeout=300)
    with output.open(newline="") as file:
        cases = [row["case"] for row in csv.DictReader(file)]
    assert cases == ["ragged"] * 6 + ["2x16 in 40 for 4"] * 2


def test_gpus_are_named_as_the_environment_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_to_use(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert gpus_to_use(1) == ["5"]
    with pytest.raises(SystemExit, match="--gpus 3, but there are 2"):
        gpus_to_use(3)
