# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic, files and cases; nothing here is timed."""

import contextlib
import csv
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _benchmarks import BENCHMARKS, ENVIRONMENT, make_row
from hypothesis import given
from hypothesis import strategies as st

import bench_attention
import bench_host
import contenders
import engine_check
import engines
import host_load
import op_problems
import op_providers
import remote
import timing
import tower_bench
import tower_cases
import tower_worker
from correctness import (
    FP8_GATE,
    GATES,
    WrongResultError,
    attention_fp32,
    check_error,
    relative_error,
)
from csv_log import COLUMNS, CsvLog, attention_flops, percentiles, results_path
from environment import STACK_COLUMNS, Environment, command_line, commit
from failures import Failures


def test_columns_are_the_published_ones():
    assert ",".join(COLUMNS) == (
        "bench,case,provider,model,head_dim,dtype,mode,p20_ms,p50_ms,p80_ms,tflops,"
        "rel_err,gpu,vllm,torch,triton,flashinfer,quack,cudnn,commit,command"
    )
    assert tuple(make_row()) == COLUMNS


@pytest.mark.parametrize(
    ("case", "patches"),
    [
        ("1x256", 256),
        ("1x1024", 1024),
        ("1x4096", 4096),
        ("1x8160", 8160),
        ("1x15376", 15376),
        ("1x35344", 35344),
        ("8x1024", 8192),
        ("8x4096", 32768),
        ("20x400", 8000),
        ("video16x1024", 16384),
        ("mixed", 18164),
    ],
)
def test_encoder_cases_hold_the_stated_patches(case, patches):
    grids = tower_cases.CASES[case]
    assert sum(math.prod(grid) for grid in grids) == patches
    assert all(h % 2 == w % 2 == 0 for _, h, w in grids)
    frames = [h * w for t, h, w in grids for _ in range(t)]
    assert tuple(frames) == op_problems.CASES[case]


def test_encoder_cases_are_complete():
    assert len(tower_cases.CASES) == 11
    assert len(tower_cases.CASES["mixed"]) == 6
    assert set(op_problems.CASES) == {
        *tower_cases.CASES,
        "win64x256",
        "win64x1024",
    }
    assert op_problems.CASES["win64x256"] == (64,) * 256


def test_sweep_stays_within_its_bounds_and_reaches_them():
    cases = dict(bench_attention.sweep_cases())
    assert {"1x16", "1024x16", "1x65536", "32x4096"} <= set(cases)
    assert max(sum(lens) for lens in cases.values()) == 2**17
    assert len(cases) == len(set(cases.values()))


def test_fp8_has_a_gate_of_its_own():
    assert op_providers.gate("plugin-cudnn_fp8", "bf16") == FP8_GATE
    assert op_providers.gate("plugin-fp8", "fp16") == FP8_GATE
    assert op_providers.gate("plugin-cudnn", "bf16") == GATES["bf16"]


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
    rows, out = attention_fp32(q, k, v, lens, problem.scale)
    assert rows.tolist() == list(range(24))
    heads = [x.double().transpose(0, 1) for x in (q, k, v)]
    mask = torch.block_diag(*(torch.ones(n, n) for n in lens if n)).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=problem.scale
    )
    torch.testing.assert_close(out, expected.transpose(0, 1).float())

    some, part = attention_fp32(q, k, v, lens, problem.scale, 2, 3)
    assert some.tolist() == [0, 2, 4, 6, 14, 23]
    torch.testing.assert_close(part, out[some])


def test_v_is_a_view_of_the_projection():
    problem = op_problems.make_problem((4,), 8, torch.float16, torch.device("cpu"))
    assert problem.v.data_ptr() > problem.qkv.data_ptr()
    assert problem.v.stride() == (3 * 16 * 8, 8, 1)
    assert problem.q.is_contiguous()


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


def test_cpu_times_do_not_become_results():
    with pytest.raises(SystemExit, match="--output"):
        results_path("encoder", "none", None)
    assert results_path("encoder", "none", "a.csv") == Path("a.csv")
    path = results_path("encoder", "NVIDIA H200", None)
    assert path == BENCHMARKS / "results" / "h200" / "encoder.csv"


