# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic, files and cases; nothing here is timed."""

import csv
import dataclasses
import functools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_attention  # noqa: E402
import bench_encoder  # noqa: E402
import common  # noqa: E402
import engine_check  # noqa: E402
import graph_check  # noqa: E402
import table  # noqa: E402
import waterfall  # noqa: E402
from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402

ENVIRONMENT = common.Environment(
    gpu="NVIDIA H200",
    vllm="0.25.1",
    torch="2.11.0",
    triton="3.6.0",
    flashinfer="0.6.13",
    cudnn="9.19.0",
    commit="abc1234",
    command="python benchmarks/bench_encoder.py",
)


def make_row(**changes):
    arguments = {
        "bench": "encoder",
        "case": "1x4096",
        "provider": "plugin",
        "model": "Qwen/Qwen3-VL-8B-Instruct",
        "head_dim": 72,
        "dtype": "bf16",
        "mode": "graph",
        "samples_ms": [2.0, 1.0, 3.0],
        "flops": 4e12,
        "rel_err": 0.0123,
        **changes,
    }
    return common.result_row(ENVIRONMENT, **arguments)


def test_columns_are_the_published_ones():
    assert ",".join(common.COLUMNS) == (
        "bench,case,provider,model,head_dim,dtype,mode,p20_ms,p50_ms,p80_ms,tflops,"
        "rel_err,gpu,vllm,torch,triton,flashinfer,cudnn,commit,command"
    )
    assert tuple(make_row()) == common.COLUMNS


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
    grids = bench_encoder.CASES[case]
    assert sum(math.prod(grid) for grid in grids) == patches
    assert all(h % 2 == w % 2 == 0 for _, h, w in grids)
    frames = [h * w for t, h, w in grids for _ in range(t)]
    assert tuple(frames) == bench_attention.CASES[case]


def test_encoder_cases_are_complete():
    assert len(bench_encoder.CASES) == 11
    assert len(bench_encoder.CASES["mixed"]) == 6
    assert set(bench_attention.CASES) == {
        *bench_encoder.CASES,
        "win64x256",
        "win64x1024",
    }
    assert bench_attention.CASES["win64x256"] == (64,) * 256


def test_sweep_stays_within_its_bounds_and_reaches_them():
    cases = dict(bench_attention.sweep_cases())
    assert {"1x16", "1024x16", "1x65536", "32x4096"} <= set(cases)
    assert max(sum(lens) for lens in cases.values()) == 2**17
    assert len(cases) == len(set(cases.values()))


def test_fp8_has_a_gate_of_its_own():
    assert bench_attention.gate("plugin-cudnn_fp8", "bf16") == common.FP8_GATE
    assert bench_attention.gate("plugin-fp8", "fp16") == common.FP8_GATE
    assert bench_attention.gate("plugin-cudnn", "bf16") == common.GATES["bf16"]


