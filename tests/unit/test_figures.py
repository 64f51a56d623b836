# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and the files that they come from."""

import dataclasses

import pytest
from _benchmarks import ENVIRONMENT, make_row

import bench_tables
import chosen_rows
import engine_tables
import prune
import table
import waterfall
from csv_log import CsvLog
from environment import ENVIRONMENT_COLUMNS


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
    lines = bench_tables.best_table(rows).splitlines()
    model = rows[0]["model"]
    assert lines[2:] == [
        f"| {model} | 1x4096 | 4 | flash_attn compiled_graph | 2 | 2.00 |",
        f"| {model} | mixed | 1 | flash_attn graph | 2 | 0.50 |",
        f"| {model} | geometric mean |  |  |  | 1.00 |",
    ]
    rows.append(make_row(provider="plugin-fp8", samples_ms=[1.0]))
    lines = bench_tables.best_table(rows).splitlines()
    assert lines[2].endswith("| 2 | 2.00 | 1 | 4.00 |")
    assert lines[3].endswith("| 2 | 0.50 | - |  |")
    assert len({line.count("|") for line in lines}) == 1


def test_quantised_towers_are_compared_with_each_other():
    rows = [
        make_row(provider="stock-flash_attn", samples_ms=[2.0]),
        make_row(provider="stock-flash_attn-q8", samples_ms=[6.0]),
        make_row(provider="stock-flashinfer-q8", mode="eager", samples_ms=[1.0]),
        make_row(provider="plugin", samples_ms=[4.0]),
        make_row(provider="plugin-q8", samples_ms=[3.0]),
        make_row(provider="plugin-fp8-q8", samples_ms=[1.0]),
    ]
    line = table.KINDS["best_quantized"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 6 | flash_attn-q8 graph | 3 | 2.00 | 1 | 6.00 |")
    line = table.KINDS["best"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 2 | flash_attn graph | 4 | 0.50 |")
    with pytest.raises(chosen_rows.NoRowsError):
        table.KINDS["best_quantized_eager"](rows)


def test_best_without_graphs():
    rows = [
        make_row(provider="stock-flash_attn", mode="graph", samples_ms=[1.0]),
        make_row(provider="stock-flash_attn", mode="host", samples_ms=[0.1]),
        make_row(provider="stock-flash_attn", mode="eager", samples_ms=[8.0]),
        make_row(provider="stock-flashinfer", mode="fused", samples_ms=[6.0]),
        make_row(provider="stock-flash_attn4", mode="compiled", samples_ms=[4.0]),
        make_row(provider="plugin", mode="eager", samples_ms=[2.0]),
        # Blocks that vLLM compiled are not the package's own mode.
        make_row(provider="plugin", mode="compiled", samples_ms=[1.0]),
        make_row(provider="plugin", mode="graph", samples_ms=[0.5]),
    ]
    line = table.KINDS["best_eager"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 4 | flash_attn4 compiled | 2 | 2.00 |")
    compiled = make_row(provider="plugin", mode="compiled_graph", samples_ms=[0.1])
    line = table.KINDS["best"]([*rows, compiled]).splitlines()[2]
    assert line.endswith("| 1x4096 | 1 | flash_attn graph | 0.5 | 2.00 |")


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("best", "eager"), ("best_eager", "graph"), ("modes", "host"), ("best", "host")],
)
def test_a_table_of_another_mode_than_the_rows_is_none(kind, mode):
    rows = [
        make_row(provider=provider, mode=mode)
        for provider in ("stock-flash_attn", "plugin")
    ]
    with pytest.raises(chosen_rows.NoRowsError, match="no rows"):
        table.KINDS[kind](rows)
    with pytest.raises(chosen_rows.NoRowsError, match="no rows"):
        engine_tables.summary_table([make_row(mode="eager")], [graph_row()])


def test_all_contenders_and_modes_beside_each_other():
    rows = [
        make_row(provider="stock-flash_attn", samples_ms=[4.0]),
        make_row(provider="stock-flash_attn", mode="eager", samples_ms=[10.0]),
        make_row(provider="stock-flash_attn4", mode="compiled_graph", samples_ms=[3.0]),
        make_row(provider="plugin", samples_ms=[2.0]),
        make_row(provider="plugin", mode="compiled_graph", samples_ms=[1.0]),
        make_row(provider="plugin", mode="eager", samples_ms=[5.0]),
        make_row(provider="plugin", mode="host", samples_ms=[0.1]),
        make_row(case="mixed", provider="stock-flash_attn", samples_ms=[1.0]),
        make_row(case="mixed", provider="plugin", samples_ms=[1.9]),
        # Nothing to compare with.
        make_row(case="1x256", provider="plugin", samples_ms=[9.0]),
        {**make_row(provider="stock-flashinfer", samples_ms=[1.0]), "commit": "old"},
    ]
    assert bench_tables.modes_table(rows).splitlines()[2:] == [
        "| Qwen3-VL-8B | plugin | eager | 1 | 0.50 |",
        "| Qwen3-VL-8B | stock-flash_attn | eager | 1 | 1.00 |",
        "| Qwen3-VL-8B | plugin | compiled_graph | 1 | 0.25 |",
        "| Qwen3-VL-8B | stock-flash_attn4 | compiled_graph | 1 | 0.75 |",
        "| Qwen3-VL-8B | plugin | graph | 2 | 0.97 |",
        "| Qwen3-VL-8B | stock-flash_attn | graph | 2 | 1.00 |",
    ]


def test_modes_of_equal_text_are_in_the_order_of_their_times():
    rows = [
        make_row(provider="stock-flash_attn", samples_ms=[100.0]),
        make_row(provider="plugin", samples_ms=[50.3]),
        make_row(provider="plugin-fp8", samples_ms=[50.1]),
    ]
    lines = bench_tables.modes_table(rows).splitlines()[2:4]
    assert [line.split(" | ")[1] for line in lines] == ["plugin-fp8", "plugin"]
    assert all(line.endswith("| 0.50 |") for line in lines)


def graph_row(
    case="first 40 random mixtures", provider="plugin", config="automatic", **changes
):
    return {
        "config": config,
        "provider": provider,
        "model": "Qwen/Qwen3-VL-8B-Instruct",
        "case": case,
        "p50_ms": "2",
        "total_ms": "500.4",
        "padded_over_real": "",
        "commit": "new",
        **changes,
    }


def test_engines_are_compared_over_the_mixtures_that_all_of_them_timed():
    stock, plugin, fp8 = {"provider": "stock-flash_attn"}, {}, {"config": "fp8"}
    timed = [(9, stock), (9, plugin), (9, fp8), (40, plugin), (40, fp8)]
    rows = [
        graph_row(f"first {count} random mixtures", total_ms=str(10 * count), **engine)
        for count, engine in [*timed, (100, stock), (100, plugin)]
    ]
    rows.append(graph_row(total_ms="800", **stock))
    # What engines of no line timed does not count.
    rows.append(graph_row("first 5 random mixtures", config="encoder_only"))
    rows.append(graph_row("image 16x16", **fp8))
    for padded, commit in (("1.5", "new"), ("9", "of another run than the total")):
        rows.append(
            graph_row("random mixtures", padded_over_real=padded, commit=commit)
        )
    assert engine_tables.shared_mixtures(rows) == "first 40 random mixtures"
    head, _, *lines = engine_tables.graph_table(rows).splitlines()
    assert "| first 40 random mixtures | speed-up | computed" in head
    missing = "| - | - | - | -"
    assert lines == [
        f"| Qwen3-VL-8B | stock-flash_attn | - {missing} | 800 |  | - |",
        f"| Qwen3-VL-8B | plugin | - {missing} | 400 | 2.00 | 1.50 |",
        f"| Qwen3-VL-8B | plugin, FP8 | 2 {missing} | 400 | 2.00 | - |",
    ]
    encoder = [make_row(provider="stock-flash_attn"), make_row()]
    assert "40 random requests" in engine_tables.summary_table(encoder, rows)
    apart = [graph_row("first 9 random mixtures"), graph_row(**stock)]
    with pytest.raises(chosen_rows.NoRowsError, match="random mixtures"):
        engine_tables.graph_table(apart)


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


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    import plot

    return plot


@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_figure_from_a_csv(plot, tmp_path, kind):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    log = CsvLog(source)
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
    log = CsvLog(source, columns)
    with pytest.raises(chosen_rows.NoRowsError, match="measure"):
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


def host_rows(*, tower_case="1x256", steps=("norm", "qkv", "attention")):
    towers = [
        ("stock-flash_attn", "host", 0.307),
        ("stock-flash_attn", "fused_host", 0.2),
    ]
    towers.append(("plugin", "host", 0.05))
    changes = [
        {"provider": provider, "mode": mode, "samples_ms": [p50]}
        for provider, mode, p50 in towers
    ]
    rows = [make_row(bench="tower_host", case=tower_case, **row) for row in changes]
    for index, step in enumerate(steps):
        time_ms = 0.01 * (index + 1)
        rows.append(
            make_row(bench="step_host", case=step, mode="host", samples_ms=[time_ms])
        )
    # One layer's time, and another case's tower: neither is drawn.
    rows.append(make_row(bench="host", case="1x256", mode="host", samples_ms=[0.777]))
    rows.append(
        make_row(bench="tower_host", case="1x64", mode="host", samples_ms=[0.888])
    )
    return rows


def write_rows(path, rows):
    log = CsvLog(path)
    for row in rows:
        log.add(row)
    return path


def test_host_figure_from_a_csv(plot, tmp_path):
    source = write_rows(tmp_path / "host.csv", host_rows())
    target = tmp_path / "figures" / "host.svg"
    plot.draw("host", source, target, None)
    svg = target.read_text()
    for text in ("stock-flash_attn, fused ops", "norm", "qkv", "attention", "307"):
        assert text in svg
    # The steps' sum stands at the end of their bar.
    assert ">60<" in svg
    assert "777" not in svg and "888" not in svg
    for provider in ("stock-flash_attn", "plugin"):
        assert plot.COLOURS[provider].lower() in svg
    for colour in waterfall.CLASS_COLOURS[:3]:
        assert colour.lower() in svg
    first = target.read_bytes()
    plot.draw("host", source, target, None)
    assert target.read_bytes() == first


def test_host_figure_needs_towers_and_steps_of_one_case(plot, tmp_path):
    target = tmp_path / "host.svg"
    for name, rows in (
        ("other.csv", host_rows(tower_case="1x1024")),
        ("no_steps.csv", host_rows(steps=())),
    ):
        source = write_rows(tmp_path / name, rows)
        with pytest.raises(ValueError, match="1x256 and of step_host"):
            plot.draw("host", source, target, None)
    source = write_rows(
        tmp_path / "many.csv", host_rows(steps=tuple(map(str, range(10))))
    )
    with pytest.raises(ValueError, match="10 steps, but 9 colours"):
        plot.draw("host", source, target, None)
    assert not target.exists()


def test_host_table_is_of_one_bench(tmp_path):
    path = str(write_rows(tmp_path / "host.csv", host_rows()))
    assert table.render(["host", path]).splitlines()[2].endswith("| 777 |")
    lines = table.render(["host", path, "--bench", "tower_host"]).splitlines()
    assert lines[2].endswith("| 1x256 | abc1234 | 307 | 50 |")
    assert lines[3].endswith("| 1x64 | abc1234 | - | 888 |")
    options = ["--bench", "tower_host", "--mode", "fused_host"]
    assert table.render(["host", path, *options]).endswith("| 200 |")


def test_the_last_of_repeated_rows_is_drawn(plot, tmp_path):
    path = tmp_path / "rows.csv"
    log = CsvLog(path)
    log.add(make_row(samples_ms=[1.0]))
    log.add(make_row(samples_ms=[3.0]))
    (row,) = plot.read_rows(path)
    assert row["p50_ms"] == "3.0000"


def test_other_files_are_not_drawn(plot, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        plot.read_rows(path)
    CsvLog(tmp_path / "empty.csv")
    with pytest.raises(chosen_rows.NoRowsError, match="measure"):
        plot.read_rows(tmp_path / "empty.csv")


def test_rows_of_two_commits_are_not_compared():
    stock = make_row(provider="stock-flash_attn", samples_ms=[4.0])
    old = {**make_row(samples_ms=[1.0]), "commit": "old"}
    assert chosen_rows.speed_up(stock, make_row(samples_ms=[2.0])) == 2.0
    assert chosen_rows.speed_up(stock, old) is None
    assert chosen_rows.speed_up(None, old) is None
    assert "| 4 | 1 |  |" in bench_tables.case_table([stock, old], "model")
    # A mode that nobody measured again does not win by being old.
    stale = {**make_row(mode="fused_graph", samples_ms=[0.1]), "commit": "old"}
    best = chosen_rows.Best([stale, stock, make_row(samples_ms=[2.0])])
    assert best.mean(chosen_rows.PLUGIN, stock["model"]) == "2.00"


def test_tables_are_of_one_vllm(tmp_path):
    path = tmp_path / "encoder.csv"
    log = CsvLog(path)
    log.add(make_row())
    log.add({**make_row(samples_ms=[1.0]), "vllm": "0.33.0"})
    with pytest.raises(SystemExit, match="--vllm"):
        table.render(["encoder", str(path)])
    assert "| 1 |" in table.render(["encoder", str(path), "--vllm", "0.33.0"])
    with pytest.raises(SystemExit, match="no such rows"):
        table.render(["encoder", str(path), "--vllm", "0.1"])


def test_figures_are_of_one_vllm(plot, tmp_path):
    source, target = tmp_path / "rows.csv", tmp_path / "a.svg"
    log = CsvLog(source)
    log.add(make_row())
    log.add({**make_row(), "vllm": "0.33.0", "quack": "0.6.5"})
    with pytest.raises(SystemExit, match="--vllm"):
        plot.draw("encoder", source, target, None)
    plot.draw("encoder", source, target, None, vllm="0.25.1")
    assert "vLLM 0.25.1" in (svg := target.read_text())
    assert "QuACK 0.5.0" in svg and "0.33.0" not in svg
    columns = (*waterfall.COLUMNS, *ENVIRONMENT_COLUMNS)
    values = {**make_row(), "blocks": "eager", "class": "GEMM", "ms": 1, "kernels": 1}
    log = CsvLog(tmp_path / "waterfall.csv", columns)
    for vllm in ("0.25.1", "0.33.0"):
        log.add({name: {**values, "vllm": vllm}[name] for name in columns})
    with pytest.raises(SystemExit, match="--vllm"):
        waterfall.draw(log.path, target)
    waterfall.draw(log.path, target, "0.33.0")
    assert "vLLM 0.33.0" in target.read_text()
    with pytest.raises(chosen_rows.NoRowsError, match="no such rows of vLLM 0.1"):
        waterfall.draw(log.path, target, "0.1")
    with pytest.raises(chosen_rows.NoRowsError, match="no such rows of vLLM 0.1"):
        plot.draw("encoder", source, target, None, vllm="0.1")


def test_a_profile_is_of_the_vllm_that_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["waterfall.py", "--smoke", "--vllm", "0.33.0"])
    with pytest.raises(SystemExit):
        waterfall.parse_args()
    assert (
        "--vllm picks rows that are there: it needs --draw" in capsys.readouterr().err
    )


def test_errors_are_the_least_and_the_largest():
    rows = [
        make_row(case=str(i), rel_err=error) for i, error in enumerate([0.02, 0.01])
    ]
    line = bench_tables.error_table(rows).splitlines()[-1]
    assert line == "| Qwen3-VL-8B | - | 1.00 to 2.00 % | - |"


def test_newer_rows_of_a_stack_replace_older_ones():
    rows = [
        {**make_row(samples_ms=[1.0]), "commit": "old"},
        {**make_row(samples_ms=[1.0]), "vllm": "0.33.0"},
        {**make_row(samples_ms=[1.0]), "quack": "0.6.5"},
        make_row(case="mixed"),
        make_row(samples_ms=[2.0]),
    ]
    kept = prune.newest_rows(rows)
    assert kept == rows[1:]
    assert prune.newest_rows(rows, ["old"]) == rows[:1]


def test_a_version_that_is_not_known_is_equal_to_any():
    rows = [
        {**make_row(samples_ms=[1.0]), "quack": "unknown"},
        {**make_row(case="mixed"), "quack": "unknown"},
        {**make_row(), "quack": "unknown", "vllm": "0.33.0"},
        make_row(samples_ms=[2.0]),
        {**make_row(samples_ms=[3.0]), "quack": "0.6.5"},
    ]
    assert prune.newest_rows(rows) == rows[1:]


def test_few_requests_do_not_replace_many():
    few, many = ({**make_row(), "requests": str(count)} for count in (15, 100))
    assert prune.newest_rows([many, few]) == [many, few]
    assert prune.newest_rows([few, many, few]) == [many, few]


def test_each_contender_has_one_colour_of_its_own(plot):
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)
    assert not set(plot.COLOURS.values()) & set(waterfall.CLASS_COLOURS)
    with pytest.raises(ValueError, match="plugin-odd"):
        plot.colour_of("plugin-odd")


