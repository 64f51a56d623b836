# SPDX-License-Identifier: Apache-2.0
"""The rows of fp8_accuracy.py, and the page `docs/fp8_accuracy.md` that they become."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from chosen_rows import Row, newest, read
from environment import ENVIRONMENT_COLUMNS
from fp8_inputs import INPUTS
from fp8_layers import OUTLIER_CHANNELS, OUTLIER_FACTOR
from table_text import table_head, table_line

METHODS = ("bf16", "block", "dynamic", "static", "upstream")
COLUMNS = (
    "level",
    "input",
    "seed",
    "method",
    "kernel",
    "model",
    "head_dim",
    "tokens",
    "err_fp32",
    "cos_fp32",
    "err_bf16",
    "cos_bf16",
    *ENVIRONMENT_COLUMNS,
)
# The bar for block scales' error on outliers, as a part of that of upstream's method.
BAR = 0.8


def read_rows(path: Path) -> list[Row]:
    """Read a results file; of repeated measurements the last one counts."""
    keys = COLUMNS[: COLUMNS.index("tokens") + 1]
    return newest(read(path), lambda row: tuple(row[key] for key in keys))


def markdown(rows: Sequence[Row]) -> str:
    """Write the page `docs/fp8_accuracy.md` from a results file."""
    attention = [row for row in rows if row["level"] == "attention"]
    tower = [row for row in rows if row["level"] == "tower"]
    parts = ["# Accuracy of FP8 attention\n", _preamble(rows)]
    for kernel in _unique(r["kernel"] for r in attention if r["method"] != "bf16"):
        mine = [r for r in attention if r["kernel"] == kernel or r["method"] == "bf16"]
        parts += [f"## Attention output, `{kernel}`\n", _attention_table(mine)]
        if bar := _bar(mine):
            parts.append(bar)
    if tower:
        text = _TOWER_TEXT.format(tokens=tower[0]["tokens"])
        parts += ["## Embeddings of whole towers\n", text, _tower_table(tower)]
    if layers := [row for row in rows if row["level"] == "layers"]:
        text = _LAYERS_TEXT.format(
            tokens=layers[0]["tokens"],
            channels=OUTLIER_CHANNELS,
            factor=round(OUTLIER_FACTOR),
        )
        parts += ["## Linear layers in FP8\n", text, _layers_table(layers)]
    return "\n".join(parts)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _preamble(rows: Sequence[Row]) -> str:
    machines = _unique(
        f"{row['gpu']}, vLLM {row['vllm']}, torch {row['torch']}, Triton "
        f"{row['triton']}, cuDNN {row['cudnn']}, commit {row['commit']}"
        for row in rows
    )
    inputs = "\n".join(f"- `{name}`: {kind.text}." for name, kind in INPUTS.items())
    return _PREAMBLE.format(machines="; ".join(machines), inputs=inputs)


_PREAMBLE = """\
Written by `python benchmarks/fp8_accuracy.py --markdown docs/fp8_accuracy.md` from rows
that the same script measured: {machines}.

An error is `|out - fp32| / |fp32|` over the whole output: the mean over seeds and the
worst, and in brackets the mean over rows of one minus the cosine. fp32 starts from the
same bf16 inputs. Where scales come from:

- `bf16`: no FP8; the kernel that this package picks.
- `block`: one for each block of 128 tokens and head, from that block alone.
- `dynamic`: one for each tensor, from the largest absolute value of 16 passes, the
  measured one being the last.
- `static`: one for each tensor, 1.5 times what the largest absolute value of 16 other
  passes needs.
- `upstream`: as `dynamic`, but from the largest signed value, as in vLLM. The attention
  after it is the same, so that only the scales differ.

Inputs of the attention, one sequence, rounded to bf16; q and k count as rotated:

{inputs}

e4m3 keeps three bits of mantissa over fifteen binades, of which q and k use eleven, up
to 28. A scale that is a few times too large costs next to nothing; one that is too
small cuts the largest values off, and upstream's is, wherever the largest value is
negative.
"""
_TOWER_TEXT = """\
Random weights in true dimensions and one drawn image of {tokens} patches, after 15
others. Static and upstream's scales were recorded in bf16. Windows and short sequences
stay in bf16, as in an engine.
"""


_LAYERS_TEXT = """\
Towers as above, whose linear layers are quantised when they are loaded: with one scale
for a weight (`tensor`, `--quantization fp8`), or one for each of its outputs
(`channel`, `fp8_per_channel`). `vLLM` are vLLM's own layers with this package's
attention. On `outliers` {channels} channels of what each norm returns are {factor}
times as large. One image of {tokens} patches; the error against fp32.
"""


def _attention_table(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        found[row["input"], row["head_dim"]][row["method"]].append(row)
    methods = [
        m for m in METHODS if any(m in by_method for by_method in found.values())
    ]
    lines = table_head(["input", "head dim", *methods])
    for (name, head_dim), by_method in found.items():
        cells = (_cell(by_method[method]) for method in methods)
        lines.append(table_line([f"`{name}`", head_dim, *cells]))
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    errors = [float(row["err_fp32"]) for row in rows]
    angle = statistics.mean(1 - float(row["cos_fp32"]) for row in rows)
    worst = f", worst {max(errors):.2g}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.2g}{worst} ({angle:.1g})"


def error_ratio(rows: Sequence[Row], name: str) -> float | None:
    """Return block scales' mean error over upstream's on an input, None if unknown."""
    errors = {
        method: [
            float(row["err_fp32"])
            for row in rows
            if row["input"] == name and row["method"] == method
        ]
        for method in ("block", "upstream")
    }
    if not all(errors.values()):
        return None
    return statistics.mean(errors["block"]) / statistics.mean(errors["upstream"])


def _bar(rows: Sequence[Row]) -> str | None:
    ratio = error_ratio(rows, "outliers")
    if ratio is None:
        return None
    verdict = "within" if ratio <= BAR else "above"
    return (
        f"On `outliers`, the mean error of block scales is {ratio:.2f} times that of "
        f"upstream's method, {verdict} the bar of {BAR}.\n"
    )


def _tower_table(rows: Sequence[Row]) -> str:
    heads = ["model", "scales", "kernels", "against fp32", "against bf16"]
    lines = table_head(heads)
    for row in rows:
        pairs = (
            f"{float(row[f'err_{ref}']):.2g} ({1 - float(row[f'cos_{ref}']):.1g})"
            for ref in ("fp32", "bf16")
        )
        lines.append(table_line([row["model"], row["method"], row["kernel"], *pairs]))
    return "\n".join(lines) + "\n"


def _layers_table(rows: Sequence[Row]) -> str:
    methods = _unique(row["method"] for row in rows)
    lines = table_head(["model", "input", *methods])
    for model in _unique(row["model"] for row in rows):
        for name in _unique(row["input"] for row in rows):
            mine = [r for r in rows if (r["model"], r["input"]) == (model, name)]
            cells = [_cell([r for r in mine if r["method"] == m]) for m in methods]
            lines.append(table_line([model, f"`{name}`", *cells]))
    return "\n".join(lines) + "\n"
