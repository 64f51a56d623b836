# SPDX-License-Identifier: Apache-2.0
"""Which rows of a results file newer ones replace."""

from _benchmarks import make_row

import prune


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
