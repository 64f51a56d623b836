# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves which class of calls: the look-up.

A class is a range of longest-sequence lengths. A layer resolves its choices once.
Nothing is measured at run time: choices come from the user's file, from the file that
the package has for the GPU, or from its compute capability. See `docs/choices.md`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import derive_without
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.formats import MAX_WINDOW, dtype_name
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.machine.versions import public
from vllm_flashinfer_vit.ops.plan import LEAST_MEAN_LEN, Class, Plan
from vllm_flashinfer_vit.settings import ENV_KERNEL

if TYPE_CHECKING:
    import torch


class Choice(NamedTuple):
    """One class of calls and the kernels that serve it.

    Attributes:
        kernel: The kernel's name.
        max_len: Longest sequence of the class, in tokens; None for any length.
        reason: Why this kernel, with the measurement's origin.
        many: The kernel for batches of many sequences, see `LEAST_MEAN_LEN`; None if
            `kernel` serves them too.
    """

    kernel: str
    max_len: int | None
    reason: str
    many: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the class, the one for many sequences last."""
        return (self.kernel,) if self.many is None else (self.kernel, self.many)

    @property
    def served_by(self) -> str:
        """The same for people to read."""
        if self.many is None:
            return self.kernel
        return f"{self.kernel}, {self.many} below {LEAST_MEAN_LEN} rows to a sequence"


_PACKAGE = "vllm-flashinfer-vit"
_UNMEASURED = "unmeasured by this project on this GPU"

_NO_GPU = (Choice("reference", None, "no GPU: plain PyTorch serves every length"),)

_BLACKWELL = (
    Choice("triton_window", MAX_WINDOW, f"{_UNMEASURED}; one pass from the projection"),
    Choice("cudnn", None, f"{_UNMEASURED}; cuDNN leads in published figures"),
)

_OTHER = (
    Choice("triton_window", MAX_WINDOW, f"{_UNMEASURED}; one pass from the projection"),
    Choice("flash_attn", None, f"{_UNMEASURED}; vLLM's own default kernel"),
)

# At these head dims its blocks of 128 tokens spill registers on every GPU, and on an
# H200 vLLM's FlashAttention is faster from 65 tokens on, for any number of sequences.
_OTHER_ABOVE_96 = (_OTHER[0]._replace(max_len=64), *_OTHER[1:])

# The longest sequence that stays in the activations' dtype where nothing is measured:
# quantising then costs about what the faster matmuls save.
_FP8_ABOVE = 4095

# What attends in FP8 on every GPU that can.
PORTABLE_FP8 = "triton_fp8"

# By major compute capability; `PORTABLE_FP8` everywhere else.
_FP8_KERNEL: Mapping[int, str] = MappingProxyType({10: "cudnn_fp8", 12: "cudnn_fp8"})

# Windows stay in the activations' dtype, as they do on a GPU.
_NO_GPU_FP8 = (
    Choice("reference", MAX_WINDOW, _NO_GPU[0].reason),
    Choice("reference_fp8", None, "no GPU: plain PyTorch quantises and attends"),
)

# The measured GPU that stands for others of its major compute capability.
_STANDS_FOR: Mapping[int, str] = MappingProxyType({9: "NVIDIA H200"})


def choices_for(
    stack: Stack,
    dtype: "torch.dtype | str",
    head_dim: int,
    tuned_dir: Path | None = None,
) -> tuple[Choice, ...]:
    """Return the choices for a GPU, classes ascending, the last one unbounded.

    The entry with the smallest measured head dim at or above `head_dim` counts, and of
    two with one head dim the user's.

    Args:
        stack: What the machine has: its first GPU and its vLLM count. Without a version
            of vLLM it is the newest that was measured with.
        dtype: A torch dtype or its name, `bfloat16`.
        head_dim: Head dim in elements.
        tuned_dir: Folder of the user's measurements, or None to ignore them.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    if stack.capability is None:
        return _NO_GPU
    entry = _look_up(stack, dtype, head_dim, tuned_dir)
    if entry is not None:
        return entry.choices(head_dim)
    if stack.capability[0] in (10, 12):
        return _BLACKWELL
    return _OTHER if head_dim <= 96 else _OTHER_ABOVE_96