def test_rows_name_the_stack_that_is_installed():
    from importlib.metadata import version

    found = Environment.probe(["bench_encoder.py"])
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
    failures.summary()
    assert capsys.readouterr().out.count("no metadata") == 2


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
    samples = timing.take_turns(clock, runs, "graph", budget_s=0.0, least=5, most=9)
    # An even number of rounds.
    assert samples == {"a": [1.0] * 6, "b": [2.0] * 6, "c": [4.0] * 6}
    order = "".join(name for name, _ in clock.asked)
    # One warm-up round, then each provider once a round, and first and last twice.
    assert order == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac"
    assert {mode for _, mode in clock.asked} == {"graph"}


def test_processes_take_turns():
    asked = []

    class Remote:
        def __init__(self, name):
            self.name = name

        def call(self, method, mode, count, warm_up):
            asked.append(self.name)
            return [1.0] * count

    bench = tower_bench.Bench(None, None, None, ["graph"], [], "bf16", 0.0)
    remotes = [Remote(name) for name in "abc"]
    samples = bench._take_turns(remotes, "graph")
    assert [len(samples[remote]) for remote in remotes] == [6, 6, 6]
    assert "".join(asked) == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac"


def test_rounds_follow_the_budget_within_bounds():
    assert timing.rounds_within(10.0, budget_s=0.5) == 50
    assert timing.rounds_within(1000.0, budget_s=0.5) == 7
    assert timing.rounds_within(0.001, budget_s=0.5) == 100


def test_stock_runs_without_plugins_and_forced_kernels_by_setting():
    of = contenders.Contender.of
    stock = of("stock-flashinfer", "bf16")
    assert (stock.backend, stock.is_stock) == ("FLASHINFER", True)
    assert stock.environment == {"VLLM_PLUGINS": ""}
    forced = of("plugin-cudnn", "bf16", "compiled")
    assert (forced.backend, forced.is_stock) == ("FLASHINFER", False)
    assert forced.environment == {"VLLM_FLASHINFER_VIT_KERNEL": "cudnn"}
    assert of("plugin", "bf16").environment == {}
    assert of("plugin", "bf16").attn_dtype is None
    fp8 = of("plugin-fp8", "bf16")
    assert (fp8.attn_dtype, fp8.environment) == ("fp8", {})
    forced = of("plugin-triton_fp8", "bf16")
    assert forced.attn_dtype == "fp8"
    assert forced.environment == {"VLLM_FLASHINFER_VIT_KERNEL": "triton_fp8"}
    for name in ("stock-flash_attn4", "plugin", "plugin-fp8", "plugin-cudnn"):
        contender, plain = of(f"{name}-q8", "bf16"), of(name, "bf16")
        assert (contender.quantization, plain.quantization) == ("fp8", None)
        same = replace(plain, provider=f"{name}-q8", quantization="fp8")
        assert contender == same
    odds = (
        "stock",
        "stock-",
        "stock-q8",
        "stock-4",
        "stock-flashinfer4",
        "stock-my_flash_attn4",
    )
    for odd in (*odds, "odd"):
        with pytest.raises(ValueError, match="stock"):
            of(odd, "bf16")


def test_stock_runs_the_flash_attention_that_is_asked_for():
    of = contenders.Contender.of
    for name, version in (("stock-flash_attn", None), ("stock-flash_attn4", 4)):
        contender = of(name, "bf16", "compiled")
        assert (contender.backend, contender.flash_attn_version) == (
            "FLASH_ATTN",
            version,
        )
        assert (contender.provider, contender.is_stock) == (name, True)
    assert of("plugin-flash_attn_4", "bf16").flash_attn_version is None


