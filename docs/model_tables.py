# SPDX-License-Identifier: Apache-2.0
"""The tables of models.md: what `models.toml` says, and what the code knows.

`generate.py` writes them into the page. The keys of the file, most of which a tower may
leave out:

    module      vLLM's, below `vllm.model_executor.models`, or below `vllm` with dots
    part        of a module with several towers, or that is served in part
    serves      models that build it
    since       the first release whose tower has `MMEncoderAttention`, if not 0.25.1
    until       the last one, if there is a newer release without
    head_dims   those that no code of this repository builds at true size
    length      the longest length, as it is handed over
    blocks      what runs of them, if it is no program of this package, and why
    graphs      vLLM's classes whose encoder graphs it captures, and since when; a model
                that derives from one is captured as that
    encoders    names in `tests/integration/_encoders.py`
    why, runs   why it is outside, and what runs instead
    tested      what of it the tests build; `read` if nothing
    stock       what vLLM 0.25.1's own FLASHINFER makes of it
"""

import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
for folder in ("benchmarks", "tests/integration"):
    sys.path.append(str(ROOT / folder))

import chosen_rows  # noqa: E402
from table_text import table_head, table_line  # noqa: E402

FACTS = Path(__file__).with_name("models.toml")
RESULTS = ROOT / "benchmarks" / "results"
# GPUs whose rows say a model's gain, by what the table calls them. Only a model without
# rows of the first shows the second's.
GPUS = {"": "h200", "H100: ": "h100-80gb-hbm3"}

Tower = Mapping[str, Any]
_DENSE = (
    *("module", "serves", "head dims", "blocks", "encoder graphs", "FP8 on an H200"),
    *("by name", "gain", "tested"),
)
_PACKED = (*_DENSE[:3], "longest length", *_DENSE[3:], "stock 0.25.1")
_OUTSIDE = ("module", "what", "serves", "why", "what runs", "tested")


def read() -> Mapping[str, Sequence[Tower]]:
    """Return what the file says: `packed`, `dense`, `transformers` and `outside`."""
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def full_name(module: str) -> str:
    """Return a module's name below `vllm`, as tests and patches have it."""
    return module if "." in module else f"model_executor.models.{module}"


def packed() -> str:
    """Write a line for each tower of packed sequences."""
    return _table(_PACKED, "packed")


def dense() -> str:
    """Write a line for each tower of dense batches."""
    return _table(_DENSE, "dense")


def transformers() -> str:
    """Write a line for each tower that vLLM takes from Transformers."""
    return _table(_DENSE, "transformers")


def outside() -> str:
    """Write a line for each tower, or part of one, that runs elsewhere."""
    return _table(_OUTSIDE, "outside")


