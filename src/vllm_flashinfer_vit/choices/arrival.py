# SPDX-License-Identifier: Apache-2.0
"""From which length on FP8 pays, by what attention gets of the projection before it.

Measurements have q and k turned by who attends: by FP8's quantiser on its way, and by a
pass in front of other kernels. A layer knows once its blocks are built what it will
get. See `docs/choices.md`.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from vllm_flashinfer_vit.choices.lookup import Choice, fp8_ranges
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.ops.plan import LEAST_MEAN_LEN

# So many tokens later FP8 is worth it where it saves no pass, see docs/choices.md.
_WITHOUT_PASS = 1024


class Arrival(NamedTuple):
    """What serves a layer by how q and k arrive.

    Attributes:
        choices: The layer's.
        later: Those in which FP8 begins later than it was measured to be worth it, of
            all batches or of some; else as measured.
        how: In which batches q and k arrive so, and how, for people to read.
    """

    choices: tuple[Choice, ...]
    later: tuple[Choice, ...]
    how: str


def arrival_of(
    choices: tuple[Choice, ...], is_turned: bool, is_projected: bool, is_quantized: bool
) -> Arrival:
    """Return what serves a layer.

    Args:
        choices: As measured.
        is_turned: Whether who attends has to turn q and k, unless something does.
        is_projected: Whether the projection turns them then, for other kernels.
        is_quantized: Whether it also quantises for FP8.
    """
    if is_turned and not is_projected:
        return Arrival(choices, choices, "")
    later = without_pass(choices)
    if not is_turned:
        return Arrival(later, later, "as they attend")
    how = "turned by their projection"
    if not is_quantized:
        return Arrival(later, later, how)
    how += f" in batches of fewer than {LEAST_MEAN_LEN} rows to a sequence"
    return Arrival(quantized_by_projection(choices), later, how)


def without_pass(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices of a layer whose q and k need no pass, whoever turned them.

    Measurements have them turned: by FP8's quantiser on its way, and by a pass in front
    of other kernels, which such a layer does without. The pass takes its time by the
    token, and what FP8 saves of a token's grows with the sequence: the shortest
    sequence that FP8 is worth it for has more tokens.
    """
    measured = tuple(choices)
    found = [*measured[:1]]
    begin = 0
    for short, choice in itertools.pairwise(measured):
        if _begins_by_speed(short, choice):
            assert short.max_len is not None
            begin = short.max_len + _WITHOUT_PASS
            _, last = next(r for r in fp8_ranges(measured) if r[0] == short.max_len + 1)
            if last is not None:
                # Where another kernel is faster than FP8, it stays.
                begin = min(begin, last)
            found[-1] = short._replace(max_len=begin)
        if choice.max_len is None or choice.max_len > begin:
            found.append(choice)
    return tuple(found)


def quantized_by_projection(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices of a layer whose projection also quantises for FP8.

    Neither has a pass then, and FP8 begins where it was measured to. Batches of many
    sequences, as graphs with room for many are, are not quantised by the projection:
    they have what `without_pass` gives them.
    """
    few = tuple(choices)
    many = without_pass(few)
    ends = {c.max_len for c in (*few, *many) if c.max_len is not None}
    found = []
    for end in (*sorted(ends), None):
        one, other = _class_of(few, end), _class_of(many, end)
        kernel = other.many or other.kernel
        found.append(
            one._replace(max_len=end, many=None if kernel == one.kernel else kernel)
        )
    return tuple(found)


def _class_of(choices: Iterable[Choice], length: int | None) -> Choice:
    """Return the choice of sequences of a length, None for more than any bound."""
    return next(
        choice
        for choice in choices
        if choice.max_len is None or (length is not None and length <= choice.max_len)
    )


def _begins_by_speed(short: Choice, long: Choice) -> bool:
    """Whether FP8 begins with `long` since it is faster there than what is before."""
    fp8 = KERNELS[long.kernel]
    if not fp8.is_fp8 or fp8.is_reference or KERNELS[short.kernel].is_fp8:
        return False
    # A kernel that takes no longer sequences ends where it has to.
    return all(KERNELS[name].max_len is None for name in short.kernels)
