# SPDX-License-Identifier: Apache-2.0
"""What pages say of servers on an H200 is what the rows say."""

from _pages import RESULTS, rows, text_of
from _servers import DEFAULT, GRAPHS, ORDER, gains, percents, server_lines, times

import chosen_rows

# Stock with FlashAttention 4, and both of this package's, of one run.
BOTH_MODES = [
    *("stock-flash_attn4:graph", "stock-flash_attn4:eager"),
    *("plugin:graph", "plugin-fp8:graph"),
]
WORKLOADS = ("page", "photograph", "thumbnails", "mixture")
# Of one run, since large batches run without a graph.
LARGE = "serve_both_modes"
LATER = ["stock-flash_attn4:eager", "plugin:graph", "plugin:eager", "plugin-fp8:graph"]
QWEN3 = "Qwen/Qwen3-VL-8B-Instruct"


def of_setup(line: dict[str, str], setup: str) -> float:
    """Return a server's figure of a line: milliseconds, or requests a second."""
    return float(line[setup.replace(":", " ")].split()[0])


def over(line: dict[str, str], setup: str, stocks: list[str]) -> float:
    """Return how many times as good a server is as the best of some."""
    ours, theirs = of_setup(line, setup), [of_setup(line, one) for one in stocks]
    return min(theirs) / ours if line["at once"] == "1" else ours / max(theirs)


def by_workload(
    setups: list[str], at_once: str, name: str = "serve"
) -> dict[str, dict[str, str]]:
    """Return the lines of an H200's servers of Qwen3-VL with four API servers."""
    return {
        line["workload"]: line
        for line in server_lines(RESULTS, name, setups)
        if (line["more arguments"], line["at once"]) == (ORDER[0], at_once)
        and line["model"] == "Qwen3-VL-8B"
    }


def test_pages_say_what_servers_of_qwen3_gain() -> None:
    page, readme = text_of("serving.md"), text_of("README.md")
    stocks, ours = BOTH_MODES[:2], BOTH_MODES[2:]
    one, full = (by_workload(BOTH_MODES, at_once) for at_once in ("1", "64"))
    for name in WORKLOADS:
        cells = [over(by[name], own, stocks) for by in (one, full) for own in ours]
        assert f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |" in page
    later = by_workload(LATER, "64", LARGE)
    for name, line in later.items():
        cells = [f"{over(line, own, LATER[:1]):.2f}" for own in LATER[1:]]
        assert f"| {name} | {' | '.join(cells)} |" in page
    assert len(later) == 3
    bf16, fp8 = (
        percents(
            [over(full[name], own, stocks) for name in WORKLOADS]
            + [over(line, own, LATER[:1]) for line in later.values()]
        )
        for own in ours
    )
    gain = f"bf16 {bf16} % more, FP8 attention {fp8} % more"
    assert f"Qwen3-VL-8B, against stock's best mode | {gain} |" in readme
    bf16, fp8 = (
        times([over(full[name], own, stocks[:1]) for name in WORKLOADS]) for own in ours
    )
    assert f"gains are {bf16} in bf16 and {fp8} with FP8 attention" in page
    first = [over(one[name], own, stocks) for name in WORKLOADS for own in ours]
    assert min(first) > 1
    others = [
        line
        for line in server_lines(RESULTS, setups=GRAPHS)
        if line["more arguments"] == ORDER[0] and line["model"] != "Qwen3-VL-8B"
    ]
    least = min(*first, *gains(others, "1"))
    threads = [
        line for line in server_lines(RESULTS) if "OMP" in line["more arguments"]
    ]
    older = f"({min(gains(threads, '1')):.2f} with `OMP_NUM_THREADS=4`)"
    assert f"| at least {least:.2f} times as soon {older} |" in readme
    pair = [f"{of_setup(one['thumbnails'], own):.0f}" for own in reversed(ours)]
    assert "took {} and {} ms".format(*pair) in page
    fp8, theirs = (of_setup(later["page"], LATER[n]) for n in (3, 0))
    assert f"before: {fp8:.2f} a second in place of {theirs:.2f}." in page
    pair = [f"{of_setup(later['photograph'], LATER[n]):.2f}" for n in (1, 0)]
    assert "nothing here, {} a second in place of {};".format(*pair) in page
    best = [f"{max(of_setup(full['page'], x) for x in y):.2f}" for y in (ours, stocks)]
    said = "{} requests a second with FP8 attention, in place of {}.".format(*best)
    assert said in page