@pytest.mark.parametrize("is_supported", [True, False])
def test_flash_attention_4_is_measured_where_vllm_can_run_it(monkeypatch, is_supported):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(
        fa_utils, "is_fa_version_supported", lambda version: is_supported
    )
    found = contenders.default_providers(on_gpu=True)
    assert ("stock-flash_attn4" in found) is is_supported
    assert {"stock-flash_attn", "stock-flashinfer", "plugin"} <= set(found)
    assert contenders.default_providers(on_gpu=False) == (
        "stock-torch_sdpa",
        "plugin",
    )


def test_pixels_are_the_same_values_in_every_dtype():
    def drawn(dtype):
        weight = torch.empty(8, 3, 2, 4, dtype=dtype)
        patch_embed = SimpleNamespace(proj=SimpleNamespace(weight=weight))
        visual = SimpleNamespace(patch_embed=patch_embed)
        return engines.random_pixels(visual, 64, torch.Generator().manual_seed(0))

    pixels = drawn(torch.float32)
    assert pixels.shape == (64, 24)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(drawn(dtype), pixels.to(dtype))


def test_engines_fill_quantised_layers_alike():
    def filled():
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(
            torch.zeros(64, 192).to(torch.float8_e4m3fn), requires_grad=False
        )
        layer.weight_scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        visual = torch.nn.ModuleDict({"qkv": layer})
        engines.fill_tower(SimpleNamespace(visual=visual))
        return layer

    first, second = filled(), filled()
    values = first.weight.float() * first.weight_scale
    assert values.std() == pytest.approx(0.04, rel=0.05)
    assert first.weight.float().abs().max() == 448
    assert torch.equal(values, second.weight.float() * second.weight_scale)


def test_a_contender_is_what_its_name_says():
    of, check = contenders.Contender.of, contenders.check_promises
    compiled, eager = (SimpleNamespace(do_not_compile=flag) for flag in (False, True))
    layer = SimpleNamespace(_fa_version=4)
    check(of("stock-flash_attn4", "bf16"), layer, [eager])
    check(of("stock-flash_attn", "bf16", "compiled"), layer, [compiled] * 2)
    with pytest.raises(RuntimeError, match="got attention layers"):
        check(of("plugin", "bf16"), layer, [eager])
    quantized = torch.nn.Module()
    quantized.output_size = 8
    quantized.weight = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
    plain = torch.nn.Module()
    plain.output_size = 8
    plain.weight = torch.zeros(8, 8)
    check(of("stock-flash_attn-q8", "bf16"), layer, [quantized])
    with pytest.raises(RuntimeError, match="not quantised"):
        check(of("stock-flash_attn-q8", "bf16"), layer, [quantized, plain])
    # Where vLLM cannot run a version, it takes another one.
    with pytest.raises(RuntimeError, match="FlashAttention None here, not 4"):
        check(of("stock-flash_attn4", "bf16"), SimpleNamespace(_fa_version=None), [])
    for blocks in ([compiled, eager], [SimpleNamespace()]):
        with pytest.raises(RuntimeError, match="does not compile the blocks"):
            check(of("stock-flash_attn", "bf16", "compiled"), layer, blocks)


def test_modes_name_how_the_blocks_run():
    blocks = [contenders.blocks_of(mode) for mode in contenders.MODES]
    assert list(dict.fromkeys(blocks)) == list(contenders.BLOCKS)
    assert blocks == [name for name in contenders.BLOCKS for _ in range(2)]


def test_host_modes_run_the_same_blocks_as_others():
    blocks = [
        contenders.blocks_of(mode) for mode in ("host", "fused_host", "compiled_host")
    ]
    assert blocks == list(contenders.BLOCKS)


def test_only_stock_runs_in_modes_of_its_own():
    bench = tower_bench.Bench(
        None, None, None, ["graph"], ["fused_graph", "compiled"], "bf16", 1.0
    )

    def modes(provider):
        return [
            mode
            for blocks in contenders.BLOCKS
            for mode in contenders.MODES
            if bench.runs(contenders.Contender.of(provider, "bf16", blocks), mode)
        ]

    assert modes("stock-flash_attn") == ["graph", "fused_graph", "compiled"]
    assert modes("plugin") == modes("plugin-fp8") == ["graph"]
    # Compiled blocks with this package's attention, if they are asked for.
    bench.modes = ["graph", "compiled_graph"]
    assert modes("plugin") == ["graph", "compiled_graph"]


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


