# SPDX-License-Identifier: Apache-2.0
"""What `tune` is asked to measure: its options, and what holds without them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.choices.gemm_table import GemmLayer
from vllm_flashinfer_vit.choices.measure import COUNTS, LENGTHS
from vllm_flashinfer_vit.choices.measure_gemms import ROWS, SIZES
from vllm_flashinfer_vit.gemms.catalog import SCALES
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS
from vllm_flashinfer_vit.kernels.formats import dtype_name

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


class Effort(NamedTuple):
    """How much is measured, where no option says it.

    Attributes:
        dtypes: Keys of `DTYPES`.
        lengths: Longest sequences, ascending, in tokens.
        counts: Numbers of sequences.
        time_limit_s: Seconds until what is not measured yet is left out.
        rows: Numbers of rows of GEMMs, ascending.
    """

    dtypes: Sequence[str]
    lengths: Sequence[int]
    counts: Sequence[int]
    time_limit_s: float
    rows: Sequence[int] = ROWS


FULL = Effort(tuple(DTYPES), LENGTHS, COUNTS, 660.0)
# A quarter of the batches of a head dim. Towers run in bf16 unless told otherwise, and
# few kernels win for a range of lengths that is shorter than a doubling.
QUICK = Effort(
    ("bf16",),
    (64, 128, 256, 512, 1024, 2048, 4096, 16384),
    (1, 16, 256),
    150.0,
    (4096, 16384),
)

PARTS = ("attention", "gemms")


@dataclass(frozen=True)
class Options:
    """What to measure, and where the table goes.

    Attributes:
        dtypes: Keys of `DTYPES`, comma-separated; None for the effort's.
        head_dims: Head dims in elements, comma-separated; None for `HEAD_DIMS`.
        output: The table's file; None for this GPU's file in the user's folder.
        time_limit_s: Seconds until what is not measured yet is left out; None for the
            effort's.
        quick: Whether the effort is `QUICK`.
        add: Whether what the file has of other dtypes, head dims and layers stays.
        gemms: Sizes of layers in FP8, inputs x outputs, comma-separated; None for
            `SIZES`.
        only: One of `PARTS`, None for all.
    """

    dtypes: str | None = None
    head_dims: str | None = None
    output: Path | None = None
    time_limit_s: float | None = None
    quick: bool = False
    add: bool = False
    gemms: str | None = None
    only: str | None = None

    @property
    def effort(self) -> Effort:
        """What is measured, options included."""
        effort = QUICK if self.quick else FULL
        if self.dtypes is not None:
            names = (name.strip() for name in self.dtypes.split(","))
            effort = effort._replace(dtypes=tuple(names))
        if self.time_limit_s is not None:
            effort = effort._replace(time_limit_s=self.time_limit_s)
        return effort

    def check(self) -> None:
        """Check all options.

        Raises:
            TuneError: An option is not valid, or could not act.
        """
        if math.isnan(self.effort.time_limit_s):
            raise TuneError("--time-limit has nan: use seconds, 1 or more")
        self.combinations()
        self.layers()

    def combinations(self) -> list[tuple[torch.dtype, int]]:
        """Return dtypes and head dims in the order in which they are measured.

        Raises:
            TuneError: An option is not valid, or could not act.
        """
        names = self._checked_dtypes()
        dims = self._checked_head_dims()
        if self.only == "gemms":
            return []
        return [(DTYPES[name], head_dim) for name in names for head_dim in dims]

    def layers(self) -> list[tuple[torch.dtype, GemmLayer]]:
        """Return the layers in FP8 whose GEMMs are measured, by the output's dtype.

        Raises:
            TuneError: An option is not valid, or could not act.
        """
        names = self._checked_dtypes()
        sizes = dict.fromkeys(SIZES if self.gemms is None else _sizes(self.gemms))
        if self.only == "attention":
            return []
        return [
            (DTYPES[name], GemmLayer(dtype_name(DTYPES[name]), *size, scales))
            for name in names
            # That of FP8 attention says nothing of what a layer returns.
            if name != "fp8"
            for size in sizes
            for scales in SCALES
        ]

    def _checked_head_dims(self) -> Sequence[int]:
        """Return the head dims, each once.

        Raises:
            TuneError: One is not valid.
        """
        if self.head_dims is None:
            return HEAD_DIMS
        dims = [text.strip() for text in self.head_dims.split(",")]
        for text in dims:
            if not _is_multiple(text, of=8, largest=256):
                raise TuneError(
                    f"--head-dims has {shortened(text)}: use multiples of 8 from 8 to "
                    "256"
                )
        return list(dict.fromkeys(map(int, dims)))

    def _checked_dtypes(self) -> list[str]:
        """Return the names of dtypes; what was given has to have a use.

        Raises:
            TuneError: A name is not valid, or another option leaves it no use.
        """
        names = list(dict.fromkeys(self.effort.dtypes))
        for name in names:
            if name not in DTYPES:
                raise TuneError(
                    f"--dtypes has {shortened(name)}: use {' or '.join(DTYPES)}"
                )
        if self.only is not None and self.only not in PARTS:
            raise TuneError(
                f"--only has {shortened(self.only)}: use {' or '.join(PARTS)}"
            )
        unused = None
        if self.only == "attention" and self.gemms is not None:
            unused = "--only attention measures no GEMM: leave out --gemms, or --only"
        elif self.only == "gemms" and self.head_dims is not None:
            unused = "--only gemms has no head dims: leave out --head-dims, or --only"
        elif self.only == "gemms" and self.dtypes is not None and "fp8" in names:
            unused = "--only gemms needs bf16 or fp16 in --dtypes; fp8 is attention's"
        elif self.gemms is not None and set(names) == {"fp8"}:
            unused = "--gemms needs bf16 or fp16 in --dtypes; fp8 is attention's"
        if unused is not None:
            raise TuneError(unused)
        return names

    def command(self) -> str:
        """Return the command that measures the same again.

        Raises:
            TuneError: An option is not valid.
        """
        has_attention = self.only != "gemms"
        dtypes = [name for name in self.effort.dtypes if has_attention or name != "fp8"]
        text = (
            f"vllm-flashinfer-vit tune{' --quick' if self.quick else ''}"
            f"{' --add' if self.add else ''} --dtypes {','.join(dtypes)}"
        )
        if self.only is not None:
            text += f" --only {self.only}"
        if has_attention:
            text += f" --head-dims {','.join(map(str, self._checked_head_dims()))}"
        if self.gemms is not None:
            sizes = (f"{inputs}x{outputs}" for inputs, outputs in _sizes(self.gemms))
            text += f" --gemms {','.join(sizes)}"
        return text


def _sizes(listed: str) -> list[tuple[int, int]]:
    """Return layers' inputs and outputs.

    Raises:
        TuneError: A size is not valid.
    """
    found = []
    for text in (text.strip() for text in listed.split(",")):
        inputs, _, outputs = text.partition("x")
        if not all(_is_multiple(n, of=16, largest=65536) for n in (inputs, outputs)):
            raise TuneError(
                f"--gemms has {shortened(text)}: use inputs x outputs with their "
                "padding, such as 1152x3456, multiples of 16 up to 65536"
            )
        found.append((int(inputs), int(outputs)))
    return found


def _is_multiple(text: str, of: int, largest: int) -> bool:
    """Whether a text is a multiple of a number, from that on up to the largest."""
    # Python refuses thousands of digits, and does not say of which option.
    is_short = len(text) <= len(str(largest))
    is_number = is_short and text.isascii() and text.isdecimal()
    return is_number and int(text) % of == 0 and of <= int(text) <= largest
