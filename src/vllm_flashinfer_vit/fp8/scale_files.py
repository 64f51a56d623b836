# SPDX-License-Identifier: Apache-2.0
"""Files of FP8 scales: schema, read, validate, merge, write.

A scale is what one e4m3 unit stands for: `x ~ x8 * scale`, and `scale` is `amax *
margin / 448` for the largest absolute value `amax` of a layer's rotated q or k, or v.
vLLM itself also reads the files that this package writes, and the other way round.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, AliasChoices, Field, RootModel

from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, FP32_TINY
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.json_files import Strict, lined, read_json, validated

_Schema = Literal["vllm-flashinfer-vit/fp8-scales/1"]
SCHEMA: _Schema = "vllm-flashinfer-vit/fp8-scales/1"

# Kernels read scales as fp32.
_FP32_MAX = (2 - 2.0**-23) * 2.0**127

# Stands in `method` for what a file of vLLM's own form holds.
_SIGNED = "vLLM's signed maxima"
_COUNTED = re.compile(r"abs-max of (\d+) (\w+)")

# Numbers may be rounded by hand; e4m3 itself rounds by up to 6 %.
_SCALE_TOLERANCE = 0.01

_ANOTHER = "make another by `vllm-flashinfer-vit calibrate`"

# Ranks that save at once need milliseconds each; an engine must not wait for more.
_SAVE_TIMEOUT_S = 10.0


class ScaleError(ValueError):
    """A file of scales cannot be used; the message names it, and the layer."""


class QKV(NamedTuple):
    """A positive number for each of a layer's q, k and v."""

    q: float
    k: float
    v: float


class LayerScales(NamedTuple):
    """One layer's scales.

    Attributes:
        scale: What one e4m3 unit stands for.
        amax: The largest absolute values that were seen. From a file of vLLM's own
            form, what the scales can represent.
        head_dim: The layer's head dim, or None if the file does not say.
    """

    scale: QKV
    amax: QKV
    head_dim: int | None


@dataclass(frozen=True)
class ScaleFile:
    """A model's scales.

    Attributes:
        layers: Scales by layer name, as vLLM names its attention layers.
        margin: What the abs-max was multiplied by; None if the file does not say.
        made_by: The fingerprint: `command`, `version` (of this package), `vllm`,
            `model` and `method`. Empty for a file of vLLM's own form.
    """

    layers: Mapping[str, LayerScales]
    margin: float | None = None
    made_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_upstream(self) -> bool:
        """Whether the file has vLLM's own form, of unknown origin."""
        return not self.made_by

    @property
    def has_signed_maxima(self) -> bool:
        """Whether vLLM's own scales are in it, merged ones included."""
        return self.is_upstream or _SIGNED in self.made_by["method"]


def check_margin(margin: float, option: str) -> None:
    """Check head room before anything is seen that it would spoil.

    Args:
        margin: What the abs-max is to be multiplied by.
        option: What gave it, for the message.

    Raises:
        ScaleError: e4m3 cannot hold values with such scales.
    """
    if not 1 / E4M3_MAX <= margin <= E4M3_MAX:
        raise ScaleError(
            f"{option} is {margin:g}: use a number from 1/448 to 448, such as 1.5; "
            "with more, one unit of e4m3 is above all values, with less, all beyond a "
            "448th of the largest are cut off"
        )


def from_amax(
    amax: Mapping[str, tuple[QKV, int]], margin: float, made_by: Mapping[str, str]
) -> ScaleFile:
    """Derive scales from what was seen.

    Args:
        amax: Largest absolute values and head dim, by layer name.
        margin: Head room, 1.5 by vLLM's default.
        made_by: See `ScaleFile`.

    Raises:
        ScaleError: An abs-max is negative or not finite.
    """
    layers = {}
    for name, (seen, head_dim) in amax.items():
        if not all(math.isfinite(x) and x >= 0 for x in seen):
            raise ScaleError(
                f"layer {name!r}: abs-max q {seen.q}, k {seen.k}, v {seen.v}; each "
                "must be finite and not negative"
            )
        layers[name] = LayerScales(_scale(seen, margin), seen, head_dim)
    return ScaleFile(layers, margin, dict(made_by))


def _scale(amax: QKV, margin: float) -> QKV:
    # Nothing but zeros: any scale represents them.
    return QKV(*(x * margin / E4M3_MAX or 1.0 for x in amax))