def test_percentiles_of_a_known_list():
    assert common.percentiles([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == (2.0, 3.5, 5.0)
    assert common.percentiles([7.0]) == (7.0, 7.0, 7.0)


@given(st.lists(st.floats(0.001, 1e4), min_size=2, max_size=50))
def test_percentiles_are_ordered_and_inside(samples):
    p20, p50, p80 = common.percentiles(samples)
    inside = (min(samples), p20, p50, p80, max(samples))
    assert all(a <= b + 1e-9 * abs(b) for a, b in zip(inside, inside[1:], strict=False))


def test_tflops_are_operations_over_the_median():
    flops = common.attention_flops([16384], num_heads=16, head_dim=80)
    assert flops == 4 * 16 * 80 * 16384 * 16384
    # 2.44 ms for one sequence of 16384 tokens are 563 TFLOP/s.
    row = make_row(samples_ms=[2.44, 2.44, 9.0], flops=flops)
    assert float(row["tflops"]) == pytest.approx(563.2, rel=1e-3)
    assert row["p50_ms"] == "2.4400"


def test_sequences_do_not_attend_to_each_other_in_the_flops():
    one = common.attention_flops([128], 16, 80)
    assert common.attention_flops([64, 64], 16, 80) == one // 2


def test_relative_error_is_of_norms():
    ref = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    off = ref + torch.tensor([[0.0, 0.3], [0.4, 0.0]])
    assert common.relative_error(off, ref) == pytest.approx(0.1, rel=1e-5)
    assert common.relative_error(ref.bfloat16(), ref) == 0.0
    with pytest.raises(common.WrongResultError, match=r"\(1, 2\).*\(2, 2\)"):
        common.relative_error(ref[:1], ref)


@pytest.mark.parametrize("rel_err", [0.3, math.nan, math.inf])
def test_gate_refuses_wrong_and_undefined_results(rel_err):
    with pytest.raises(common.WrongResultError):
        common.check_error(rel_err, 0.2)
    common.check_error(0.2, 0.2)


def test_fp32_reference_attends_within_each_sequence():
    lens = (5, 0, 1, 18)
    problem = bench_attention.make_problem(
        lens, 16, torch.bfloat16, torch.device("cpu")
    )
    q, k, v = problem.parts()
    rows, out = common.attention_fp32(q, k, v, lens, problem.scale)
    assert rows.tolist() == list(range(24))
    heads = [x.double().transpose(0, 1) for x in (q, k, v)]
    mask = torch.block_diag(*(torch.ones(n, n) for n in lens if n)).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=problem.scale
    )
    torch.testing.assert_close(out, expected.transpose(0, 1).float())

    some, part = common.attention_fp32(q, k, v, lens, problem.scale, 2, 3)
    assert some.tolist() == [0, 2, 4, 6, 14, 23]
    torch.testing.assert_close(part, out[some])


def test_v_is_a_view_of_the_projection():
    problem = bench_attention.make_problem((4,), 8, torch.float16, torch.device("cpu"))
    assert problem.v.data_ptr() > problem.qkv.data_ptr()
    assert problem.v.stride() == (3 * 16 * 8, 8, 1)
    assert problem.q.is_contiguous()


def test_csv_rows_are_on_disk_at_once_and_appended(tmp_path):
    path = tmp_path / "new" / "encoder.csv"
    common.CsvLog(path).add(make_row(case="1x256"))
    log = common.CsvLog(path)
    log.add(make_row(case="1x1024"))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["1x256", "1x1024"]
    assert rows[0]["command"] == ENVIRONMENT.command


def test_csv_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("bench,case\nencoder,1x256\n")
    with pytest.raises(ValueError, match="bench,case"):
        common.CsvLog(path)
    assert path.read_text() == "bench,case\nencoder,1x256\n"


def test_csv_row_must_have_all_columns(tmp_path):
    log = common.CsvLog(tmp_path / "a.csv")
    row = make_row()
    del row["rel_err"]
    with pytest.raises(ValueError, match="rel_err"):
        log.add(row)
    with pytest.raises(ValueError, match="speed"):
        log.add({**make_row(), "speed": 1})


def test_command_line_leaves_out_where_rows_go():
    argv = ["/somewhere/bench_encoder.py", "--output", "/x/a.csv", "--cases", "1x256"]
    expected = "python benchmarks/bench_encoder.py --cases 1x256"
    assert common.command_line(argv) == expected
    argv[1:3] = ["--output=/x/a.csv", "--logs", "/x/logs"]
    assert common.command_line(argv) == expected


def test_cpu_times_do_not_become_results():
    with pytest.raises(SystemExit, match="--output"):
        common.results_path("encoder", "none", None)
    assert common.results_path("encoder", "none", "a.csv") == Path("a.csv")
    path = common.results_path("encoder", "NVIDIA H200", None)
    assert path == BENCHMARKS / "results" / "h200" / "encoder.csv"


def test_commit_can_be_told(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    assert common.commit() == "0123abc"


def test_a_failure_is_noted_and_the_rest_goes_on(capsys):
    failures = common.Failures()
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
    samples = common.take_turns(clock, runs, "graph", budget_s=0.0, least=5, most=9)
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

    bench = bench_encoder.Bench(None, None, None, ["graph"], [], "bf16", 0.0)
    remotes = [Remote(name) for name in "abc"]
    samples = bench._take_turns(remotes, "graph")
    assert [len(samples[remote]) for remote in remotes] == [6, 6, 6]
    assert "".join(asked) == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac"


def test_rounds_follow_the_budget_within_bounds():
    assert common.rounds_within(10.0, budget_s=0.5) == 50
    assert common.rounds_within(1000.0, budget_s=0.5) == 7
    assert common.rounds_within(0.001, budget_s=0.5) == 100


def test_stock_runs_without_plugins_and_forced_kernels_by_setting():
    of = bench_encoder.Contender.of
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
    with pytest.raises(ValueError, match="stock"):
        of("stock", "bf16")


def test_modes_name_how_the_blocks_run():
    blocks = [bench_encoder._blocks(mode) for mode in bench_encoder.MODES]
    assert list(dict.fromkeys(blocks)) == list(bench_encoder.BLOCKS)
    assert blocks == [name for name in bench_encoder.BLOCKS for _ in range(2)]


def test_only_stock_runs_in_modes_of_its_own():
    bench = bench_encoder.Bench(
        None, None, None, ["graph"], ["fused_graph", "compiled"], "bf16", 1.0
    )

    def modes(provider):
        return [
            mode
            for blocks in bench_encoder.BLOCKS
            for mode in bench_encoder.MODES
            if bench.runs(bench_encoder.Contender.of(provider, "bf16", blocks), mode)
        ]

    assert modes("stock-flash_attn") == ["graph", "fused_graph", "compiled"]
    assert modes("plugin") == modes("plugin-fp8") == ["graph"]


def test_environment_of_a_process_does_not_stay(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.delenv("VLLM_FLASHINFER_VIT_KERNEL", raising=False)
    wanted = {"VLLM_PLUGINS": "", "VLLM_FLASHINFER_VIT_KERNEL": "cudnn"}
    with bench_encoder._environment(wanted):
        assert {name: os.environ[name] for name in wanted} == wanted
    assert os.environ["VLLM_PLUGINS"] == "mine"
    assert "VLLM_FLASHINFER_VIT_KERNEL" not in os.environ


def test_best_of_all_modes():
    rows = [
        make_row(provider="stock-flash_attn", mode="eager", samples_ms=[6.0]),
        make_row(provider="stock-flash_attn", mode="compiled_graph", samples_ms=[4.0]),
        make_row(provider="stock-flashinfer", mode="graph", samples_ms=[5.0]),
        make_row(provider="plugin", mode="eager", samples_ms=[9.0]),
        # Measured again: the newer row counts, though it is slower.
        make_row(provider="plugin", mode="graph", samples_ms=[1.0]),
        make_row(provider="plugin", mode="graph", samples_ms=[2.0]),
        make_row(case="mixed", provider="stock-flash_attn", samples_ms=[1.0]),
        make_row(case="mixed", provider="plugin", samples_ms=[2.0]),
        make_row(case="1x256", provider="plugin"),
    ]
    lines = table.best_table(rows).splitlines()
    model = rows[0]["model"]
    assert lines[2:] == [
        f"| {model} | 1x4096 | 4 | flash_attn compiled_graph | 2 | 2.00 |",
        f"| {model} | mixed | 1 | flash_attn graph | 2 | 0.50 |",
        f"| {model} | geometric mean | | |  | 1.00 |",
    ]
    rows.append(make_row(provider="plugin-fp8", samples_ms=[1.0]))
    lines = table.best_table(rows).splitlines()
    assert lines[2].endswith("| 2 | 2.00 | 1 | 4.00 |")
    assert lines[3].endswith("| 2 | 0.50 | - |  |")
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("_quantize_blocks_kernel", "quantizer"),
        ("_rope_kernel", "rotary"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16>", "rotary"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("_window_kernel", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "GEMM"),
        ("_sum_norm_kernel", "norm"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("void at::native::reduce_kernel<512, 1, MeanOps<float>>", "norm"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "activation"),
        ("at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)", "activation"),
        ("void at::native::CatArrayBatchedCopy_vectorized<...>", "copy"),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", "addition"),
        ("BinaryFunctor<float, float, float, MulFunctor<float>>", waterfall.OTHER),
    ],
)
def test_kernels_are_told_apart(kernel, name):
    assert waterfall.class_of(kernel) == name


def test_class_times_are_sums():
    kernels = {"nvjet_a": 2.0, "_rope_kernel": 0.5, "nvjet_b": 1.0, "odd": 4.0}
    assert waterfall.class_times(kernels) == {
        "rotary": (0.5, 1),
        "GEMM": (3.0, 2),
        waterfall.OTHER: (4.0, 1),
    }


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
        **changes,
    }


def test_a_good_engine_is_not_faulted():
    assert engine_check.judge(engine_row()) == []
    compiled = engine_row(
        config="compile_mm_encoder", compiled_modules=34, attention_share=""
    )
    assert engine_check.judge(compiled) == []


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


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    import plot

    return plot


@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_figure_from_a_csv(plot, tmp_path, kind):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    log = common.CsvLog(source)
    # 1x256 of the plugin is missing: a provider that cannot run leaves a gap.
    for provider, case in [
        ("stock-flash_attn", "1x256"),
        ("stock-flash_attn", "mixed"),
        ("plugin", "mixed"),
    ]:
        log.add(make_row(provider=provider, case=case))
    plot.draw(kind, source, target, None)
    svg = target.read_text()
    for text in ("stock-flash_attn", "plugin", "1x256", "mixed", "NVIDIA H200"):
        assert text in svg
    first = target.read_bytes()
    plot.draw(kind, source, target, ["graph"])
    assert target.read_bytes() == first
    with pytest.raises(ValueError, match="eager"):
        plot.draw(kind, source, target, ["eager"])


def test_equal_times_are_equal_speeds(plot):
    # 119.4 * 1.2507 / 1.2507 is above 119.4, and matplotlib refuses such an error bar.
    row = {"case": "a", "provider": "b", "tflops": "119.4"}
    row |= dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), "1.2507")
    (span,) = plot._speeds([row])
    assert span.low == span.middle == span.high == 119.4