def fp8_choices_for(
    stack: Stack,
    dtype: "torch.dtype | str",
    head_dim: int,
    tuned_dir: Path | None = None,
) -> tuple[Choice, ...]:
    """Return the choices of a layer with FP8 attention; see `choices_for`.

    Windows and short sequences have kernels in the activations' dtype, by the same
    measurements or up to `_FP8_ABOVE` tokens; FP8 kernels take the rest.

    Args:
        stack: As for `choices_for`.
        dtype: The activations' dtype.
        head_dim: As for `choices_for`.
        tuned_dir: As for `choices_for`.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    if stack.capability is None:
        return _NO_GPU_FP8
    entry = _look_up(stack, FP8_DTYPE, head_dim, tuned_dir)
    if entry is not None:
        return entry.choices(head_dim)
    kernel = _FP8_KERNEL.get(stack.capability[0], PORTABLE_FP8)
    return _longest_in_fp8(choices_for(stack, dtype, head_dim, tuned_dir), kernel)


def _longest_in_fp8(choices: Iterable[Choice], kernel: str) -> tuple[Choice, ...]:
    """Give an FP8 kernel what is longer than `_FP8_ABOVE` tokens."""
    short = []
    for choice in choices:
        if choice.max_len is None or choice.max_len >= _FP8_ABOVE:
            short.append(choice._replace(max_len=_FP8_ABOVE))
            break
        short.append(choice)
    return (*short, Choice(kernel, None, f"FP8, {_UNMEASURED}"))


def measured_without(
    refused: frozenset[str],
    stack: Stack,
    dtype: "torch.dtype | str",
    head_dim: int,
    tuned_dir: Path | None = None,
    *,
    fp8: bool = False,
) -> tuple[Choice, ...]:
    """Return the choices that measurements give where kernels cannot run.

    Args:
        refused: Names of these kernels.
        stack: As for `choices_for`, like the other arguments.
        dtype: See `stack`.
        head_dim: See `stack`.
        tuned_dir: See `stack`.
        fp8: The layer is one with FP8 attention. Where only the kernels of the
            activations' dtype were measured, FP8 begins where it does with all of them.

    Returns:
        The choices; none where nothing was measured, or no measured kernel takes
        sequences of any length.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    measured = FP8_DTYPE if fp8 else dtype
    if entry := _look_up(stack, measured, head_dim, tuned_dir):
        return entry.choices_without(refused, measured, head_dim)
    if not fp8 or stack.capability is None:
        return ()
    kernels = _FP8_KERNEL.get(stack.capability[0], PORTABLE_FP8), PORTABLE_FP8
    left = [kernel for kernel in kernels if kernel not in refused]
    short = measured_without(refused, stack, dtype, head_dim, tuned_dir)
    return _longest_in_fp8(short, left[0]) if short and left else ()


def fp8_ranges(choices: Iterable[Choice]) -> list[tuple[int, int | None]]:
    """Return the longest sequences, in tokens, that run in FP8: first and last ones.

    Ascending; the last one is None where there is no bound. Empty without FP8.
    """
    ranges: list[tuple[int, int | None]] = []
    shorter = 0
    for choice in choices:
        if KERNELS[choice.kernel].is_fp8:
            first = shorter + 1
            if ranges and ranges[-1][1] == shorter:
                first, _ = ranges.pop()
            ranges.append((first, choice.max_len))
        shorter = choice.max_len or 0
    return ranges


def fp8_lengths(choices: Iterable[Choice]) -> str:
    """Say which sequences run in FP8; empty if none do."""
    return " and ".join(
        f"of {first} tokens or more" if last is None else f"of {first} to {last}"
        for first, last in fp8_ranges(choices)
    )


def is_measured(gpu_name: str, tuned_dir: Path | None = None) -> bool:
    """Whether a file has measurements of exactly this GPU.

    Args:
        gpu_name: The GPU's product name.
        tuned_dir: As for `choices_for`.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    if tuned_dir is not None:
        table = tuned.read(tuned_dir, gpu_name)
        # One of GEMMs alone says nothing of these kernels.
        if table is not None and table.classes:
            return True
    return bool(tuned.read_bundled(gpu_name, None))


def other_versions(
    stack: Stack,
    dtype: "torch.dtype | str",
    head_dim: int,
    tuned_dir: Path | None = None,
) -> str | None:
    """Say if choices were measured with other versions than this machine has.

    Versions that the file or the machine does not tell are not compared; that of this
    package is in a file of the user's, since a newer one may have other kernels.

    Args:
        stack: As for `choices_for`.
        dtype: As for `choices_for`; `FP8_DTYPE` for layers with FP8 attention.
        head_dim: As for `choices_for`.
        tuned_dir: As for `choices_for`.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    entry = _look_up(stack, dtype, head_dim, tuned_dir)
    if entry is None:
        return None
    made_by = dict(entry.table.made_by)
    here = dict(stack.versions)
    if tuned_dir and entry.table == tuned.read(tuned_dir, stack.gpus[0].name):
        made_by[_PACKAGE], here[_PACKAGE] = made_by.get("version"), __version__
    versions = [
        f"{name} {measured} (here {present})"
        for name, present in here.items()
        if (measured := made_by.get(name)) and public(measured) != public(present)
    ]
    if not versions:
        return None
    return (
        f"Kernels are chosen by measurements with other versions: {', '.join(versions)}"
        ". `vllm-flashinfer-vit tune` measures them on this machine."
    )