def read(path: Path) -> ScaleFile:
    """Read a file of this package's schema, or of vLLM's own three forms.

    vLLM's forms hold layers with `q`, `k`, `v` or `q_scale`, `k_scale`, `v_scale`, at
    the top level or below `layers`.

    Raises:
        ScaleError: The file cannot be used.
    """
    try:
        return _parse(read_json(path))
    except (OSError, ValueError) as error:
        raise ScaleError(
            f"the file of FP8 scales {path} cannot be used: {error}; {_ANOTHER}"
        ) from error


def write(scales: ScaleFile, path: Path) -> None:
    """Write a file, see `files.write`.

    Raises:
        ScaleError: The file would be refused when read.
        FileError: The file cannot be written.
    """
    text = dumps(scales)
    try:
        _parse(json.loads(text))
    except ValueError as error:
        raise ScaleError(f"scales for {path} cannot be used: {error}") from error
    files.write(path, text.encode())


def merge(old: ScaleFile, new: ScaleFile) -> ScaleFile:
    """Widen new scales by what an older file saw: ranks, runs and images add up.

    Args:
        old: The file that is there, see `check_model`.
        new: Its margin and origin hold for the result; `method` names both.

    Raises:
        ScaleError: The files are of different models, as layers or head dims show.
    """
    assert new.margin is not None
    amax = {}
    for name in dict.fromkeys((*old.layers, *new.layers)):
        both = [file.layers[name] for file in (old, new) if name in file.layers]
        head_dims = sorted({one.head_dim for one in both if one.head_dim is not None})
        if not head_dims:
            raise ScaleError(f"layer {name!r} is not a layer of this model")
        if len(head_dims) > 1:
            raise ScaleError(f"layer {name!r} has head dims {head_dims}")
        widest = QKV(*map(max, zip(*(one.amax for one in both), strict=True)))
        amax[name] = widest, head_dims[0]
    method = _method_of_both(old.made_by.get("method", _SIGNED), new.made_by["method"])
    return from_amax(amax, new.margin, {**new.made_by, "method": method})


def _method_of_both(*methods: str) -> str:
    """Name two origins; what both counted is added up, so that many runs stay short."""
    counts: dict[str, int] = {}
    for part in " + ".join(methods).split(" + "):
        counted = _COUNTED.fullmatch(part)
        name, count = (counted[2], int(counted[1])) if counted else (part, 0)
        counts[name] = counts.get(name, 0) + count
    return " + ".join(
        f"abs-max of {n} {name}" if n else name for name, n in counts.items()
    )


def check_model(scales: ScaleFile, path: Path, model: str) -> None:
    """Check that a file is of a model; one of vLLM's own form does not say.

    Raises:
        ScaleError: It is of another one.
    """
    if not scales.is_upstream and scales.made_by["model"] != model:
        raise ScaleError(
            f"{path} holds scales of model {scales.made_by['model']!r}, not of "
            f"{model!r}; choose another file"
        )


def check_mergeable(path: Path, model: str) -> None:
    """Check, before hours of serving, that scales can be saved to a path.

    Raises:
        FileError: The file cannot be written.
        ScaleError: There is a file, and it is not of this package or of another model.
    """
    files.check(path)
    if not path.exists():
        return
    there = read(path)
    if there.is_upstream:
        raise ScaleError(
            f"scales are saved by widening what a file holds, but {path} was not "
            "written by this package; choose another path"
        )
    check_model(there, path, model)


def save(new: ScaleFile, path: Path) -> ScaleFile:
    """Merge scales into a path, safe against other processes that do so too.

    Args:
        new: From `from_amax`.
        path: A file that this function wrote, or none.

    Returns:
        What the file holds now.

    Raises:
        ScaleError: The file there is not of this model.
        FileError: The file cannot be written, or `calibrate` is making it.
    """
    with files.locked(path, _SAVE_TIMEOUT_S):
        check_mergeable(path, new.made_by["model"])
        merged = merge(read(path), new) if path.exists() else new
        write(merged, path)
    return merged


def scales_for(
    scales: ScaleFile, path: Path, layer_name: str, head_dim: int
) -> LayerScales:
    """Look a layer up.

    Args:
        scales: What the file holds.
        path: The file, for messages.
        layer_name: The layer's name in vLLM.
        head_dim: Its head dim.

    Raises:
        ScaleError: The file lacks the layer, or has it with another head dim.
    """
    found = scales.layers.get(layer_name)
    if found is None:
        raise ScaleError(
            f"layer {layer_name!r} is not in the file of FP8 scales {path}; it has "
            f"{_some(scales.layers)}. It is of another model, or made for a part of "
            f"it; {_ANOTHER}"
        )
    if found.head_dim not in (None, head_dim):
        raise ScaleError(
            f"layer {layer_name!r} has head dim {head_dim}, but {found.head_dim} in "
            f"the file of FP8 scales {path}, so it is of another model; {_ANOTHER}"
        )
    return found


