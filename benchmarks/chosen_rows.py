# SPDX-License-Identifier: Apache-2.0
"""Reads result files, and chooses the rows that tables and figures compare.

Of repeated measurements the newest counts. A speed-up is only known for two rows of one
run, by one command of one commit: measurements of two runs differ by more than what is
compared.
"""

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tower_cases import AUDIO_CASES, CASES, DENSE_CASES, SMOKE_CASES

Row = Mapping[str, str]
BASELINE = "stock-flash_attn"
PLUGIN = "plugin"
PLUGIN_FP8 = "plugin-fp8"
# Ends the name of a provider whose linear layers are quantised, too.
QUANTIZED = "-q8"
# All such ends, and what each stands for as `--quantization`.
QUANTIZATIONS = {QUANTIZED: "fp8", "-b8": "fp8_per_block"}
# Rows that are equal in these measured the same.
KEYS = ("model", "case", "provider", "mode", "dtype")
# Rows of servers that were asked the same.
SERVER_KEYS = ("model", "workload", "concurrency", "answer_tokens", "serve_args")


class NoRowsError(SystemExit):
    """A results file has no rows that a table is to show."""


def read(path: Path) -> list[Row]:
    """Return the rows of a results file, oldest first.

    Raises:
        NoRowsError: There is no such file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as source:
            return list(csv.DictReader(source))
    except FileNotFoundError:
        raise NoRowsError(f"there is no file {path}; measure its rows first") from None


def newest(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> list[Row]:
    """Keep the last row of each key: files are appended to."""
    return list({key(row): row for row in rows}.values())


def run_of(row: Row) -> tuple[str, str]:
    """Return what rows of one run have alike; of one commit there may be several."""
    return row["commit"], row["command"]


def _of_last(
    rows: Iterable[Row], names: Sequence[str], source: Callable[[Row], object]
) -> list[Row]:
    """Of rows that are equal in some columns, keep those of the last one's source.

    They are in the order in which such rows first come.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [
        row
        for group in groups.values()
        for row in group
        if source(row) == source(group[-1])
    ]


def of_last_run(
    rows: Iterable[Row], compared: Sequence[str], measured: Sequence[str]
) -> list[Row]:
    """Of rows that are compared keep the newest of each, of the last one's run.

    Args:
        rows: Oldest first.
        compared: Columns that rows have alike that are compared.
        measured: Those in which rows differ that measured different things.
    """
    return newest(
        _of_last(rows, compared, run_of),
        lambda row: tuple(row[name] for name in (*compared, *measured)),
    )


def of_servers(rows: Iterable[Row]) -> list[Row]:
    """Return servers' newest rows: of a workload those of its last commit alone.

    Of a commit each run stays whole: to leave out what a later one measured again would
    take the server from it that its others are compared with.
    """
    keys = (*SERVER_KEYS, "command", "provider", "mode")
    return newest(
        _of_last(rows, SERVER_KEYS, lambda row: row["commit"]),
        lambda row: tuple(row[name] for name in keys),
    )


def setups_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return providers with their modes, stock's first, else as they first come."""
    setups = dict.fromkeys((row["provider"], row["mode"]) for row in rows)
    return sorted(setups, key=lambda setup: not setup[0].startswith("stock-"))


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


def check_names(
    rows: Iterable[Row], wanted: Mapping[str, Sequence[str] | None], path: Path
) -> None:
    """Check that a file has rows with each of some values.

    Args:
        rows: Rows of `path`.
        wanted: Values by column; None for any.
        path: For the message.

    Raises:
        NoRowsError: It has none with one of them.
    """
    for column, values in wanted.items():
        if values is None:
            continue
        known = dict.fromkeys(row[column] for row in rows)
        if strange := [value for value in values if value not in known]:
            raise NoRowsError(
                f"{path} has no rows with {column} {', '.join(strange)}, but with "
                + ", ".join(known)
            )


def speed_up(base: Row | None, row: Row | None, column: str = "p50_ms") -> float | None:
    """Return how many times as fast `row` is; None if they are not of one run."""
    if base is None or row is None or run_of(base) != run_of(row):
        return None
    return float(base[column]) / float(row[column])


def quantized_end(provider: str) -> str:
    """Return the one of `QUANTIZATIONS` that ends a name, empty for 16-bit layers."""
    return next((end for end in QUANTIZATIONS if provider.endswith(end)), "")


