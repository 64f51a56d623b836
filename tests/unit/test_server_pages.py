# SPDX-License-Identifier: Apache-2.0
"""What pages say of servers and single requests is what the rows say."""

from collections import defaultdict

from _pages import H100_RESULTS, RESULTS, rows, text_of
from _servers import (
    DEFAULT,
    GRAPHS,
    OLDER,
    ORDER,
    QUANTIZED,
    gains,
    percents,
    server_lines,
    times,
)

import chosen_rows


def check_tokens_of_pages(found: list[chosen_rows.Row]) -> None:
    """Check that full servers' pages are counted with 15376 patches."""
    counted = [
        float(row["image_tokens_s"]) / float(row["req_s"])
        for row in found
        if (row["workload"], row["concurrency"]) == ("page", "64")
    ]
    # A token of the language model is made of four patches.
    assert all(abs(tokens - 15376 / 4) < 10 for tokens in counted)


def test_pages_say_what_servers_gain_on_an_h100() -> None:
    lines = server_lines(H100_RESULTS, setups=GRAPHS)
    four = [r for r in lines if r["more arguments"] == ORDER[0]]
    many, alone = percents(gains(four, "64")), times(gains(four, "1"))
    readme = text_of("README.md")
    for name in ("serving.md", "results_h100.md"):
        page = text_of(name)
        assert f"full server answers {many} % more requests a second" in page
        assert f"{alone} times as soon" in page
    lines = server_lines(H100_RESULTS, setups=DEFAULT)
    full, one = percents(gains(lines, "64")), times(gains(lines, "1"))
    said = f"{many} % more; {full} % | {alone} times as soon; {one} |"
    assert f"| H100, graphs; default mode | {said}" in readme
    for name in ("serving.md", "results_h100.md"):
        page = text_of(name)
        assert f"full server answers {full} % more requests" in page
        assert f"{one} times as soon, and a full" in page
    first = {
        model: "{} ms in place of {}".format(
            *(f"{float(r[name].split()[0]):.0f}" for name in names)
        )
        for model, *names in (
            ("Qwen3-VL-8B", "plugin-fp8 graph", "stock-flash_attn4 graph"),
            ("Qwen2.5-VL-7B", "plugin graph", "stock-flash_attn graph"),
            ("Qwen2-VL-7B", "plugin-fp8 graph", "stock-flash_attn4 graph"),
        )
        for r in four
        if (r["model"], r["workload"], r["at once"]) == (model, "page", "1")
    }
    page = text_of("serving.md")
    assert f"a page after {first['Qwen3-VL-8B']} (Qwen3-VL)" in page
    for model, name in (("Qwen2.5-VL-7B", "Qwen2.5-VL"), ("Qwen2-VL-7B", "Qwen2-VL")):
        assert f"{first[model].replace(' ms', '')} ({name})" in page
    losses = [
        round(100 - 100 * float(r["stock-flash_attn graph"]) / stock)
        for r in server_lines(H100_RESULTS, OLDER)
        if (r["more arguments"], r["at once"]) == (ORDER[0], "64")
        for stock in [float(r["stock-flash_attn eager"])]
    ]
    said = f"{min(losses)} to {max(losses)} %"
    assert f"[{said} on an H100]" in page
    assert f"{said} fewer requests with its graphs" in text_of("results_h100.md")


