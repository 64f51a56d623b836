# SPDX-License-Identifier: Apache-2.0
"""Which rows of a results file newer ones replace."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _benchmarks import make_row
from _pages import H100_RESULTS, RESULTS

import bench_quantize
import bench_request
import bench_serve
import chosen_rows
import csv_log
import engine_check
import fp8_page
import graph_check
import page_commands
import prune
import soak
import waterfall
from environment import ENVIRONMENT_COLUMNS

COLUMNS: dict[str, Sequence[str]] = {
    "attention, encoder and host": csv_log.COLUMNS,
    "engine": engine_check.COLUMNS,
    "fp8_accuracy": fp8_page.COLUMNS,
    "graphs": graph_check.COLUMNS,
    "page_commands": page_commands.COLUMNS,
    "quantize": bench_quantize.BENCH_COLUMNS,
    "request": bench_request.COLUMNS,
    "serve": bench_serve.COLUMNS,
    "soak": soak.COLUMNS,
    "soak_memory": soak.MEMORY_COLUMNS,
    "waterfall": waterfall.COLUMNS,
}


def test_a_column_is_what_was_measured_or_what_was_found() -> None:
    kinds = prune.IDENTITY, prune.MEASURED, ENVIRONMENT_COLUMNS
    known = [name for kind in kinds for name in kind]
    assert len(known) == len(set(known))
    written = {name for columns in COLUMNS.values() for name in columns}
    assert written | set(ENVIRONMENT_COLUMNS) == set(known)
    assert set(chosen_rows.SERVER_KEYS) < set(prune.IDENTITY)
    assert set(chosen_rows.KEYS) < set(prune.IDENTITY)


def test_committed_files_have_the_columns_of_now() -> None:
    sets = {tuple(columns) for columns in COLUMNS.values()}
    sets.add((*waterfall.COLUMNS, *ENVIRONMENT_COLUMNS))
    for folder in (RESULTS, H100_RESULTS):
        for path in folder.glob("*.csv"):
            head, _, _ = path.read_text().partition("\n")
            assert path.stem == "bits" or tuple(head.split(",")) in sets, path


def test_a_file_with_an_unknown_column_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.csv"
    log = csv_log.CsvLog(path, [*csv_log.COLUMNS, "batch"])
    log.add({**make_row(), "batch": "1"})
    log.add({**make_row(), "batch": "2"})
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["prune.py", str(path)])
    with pytest.raises(SystemExit, match="add batch to IDENTITY or MEASURED"):
        prune.main()
    assert path.read_bytes() == before


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


def test_each_stage_of_a_request_is_a_row_of_its_own():
    rows = [{**make_row(), "stage": stage} for stage in ("decode", "encoder")]
    assert prune.newest_rows(rows) == rows


def test_a_run_that_ended_early_takes_nothing_from_a_whole_one():
    whole = [
        {**make_row(provider=provider), "commit": "old"}
        for provider in ("stock-flash_attn", "plugin")
    ]
    early = {**whole[0], "commit": "new"}
    assert prune.newest_rows([*whole, early]) == [*whole, early]
    # Of another case the older run is not needed.
    other = [{**row, "case": "mixed"} for row in whole]
    newer = [{**row, "commit": "new"} for row in other]
    assert prune.newest_rows([*whole, *other, early, *newer]) == [
        *whole,
        early,
        *newer,
    ]