def test_waterfall_from_a_csv(plot, tmp_path):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    columns = (*waterfall.COLUMNS, *waterfall.ENVIRONMENT_COLUMNS)
    log = common.CsvLog(source, columns)
    with pytest.raises(ValueError, match="no rows"):
        waterfall.draw(source, target)
    for provider, name, time_ms in [
        ("stock-flash_attn", "GEMM", 20.0),
        ("stock-flash_attn", "norm", 10.0),
        ("plugin", "GEMM", 16.0),
    ]:
        values = ("a model", "8x4096", provider, "eager", "bf16", name, time_ms, 1)
        row = dict(zip(waterfall.COLUMNS, values, strict=True))
        log.add({**row, **dataclasses.asdict(ENVIRONMENT)})
    waterfall.draw(source, target)
    svg = target.read_text()
    for text in ("stock-flash_attn", "plugin", "GEMM", "norm", "a model, 8x4096", "30"):
        assert text in svg
    assert "rotary" not in svg
    first = target.read_bytes()
    waterfall.draw(source, target)
    assert target.read_bytes() == first


def test_the_last_of_repeated_rows_is_drawn(plot, tmp_path):
    path = tmp_path / "rows.csv"
    log = common.CsvLog(path)
    log.add(make_row(samples_ms=[1.0]))
    log.add(make_row(samples_ms=[3.0]))
    (row,) = plot.read_rows(path)
    assert row["p50_ms"] == "3.0000"