def test_pages_say_what_parts_of_a_request_take() -> None:
    page = text_of("serving.md")
    medians = {
        (r["bench"], r["workload"], r["stage"], r["provider"]): float(r["p50_ms"])
        for r in rows("request", "0.33.0", RESULTS)
    }

    def pair(*what: str, digits: int = 0) -> tuple[str, str]:
        providers = chosen_rows.PLUGIN_FP8, chosen_rows.BASELINE
        ours, stock = (f"{medians[*what, p]:.{digits}f}" for p in providers)
        return ours, stock

    pages, photographs, thumbnails = (
        [pair("request", one, stage) for stage in ("whole", "processor")]
        for one in ("page", "photograph", "thumbnails")
    )
    assert "a page takes {} ms in place of {}".format(*pages[0]) in page
    assert "a photograph {} in place of {}".format(*photographs[0]) in page
    assert "20 thumbnails {} in place of {} (medians".format(*thumbnails[0]) in page
    assert "takes {} ms of a page in place of {}".format(*pages[1]) in page
    assert "{} of a photograph in place of {}".format(*photographs[1]) in page
    assert "{} of 20 thumbnails in place of {}".format(*thumbnails[1]) in page
    ours, stock = pair("trace", "page", "encoder", digits=1)
    assert f"works {ours} ms for a page in place of {stock}" in page


def test_the_page_of_an_h100_has_its_servers() -> None:
    text = text_of("results_h100.md").partition(" ## Servers ")[2]
    kinds: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in server_lines(H100_RESULTS, setups=GRAPHS):
        kinds[line["more arguments"]].append(line)
    now_four, without = (kinds[x] for x in (ORDER[0], ORDER[3]))
    assert f"first token comes {times(gains(without, '1'))} times as soon" in text
    same = [line for line in now_four if line["model"] == without[0]["model"]]
    assert f"on other hosts, {times(gains(same, '1'))} times" in text
    found = rows("serve", "0.33.0", H100_RESULTS)
    busy = [
        float(row["gpu_busy"])
        for row in found
        if row["concurrency"] == "64" and row["gpu_busy"] != "unknown"
    ]
    assert f"works {100 * min(busy):.0f} to {100 * max(busy):.0f} % of the time" in text
    check_tokens_of_pages(found)


def test_pages_say_what_servers_with_linear_layers_in_fp8_gain() -> None:
    text = text_of("results_h100.md")
    lines = server_lines(H100_RESULTS, setups=QUANTIZED)
    (full,) = [line for line in lines if line["at once"] == "64"]
    ours, *stocks = (
        float(full[setup.replace(":", " ")]) for setup in reversed(QUANTIZED)
    )
    without_graphs, with_graphs = stocks
    assert without_graphs > with_graphs
    assert f"beaten by {100 * ours / without_graphs - 100:.0f} %" in text
    assert f"first token comes {times(gains(lines, '1'))} times as soon" in text
    graphs = server_lines(H100_RESULTS, setups=GRAPHS)
    many, one = (
        line
        for at_once in ("64", "1")
        for line in graphs
        if "visual" in line["more arguments"] and line["at once"] == at_once
    )
    gain = "best over stock's best"
    assert (
        f"pages {many[gain]} times as many when full, and the first token {one[gain]} "
        "times as soon"
    ) in text
    (bf16,) = (
        float(line["plugin-fp8 graph"])
        for line in graphs
        if (line["workload"], line["at once"]) == ("page", "64")
        and (line["model"], line["more arguments"]) == ("Qwen3-VL-8B", ORDER[0])
    )
    page = text_of("serving.md")
    assert (
        f"answers {ours:.1f} pages a second, in place of {bf16:.1f} in bf16 on another "
        f"host, and stock's quantised one {without_graphs:.1f}"
    ) in page
    assert (
        "{:.1f} pages a second, and stock's {:.1f}".format(
            *(
                float(many[f"{name} graph"])
                for name in ("plugin-fp8", "stock-flash_attn")
            )
        )
        in page
    )