def built() -> dict[str, list[tuple[str, int]]]:
    """Return models and head dims that this repository builds at true size, by module.

    A module with several towers has its part after it. Some models are there more than
    once; the benchmarks measure them under these names.
    """
    import gemma4_stack
    from known_stacks import STACKS
    from vllm_flashinfer_vit.towers.spec import FAMILIES, NAMED_MODELS
    from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

    found: dict[str, list[tuple[str, int]]] = {}
    for name, (family, config) in NAMED_MODELS.items():
        width = config.get("embed_dim", config["hidden_size"])
        module = FAMILIES[family].module
        found.setdefault(module, []).append((name, width // config["num_heads"]))
    for name, whole in WHOLE_MODELS.items():
        found.setdefault(whole.tower, []).append((name, whole.head_dim))
    for name, stack in STACKS.items():
        found.setdefault(stack.module, []).append((name, stack.head_dim))
    for name, sizes in gemma4_stack.TOWERS.items():
        found.setdefault("gemma4_mm", []).append((name, sizes.head_size))
    return found


def with_block_patch() -> set[str]:
    """Return the modules of the blocks that patches have run as programs."""
    from vllm_flashinfer_vit.plugin import all_patches

    targets = (p.target for p in all_patches() if p.name.endswith("-blocks"))
    return {target.partition(":")[0].removeprefix("vllm.") for target in targets}


def gains(rows: Iterable[chosen_rows.Row]) -> dict[str, str]:
    """Return by model the geometric means of the newest vLLM that it was measured with.

    They are of graphs, or say that they are not: where stock has none of a model.

    Args:
        rows: Of one GPU, those with graphs of one file.
    """
    found: dict[str, str] = {}
    rows = list(rows)
    for mode, end in (("eager", " without graphs"), ("graph", "")):
        for vllm in sorted({row["vllm"] for row in rows}, key=Version):
            best = chosen_rows.Best([row for row in rows if row["vllm"] == vllm], mode)
            for model in best.models:
                means = {p: best.mean(p, model) for p in best.challengers}
                names = {chosen_rows.PLUGIN: "", chosen_rows.PLUGIN_FP8: "FP8 "}
                shown = [f"{names[p]}{mean}" for p, mean in means.items() if mean]
                if shown:
                    found[model] = f"{_short(model)} {', '.join(shown)}{end}"
    return found


def measured() -> dict[str, str]:
    """Return by model the gain on the first of `GPUS` that has one, and which it is."""
    found: dict[str, str] = {}
    for prefix, gpu in GPUS.items():
        rows = chosen_rows.read(RESULTS / gpu / "encoder.csv")
        # Its rows of graphs are there to compare with eager mode.
        if (eager := RESULTS / gpu / "eager.csv").is_file():
            rows += [r for r in chosen_rows.read(eager) if r["mode"] != "graph"]
        of_gpu = gains(rows)
        found = {**{model: prefix + gain for model, gain in of_gpu.items()}, **found}
    return found


def _table(heads: Sequence[str], kind: str) -> str:
    lines = table_head(heads)
    known = _Known()
    for tower in read()[kind]:
        cells = _cells(tower, known)
        lines.append(table_line(cells[head] or "-" for head in heads))
    return "\n".join(lines)


class _Known:
    """What the code and the rows know, read once for a table."""

    def __init__(self) -> None:
        from _encoders import DENSE, PACKED

        self.encoders = {**PACKED, **DENSE}
        self.built = built()
        self.gains = measured()
        self.patched = with_block_patch()

    def runs_programs(self, tower: Tower) -> bool:
        """Whether a test counts programs, or a patch is for a module without a test."""
        return self._is_so(tower, lambda encoder: encoder.programs > 0)

    def turns(self, tower: Tower) -> str:
        """Return how much of q and k attention turns, as `runs_programs` knows."""
        for turns in ("all", "a part"):
            if self._is_so(tower, lambda encoder, of=turns: encoder.turns == of):
                return turns
        return "nothing"

    def _is_so(self, tower: Tower, of: Callable[[Any], bool]) -> bool:
        names = tower.get("encoders", ())
        if names:
            return any(of(self.encoders[name]) for name in names)
        return "part" not in tower and full_name(tower["module"]) in self.patched


def _cells(tower: Tower, known: _Known) -> dict[str, str]:
    part = f" ({tower['part']})" if "part" in tower else ""
    models = known.built.get(f"{tower['module']}{part}", ())
    head_dims = sorted({dim for _, dim in models} | set(tower.get("head_dims", ())))
    found = [known.gains[name] for name, _ in models if name in known.gains]
    is_outside = "why" in tower
    programs = "" if is_outside or not known.runs_programs(tower) else "programs"
    fp8 = "" if is_outside else _fp8(head_dims, turns=known.turns(tower))
    return {
        "module": f"`{tower['module']}`" + ("" if is_outside else part + _when(tower)),
        "what": tower.get("part", ""),
        "serves": tower.get("serves", ""),
        "head dims": ", ".join(map(str, head_dims)),
        "longest length": tower.get("length", ""),
        "blocks": tower.get("blocks", programs),
        "encoder graphs": _graphs(tower),
        "FP8 on an H200": fp8,
        "by name": ", ".join(_named(models)),
        "gain": "; ".join(found) or "not measured",
        "why": tower.get("why", ""),
        "what runs": tower.get("runs", ""),
        "tested": tower["tested"],
        "stock 0.25.1": tower.get("stock", ""),
    }


def _when(tower: Tower) -> str:
    since, until = tower.get("since"), tower.get("until")
    return (f", from {since}" if since else "") + (f", until {until}" if until else "")


def _graphs(tower: Tower) -> str:
    """Say which classes vLLM captures, and whether this package does so exactly."""
    from vllm_flashinfer_vit.machine.versions import TESTED_VLLM
    from vllm_flashinfer_vit.models.exact_graphs import CLASSES

    texts: dict[str, list[str]] = {"exact": [], "padded": []}
    for name, since in tower.get("graphs", {}).items():
        short = name.removesuffix("ForConditionalGeneration").removesuffix(
            "ForCausalLM"
        )
        exact_since = CLASSES.get(name)
        if exact_since != "":
            when = "" if since == TESTED_VLLM[0] else f" from {since}"
            texts["padded"].append(f"{short}{when}")
        if exact_since is not None:
            first = exact_since or since
            when = "" if first == TESTED_VLLM[0] else f" from {first}"
            texts["exact"].append(f"{short}{when}")
    return "; ".join(f"{kind}: {', '.join(t)}" for kind, t in texts.items() if t)


def _fp8(head_dims: Sequence[int], *, turns: str) -> str:
    """Say from which length on FP8 attention runs, by head dim if that differs.

    Where rotary turns whole heads, of sequences of 512 rows and more in the mean.
    """
    texts: dict[str, list[str]] = {}
    for head_dim in head_dims:
        texts.setdefault(_fp8_of(head_dim, turns=turns), []).append(str(head_dim))
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{', '.join(dims)}: {text}" for text, dims in texts.items())


def _fp8_of(head_dim: int, *, turns: str) -> str:
    from vllm_flashinfer_vit.choices.arrival import without_pass
    from vllm_flashinfer_vit.choices.lookup import (
        PORTABLE_FP8,
        fp8_choices_for,
        fp8_ranges,
    )
    from vllm_flashinfer_vit.kernels.catalog import KERNELS
    from vllm_flashinfer_vit.machine.stack import Gpu, Stack

    takes = KERNELS[PORTABLE_FP8].needs.head_dims
    if takes is not None and not takes[0] <= head_dim <= takes[1]:
        return "refused"
    h200 = Stack(python="", gpus=(Gpu("NVIDIA H200", (9, 0), None),))
    choices = fp8_choices_for(h200, "bfloat16", head_dim)
    if turns == "nothing":
        choices = without_pass(choices)
    ranges = fp8_ranges(choices)
    return f"from {ranges[0][0]} tokens" if ranges else "not faster"


def _named(models: Iterable[tuple[str, int]]) -> list[str]:
    from vllm_flashinfer_vit.towers.spec import NAMED_MODELS
    from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

    known = {**NAMED_MODELS, **WHOLE_MODELS}
    return [_short(name) for name, _ in models if name in known]


def _short(model: str) -> str:
    return model.rpartition("/")[2].removesuffix("-Instruct")