def test_pages_say_what_graphs_and_fp8_attention_bring_a_server() -> None:
    page = text_of("serving.md")
    one, full = (by_workload(BOTH_MODES, at_once) for at_once in ("1", "64"))
    graph, eager, bf16, fp8 = BOTH_MODES
    ratios = [of_setup(full[x], eager) / of_setup(full[x], graph) for x in WORKLOADS]
    # Stock's best full server is one without graphs.
    assert min(ratios) > 1
    assert f"full servers answered {percents(ratios)} % more" in text_of(
        "operations.md"
    )
    fewer = [100 - 100 / ratio for ratio in ratios]
    less = f"{min(fewer):.0f} to {max(fewer):.0f} % fewer requests with its graphs"
    assert page.count(f"{less} than without") == 1
    assert f"it is up to {max(fewer):.0f} %" in text_of("results_h100.md")
    alone, many = (by_workload(LATER, at_once, LARGE) for at_once in ("1", "64"))
    more = {
        x: [100 * over(by[x], fp8, [bf16]) - 100 for by in (full, many)] for x in many
    }
    assert (
        "{:.0f} and {:.0f} % more pages a second, {:.0f} and {:.0f} % more "
        "photographs, {:.0f} and {:.0f} % more thumbnails"
    ).format(*more["page"], *more["photograph"], *more["thumbnails"]) in page
    thumbnails = more.pop("thumbnails")
    mixture = 100 * over(full["mixture"], fp8, [bf16]) - 100
    others = [mixture, *more["page"], *more["photograph"]]
    span = f"{min(others):.0f} to {max(others):.0f} % more requests"
    few = f"{min(thumbnails):.0f} to {max(thumbnails):.0f} %"
    assert f"answers {span} than in bf16, with thumbnails {few}" in text_of("fp8.md")
    with_graphs, without = (
        [of_setup(many[x], own) for x in ("page", "photograph", "thumbnails")]
        for own in LATER[1:3]
    )
    # Graphs cost nothing, and a first token is as soon with them.
    assert all(a >= b for a, b in zip(with_graphs, without, strict=True))
    firsts = [over(line, LATER[1], LATER[2:3]) for line in alone.values()]
    assert min(firsts) >= 1
    assert (
        "answers {:.2f} pages, {:.1f} photographs and {:.1f} requests of thumbnails a "
        "second with them, {:.2f}, {:.1f} and {:.1f} without, in one run"
    ).format(*with_graphs, *without) in page
    took = [
        of_setup(by["photograph"], own)
        for by, own in ((alone, bf16), (alone, LATER[2]), (one, graph), (one, eager))
    ]
    assert (
        "after {:.0f} ms in place of {:.0f}, stock's after {:.0f} in place of {:.0f}"
    ).format(*took) in page