def check_no_others(scales: ScaleFile, path: Path, layers: Collection[str]) -> None:
    """Check that a file names no layer that the model does not have.

    Raises:
        ScaleError: It names one.
    """
    others = [name for name in scales.layers if name not in layers]
    if others:
        raise ScaleError(
            f"layer {others[0]!r} of the file of FP8 scales {path} is none of this "
            f"model's layers: {_some(layers)}; {_ANOTHER}"
        )


def dumps(scales: ScaleFile) -> str:
    """Return a file's JSON text, a line for each layer."""
    made_by = {**scales.made_by, "margin": scales.margin}
    layers = {
        name: {
            **one.scale._asdict(),
            "amax": one.amax._asdict(),
            "head_dim": one.head_dim,
        }
        for name, one in scales.layers.items()
    }
    return lined({"schema": SCHEMA, "made_by": made_by, "layers": layers})


def _some(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def _parse(document: Any) -> ScaleFile:
    """Check a document.

    Raises:
        ValueError: It has none of the known forms.
    """
    if isinstance(document, dict) and "schema" not in document:
        return _parse_upstream(document)
    checked = validated(_Document, document)
    for name, row in checked.layers.items():
        _check_scale(name, row.qkv, _scale(row.amax.qkv, checked.made_by.margin))
    return ScaleFile(
        {
            name: LayerScales(row.qkv, row.amax.qkv, row.head_dim)
            for name, row in checked.layers.items()
        },
        checked.made_by.margin,
        checked.made_by.model_dump(exclude={"margin"}),
    )


def _check_scale(name: str, found: QKV, expected: QKV) -> None:
    """Check what a layer's scales are against what its abs-max makes them.

    Raises:
        ValueError: A number is not the one that was written.
    """
    for part, scale, made in zip(QKV._fields, found, expected, strict=True):
        if not math.isclose(scale, made, rel_tol=_SCALE_TOLERANCE):
            raise ValueError(
                f"layers[{name!r}].{part} is {scale:g}, where amax.{part} times the "
                f"margin over {E4M3_MAX:.0f} is {made:g}; a number was changed"
            )


def _parse_upstream(document: dict[str, Any]) -> ScaleFile:
    nested = document.get("layers")
    # vLLM skips what is no object, such as a comment.
    rows = {
        name: row
        for name, row in (nested if isinstance(nested, dict) else document).items()
        if isinstance(row, dict)
    }
    checked = validated(_Upstream, _some_layer(rows))
    return ScaleFile(
        {
            name: LayerScales(row.qkv, QKV(*(x * E4M3_MAX for x in row.qkv)), None)
            for name, row in checked.root.items()
        }
    )


def _some_layer(layers: dict[str, Any]) -> dict[str, Any]:
    if not layers:
        raise ValueError("it holds no layer")
    return layers


def _is_scale(value: float) -> float:
    if not FP32_TINY <= value <= _FP32_MAX:
        raise ValueError("it must be positive and finite, in fp32 too")
    return value


def _is_amax(value: float) -> float:
    if not 0 <= value <= _FP32_MAX:
        raise ValueError("it must not be negative, and finite in fp32")
    return value


_Scale = Annotated[float, AfterValidator(_is_scale)]
_Amax = Annotated[float, AfterValidator(_is_amax)]


class _Three(Strict):
    q: float
    k: float
    v: float

    @property
    def qkv(self) -> QKV:
        return QKV(self.q, self.k, self.v)


class _AmaxRow(_Three):
    q: _Amax
    k: _Amax
    v: _Amax


class _Row(_Three):
    q: _Scale
    k: _Scale
    v: _Scale
    amax: _AmaxRow
    head_dim: int = Field(ge=1)


class _MadeBy(Strict):
    command: str
    version: str
    vllm: str
    model: str
    method: str
    margin: _Scale


class _Document(Strict):
    schema_: _Schema = Field(alias="schema")
    made_by: _MadeBy
    layers: Annotated[dict[str, _Row], AfterValidator(_some_layer)]


class _UpstreamRow(_Three):
    q: _Scale = Field(validation_alias=AliasChoices("q", "q_scale"))
    k: _Scale = Field(validation_alias=AliasChoices("k", "k_scale"))
    v: _Scale = Field(validation_alias=AliasChoices("v", "v_scale"))


class _Upstream(RootModel[dict[str, _UpstreamRow]]):
    pass
