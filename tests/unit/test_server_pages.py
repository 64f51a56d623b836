# SPDX-License-Identifier: Apache-2.0
"""What pages say of servers and single requests is what the rows say."""

from collections import defaultdict
from pathlib import Path

from _pages import H100_RESULTS, RESULTS, rows, text_of

import chosen_rows
import engine_tables


def server_lines(results: Path) -> list[dict[str, str]]:
    """Return the lines of the table of servers, by its head."""
    found = rows("serve", "0.33.0", results)
    lines = engine_tables.serve_table(found).splitlines()
    del lines[1]
    head, *rest = ([cell.strip() for cell in line.split("|")] for line in lines)
    lines_of = [dict(zip(head, cells, strict=True)) for cells in rest]
    assert all(float(r["best over stock's best"]) > 1 for r in lines_of)
    return lines_of


def test_pages_say_what_servers_gain() -> None:
    lines = server_lines(RESULTS)
    assert all(r["more arguments"].endswith("server-count 4`") for r in lines)
    unset = [r for r in lines if "OMP" not in r["more arguments"]]
    many, alone = (
        [float(r["best over stock's best"]) for r in unset if r["at once"] == at_once]
        for at_once in ("64", "1")
    )
    more = "{} to {} %".format(*(round(100 * f(many) - 100) for f in (min, max)))
    sooner = f"{min(alone):.2f} to {max(alone):.2f} times as soon"
    readme = text_of("README.md")
    assert f"[{more} more requests a second than stock's with graphs" in readme
    assert sooner in readme
    page = text_of("serving.md")
    assert f"answers {more} more requests a second" in page and sooner in page
    # One row of each number of threads, of one server.
    changes: dict[str, list[float]] = {"1": [], "64": []}
    for row in unset:
        for four in (r for r in lines if "OMP" in r["more arguments"]):
            if all(
                four[name] == row[name] for name in ("model", "workload", "at once")
            ):
                for name in ("stock-flash_attn graph", "plugin-fp8 graph"):
                    now, then = (float(r[name].split()[0]) for r in (four, row))
                    changes[row["at once"]].append(100 * (now / then - 1))
    assert len(changes["1"]) == len(changes["64"]) == 6
    alone = sorted(-change for change in changes["1"])
    assert f"comes {alone[0]:.0f} to {alone[-1]:.0f} % sooner" in page
    most, least = max(changes["64"]), -min(changes["64"])
    assert f"between {least:.0f} % fewer and {most:.0f} % more requests" in page


def test_pages_say_what_servers_gain_on_an_h100() -> None:
    lines = server_lines(H100_RESULTS)
    four = [r for r in lines if r["more arguments"] == "`--api-server-count 4`"]
    many = [r for r in four if r["at once"] == "64"]
    gains = [round(100 * float(r["best over stock's best"]) - 100) for r in many]
    page = text_of("serving.md")
    assert f"servers gain [{min(gains)} to {max(gains)} %](results_h100.md" in page
    losses = [
        round(100 - 100 * float(r["stock-flash_attn graph"]) / stock)
        for r in many
        for stock in [float(r["stock-flash_attn eager"])]
    ]
    said = f"{min(losses)} to {max(losses)} % fewer requests with its graphs"
    assert said in page


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
    found = rows("serve", "0.33.0", H100_RESULTS)
    gains: dict[str, list[float]] = defaultdict(list)
    for line in server_lines(H100_RESULTS):
        kind = line["more arguments"] if line["at once"] == "64" else "alone"
        gains[kind].append(float(line["best over stock's best"]))
    alone = gains.pop("alone")
    assert f"{min(alone):.2f} to {max(alone):.2f} times as soon" in text
    four, shared, one = (
        " to ".join(f"{100 * f(ratios) - 100:.0f}" for f in (min, max))
        for ratios in gains.values()
    )
    assert (
        f"answers {four} % more requests a second than stock's best, with `torch_shm` "
        f"{shared} %, and with one API server and without graphs {one} %"
    ) in text
    first = {
        row["provider"] + row["mode"]: float(row["ttft_p50_ms"])
        for row in found
        if (row["workload"], row["concurrency"]) == ("page", "1")
        and (row["commit"], row["serve_args"]) == ("3b9b6d1", "--api-server-count 4")
    }
    ours = first[f"{chosen_rows.PLUGIN_FP8}graph"]
    stock = first[f"{chosen_rows.BASELINE}eager"]
    assert f"a page took {ours:.0f} ms, with {stock:.0f} in stock's eager" in text
    counted = [
        float(row["image_tokens_s"]) / float(row["req_s"])
        for row in found
        if (row["workload"], row["concurrency"]) == ("page", "64")
    ]
    # A token of the language model is made of four patches.
    assert all(abs(tokens - 15376 / 4) < 10 for tokens in counted)
    assert f"is {100 * 15376 / 12544 - 100:.0f} % too high" in text
