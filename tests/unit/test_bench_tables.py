# SPDX-License-Identifier: Apache-2.0
"""Tables of result files, and the rows that they compare."""

import pytest
from _benchmarks import host_rows, make_row, write_rows

import bench_tables
import chosen_rows
import engine_tables
import table
from csv_log import CsvLog


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
    few = "flash_attn compiled_graph; no flash_attn graph"
    fewer = "no flash_attn eager, flash_attn compiled_graph, flashinfer graph"
    assert lines[2:] == [
        f"| {model} | 1x4096 | 4 | {few} | 2 | 2.00 |",
        f"| {model} | mixed | 1 | flash_attn graph; {fewer} | 2 | 0.50 |",
        f"| {model} | geometric mean |  |  |  | 1.00 |",
    ]
    rows.append(make_row(provider="plugin-fp8", samples_ms=[1.0]))
    lines = bench_tables.best_table(rows).splitlines()
    assert lines[2].endswith("| 2 | 2.00 | 1 | 4.00 |")
    assert lines[3].endswith("| 2 | 0.50 | - |  |")
    assert len({line.count("|") for line in lines}) == 1


def test_a_mean_of_fewer_cases_than_the_one_beside_it_says_so():
    stock, plugin, fp8 = "stock-flash_attn", "plugin", "plugin-fp8"
    times = {stock: 4.0, plugin: 2.0, fp8: 1.0}
    rows = [
        make_row(case=case, provider=provider, mode=mode, samples_ms=[times[provider]])
        for mode in ("graph", "eager")
        for case, providers in (
            ("1x4096", (stock, plugin, fp8)),
            ("mixed", (stock, plugin)),
            # Nobody's speed-up is known.
            ("1x256", (stock,)),
        )
        for provider in providers
    ]
    few = "4.00 (1 of 2 cases)"
    line = bench_tables.best_table(rows).splitlines()[-1]
    assert line.endswith(f"| geometric mean |  |  |  | 2.00 |  | {few} |")
    graph = [row for row in rows if row["mode"] == "graph"]
    line = bench_tables.case_table(graph, "model").splitlines()[-1]
    assert line.endswith(f"| geometric mean |  |  |  | 2.00 | {few} |")
    engines = [graph_row(provider=provider) for provider in (stock, plugin)]
    line = engine_tables.summary_table(rows, rows, engines).splitlines()[-1]
    assert line.count(f"2.00, {few}") == 3


