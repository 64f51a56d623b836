# SPDX-License-Identifier: Apache-2.0
"""Prints result files as the Markdown tables of README and docs.

    python benchmarks/table.py summary benchmarks/results/h200
    python benchmarks/table.py best benchmarks/results/h200/encoder.csv
    python benchmarks/table.py best_eager benchmarks/results/h200/eager.csv
    python benchmarks/table.py modes benchmarks/results/h200/encoder.csv
    python benchmarks/table.py encoder benchmarks/results/h200/encoder.csv --mode eager
    python benchmarks/table.py host benchmarks/results/h200/host.csv --bench tower_host
    python benchmarks/table.py serve benchmarks/results/h200/serve.csv
    python benchmarks/table.py attention benchmarks/results/h200/attention.csv \
        --bench qkv_attention --providers stock-flash_attn plugin plugin-hopper_fp8

Of repeated measurements the newest counts. A speed-up is only printed for two rows of
one commit: measurements of two runs differ by more than what is compared.
"""

import argparse
import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]
BASELINE = "stock-flash_attn"
PLUGIN = "plugin"
PLUGIN_FP8 = "plugin-fp8"
# Ends the name of a provider whose linear layers are quantised, too.
QUANTIZED = "-q8"
# Shown as they are, and given a speed-up of their own.
CHALLENGERS = (PLUGIN, PLUGIN_FP8, "plugin-hopper_fp8", "plugin-triton_fp8")
# Contenders get through other numbers of them; a time is that of all N together.
MIXTURES = re.compile(r"first (\d+) random mixtures")
GRAPH_CASES = (
    "image 16x16",
    "image 32x32",
    "image 64x64",
    "8 x (32x32)",
    "20 x (20x20)",
)
# Those of the table of encoder graphs: provider and configuration.
ENGINES = ((BASELINE, "automatic"), (PLUGIN, "automatic"), (PLUGIN, "fp8"))
_KEYS = ("model", "case", "provider", "mode", "dtype")


class NoRowsError(SystemExit):
    """A results file has no rows that a table is to show."""


def read(path: Path) -> list[Row]:
    """Return the rows of a results file, oldest first."""
    with path.open(newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source))