def test_a_towers_host_time_is_over_its_blocks(monkeypatch):
    monkeypatch.setattr(tower_worker, "host_ms", lambda run: run())
    calls = []

    def run():
        calls.append(1)
        return 81.0

    worker = SimpleNamespace(
        _runs={"host": run, "fused_host": run},
        tower=SimpleNamespace(spec=SimpleNamespace(depth=27)),
    )
    for mode in worker._runs:
        assert tower_worker.Worker.sample(worker, mode, 2, True) == [3.0, 3.0]
    assert len(calls) == 6


def test_a_tower_of_host_rows_counts_no_operations(tmp_path):
    class Remote:
        contender = contenders.Contender.of("plugin", "bf16")

        def call(self, method, *arguments):
            if method == "sample":
                return [0.05] * arguments[1]
            return {"load": "", "check": 0.01}[method]

    log = CsvLog(tmp_path / "host.csv")
    bench = tower_bench.Bench(
        log, ENVIRONMENT, Failures(), ["host"], [], "bf16", 0.0, "tower_host"
    )
    grids = tower_cases.CASES["1x256"]
    bench._run_case("a model", "1x256", grids, [Remote()], "", 1e12, 80)
    with log.path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["bench"], row["mode"], row["tflops"]) == ("tower_host", "host", "0")
    assert (row["p50_ms"], row["rel_err"]) == ("0.0500", "1.00e-02")


def test_metadata_of_a_known_batch_comes_first_and_is_not_timed(monkeypatch):
    prepared = []
    visual = SimpleNamespace(prepare_encoder_metadata=prepared.append)
    worker = SimpleNamespace(tower=SimpleNamespace(visual=visual))

    def host_ms(call):
        call()
        return float(len(prepared))

    monkeypatch.setattr(tower_worker, "host_ms", host_ms)
    batches = [((1, 4, 6),), ((2, 4, 4),) * 2]
    times = tower_worker.Worker.metadata_ms(worker, ((1, 8, 8),), batches)
    assert times == [2.0, 3.0]
    assert prepared == [[[1, 8, 8]], [[1, 4, 6]], [[2, 4, 4], [2, 4, 4]]]


def test_sizes_of_cold_metadata_are_new():
    sizes = {}
    for case, ((_, height, width), *_) in bench_host.METADATA.items():
        sizes[case] = bench_host.other_sizes(height, width, bench_host.METADATA_SAMPLES)
        assert len(set(sizes[case])) == bench_host.METADATA_SAMPLES
        assert (height, width) not in sizes[case]
        assert all(h % 2 == w % 2 == 0 for h, w in sizes[case])
        patches = [h * w for h, w in sizes[case]]
        assert max(patches) <= 1.2 * height * width
        assert min(patches) >= 0.8 * height * width
    # What one case has shown to a process is not new to it in the other.
    assert not set(sizes["1x256"]) & set(sizes["20x400"])


def test_metadata_is_cold_once_and_warm_again_and_again(tmp_path):
    class Remote:
        def __init__(self, provider):
            self.contender = contenders.Contender.of(provider, "bf16")
            self.seen = []

        def call(self, method, known, batches):
            assert method == "metadata_ms" and known == grids
            self.seen += batches
            return [1.0] * len(batches)

    grids = bench_host.METADATA["20x400"]
    log = CsvLog(tmp_path / "host.csv")
    rows = bench_host.Rows(log, ENVIRONMENT)
    remotes = [Remote("stock-flash_attn"), Remote("plugin")]
    bench_host.time_metadata(rows, "a model", 80, remotes, "20x400", grids)
    count = bench_host.METADATA_SAMPLES
    for tower in remotes:
        cold, warm = tower.seen[:count], tower.seen[count:]
        assert len({*cold, grids}) == count + 1
        assert all(len(batch) == 20 and len(set(batch)) == 1 for batch in cold)
        assert warm == [grids] * count
    with log.path.open(newline="") as file:
        found = [(row["bench"], row["case"]) for row in csv.DictReader(file)]
    cases = ["20x400-cold"] * 2 + ["20x400-warm"] * 2
    assert found == [("metadata_host", case) for case in cases]