def test_the_page_says_what_a_soak_found() -> None:
    page = text_of("serving.md")
    (row,) = rows("soak", "0.33.0", H100_RESULTS)
    older, parallel, data = rows("soak", "0.33.0", RESULTS)
    counts = ("sent", "answered", "refused", "cancelled", "faults", "wrong", "sampled")
    for one, other in ((row, older), (parallel, data)):
        assert [one[name] for name in counts] == [other[name] for name in counts]
        sent, answered, refused, cancelled = (f"{int(one[n]):,}" for n in counts[:4])
        assert (
            f"| {sent} | {answered} | {refused} | {cancelled} | {one['faults']} | "
            f"{one['wrong']} of {one['sampled']} sampled | {one['built_after_start']} |"
        ) in page
    assert f"{row['scale_file_changes']} changes of the scale file" in page
    assert (
        f"Device memory grew by {row['device_growth']} % and host memory by "
        f"{row['rss_growth']} %"
    ) in page
    assert "--mm-encoder-tp-mode data" in data["serve_args"]
    assert (
        f"Device memory grew by {parallel['device_growth']} % and "
        f"{data['device_growth']} %, host memory by {parallel['rss_growth']} % and "
        f"{data['rss_growth']} %"
    ) in page
    middle, worst = (
        [f"{float(r[name]):.2f}" for r in (parallel, data)]
        for name in ("median_diff", "worst_diff")
    )
    assert (
        f"by {middle[0]} in the median and by at most {worst[0]} with heads shared, by "
        f"{middle[1]} and {worst[1]} with whole images"
    ) in page
    saved = [(r["scales_saved"], r["scales_not_saved"]) for r in (parallel, data)]
    assert saved == [("2", "2"), ("1", "3")]
    assert "two saved their scales with heads shared and one with whole images" in page


def test_the_page_of_an_h100_has_its_older_servers() -> None:
    text = text_of("results_h100.md").partition(" ## Older servers")[2]
    found = rows(OLDER, "0.33.0", H100_RESULTS)
    lines = server_lines(H100_RESULTS, OLDER)
    four, shared, one = (
        [line for line in lines if line["more arguments"] == kind] for kind in ORDER[:3]
    )
    assert (
        f"answers {percents(gains(four, '64'))} % more requests a second than stock's "
        f"best, with `torch_shm` {percents(gains(shared, '64'))} %, and with one API "
        f"server and without graphs {percents(gains(one, '64'))} %"
    ) in text
    assert f"{times(gains(lines, '1'))} times as soon" in text
    first = {
        row["provider"] + row["mode"]: float(row["ttft_p50_ms"])
        for row in found
        if (row["workload"], row["concurrency"]) == ("page", "1")
        and (row["commit"], row["serve_args"]) == ("3b9b6d1", "--api-server-count 4")
    }
    ours = first[f"{chosen_rows.PLUGIN_FP8}graph"]
    stock = first[f"{chosen_rows.BASELINE}eager"]
    assert f"a page took {ours:.0f} ms, with {stock:.0f} in stock's eager" in text
    check_tokens_of_pages(found)
    assert f"is {100 * 15376 / 12544 - 100:.0f} % too high" in text


def test_the_page_of_an_h100_has_its_requests() -> None:
    text = text_of("results_h100.md").partition(" ## One request ")[2]
    medians = {
        (r["bench"], r["workload"], r["stage"], r["provider"]): float(r["p50_ms"])
        for r in rows("request", "0.33.0", H100_RESULTS)
    }
    whole = [
        "{:.0f}{} in place of {:.0f}".format(
            medians["request", one, "whole", chosen_rows.PLUGIN_FP8],
            " ms" if one == "page" else "",
            medians["request", one, "whole", chosen_rows.BASELINE],
        )
        for one in ("page", "photograph", "thumbnails")
    ]
    assert (
        f"a page takes {whole[0]}, a photograph {whole[1]}, 20 thumbnails {whole[2]}"
    ) in text
    for bench, stage, said in (
        (
            "request",
            "processor",
            "processor takes {:.0f} ms of a page in place of {:.0f}",
        ),
        ("trace", "transport", "to the engine takes {:.0f} ms in place of {:.0f}"),
    ):
        ours, stock = (
            medians[bench, "page", stage, provider]
            for provider in (chosen_rows.PLUGIN_FP8, chosen_rows.BASELINE)
        )
        assert said.format(ours, stock) in text