class Best:
    """Stock's best time of all backends and modes, and this package's over it.

    The modes are all of known sizes where this package replays a graph, those without
    a graph where it does not, and those of new sizes where its own is one. Of each
    case of a model only the rows of the run count that measured this package in that
    mode last. Towers with quantised linear layers are compared with each other alone.
    """

    def __init__(
        self, rows: Iterable[Row], own_mode: str = "graph", quantized: bool = False
    ) -> None:
        end = QUANTIZED if quantized else ""
        self._timed = what_is_timed(own_mode)
        compared = {self._timed, "new" if self._timed == "new" else "eager"}
        rows = [
            row
            for row in rows
            if what_is_timed(row["mode"]) in compared
            and quantized_end(row["provider"]) == end
            and (row["provider"].startswith("stock-") or row["mode"] == own_mode)
        ]
        # What of stock's each run timed, of any case.
        self._stock_setups: dict[tuple[str, tuple[str, str]], list[str]] = {}
        for row in rows:
            if row["provider"].startswith("stock-"):
                setups = self._stock_setups.setdefault((row["model"], run_of(row)), [])
                if (setup := _setup(row)) not in setups:
                    setups.append(setup)
        last = {
            (row["model"], row["case"]): run_of(row)
            for row in rows
            if row["provider"] == PLUGIN + end
        }
        rows = [
            row for row in rows if run_of(row) == last.get((row["model"], row["case"]))
        ]
        self.rows = newest(rows, lambda row: tuple(row[name] for name in KEYS))
        present = {row["provider"] for row in self.rows}
        challengers = PLUGIN + end, PLUGIN_FP8 + end
        self.challengers = [p for p in challengers if p in present]
        self.models = list(dict.fromkeys(row["model"] for row in self.rows))

    def cases(self, model: str) -> list[str]:
        """Return a model's cases that stock runs in a mode like this package's."""
        mine = (
            row["case"]
            for row in self.rows
            if row["model"] == model
            and row["provider"].startswith("stock-")
            and what_is_timed(row["mode"]) == self._timed
        )
        known = {**CASES, **DENSE_CASES, **AUDIO_CASES, **SMOKE_CASES}
        order = {case: place for place, case in enumerate(known)}
        return sorted(dict.fromkeys(mine), key=lambda case: order.get(case, len(order)))

    def stock(self, model: str, case: str) -> Row | None:
        """Return stock's fastest row."""
        return self._fastest(model, case, lambda name: name.startswith("stock-"))

    def which(self, model: str, case: str) -> str:
        """Say which of stock's is the fastest, and which have no row of this case.

        Those are what the same run timed in another case: here it failed, or was over.
        """
        mine = [
            row for row in self.rows if (row["model"], row["case"]) == (model, case)
        ]
        fastest = self.stock(model, case)
        assert fastest is not None
        timed = {_setup(row) for row in mine}
        ran = self._stock_setups[model, run_of(fastest)]
        missing = [setup for setup in ran if setup not in timed]
        return _setup(fastest) + (f"; no {', '.join(missing)}" if missing else "")

    def of(self, provider: str, model: str, case: str) -> Row | None:
        """Return the fastest row of a provider."""
        return self._fastest(model, case, lambda name: name == provider)

    def mean(self, provider: str, model: str) -> str:
        """Return the geometric mean of a provider's speed-ups; see `mean`."""
        cases = self.cases(model)
        ratios = (
            speed_up(self.stock(model, case), self.of(provider, model, case))
            for case in cases
        )
        return mean([ratio for ratio in ratios if ratio is not None], len(cases))

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


def _setup(row: Row) -> str:
    return f"{row['provider'].removeprefix('stock-')} {row['mode']}"


def what_is_timed(mode: str) -> str:
    """Return what a mode times: `graph` replays, `eager` calls, the `host` alone, or
    calls with `new` sizes.
    """
    ends = ("graph", "host", "new")
    return next((end for end in ends if mode.endswith(end)), "eager")


def mean(values: Sequence[float], cases: int) -> str:
    """The geometric mean with two digits, empty without values.

    Of fewer values than there are cases it says so: means stand beside each other.
    """
    if not values:
        return ""
    text = f"{statistics.geometric_mean(values):.2f}"
    count = len(values)
    return text if count == cases else f"{text} ({count} of {cases} cases)"
