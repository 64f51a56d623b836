# SPDX-License-Identifier: Apache-2.0
"""What `tune` is asked to measure: its options, and what holds without them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.choices.gemm_table import GemmLayer
from vllm_flashinfer_vit.choices.measure import COUNTS, LENGTHS
from vllm_flashinfer_vit.choices.measure_gemms import ROWS, SIZES
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS
from vllm_flashinfer_vit.kernels.formats import dtype_name
from vllm_flashinfer_vit.kernels.gemms import SCALES

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
        self.combinations()
        self.layers()

    def combinations(self) -> list[tuple[torch.dtype, int]]:
        """Return dtypes and head dims in the order in which they are measured.

        Raises:
            TuneError: An option is not valid, or could not act.
        """
        names = self._checked_dtypes()
        dims = [text.strip() for text in self._head_dims.split(",")]
        for text in dims:
            if not text.isdecimal() or int(text) % 8 or not 8 <= int(text) <= 256:
                raise TuneError(
                    f"--head-dims has {text!r}: use multiples of 8 from 8 to 256"
                )
        if self.only == "gemms":
            return []
        return [
            (DTYPES[name], int(text)) for name in names for text in dict.fromkeys(dims)
        ]

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

    @property
    def _head_dims(self) -> str:
        if self.head_dims is None:
            return ",".join(map(str, HEAD_DIMS))
        return self.head_dims

    def _checked_dtypes(self) -> list[str]:
        """Return the names of dtypes; what was given has to have a use.

        Raises:
            TuneError: A name is not valid, or another option leaves it no use.
        """
        names = list(dict.fromkeys(self.effort.dtypes))
        for name in names:
            if name not in DTYPES:
                raise TuneError(f"--dtypes has {name!r}: use {' or '.join(DTYPES)}")
        if self.only is not None and self.only not in PARTS:
            raise TuneError(f"--only has {self.only!r}: use {' or '.join(PARTS)}")
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
        """Return the command that measures the same again."""
        has_attention = self.only != "gemms"
        dtypes = [name for name in self.effort.dtypes if has_attention or name != "fp8"]
        text = (
            f"vllm-flashinfer-vit tune{' --quick' if self.quick else ''}"
            f"{' --add' if self.add else ''} --dtypes {','.join(dtypes)}"
        )
        if self.only is not None:
            text += f" --only {self.only}"
        if has_attention:
            text += f" --head-dims {self._head_dims.replace(' ', '')}"
        if self.gemms is not None:
            text += f" --gemms {self.gemms.replace(' ', '')}"
        return text


def _sizes(listed: str) -> list[tuple[int, int]]:
    """Return layers' inputs and outputs.

    Raises:
        TuneError: A size is not valid.
    """
    found = []
    for text in (text.strip() for text in listed.split(",")):
        inputs, _, outputs = text.partition("x")
        if not (_is_padded_size(inputs) and _is_padded_size(outputs)):
            raise TuneError(
                f"--gemms has {text!r}: use inputs x outputs with vLLM's padding, "
                "such as 1152x3456, multiples of 16 up to 65536"
            )
        found.append((int(inputs), int(outputs)))
    return found


def _is_padded_size(text: str) -> bool:
    """Whether a size is one that FP8 weights have in vLLM."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= 5
    return is_number and int(text) % 16 == 0 and 16 <= int(text) <= 65536