def newest(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> list[Row]:
    """Keep the last row of each key: files are appended to."""
    return list({key(row): row for row in rows}.values())


def of_one_vllm(rows: Iterable[Row], vllm: str | None, path: Path) -> list[Row]:
    """Return the rows of one version of vLLM.

    Args:
        rows: Rows of `path`.
        vllm: The version; None if there is only one.
        path: For the message.

    Raises:
        NoRowsError: There are no rows.
        SystemExit: There are several versions, and none was named.
    """
    rows = [row for row in rows if vllm in (None, row["vllm"])]
    if not rows:
        of_vllm = f" of vLLM {vllm}" if vllm else ""
        raise NoRowsError(f"{path} has no such rows{of_vllm}; measure them first")
    if len(versions := sorted({row["vllm"] for row in rows})) > 1:
        raise SystemExit(f"{path} has vLLM {', '.join(versions)}: name one with --vllm")
    return rows


def speed_up(base: Row | None, row: Row | None, column: str = "p50_ms") -> float | None:
    """Return how many times as fast `row` is; None if they are not of one run."""
    if base is None or row is None or base["commit"] != row["commit"]:
        return None
    return float(base[column]) / float(row[column])


def table(rows: list[Row], group: str) -> str:
    """Write a line a case: milliseconds, and how many times as fast as stock."""
    rows = newest(rows, lambda row: (row[group], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    found: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row[group], row["case"]][row["provider"]] = row
    challengers = [p for p in CHALLENGERS if p in providers]
    heads = [group, "case", *providers, *(f"{p}: speed-up" for p in challengers)]
    lines = _head(heads)
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, case), by_provider in found.items():
        cells = [_time(by_provider.get(provider)) for provider in providers]
        for provider in challengers:
            ratio = speed_up(by_provider.get(BASELINE), by_provider.get(provider))
            cells.append("" if ratio is None else f"{ratio:.2f}")
            if ratio is not None:
                ratios[name][provider].append(ratio)
        lines.append(_line([name, case, *cells]))
    for name, by_challenger in ratios.items():
        means = [mean(by_challenger[provider]) for provider in challengers]
        lines.append(_line([name, "geometric mean", *[""] * len(providers), *means]))
    return _written(lines)


class Best:
    """Stock's best time of all backends and modes, and this package's over it.

    The modes are those that replay a graph, or those that do not, as this package's own
    mode does or does not: its program in a graph, or without one. Of each model only
    the rows of the commit count that measured this package in that mode last. Towers
    with quantised linear layers are compared with each other alone.
    """

    def __init__(
        self, rows: Iterable[Row], own_mode: str = "graph", quantized: bool = False
    ) -> None:
        end = QUANTIZED if quantized else ""
        rows = [
            row
            for row in rows
            if _timed(row["mode"]) == _timed(own_mode)
            and row["provider"].endswith(QUANTIZED) == quantized
            and (row["provider"].startswith("stock-") or row["mode"] == own_mode)
        ]
        last = {
            row["model"]: row["commit"]
            for row in rows
            if row["provider"] == PLUGIN + end
        }
        rows = [row for row in rows if row["commit"] == last.get(row["model"])]
        self.rows = newest(rows, lambda row: tuple(row[name] for name in _KEYS))
        present = {row["provider"] for row in self.rows}
        challengers = PLUGIN + end, PLUGIN_FP8 + end
        self.challengers = [p for p in challengers if p in present]
        self.models = list(dict.fromkeys(row["model"] for row in self.rows))

    def cases(self, model: str) -> list[str]:
        """Return a model's cases that stock runs."""
        mine = (row for row in self.rows if row["model"] == model)
        cases = dict.fromkeys(row["case"] for row in mine)
        return [case for case in cases if self.stock(model, case)]

    def stock(self, model: str, case: str) -> Row | None:
        """Return stock's fastest row."""
        return self._fastest(model, case, lambda name: name.startswith("stock-"))

    def of(self, provider: str, model: str, case: str) -> Row | None:
        """Return the fastest row of a provider."""
        return self._fastest(model, case, lambda name: name == provider)

    def mean(self, provider: str, model: str) -> str:
        """Return the geometric mean of a provider's speed-ups."""
        ratios = (
            speed_up(self.stock(model, case), self.of(provider, model, case))
            for case in self.cases(model)
        )
        return mean([ratio for ratio in ratios if ratio is not None])

    def _fastest(
        self, model: str, case: str, is_wanted: Callable[[str], bool]
    ) -> Row | None:
        mine = (
            row
            for row in self.rows
            if (row["model"], row["case"]) == (model, case)
            and is_wanted(row["provider"])
        )
        return min(mine, key=lambda row: float(row["p50_ms"]), default=None)


def _timed(mode: str) -> str:
    """Return what a mode times: `graph` replays, `eager` calls, or the `host` alone."""
    return next((end for end in ("graph", "host") if mode.endswith(end)), "eager")


def modes_table(rows: Iterable[Row]) -> str:
    """Write a line a contender and mode, fastest first: times over stock FLASH_ATTN's.

    Those are of FLASH_ATTN without fused ops and compiler, in a graph if the contender
    is in one, and of the cases that both ran at one commit.

    Raises:
        NoRowsError: No contender and FLASH_ATTN ran a case in common.
    """
    rows = [row for row in rows if _timed(row["mode"]) != "host"]
    rows = newest(rows, lambda row: tuple(row[name] for name in _KEYS))
    base = {
        (row["model"], row["case"], row["mode"]): row
        for row in rows
        if row["provider"] == BASELINE
    }
    ratios: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        timed = _timed(row["mode"])
        ratio = speed_up(row, base.get((row["model"], row["case"], timed)))
        if ratio is not None:
            key = (_short(row["model"]), timed, row["provider"], row["mode"])
            ratios[key].append(ratio)

    def fastest_first(key: tuple[str, ...]) -> tuple[str, str, float]:
        return key[0], key[1], statistics.geometric_mean(ratios[key])

    lines = _head(["model", "contender", "mode", "cases", f"time over {BASELINE}"])
    for key in sorted(ratios, key=fastest_first):
        model, _, provider, mode = key
        cells = [model, provider, mode, str(len(ratios[key])), mean(ratios[key])]
        lines.append(_line(cells))
    return _written(lines)


def best_table(
    rows: Iterable[Row], own_mode: str = "graph", quantized: bool = False
) -> str:
    """Write a line a case of `Best`.

    Raises:
        NoRowsError: There is no case that stock and this package ran in such modes.
    """
    best = Best(rows, own_mode, quantized)
    heads = ["model", "case", "stock", "which"]
    for provider in best.challengers:
        heads += [provider, "speed-up"]
    lines = _head(heads)
    for model in best.models:
        for case in best.cases(model):
            stock = best.stock(model, case)
            assert stock is not None
            backend = stock["provider"].removeprefix("stock-")
            cells = [model, case, _time(stock), f"{backend} {stock['mode']}"]
            for provider in best.challengers:
                row = best.of(provider, model, case)
                ratio = speed_up(stock, row)
                cells += [_time(row), "" if ratio is None else f"{ratio:.2f}"]
            lines.append(_line(cells))
    for model in best.models:
        if best.cases(model):
            cells = [model, "geometric mean", "", ""]
            for provider in best.challengers:
                cells += ["", best.mean(provider, model)]
            lines.append(_line(cells))
    return _written(lines)


def summary_table(encoder: list[Row], graphs: list[Row]) -> str:
    """Write one line a model: the geometric means, and the requests of real engines.

    Raises:
        NoRowsError: No tower ran in a graph.
    """
    best = Best(encoder)
    mixtures = shared_mixtures(graphs)
    same = [row for row in best.rows if row["mode"] == "graph"]
    lines = _head(
        [
            "speed-up in bf16, and with FP8 attention",
            "over stock FLASH_ATTN in the same mode",
            "over the best of stock's backends and modes",
            f"in a real engine, {_count(mixtures)} random requests",
        ]
    )
    for model in sorted(best.models):
        bf16, fp8 = (
            mean(
                [
                    ratio
                    for case in best.cases(model)
                    if (ratio := _same_mode(same, provider, model, case)) is not None
                ]
            )
            for provider in (PLUGIN, PLUGIN_FP8)
        )
        engine = (
            speed_up(
                _request(graphs, model, BASELINE, "automatic", mixtures),
                _request(graphs, model, PLUGIN, config, mixtures),
                "total_ms",
            )
            for config in ("automatic", "fp8")
        )
        engine_cells = ["-" if x is None else f"{x:.2f}" for x in engine]
        lines.append(
            _line(
                [
                    _short(model),
                    f"{bf16}, {fp8}",
                    f"{best.mean(PLUGIN, model)}, {best.mean(PLUGIN_FP8, model)}",
                    ", ".join(engine_cells),
                ]
            )
        )
    return _written(lines)


def _same_mode(
    rows: Iterable[Row], provider: str, model: str, case: str
) -> float | None:
    mine = {
        row["provider"]: row
        for row in rows
        if (row["model"], row["case"]) == (model, case)
    }
    return speed_up(mine.get(BASELINE), mine.get(provider))


def _request(
    rows: Iterable[Row], model: str, provider: str, config: str, case: str
) -> Row | None:
    wanted = (config, provider, model, case)
    keys = ("config", "provider", "model", "case")
    mine = [row for row in rows if tuple(row[key] for key in keys) == wanted]
    return mine[-1] if mine else None


def shared_mixtures(graphs: Iterable[Row]) -> str:
    """Return the case of the most random mixtures that all engines of a table timed.

    Raises:
        NoRowsError: They share none.
    """
    timed: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for row in graphs:
        if (row["provider"], row["config"]) in ENGINES:
            cases = timed[row["model"], row["provider"], row["config"]]
            if MIXTURES.fullmatch(row["case"]):
                cases.add(row["case"])
    if not (shared := set.intersection(*timed.values()) if timed else set()):
        raise NoRowsError("the engines timed no equal number of random mixtures")
    return max(shared, key=lambda case: int(_count(case)))


def _count(mixtures: str) -> str:
    found = MIXTURES.fullmatch(mixtures)
    assert found is not None
    return found[1]


def error_table(rows: Iterable[Row]) -> str:
    """Write the least and the largest error against fp32 by model and contender."""
    rows = newest(rows, lambda row: tuple(row[name] for name in _KEYS))
    providers = [BASELINE, PLUGIN, PLUGIN_FP8]
    lines = _head(["model", *providers])
    for model in sorted({row["model"] for row in rows}):
        cells = [_short(model)]
        for provider in providers:
            errors = [
                float(row["rel_err"]) * 100
                for row in rows
                if (row["model"], row["provider"]) == (model, provider)
            ]
            ends = f"{min(errors):.2f} to {max(errors):.2f} %" if errors else "-"
            cells.append(ends)
        lines.append(_line(cells))
    return _written(lines)


def graph_table(rows: list[Row]) -> str:
    """Write the tower's times in real engines, and what random mixtures took.

    The computed patches are of the engine that timed the mixtures.

    Raises:
        NoRowsError: As `shared_mixtures`.
    """
    mixtures = shared_mixtures(rows)
    heads = ["model", "engine", *GRAPH_CASES, mixtures, "speed-up"]
    lines = _head([*heads, "computed patches over real"])
    for model in dict.fromkeys(row["model"] for row in rows):
        base = _request(rows, model, BASELINE, "automatic", mixtures)
        for provider, config in ENGINES:
            cells = [_short(model), provider + (", FP8" if config == "fp8" else "")]
            for case in GRAPH_CASES:
                row = _request(rows, model, provider, config, case)
                cells.append(_time(row))
            total = _request(rows, model, provider, config, mixtures)
            cells.append("-" if total is None else f"{float(total['total_ms']):.0f}")
            ratio = speed_up(base, total, "total_ms")
            is_stock = provider == BASELINE
            cells.append("" if is_stock or ratio is None else f"{ratio:.2f}")
            same = [row for row in rows if total and row["commit"] == total["commit"]]
            padded = _request(same, model, provider, config, "random mixtures")
            value = padded["padded_over_real"] if padded else ""
            cells.append(f"{float(value):.2f}" if value else "-")
            lines.append(_line(cells))
    return _written(lines)


def memory_table(rows: list[Row]) -> str:
    """Write the most memory that each engine's process held, in MiB."""
    keys = ("config", "provider", "model")
    found = {tuple(row[key] for key in keys): row for row in rows}
    contenders = list(dict.fromkeys(key[:2] for key in found))
    lines = _head(["model", *(f"{c}: {p}" for c, p in contenders)])
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = (found.get((*contender, model)) for contender in contenders)
        cells = (row["peak_memory_mib"] if row else "-" for row in mine)
        lines.append(_line([_short(model), *cells]))
    return _written(lines)


def host_table(rows: Iterable[Row]) -> str:
    """Write the host's time in microseconds, of one bench and mode."""
    rows = newest(rows, lambda row: (row["model"], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    times: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        time_us = f"{float(row['p50_ms']) * 1e3:.0f}"
        key = (_short(row["model"]), row["case"], row["commit"])
        times[key][row["provider"]] = time_us
    lines = _head(["model", "case", "commit", *providers])
    for key, by_provider in times.items():
        lines.append(_line([*key, *(by_provider.get(p, "-") for p in providers)]))
    return _written(lines)


def serve_table(rows: Iterable[Row]) -> str:
    """Write a line a workload: what each server did, and the best over stock's best.

    One request at a time: the median time to the first token and its 99th percentile,
    in milliseconds. Several: requests a second.
    """
    names = ("model", "workload", "concurrency", "serve_args")
    rows = newest(rows, lambda row: tuple(row[n] for n in (*names, "provider", "mode")))
    setups = list(dict.fromkeys((row["provider"], row["mode"]) for row in rows))
    found: dict[tuple[str, ...], dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in rows:
        key = tuple(row[name] for name in names)
        found[key][row["provider"], row["mode"]] = row
    heads = (" ".join(setup) for setup in setups)
    first = ("model", "workload", "at once", "more arguments")
    lines = _head([*first, *heads, "best over stock's best"])
    for (model, workload, at_once, more), by_setup in found.items():
        column, is_time = ("ttft_p50_ms", True) if at_once == "1" else ("req_s", False)
        cells = []
        for setup in setups:
            row = by_setup.get(setup)
            text = "-" if row is None else row[column]
            if row is not None and is_time:
                text += f" ({row['ttft_p99_ms']})"
            cells.append(text)
        best = _best_over_stock(by_setup.values(), column, is_time)
        more = f"`{more}`" if more else ""
        lines.append(_line([_short(model), workload, at_once, more, *cells, best]))
    return _written(lines)


def _best_over_stock(rows: Iterable[Row], column: str, is_time: bool) -> str:
    """Return how many times as good the best is; rows of one commit are compared."""
    rows = list(rows)
    last = {row["commit"] for row in rows[-1:]}
    values: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if row["commit"] in last:
            values[row["provider"].startswith("stock-")].append(float(row[column]))
    if not all(values.values()):
        return ""
    if is_time:
        return f"{min(values[True]) / min(values[False]):.2f}"
    return f"{max(values[False]) / max(values[True]):.2f}"


def quantize_table(rows: Iterable[Row]) -> str:
    """Write TB/s of bytes read and written once, by head dim and case."""
    rows = newest(rows, lambda row: (row["head_dim"], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    found: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row["head_dim"], row["case"]][row["provider"]] = row
    lines = _head(["head_dim", "case", *providers, "blocks over copy"])
    for key, by_provider in found.items():
        speeds = {p: float(row["tb_per_s"]) for p, row in by_provider.items()}
        cells = [f"{speeds[p]:.2f}" if p in speeds else "-" for p in providers]
        share = 100 * speeds["plugin-blocks"] / speeds["copy"]
        lines.append(_line([*key, *cells, f"{share:.0f} %"]))
    return _written(lines)


def mean(values: Sequence[float]) -> str:
    """The geometric mean with two digits, empty without values."""
    return f"{statistics.geometric_mean(values):.2f}" if values else ""


def format_ms(value: float | None) -> str:
    """Three significant digits, or a dash for what did not run."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _time(row: Row | None) -> str:
    return format_ms(None if row is None else float(row["p50_ms"]))


def _short(model: str) -> str:
    return model.removeprefix("Qwen/").removesuffix("-Instruct")


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _written(lines: Sequence[str]) -> str:
    """Return a table of `_head` and lines below it.

    Raises:
        NoRowsError: There is no line below the head.
    """
    if len(lines) == 2:
        raise NoRowsError("the file has no rows of what this table compares")
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


KINDS: Mapping[str, Callable[[list[Row]], str]] = {
    "encoder": lambda rows: table(rows, "model"),
    "best": best_table,
    "best_eager": lambda rows: best_table(rows, "eager"),
    "best_quantized": lambda rows: best_table(rows, quantized=True),
    "best_quantized_eager": lambda rows: best_table(rows, "eager", quantized=True),
    "modes": modes_table,
    "attention": lambda rows: table(rows, "head_dim"),
    "errors": error_table,
    "graphs": graph_table,
    "memory": memory_table,
    "host": host_table,
    "quantize": quantize_table,
    "serve": serve_table,
}
# Kinds of which only one mode is compared.
_DEFAULT_MODES = {
    **dict.fromkeys(("encoder", "attention", "errors", "quantize"), "graph"),
    "host": "host",
}
# Kinds whose file also has rows of benches that are read by their names.
_DEFAULT_BENCHES = {"host": "host"}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("summary", *KINDS))
    parser.add_argument(
        "source", type=Path, help="a results file; for summary their folder"
    )
    parser.add_argument("--vllm", help="rows of this version; needed if there are more")
    parser.add_argument("--mode", help="default: graph, where one mode is compared")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--commit", help="default: the newest row of each")
    parser.add_argument("--bench", help="default: host, for the table of that name")
    parser.add_argument("--head-dim")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--providers", nargs="+")
    return parser.parse_args(argv)


def wanted_rows(path: Path, args: argparse.Namespace, mode: str | None) -> list[Row]:
    """Return the rows of a file that the options ask for.

    Raises:
        SystemExit: As `of_one_vllm`.
    """
    wanted = {
        "mode": mode,
        "dtype": args.dtype,
        "commit": args.commit,
        "bench": args.bench or _DEFAULT_BENCHES.get(args.kind),
        "head_dim": args.head_dim,
    }
    rows = [
        row
        for row in read(path)
        if all(v is None or row.get(name, v) == v for name, v in wanted.items())
        and (args.cases is None or row["case"] in args.cases)
        and (args.providers is None or row["provider"] in args.providers)
    ]
    return of_one_vllm(rows, args.vllm, path)


def render(argv: Sequence[str] | None = None) -> str:
    """Return the table that the arguments ask for.

    Raises:
        NoRowsError: Nothing is left to show.
        SystemExit: As `wanted_rows`, or the arguments are wrong.
    """
    args = parse_args(argv)
    if args.kind == "summary":
        encoder = wanted_rows(args.source / "encoder.csv", args, None)
        return summary_table(
            encoder, wanted_rows(args.source / "graphs.csv", args, None)
        )
    mode = args.mode or _DEFAULT_MODES.get(args.kind)
    return KINDS[args.kind](wanted_rows(args.source, args, mode))


if __name__ == "__main__":
    print(render())
