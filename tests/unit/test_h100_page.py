# SPDX-License-Identifier: Apache-2.0
"""What the page of an H100 says of new sizes and of one layer is what the rows say."""

import statistics
from collections import defaultdict

from _pages import H100_RESULTS, RESULTS, rows, text_of

import chosen_rows
import tower_cases


def test_the_page_of_an_h100_says_what_new_sizes_gain() -> None:
    page = text_of("results_h100.md").partition(" eager mode, new sizes ")[2]
    best = chosen_rows.Best(rows("encoder", "0.33.0", H100_RESULTS), own_mode="new")
    pairs = [
        (stock, ours)
        for model in best.models
        for case in best.cases(model)
        if (stock := best.stock(model, case))
        and (ours := best.of(chosen_rows.PLUGIN, model, case))
    ]
    gains = [float(stock["p50_ms"]) / float(ours["p50_ms"]) for stock, ours in pairs]
    assert len(pairs) > 25 and min(gains) > 1
    small = [pair for pair in pairs if pair[0]["case"] in ("1x256", "1x1024")]
    assert len(small) == 6 and {row["commit"] for p in small for row in p} == {
        "ca6a00a"
    }
    span = [
        (min(values), max(values))
        for values in (
            [float(s["p50_ms"]) / float(o["p50_ms"]) for s, o in small],
            *([float(pair[i]["p50_ms"]) for pair in small] for i in (1, 0)),
        )
    ]
    assert (
        f"{span[0][0]:.2f} to {span[0][1]:.2f} times as fast: {span[1][0]:.0f} to "
        f"{span[1][1]:.0f} ms in place of {span[2][0]:.0f} to {span[2][1]:.0f}"
    ) in page


def test_the_page_of_an_h100_compares_stock_with_the_h200() -> None:
    page = text_of("results_h100.md")
    of_h100, of_h200 = (
        chosen_rows.Best(rows("encoder", "0.33.0", folder))
        for folder in (H100_RESULTS, RESULTS)
    )
    longer = [
        100
        * statistics.geometric_mean(
            float(here["p50_ms"]) / float(there["p50_ms"])
            for case in of_h100.cases(model)
            if (here := of_h100.stock(model, case))
            and (there := of_h200.stock(model, case))
        )
        - 100
        for model in tower_cases.MODELS
    ]
    said = f"stock's best takes {min(longer):.0f} to {max(longer):.0f} % longer"
    assert said in page
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows("encoder", "0.33.0"):
        is_newest = row["commit"] == "884af39" and row["provider"].startswith("stock")
        if row["model"] == tower_cases.MODELS[2] and is_newest:
            best = times[row["case"]]
            before = best.get(row["mode"], float("inf"))
            best[row["mode"]] = min(before, float(row["p50_ms"]))
    by = {
        case: 100 * min(best["graph"], best["compiled_graph"]) / fused - 100
        for case, best in times.items()
        if (fused := best["fused_graph"]) == min(best.values())
    }
    assert len(by) == 4 and "stock's best in four cases" in page
    assert f"by {by.pop('8x1024'):.1f} % in *8x1024* and by less than 1 %" in page
    assert max(by.values()) < 1


def test_the_page_of_an_h100_says_what_a_layer_gains() -> None:
    page = text_of("results_h100.md").partition(" One attention layer ")[2]
    stocks = chosen_rows.BASELINE, f"{chosen_rows.BASELINE}4"
    found: dict[str, dict[str, dict[str, chosen_rows.Row]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows("attention", "0.33.0", H100_RESULTS):
        if (row["bench"], row["mode"]) == ("qkv_attention", "graph"):
            found[row["head_dim"]][row["case"]][row["provider"]] = row
    gains = {
        head_dim: [
            min(float(by[name]["p50_ms"]) for name in stocks)
            / float(by[chosen_rows.PLUGIN]["p50_ms"])
            for by in cases.values()
        ]
        for head_dim, cases in found.items()
    }
    means = {head_dim: statistics.geometric_mean(x) for head_dim, x in gains.items()}
    assert f"{means['72']:.2f} (head dim 72) and {means['80']:.2f} (80)" in page
    assert f"the least is {min(map(min, gains.values())):.3f}" in page
    errors = [
        float(by[chosen_rows.PLUGIN]["rel_err"]) / float(by[stocks[0]]["rel_err"])
        for cases in found.values()
        for by in cases.values()
    ]
    assert f"at most {max(errors):.2f} times stock's" in page


def test_the_page_of_an_h100_says_what_requests_take_that_first_come() -> None:
    page = text_of("results_h100.md")
    totals: dict[str, list[float]] = defaultdict(list)
    for name in ("graphs_first_time", "graphs"):
        for row in rows(name, "0.33.0", H100_RESULTS):
            if (
                row["model"].endswith("Qwen3-VL-8B-Instruct")
                and row["provider"] == chosen_rows.PLUGIN
                and row["case"] == "first 300 random mixtures"
            ):
                totals[row["config"]].append(float(row["total_ms"]))
    (first, twice), (fp8_first, fp8_twice) = totals["automatic"], totals["fp8"]
    assert f"300 take {first:.0f} ms, and {fp8_first:.0f} with FP8 attention" in page
    more = [100 * a / b - 100 for a, b in ((first, twice), (fp8_first, fp8_twice))]
    assert "attention, {:.0f} and {:.0f} % more than".format(*more) in page
    compared = [
        row
        for row in rows("graphs_first_time", "0.33.0", H100_RESULTS)
        if row["same_kernel_bitwise"]
    ]
    assert all(float(row["same_kernel_bitwise"]) == 1 for row in compared)
    assert {row["requests"] for row in compared if "random" in row["case"]} == {"300"}