def test_a_contender_keeps_its_colour_in_any_company(plot, tmp_path):
    source = tmp_path / "rows.csv"
    log = CsvLog(source)
    for provider in ("stock-flash_attn", "stock-flashinfer", "plugin"):
        log.add(make_row(provider=provider))
    for kind in ("encoder", "attention"):
        for providers in (["plugin"], ["stock-flash_attn", "plugin"], None):
            target = tmp_path / "a.svg"
            plot.draw(kind, source, target, None, providers)
            svg = target.read_text().lower()
            assert plot.COLOURS["plugin"].lower() in svg
            assert "is better" in svg and "nxl: n images of l patches" in svg
            shown = plot.COLOURS["stock-flashinfer"].lower() in svg
            assert shown == (providers is None)


@pytest.mark.parametrize(
    ("background", "text"),
    [("#332288", "white"), ("#444444", "white"), ("#88CCEE", "black")],
)
def test_digits_are_readable_on_their_bar(background, text):
    assert waterfall.text_colour(background) == text


def test_bars_are_in_the_order_of_their_sizes(plot):
    cases = ["win64x256", "mixed", "8x4096", "1x1024\n2 ms", "20x400", "video16x1024"]
    cases.insert(0, "1x4096")
    assert [
        case.partition("\n")[0] for case in sorted(cases, key=plot._case_order)
    ] == [
        "1x1024",
        "1x4096",
        "20x400",
        "8x4096",
        "video16x1024",
        "mixed",
        "win64x256",
    ]
