# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of servers, from rows of bench_serve.py."""

import dataclasses
import sys
from pathlib import Path

import pytest
from _benchmarks import ENVIRONMENT

import bench_serve
import engine_tables
import prune
import table
from chosen_rows import NoRowsError
from csv_log import CsvLog
from environment import STACK_COLUMNS


def serve_row(setup: str, at_once: int, req_s: float, ttft: float, **changes: str):
    provider, mode = setup.split(":")
    return {
        "bench": "serve",
        "provider": provider,
        "mode": mode,
        "model": "Qwen/Qwen3-VL-8B-Instruct",
        "workload": "page",
        "concurrency": str(at_once),
        "answer_tokens": "1",
        "serve_args": "",
        "req_s": f"{req_s:.2f}",
        "ttft_p50_ms": f"{ttft:.1f}",
        "ttft_p99_ms": f"{2 * ttft:.1f}",
        "commit": "abc1234",
        "command": "python benchmarks/bench_serve.py",
        **changes,
    }


def test_servers_are_compared_with_stocks_best_setup() -> None:
    rows = [
        serve_row("stock-flash_attn:eager", 1, 3, 100),
        serve_row("stock-flash_attn:graph", 1, 4, 90),
        serve_row("plugin:graph", 1, 5, 60),
        serve_row("stock-flash_attn:eager", 64, 10, 900),
        serve_row("stock-flash_attn:graph", 64, 8, 800),
        serve_row("plugin:graph", 64, 15, 500),
    ]
    head, _, alone, busy = engine_tables.serve_table(rows).splitlines()
    assert "| stock-flash_attn eager | stock-flash_attn graph | plugin graph |" in head
    assert alone.endswith(
        "| 1 |  | 100.0 (200.0) | 90.0 (180.0) | 60.0 (120.0) | 1.50 |"
    )
    assert busy.endswith("| 64 |  | 10.00 | 8.00 | 15.00 | 1.50 |")


def test_a_mode_does_not_hide_stocks_best(tmp_path: Path) -> None:
    own = dataclasses.asdict(ENVIRONMENT)
    missing = {**dict.fromkeys(bench_serve.COLUMNS, "0"), **own}
    other = {"command": "python benchmarks/bench_serve.py --port 8200"}
    log = CsvLog(tmp_path / "serve.csv", bench_serve.COLUMNS)
    for row in (
        serve_row("stock-flash_attn:graph", 64, 10, 90),
        serve_row("plugin:graph", 64, 15, 60),
        serve_row("stock-flash_attn:eager", 1, 3, 60, **other),
        serve_row("plugin:eager", 1, 4, 40, **other),
    ):
        log.add({**missing, **row})
    asked = ["serve", str(log.path), "--mode", "graph"]
    assert table.render(asked).endswith("| 10.00 | 15.00 | 1.50 |")
    log.add({**missing, **serve_row("stock-flash_attn:eager", 64, 12, 80)})
    with pytest.raises(SystemExit, match="stock-flash_attn eager of a run that"):
        table.render(asked)
    assert "| 10.00 | 12.00 | 15.00 | - | 1.25 |" in table.render(asked[:2])


def test_answers_of_other_lengths_are_other_lines() -> None:
    rows = [
        serve_row("stock-flash_attn:graph", 64, 10, 90),
        serve_row("plugin:graph", 64, 15, 60),
        serve_row("stock-flash_attn:graph", 64, 4, 90, answer_tokens="128"),
        serve_row("plugin:graph", 64, 5, 60, answer_tokens="128"),
    ]
    _, _, one, many = engine_tables.serve_table(rows).splitlines()
    assert "| page | 64 |" in one and one.endswith("| 10.00 | 15.00 | 1.50 |")
    assert "| page, 128 tokens of answer | 64 |" in many
    assert many.endswith("| 4.00 | 5.00 | 1.25 |")
    rows = [{**row, **dict.fromkeys(STACK_COLUMNS, "x")} for row in rows]
    assert prune.newest_rows(rows) == rows


def test_a_figure_is_of_answers_of_one_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import plot_serve

    log = CsvLog(tmp_path / "serve.csv", bench_serve.COLUMNS)
    environment = dataclasses.asdict(ENVIRONMENT)
    for tokens, req_s in (("1", 10.25), ("128", 4.75)):
        for at_once in (1, 64):
            row = serve_row("plugin:graph", at_once, req_s, 60, answer_tokens=tokens)
            missing = dict.fromkeys(bench_serve.COLUMNS, "0")
            log.add({**missing, **environment, **row})
    target = tmp_path / "serve.svg"
    for given, asked, shown in (
        ([], "One token is asked for", "10.2"),
        (["--answer-tokens", "128"], "128 tokens are asked for", "4.75"),
    ):
        argv = ["plot_serve.py", str(log.path), str(target), *given]
        monkeypatch.setattr(sys, "argv", argv)
        plot_serve.main()
        svg = target.read_text()
        assert asked in svg and f">{shown}<" in svg
    argv = ["plot_serve.py", str(log.path), str(target), "--answer-tokens", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="no rows with .*'answer_tokens': '2'"):
        plot_serve.main()