def test_pages_say_what_other_servers_of_an_h200_gain() -> None:
    page, readme = text_of("serving.md"), text_of("README.md")
    lines = server_lines(RESULTS, setups=DEFAULT)
    one, full = times(gains(lines, "1")), percents(gains(lines, "64"))
    assert f"the first token comes {one} times as soon, that of a page after" in page
    assert f"full server answers {full} % more requests a second. - **On an" in page
    assert f"| H200, default mode | {full} % more;" in readme
    later = by_workload(LATER, "64", LARGE)
    least, *_, most = sorted(
        (over(line, LATER[2], LATER[:1]), name) for name, line in later.items()
    )
    # Half a per cent slower: nobody could tell.
    assert least[1] == "photograph" and abs(least[0] - 1) < 0.01
    closer = f"to {100 * most[0] - 100:.0f} %"
    said = f"level {closer} more than stock with FlashAttention 4, a setting"
    assert f"{said} | {one} times as soon |" in readme
    slow = [f"{of_setup(later[least[1]], LATER[n]):.2f}" for n in (2, 0)]
    said = "level (photographs, {} a second in place of {})".format(*slow)
    assert f"{said} {closer} more than stock with FlashAttention 4" in page
    for name, said in (
        ("page", "of a page after {:.0f} ms in place of {:.0f}"),
        ("thumbnails", "of thumbnails after {:.0f} in place of {:.0f}"),
    ):
        line = by_workload(DEFAULT, "1")[name]
        took = [of_setup(line, setup) for setup in reversed(DEFAULT)]
        assert said.format(*took) in page
    graphs = server_lines(RESULTS, setups=GRAPHS)
    lines = [line for line in graphs if line["model"] == "Qwen2.5-VL-7B"]
    (one,) = {f"{gain:.2f}" for gain in gains(lines, "1")}
    full = percents(gains(lines, "64"))
    assert f"comes {one} times as soon with all three kinds of images" in page
    assert f"full server answers {full} % more requests a second. Of Qwen2-VL" in page
    assert f"graphs, Qwen2.5-VL-7B | {full} % more | {one} times as soon |" in readme
    lines = [line for line in graphs if line["model"] == "Qwen2-VL-7B"]
    (one,), (full,) = (gains(lines, at_once) for at_once in ("1", "64"))
    assert f"it is {one:.2f} times and {100 * full - 100:.0f} %" in page


def test_the_page_says_why_pages_gain_no_more() -> None:
    text = text_of("serving.md").partition("gains 1.15, and not 1.3")[2]
    case = QWEN3, "1x15376"
    best = chosen_rows.Best(rows("encoder", "0.33.0", RESULTS))
    quantized = chosen_rows.Best(
        rows("encoder_quantized", "0.33.0", RESULTS), quantized=True
    )
    found = (
        best.stock(*case),
        best.of(chosen_rows.PLUGIN_FP8, *case),
        quantized.of(chosen_rows.PLUGIN_FP8 + chosen_rows.QUANTIZED, *case),
    )
    stock, ours, linear = (round(float(row["p50_ms"])) for row in found if row)
    assert found[0] and found[0]["provider"] == "stock-flash_attn4"
    (llm,) = (
        round(float(row["p50_ms"]))
        for row in rows("request", "0.33.0", RESULTS)
        if (row["bench"], row["workload"]) == ("trace", "page")
        and (row["stage"], row["provider"])
        == ("language model", chosen_rows.PLUGIN_FP8)
    )
    gain = (stock + llm) / (ours + llm)
    assert f"the tower takes {stock} ms at stock's best and {ours} in this" in text
    assert f"({stock} + {llm}) / ({ours} + {llm}) = {gain:.2f}" in text
    line = by_workload(LATER, "64", LARGE)["page"]
    theirs, mine = of_setup(line, LATER[0]), of_setup(line, LATER[3])
    assert f"{over(line, LATER[3], LATER[:1]):.2f}" == "1.15"
    assert f"{theirs:.2f} and {mine:.2f} requests a second are" in text
    assert f"are {1e3 / theirs:.0f} and {1e3 / mine:.0f} ms a request" in text
    # Of 9a7ef08, whose rows are in the file's history: as these servers ran.
    before, then = 95, 75
    assert (
        f"takes {before} ms at stock's best, with" in text and f"took {then} in" in text
    )
    gain = (before + llm) / (then + llm)
    assert f"({before} + {llm}) / ({then} + {llm}) = {gain:.2f}" in text
    saved = 1e3 / theirs - 1e3 / mine
    assert f"{saved:.0f} less; the towers saved {before - then} of them" in text
    with_linear = (before + llm) / (linear + llm)
    assert f"[{linear} ms](quantized_towers.md#measured)" in text
    assert f"would make {with_linear:.2f} over those {before}" in text
    needed = (before + llm) / 1.3 - llm
    assert f"take {needed:.0f}, less than any of this" in text and needed < linear
    busy = [
        round(100 * float(row["gpu_busy"]))
        for row in rows(LARGE, "0.33.0", RESULTS)
        if (row["workload"], row["concurrency"]) == ("page", "64")
    ]
    assert f"works {min(busy)} to {max(busy)} % of the time" in text