def test_other_files_are_not_drawn(plot, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        plot.read_rows(path)
    common.CsvLog(tmp_path / "empty.csv")
    with pytest.raises(ValueError, match="no rows"):
        plot.read_rows(tmp_path / "empty.csv")


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
        limit = common.FP8_GATE if "fp8" in row["provider"] else 0.01
        assert 0 < float(row["rel_err"]) < limit
    assert all(0 < float(row["p20_ms"]) <= float(row["p80_ms"]) for row in rows)


def test_mixtures_are_seeded_and_fit() -> None:
    requests = graph_check.mixtures(300, seed=0)
    assert requests == graph_check.mixtures(300, seed=0)
    assert requests != graph_check.mixtures(300, seed=1)
    assert {modality for modality, _ in requests} == {"image", "video"}
    for _, grids in requests:
        assert 0 < graph_check.patches(grids) <= 4 * graph_check.MAX_TOKENS
        assert all(h % 2 == w % 2 == 0 for _, h, w in grids)


def test_fine_budgets_pad_the_mixtures_little() -> None:
    from vllm_flashinfer_vit.graphs.sizes import fine_budgets

    tokens = [
        graph_check.patches(grids) // 4 for _, grids in graph_check.mixtures(300, 0)
    ]
    budgets = fine_budgets(64, graph_check.MAX_TOKENS)
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
    equal = graph_check.Found(0.0, True, 0.0, True, 80, 50, 6, 1)
    other = graph_check.Found(math.nan, False, 1e-3, False, 20, 20, 1, 0)
    assert graph_check.summary([equal, equal, other]) == {
        "padded_over_real": "1.5000",
        "graph_hits": 13,
        "graph_misses": 2,
        "rel_err": "nan",
        "bitwise": "0.667",
        "same_kernel_rel_err": "1.00e-03",
        "same_kernel_bitwise": "0.667",
    }
    without_graphs = equal._replace(padded=0, real=0)
    assert graph_check.summary([without_graphs])["padded_over_real"] == ""


@pytest.fixture
def unpatched() -> Iterator[None]:
    yield
    from vllm_flashinfer_vit import patches

    for patch in reversed(patches.all_patches()):
        patch.revert()


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is the GPU here")
@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("model", graph_check.MODELS)
def test_graphs_are_compared_by_their_kernels(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
    from vllm_flashinfer_vit.ops import attention as ops

    # Another result by kernel, and by the bound that the kernel is given.
    def attend(name, q, k, v, cu_seqlens, max_seqlen, scale):
        factor = 1 + len(name) / 100 + max_seqlen / 10000
        return attention_ref(q, k, factor * v, cu_seqlens, max_seqlen, scale)

    monkeypatch.setattr(ops, "_kernel", lambda name: functools.partial(attend, name))
    tower = graph_check.small_tower(graph_check.Job(model, "limits", "plugin"))
    for layer in tower.attention_layers().values():
        layer._plan = "20:reference,100:triton,*:flash_attn"
    # Graphs of 64 and 256 patches hold all but the last image, which is too large.
    grids = [[1, 10, 12], *[[1, 4, 4]] * 5, [1, 18, 18]]
    with simulated_graphs(), tower.running(), torch.inference_mode():
        manager = build_manager(tower, max_tokens=256, budgets=(16, 64), max_items=4)
        capture(manager, tower)
        encoder = graph_check.Encoder(
            manager, manager.model.wrapped, torch.device("cpu")
        )
        inputs = encoder.inputs(("image", grids), 0)
        with encoder.batches() as batches:
            encoder.graph(inputs)
        found = graph_check.compare(encoder, inputs)
        graph = encoder.graph
        monkeypatch.setattr(encoder, "graph", lambda inputs: graph(inputs).flip(0))
        wrong = graph_check.compare(encoder, inputs)
    served = [(batch.items, batch.graph and batch.graph.patches) for batch in batches]
    assert served == [([1, 2, 3, 4], 64), ([5, 0], 256), ([6], None)]
    assert found.rel_err > 1e-4
    assert not found.bitwise
    assert found[2:] == (0.0, True, 80, 50, 6, 1)
    assert wrong.same_kernel_rel_err > graph_check.GATE


def test_totals_are_of_common_prefixes() -> None:
    assert graph_check.prefixes(300) == [100, 200, 300]
    assert graph_check.prefixes(250) == [100, 200, 250]
    assert graph_check.prefixes(8) == [8]


def test_gpus_are_named_as_the_environment_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert graph_check.gpus_to_use(2, smoke=False) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert graph_check.gpus_to_use(1, smoke=False) == ["5"]
    with pytest.raises(SystemExit, match="--gpus 3, but there are 2"):
        graph_check.gpus_to_use(3, smoke=False)
    assert graph_check.gpus_to_use(3, smoke=True) == ["0", "1", "2"]


def test_finished_engines_are_not_started_again(tmp_path: Path) -> None:
    path = tmp_path / "graphs.csv"
    job = graph_check.Job("Qwen/Qwen3-VL-8B-Instruct", "limits", "plugin")
    log = common.CsvLog(path, graph_check.COLUMNS)
    row = dict.fromkeys(graph_check.COLUMNS, "")
    row |= {"commit": "abc", "model": job.model, "config": job.config}
    log.add({**row, "provider": job.provider, "case": "image 16x16"})
    assert graph_check.finished(path, "abc") == set()
    log.add({**row, "provider": job.provider, "case": "random mixtures"})
    assert graph_check.finished(path, "abc") == {job}
    assert graph_check.finished(path, "def") == set()


def test_stock_is_timed_where_it_is_right() -> None:
    jobs = graph_check.jobs_for(graph_check.MODELS, tuple(graph_check.CONFIGS))
    assert len(jobs) == 12
    assert {j.config for j in jobs if j.provider != "plugin"} == {"automatic"}