def test_a_figure_has_one_bar_for_a_server_and_workload() -> None:
    pytest.importorskip("matplotlib")
    import plot_serve

    own = dataclasses.asdict(ENVIRONMENT)
    rows = [
        {**own, **serve_row("plugin:graph", at_once, req_s, 60)}
        for at_once, req_s in ((1, 4), (16, 12), (64, 15))
    ]
    alone, busy = plot_serve.draw_serve(rows).axes
    assert [len(axes.patches) for axes in (alone, busy)] == [1, 1]
    assert busy.patches[0].get_height() == 15
    assert busy.get_title(loc="left").startswith("64 requests at once")


def test_servers_of_two_commits_are_not_compared() -> None:
    rows = [
        serve_row("stock-flash_attn:graph", 1, 4, 90, commit="0000000"),
        serve_row("plugin:graph", 1, 5, 60),
    ]
    with pytest.raises(NoRowsError):
        engine_tables.serve_table(rows)


def test_servers_of_two_runs_of_a_commit_are_not_compared(tmp_path: Path) -> None:
    other = "python benchmarks/bench_serve.py --port 8200"
    rows = [
        serve_row("stock-flash_attn4:graph", 64, 12, 80),
        serve_row("plugin:graph", 64, 15, 60),
        serve_row("stock-flash_attn:eager", 64, 10, 90, command=other),
        serve_row("plugin:eager", 64, 14, 70, command=other),
    ]
    _, _, one, two = engine_tables.serve_table(rows).splitlines()
    assert one.endswith("| 12.00 | - | 15.00 | - | 1.25 |")
    assert two.endswith("| - | 10.00 | - | 14.00 | 1.40 |")
    # Without its stock the other run has no line, and its servers no column.
    del rows[2]
    head, _, line = engine_tables.serve_table(rows).splitlines()
    assert "eager" not in head and line.endswith("| 12.00 | 15.00 | 1.25 |")
    pytest.importorskip("matplotlib")
    import plot_serve

    rows = [{**row, **dataclasses.asdict(ENVIRONMENT), **row} for row in rows]
    lines = len(plot_serve.draw_serve(rows).axes) / len(plot_serve.PANELS)
    assert lines == 2


def test_a_line_is_of_the_commit_that_measured_it_last() -> None:
    once = [
        serve_row("plugin:graph", 64, 20, 60, commit="0000000"),
        serve_row("stock-flash_attn:graph", 64, 10, 90, commit="0000000"),
        serve_row("stock-flash_attn:eager", 64, 15, 80, commit="0000000"),
    ]
    again = [
        serve_row("plugin:graph", 64, 30, 50),
        serve_row("stock-flash_attn:graph", 64, 12, 80),
    ]
    other = serve_row("stock-flash_attn:eager", 1, 3, 100, commit="0000000")
    found = engine_tables.serve_table([*once, other, *again])
    head, _, busy, alone = found.splitlines()
    assert "graph | stock-flash_attn eager | plugin graph |" in head
    assert busy.endswith("| 12.00 | - | 30.00 | 2.50 |")
    assert alone.endswith("| - | 100.0 (200.0) | - |  |")


def test_a_run_of_servers_stays_whole() -> None:
    own = dataclasses.asdict(ENVIRONMENT)
    first = {"command": "python benchmarks/bench_serve.py --port 8200"}
    once = [
        serve_row("stock-flash_attn:graph", 64, 10, 90, **first),
        serve_row("plugin:graph", 64, 15, 60, **first),
    ]
    again = [
        serve_row("stock-flash_attn:graph", 64, 12, 80),
        serve_row("plugin-fp8:graph", 64, 18, 60),
    ]
    table = engine_tables.serve_table([*once, *again]).splitlines()
    assert [line.split("|")[-2].strip() for line in table[2:]] == ["1.50", "1.50"]
    rows = [{**own, **row} for row in (*once, *again)]
    assert prune.newest_rows(rows) == rows
    # Once nothing of a run is new, it goes; so does what it measured twice.
    newer = {**rows[1], "command": own["command"]}
    assert prune.newest_rows([*rows, newer]) == [*rows[2:], newer]
    assert prune.newest_rows([{**rows[1]}, *rows]) == rows
    old = [{**row, "commit": "0000000"} for row in rows[:2]]
    assert prune.newest_rows([*old, *rows[2:]]) == [*old, *rows[2:]]
    assert prune.newest_rows([*old, *rows[2:]], [own["commit"]]) == rows[2:]