def test_steps_are_rows_of_their_names(monkeypatch, tmp_path):
    passes = []

    class Tower:
        spec = SimpleNamespace(patch_dim=12)
        running = staticmethod(contextlib.nullcontext)

        def encode(self, pixels, grids):
            passes.append(tuple(pixels.shape))

        def attention_layers(self):
            return {"blocks.0.attn.attn": SimpleNamespace(head_size=72)}

    def steps_of(tower, encode):
        encode()
        return {"norm": lambda: None, "qkv": lambda: None}

    monkeypatch.setattr(bench_host, "build_tower", lambda *args, **kwargs: Tower())
    args = bench_host.parse_args(["--models", "Qwen/Qwen3-VL-8B-Instruct"])
    args.batches = args.calls = 2
    log, failures = CsvLog(tmp_path / "host.csv"), Failures()
    rows = bench_host.Rows(log, ENVIRONMENT)
    bench_host.time_steps(rows, failures, args)
    # Its blocks have no programs.
    assert len(failures.lines) == 1 and not passes
    monkeypatch.setattr(bench_host, "steps_of", steps_of)
    bench_host.time_steps(rows, failures, args)
    assert passes == [(256, 12)]
    with log.path.open(newline="") as file:
        found = list(csv.DictReader(file))
    names = [(row["bench"], row["case"], row["provider"]) for row in found]
    assert names == [("step_host", step, "plugin") for step in ("norm", "qkv")]


def test_each_host_bench_takes_the_cases_that_it_has():
    args = bench_host.parse_args(["--cases", "1x256", "20x400", "4x100"])
    benches = (bench_host.CASES, bench_host.TOWERS, bench_host.METADATA)
    found = [bench_host.cases_of(known, (), args) for known in benches]
    assert found == [["1x256", "4x100"], ["1x256"], ["1x256", "20x400"]]
    args = bench_host.parse_args([])
    assert bench_host.cases_of(bench_host.TOWERS, (), args) == [
        "1x64",
        "1x256",
        "1x1024",
    ]


def test_host_cases_that_no_bench_has_are_refused(monkeypatch):
    argv = ["bench_host.py", "--smoke", "--bench", "tower", "--cases", "20x400"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="20x400"):
        bench_host.main()


@pytest.mark.parametrize(("busy_s", "warns"), [(1.0, False), (5.0, True)])
def test_busy_cores_are_a_warning(monkeypatch, capsys, busy_s, warns):
    # Two seconds of measuring.
    times, work = iter([10.0, 12.0]), iter([100.0, 100.0 + busy_s])
    monkeypatch.setattr(
        host_load, "time", SimpleNamespace(monotonic=lambda: next(times))
    )
    monkeypatch.setattr(host_load, "_busy_s", lambda: next(work))
    with host_load.watched_load():
        pass
    out = capsys.readouterr().out
    assert f"{busy_s / 2:.1f} busy while measuring" in out
    assert f"{len(os.sched_getaffinity(0))} cores" in out
    assert ("warning" in out) == warns


def test_only_the_cores_that_a_process_may_use_count(monkeypatch, tmp_path):
    # User, nice, system, idle, iowait, irq, softirq, steal; in ticks.
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  111 0 0 9 9 0 0 0 0 0\ncpu0 1 2 3 9 9 4 5 6 0 0\n"
        "cpu1 10 0 0 9 9 0 0 0 0 0\ncpu10 100 0 0 9 9 0 0 0 0 0\nctxt 7\n"
    )
    monkeypatch.setattr(host_load, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 10})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    assert host_load._busy_s() == pytest.approx(1.21)