def test_the_page_says_what_flashattention_4_would_bring_stock() -> None:
    page = text_of("serving.md")
    times = {
        (row["model"], row["provider"], row["mode"]): float(row["p50_ms"])
        for row in rows("encoder", "0.33.0", RESULTS)
        if (row["case"], row["commit"]) == ("1x15376", "884af39")
    }
    saved = [
        100 - 100 * ms / times[model, chosen_rows.BASELINE, mode]
        for (model, provider, mode), ms in times.items()
        if (model, provider) == (QWEN3, "stock-flash_attn4")
    ]
    two = "Qwen/Qwen2-VL-7B-Instruct"
    before = times[two, chosen_rows.BASELINE, "graph"]
    fused = times[two, "stock-flash_attn4", "fused_graph"]
    assert (
        f"takes {min(saved):.0f} to {max(saved):.0f} % off a page of Qwen3-VL, and "
        f"with fused operations {100 - 100 * fused / before:.0f} % off one of Qwen2-VL"
    ) in page
    (line,) = (
        line
        for line in server_lines(RESULTS, setups=GRAPHS)
        if (line["model"], line["at once"]) == ("Qwen2-VL-7B", "64")
    )
    part = (before - fused) * of_setup(line, "stock-flash_attn:graph") / 10
    assert f"that is up to {part:.0f} % of a server" in page


def test_the_page_says_when_pages_come_by_the_present_fp8_kernel() -> None:
    found = [
        line
        for line in server_lines(RESULTS, "serve_one_image")
        if line["workload"] == "page"
    ]
    gains_of = [line["best over stock's best"] for line in found]
    attention, linear = gains_of
    assert (
        f"comes {attention} times as soon as from stock without graphs; with FP8 "
        f"linear layers, too, {linear} times as soon as from the best"
    ) in text_of("serving.md")


def test_the_page_says_when_first_tokens_come_with_graphs_for_one_image() -> None:
    page = text_of("serving.md")
    setups = ["stock-flash_attn4:graph", "plugin:graph", "plugin-fp8:graph"]
    found = by_workload(setups, "1", "serve_one_image")
    photograph, thumbnails = found["photograph"], found["thumbnails"]
    stock, bf16, fp8 = (of_setup(photograph, setup) for setup in setups)
    gain = over(photograph, setups[1], setups[:1])
    assert (
        f"a photograph after {bf16:.0f} ms in place of {stock:.0f}, {gain:.2f} times "
        f"as soon, with FP8 attention {fp8:.0f}."
    ) in page
    before = of_setup(by_workload(LATER, "1", LARGE)["photograph"], LATER[1])
    assert f"without these graphs, it came after {before:.0f} ms" in page
    stock, bf16, _ = (of_setup(thumbnails, setup) for setup in setups)
    gain = over(thumbnails, setups[1], setups[:1])
    said = f"come after {bf16:.0f} in place of {stock:.0f}, {gain:.2f} times."
    assert said in page
    assert (
        min(over(x, own, setups[:1]) for x in found.values() for own in setups[1:]) > 1
    )