class _Entry(NamedTuple):
    """What was measured for a dtype and head dim.

    Attributes:
        head_dim: The head dim that was measured, in elements.
        classes: The measured classes.
        table: Where they are from.
        origin: What to say of that table.
    """

    head_dim: int
    classes: tuple[Class, ...]
    table: tuned.Table
    origin: str

    def choices(self, head_dim: int) -> tuple[Choice, ...]:
        """Return the choices of layers with this head dim or a smaller one."""
        reason = self._reason(head_dim)
        return tuple(Choice(c.kernel, c.max_len, reason, c.many) for c in self.classes)

    def choices_without(
        self, refused: frozenset[str], dtype: "torch.dtype | str", head_dim: int
    ) -> tuple[Choice, ...]:
        """Return the same, none if there are none, of the kernels not refused."""
        classes = derive_without(self.table, dtype_name(dtype), self.head_dim, refused)
        reason = f"{self._reason(head_dim)}, without {' and '.join(sorted(refused))}"
        return tuple(Choice(c.kernel, c.max_len, reason, c.many) for c in classes or ())

    def _reason(self, head_dim: int) -> str:
        if self.head_dim == head_dim:
            return self.origin
        return f"{self.origin}, at head dim {self.head_dim}, the next that was measured"


def _look_up(
    stack: Stack, dtype: "torch.dtype | str", head_dim: int, tuned_dir: Path | None
) -> _Entry | None:
    """Return what was measured, or None."""
    if not stack.gpus:
        return None
    gpu, wanted = stack.gpus[0], dtype_name(dtype)
    found: _Entry | None = None
    for table, origin in tables_for(gpu.name, gpu.capability, tuned_dir, stack.vllm):
        for name, classes in table.classes.items():
            entry_dtype, _, text = name.partition("/")
            measured = int(text)
            if entry_dtype != wanted or measured < head_dim:
                continue
            if found is None or measured < found.head_dim:
                found = _Entry(measured, classes, table, origin)
    return found


def tables_for(
    gpu_name: str,
    capability: tuple[int, int],
    tuned_dir: Path | None,
    vllm: str | None,
) -> Iterator[tuple[tuned.Table, str]]:
    """Yield the tables that apply, best first, and what to say of each.

    Args:
        gpu_name: The GPU's product name.
        capability: Its CUDA compute capability.
        tuned_dir: As for `choices_for`.
        vllm: The installed version, or None for the newest that was measured with.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    if tuned_dir is not None and (table := tuned.read(tuned_dir, gpu_name)):
        yield table, f"fastest on this machine, {_measured(table)}"
    for table in tuned.read_bundled(gpu_name, vllm):
        yield table, f"fastest on {gpu_name}, {_measured(table)}"
    other = _STANDS_FOR.get(capability[0])
    if other is not None and other != gpu_name:
        for table in tuned.read_bundled(other, vllm):
            yield table, f"{_UNMEASURED}; fastest on {other}, {_measured(table)}"


def _measured(table: tuned.Table) -> str:
    is_quick = "--quick" in str(table.made_by.get("command")).split()
    command = "tune --quick" if is_quick else "tune"
    return f"measured by {command} with vLLM {table.made_by['vllm']}"


def forced(choices: Iterable[Choice], kernel: str) -> tuple[Choice, ...]:
    """Give a kernel every class that it takes; longer ones keep their choice."""
    bound = KERNELS[kernel].max_len
    first = Choice(kernel, bound, f"forced by {ENV_KERNEL}")
    if bound is None:
        return (first,)
    longer = (c for c in choices if c.max_len is None or c.max_len > bound)
    return (first, *longer)


def without(choices: Iterable[Choice], kernel: str) -> tuple[Choice, ...]:
    """Drop a kernel that cannot run.

    Of a class with two kernels the other one serves all; one with no other goes to the
    class above or below. Nothing is left if no other kernel takes the longest class.
    """
    kept = []
    for choice in choices:
        if choice.kernel == kernel and choice.many is not None:
            reason = f"{kernel} would be faster, but cannot run here"
            kept.append(Choice(choice.many, choice.max_len, reason))
        elif choice.kernel != kernel:
            many = None if choice.many == kernel else choice.many
            kept.append(choice._replace(many=many))
    if not kept or KERNELS[kept[-1].kernel].max_len is not None:
        return ()
    last = kept[-1]
    # What serves many of its sequences may not take longer ones.
    takes_all = last.many is None or KERNELS[last.many].max_len is None
    kept[-1] = last._replace(max_len=None, many=last.many if takes_all else None)
    return tuple(kept)


def replaced(choices: Iterable[Choice], kernel: str, by: str) -> tuple[Choice, ...]:
    """Give what a kernel that cannot run serves to another one."""
    reason = f"in place of {kernel}; {_UNMEASURED}"
    return tuple(
        Choice(by, choice.max_len, reason)
        if choice.kernel == kernel
        else choice._replace(many=by if choice.many == kernel else choice.many)
        for choice in choices
    )


def plan_of(choices: Iterable[Choice]) -> Plan:
    """Return the plan of a layer's choices."""
    return Plan(tuple(Class(c.max_len, c.kernel, c.many) for c in choices))