def test_environment_of_a_process_does_not_stay(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.delenv("VLLM_FLASHINFER_VIT_KERNEL", raising=False)
    wanted = {"VLLM_PLUGINS": "", "VLLM_FLASHINFER_VIT_KERNEL": "cudnn"}
    with remote._environment(wanted):
        assert {name: os.environ[name] for name in wanted} == wanted
    assert os.environ["VLLM_PLUGINS"] == "mine"
    assert "VLLM_FLASHINFER_VIT_KERNEL" not in os.environ


def engine_row(**changes):
    return {
        "config": "eager",
        "model": "Qwen/Qwen2.5-VL-7B-Instruct",
        "answered_image": 1,
        "answered_video": 1,
        "answered_multi": 1,
        "rel_err": "1.50e-02",
        "attention_share": "8.00e-01",
        "layer_class": "FlashInferViTAttention",
        "compiled_modules": 0,
        "vllm": "0.25.1",
        **changes,
    }


def test_a_good_engine_is_not_faulted():
    assert engine_check.judge(engine_row()) == []
    compiled = engine_row(
        config="compile_mm_encoder", compiled_modules=34, attention_share=""
    )
    assert engine_check.judge(compiled) == []
    for model, vllm in (("Qwen3-VL-8B", "0.27.1"), ("Qwen2-VL-7B", "0.33.0")):
        row = engine_row(config="compile_mm_encoder", model=model, vllm=vllm)
        assert engine_check.judge(row) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"answered_video": 0}, "video"),
        ({"layer_class": "MMEncoderAttention"}, "MMEncoderAttention"),
        ({"rel_err": "9.00e-02"}, "differ"),
        ({"rel_err": "nan"}, "differ"),
        ({"rel_err": ""}, "unknown"),
        ({"attention_share": "1.00e-06"}, "makes up only"),
        ({"config": "compile_mm_encoder"}, "compiled"),
        (
            {
                "config": "compile_mm_encoder",
                "model": "Qwen/Qwen3-VL-8B-Instruct",
                "vllm": "0.33.0",
            },
            "compiled",
        ),
    ],
)
def test_engine_faults_are_named(changes, fault):
    assert fault in "".join(engine_check.judge(engine_row(**changes)))


def test_compiled_engine_is_compared_with_eager_stock_once():
    jobs = engine_check.jobs_for(["m"], ["eager", "compile_mm_encoder", "tp2"])
    assert [(job.config, job.provider) for job in jobs] == [
        ("eager", "stock-flash_attn"),
        ("eager", "plugin"),
        ("compile_mm_encoder", "plugin"),
        ("tp2", "stock-flash_attn"),
        ("tp2", "plugin"),
    ]


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has real cases")
def test_attention_benchmark_runs_on_the_cpu(tmp_path):
    output = tmp_path / "attention.csv"
    script = [sys.executable, str(BENCHMARKS / "bench_attention.py"), "--smoke"]
    options = ["--cases", "ragged", "--head-dims", "72", "--output", str(output)]
    subprocess.run([*script, *options], check=True, timeout=300)
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


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has real cases")
def test_host_benchmark_runs_on_the_cpu(tmp_path):
    output = tmp_path / "host.csv"
    script = [sys.executable, str(BENCHMARKS / "bench_host.py"), "--smoke"]
    options = ["--models", "Qwen/Qwen2.5-VL-7B-Instruct", "--depth", "1"]
    options += ["--batches", "4", "--calls", "2", "--budget-s", "0.1"]
    subprocess.run(
        [*script, *options, "--output", str(output)], check=True, timeout=300
    )
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["bench"], row["case"], row["provider"]) for row in rows] == [
        (bench, case, provider)
        for bench, case in (
            ("host", "2x24"),
            ("tower_host", "1x64"),
            ("metadata_host", "1x64-cold"),
            ("metadata_host", "1x64-warm"),
        )
        for provider in ("stock-torch_sdpa", "plugin")
    ]
    assert all(row["mode"] == "host" and row["tflops"] == "0" for row in rows)
    assert all(0 < float(row["p20_ms"]) <= float(row["p80_ms"]) for row in rows)