def test_quantised_towers_are_compared_with_each_other():
    rows = [
        make_row(provider="stock-flash_attn", samples_ms=[2.0]),
        make_row(provider="stock-flash_attn-q8", samples_ms=[6.0]),
        make_row(provider="stock-flashinfer-q8", mode="eager", samples_ms=[5.0]),
        make_row(provider="plugin", samples_ms=[4.0]),
        make_row(provider="plugin-q8", samples_ms=[3.0]),
        make_row(provider="plugin-fp8-q8", samples_ms=[1.0]),
        make_row(provider="stock-flash_attn-b8", samples_ms=[0.5]),
        make_row(provider="plugin-b8", samples_ms=[0.25]),
    ]
    line = table.KINDS["best_quantized"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 5 | flashinfer-q8 eager | 3 | 1.67 | 1 | 5.00 |")
    line = table.KINDS["best"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 2 | flash_attn graph | 4 | 0.50 |")


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


def test_new_sizes_are_compared_with_each_other_alone():
    rows = [
        make_row(provider="stock-flash_attn", mode="eager", samples_ms=[1.0]),
        make_row(provider="plugin", mode="eager", samples_ms=[0.5]),
        make_row(provider="stock-flash_attn", mode="new", samples_ms=[9.0]),
        make_row(provider="stock-flash_attn4", mode="compiled_new", samples_ms=[6.0]),
        make_row(provider="plugin", mode="new", samples_ms=[4.0]),
    ]
    line = table.KINDS["best_new"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 6 | flash_attn4 compiled_new | 4 | 1.50 |")
    line = table.KINDS["best_eager"](rows).splitlines()[2]
    assert line.endswith("| 1x4096 | 1 | flash_attn eager | 0.5 | 2.00 |")


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
        engine_tables.summary_table([make_row(mode="eager")], [], [graph_row()])


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
        "command": "python benchmarks/graph_check.py",
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
    eager = [
        make_row(provider=provider, mode=mode, samples_ms=[ms])
        for provider, mode, ms in (
            ("stock-flash_attn", "eager", 9.0),
            ("stock-flash_attn", "fused", 6.0),
            ("plugin", "eager", 4.0),
            ("plugin-fp8", "eager", 3.0),
        )
    ]
    head, _, line = engine_tables.summary_table(encoder, eager, rows).splitlines()
    assert "40 random requests" in head
    assert "| 1.50, 2.00 |" in line
    apart = [graph_row("first 9 random mixtures"), graph_row(**stock)]
    with pytest.raises(chosen_rows.NoRowsError, match="random mixtures"):
        engine_tables.graph_table(apart)


def test_host_table_is_of_one_bench(tmp_path):
    path = str(write_rows(tmp_path / "host.csv", host_rows()))
    assert table.render(["host", path]).splitlines()[2].endswith("| 777 |")
    lines = table.render(["host", path, "--bench", "tower_host"]).splitlines()
    assert lines[2].endswith("| 1x256 | abc1234 | 307 | 50 |")
    assert lines[3].endswith("| 1x64 | abc1234 | - | 888 |")
    options = ["--bench", "tower_host", "--mode", "fused_host"]
    assert table.render(["host", path, *options]).endswith("| 200 |")


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


def test_rows_of_two_runs_of_a_commit_are_not_compared():
    other = {"command": "python benchmarks/bench_encoder.py --budget-s 9"}
    stock = make_row(provider="stock-flash_attn", samples_ms=[4.0])
    alone = {**make_row(samples_ms=[1.0]), **other}
    assert chosen_rows.speed_up(stock, alone) is None
    # What another run timed of stock does not win, and does not stand in.
    faster = make_row(provider="stock-flash_attn4", samples_ms=[1.0])
    best = chosen_rows.Best([{**faster, **other}, stock, make_row(samples_ms=[2.0])])
    assert best.mean(chosen_rows.PLUGIN, stock["model"]) == "2.00"
    assert chosen_rows.Best([stock, alone]).cases(stock["model"]) == []
    bars = chosen_rows.of_last_run([stock, alone], ["model", "case"], ["provider"])
    assert bars == [alone]


def test_a_case_that_lacks_what_stock_ran_in_others_says_so():
    both, stock = ("1x256", "1x4096"), {"provider": "stock-flash_attn"}
    rows = [
        *(make_row(case=case, **stock, samples_ms=[4.0]) for case in both),
        make_row(**stock, mode="fused_graph", samples_ms=[3.0]),
        make_row(provider="stock-flash_attn4", mode="fused", samples_ms=[9.0]),
        *(make_row(case=case, samples_ms=[2.0]) for case in both),
    ]
    few, all_of_them = bench_tables.best_table(rows).splitlines()[2:4]
    missing = "flash_attn fused_graph, flash_attn4 fused"
    assert f"| 1x256 | 4 | flash_attn graph; no {missing} | 2 |" in few
    assert "| 1x4096 | 3 | flash_attn fused_graph | 2 |" in all_of_them
    # Nor is it forgotten once the other case is measured again.
    again = [{**row, "commit": "new"} for row in rows if row["case"] == "1x4096"]
    assert bench_tables.best_table([*rows, *again]).splitlines()[2] == few


@pytest.mark.parametrize("kind", ["best", "best_eager", "summary"])
def test_a_table_of_stocks_best_takes_no_mode(kind, tmp_path, capsys):
    with pytest.raises(SystemExit):
        table.render([kind, str(tmp_path), "--mode", "graph"])
    assert "compares all of stock's modes" in capsys.readouterr().err


def test_a_case_that_no_later_run_measured_stays():
    def rows_of(commit, case, stock_ms, plugin_ms):
        both = (("stock-flash_attn", stock_ms), ("plugin", plugin_ms))
        return [
            {**make_row(provider=name, case=case, samples_ms=[ms]), "commit": commit}
            for name, ms in both
        ]

    rows = [
        *rows_of("old", "1x4096", 9.0, 1.0),
        *rows_of("old", "1x256", 4.0, 2.0),
        *rows_of("new", "1x4096", 9.0, 3.0),
    ]
    best = chosen_rows.Best(rows)
    model = rows[0]["model"]
    # In the order of the cases, not of the file.
    assert best.cases(model) == ["1x256", "1x4096"]
    assert best.mean(chosen_rows.PLUGIN, model) == f"{6**0.5:.2f}"


def test_each_case_has_its_speed_up_over_stock():
    times = {
        "1x4096": {"stock-flash_attn": 4.0, "plugin": 2.0, "plugin-fp8": 1.0},
        "mixed": {"stock-flash_attn": 3.0, "plugin": 0.375, "stock-flashinfer": 5.0},
    }
    rows = [
        make_row(case=case, provider=provider, samples_ms=[ms])
        for case, by_provider in times.items()
        for provider, ms in by_provider.items()
    ]
    model = rows[0]["model"]
    heads, _, *lines = bench_tables.case_table(rows, "model").splitlines()
    assert heads == (
        "| model | case | stock-flash_attn | plugin | plugin-fp8 | stock-flashinfer "
        "| plugin: speed-up | plugin-fp8: speed-up |"
    )
    assert lines == [
        f"| {model} | 1x4096 | 4 | 2 | 1 | - | 2.00 | 4.00 |",
        f"| {model} | mixed | 3 | 0.375 | - | 5 | 8.00 |  |",
        f"| {model} | geometric mean |  |  |  |  | 4.00 | 4.00 (1 of 2 cases) |",
    ]


def test_options_pick_the_rows(tmp_path):
    rows = [
        make_row(model=model, case=case, provider=provider)
        for model in ("A/one", "B/two", "C/three")
        for case in ("1x256", "1x4096", "mixed")
        for provider in ("stock-flash_attn", "plugin", "plugin-fp8")
    ]
    path = write_rows(tmp_path / "encoder.csv", rows)
    options = {
        "--models": ("A/one", "C/three"),
        "--cases": ("mixed", "1x256"),
        "--providers": ("stock-flash_attn", "plugin-fp8"),
    }
    listed = [word for name, values in options.items() for word in (name, *values)]
    lines = table.render(["encoder", str(path), *listed]).splitlines()
    assert lines[0].split(" | ")[2:4] == ["stock-flash_attn", "plugin-fp8"]
    assert [line.split(" | ")[:2] for line in lines[2:-2]] == [
        [f"| {model}", case]
        for model in options["--models"]
        for case in ("1x256", "mixed")
    ]


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


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no file .*encoder\.csv"):
        table.render(["summary", str(tmp_path)])


def test_errors_are_the_least_and_the_largest():
    rows = [
        make_row(case=str(i), rel_err=error) for i, error in enumerate([0.02, 0.01])
    ]
    line = bench_tables.error_table(rows).splitlines()[-1]
    assert line == "| Qwen3-VL-8B | - | 1.00 to 2.00 % | - |"


def test_options_that_a_file_has_no_column_for_are_refused(tmp_path):
    path = tmp_path / "serve.csv"
    path.write_text("provider,mode,vllm\nplugin,graph,0.33.0\n")
    with pytest.raises(SystemExit, match=r"no column 'case': leave out --cases"):
        table.render(["serve", str(path), "--cases", "page"])


def test_names_that_a_file_has_no_rows_of_are_said_with_those_that_it_has(tmp_path):
    path = str(write_rows(tmp_path / "encoder.csv", [make_row(), make_row(case="a")]))
    for option, names in (("--cases", "1x4096, a"), ("--models", make_row()["model"])):
        with pytest.raises(chosen_rows.NoRowsError, match=rf"nope, but with {names}$"):
            table.render(["encoder", path, option, names.split(", ")[0], "nope"])


def test_quantisers_that_were_left_out_have_no_share():
    row = {"head_dim": "72", "case": "1x4096", "tb_per_s": "2.50"}
    row |= {"commit": "new", "command": "python benchmarks/bench_quantize.py"}
    copy, blocks = ({**row, "provider": name} for name in ("copy", "plugin-blocks"))
    line = bench_tables.quantize_table([copy]).splitlines()[2]
    assert line == "| 72 | 1x4096 | 2.50 | - |"
    assert bench_tables.quantize_table([copy, blocks]).endswith("| 100 % |")
    old = {**blocks, "commit": "old"}
    assert bench_tables.quantize_table([old, copy]).endswith("| 2.50 | 2.50 | - |")


def test_attention_table_is_of_one_bench(tmp_path):
    given = {"provider": "stock-flash_attn", "samples_ms": [4.0]}
    rows = [make_row(bench="qkv_attention", **given), make_row(bench="attention")]
    path = str(write_rows(tmp_path / "attention.csv", rows))
    lines = table.render(["attention", path]).splitlines()
    assert lines[2] == "| 72 | 1x4096 | 4 |"
    shown = table.render(["attention", path, "--bench", "attention"])
    assert "| 72 | 1x4096 | 2 |" in shown
