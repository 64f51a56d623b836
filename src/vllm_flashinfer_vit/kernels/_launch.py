# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton kernels for which the host does next to nothing.

For every launch Triton inspects all arguments to find the compiled variant, then makes
what its C launcher takes of them: 30 to 45 us, more with descriptors for TMA. Here that
is done once. Afterwards a launch is one call of the C launcher, 5 us on an H200's host.
"""

import copy
import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
import triton

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

# A forward pass has a handful of layouts, which its layers share.
_MAX_LAYOUTS = 256
# The widest load; a variant for addresses that are aligned to it serves no others.
_ALIGNMENT = 16

_T = TypeVar("_T")


class Slot(NamedTuple):
    """The place of a tensor that is handed over at each launch.

    Attributes:
        like: A tensor of the same dtype.
    """

    like: torch.Tensor


class Launch:
    """The launch of a kernel, in which all but the memory of its tensors is settled."""

    def __init__(
        self, kernel: Any, grid: int, *scalars: int | float, **constants: Any
    ) -> None:
        """Settle a launch.

        Args:
            kernel: What `triton.jit` made of a function whose parameters are tensors,
                scalars and constants, in this order.
            grid: How many programs to run.
            *scalars: The kernel's scalars.
            **constants: Its constants, and options of Triton such as `num_warps`.
        """
        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._scalars = scalars
        self._constants = constants
        self._variants: dict[int, Any] = {}
        self._calls: dict[tuple[int, int], Callable[..., None]] = {}

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream; all but the addresses is the same every time.

        Args:
            *tensors: The kernel's.
        """
        if triton.knobs.runtime.interpret or not _are_aligned(tensors):
            self._through_triton(*tensors)
            return
        device = torch.cuda.current_device()
        where = device, torch._C._cuda_getCurrentRawStream(device)
        call = self._calls.get(where)
        if call is None:
            slots = [Slot(tensor) for tensor in tensors]
            call = self._calls[where] = self.settle(*slots)
        call(*tensors)

    def settle(self, *arguments: Any) -> Callable[..., None]:
        """Settle a launch on the current stream, addresses included.

        Triton's launch hooks, which profilers of kernels use, do not see it.

        Args:
            *arguments: For each of the kernel's tensors the tensor, a descriptor of one
                for TMA, None, or a `Slot`.

        Returns:
            The launch. It takes a tensor for each slot, aligned to 16 bytes, and holds
            the others.
        """
        slots = [i for i, x in enumerate(arguments) if isinstance(x, Slot)]
        # What a slot is like need not stay in memory.
        held = [None if isinstance(x, Slot) else x for x in arguments]
        fixed = [x for x in held if isinstance(x, torch.Tensor)]
        if triton.knobs.runtime.interpret or not _are_aligned(fixed):
            return functools.partial(self._fill, self._through_triton, held, slots)
        device = torch.cuda.current_device()
        compiled = self._variants.get(device)
        if compiled is None:
            tensors = [x.like if isinstance(x, Slot) else x for x in arguments]
            # It compiles, and launches nothing.
            compiled = self._variants[device] = self._kernel.warmup(
                *tensors, *self._scalars, grid=self._grid, **self._constants
            )
        names = self._kernel.arg_names[len(arguments) + len(self._scalars) :]
        rest = (*self._scalars, *(self._constants[name] for name in names))
        run = compiled[self._grid]
        stream = torch._C._cuda_getCurrentRawStream(device)
        addresses = [
            x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments
        ]
        recorded = _record(compiled, self._grid, stream, (*addresses, *rest))
        if recorded is None:
            say_unknown("Triton")
            launch = functools.partial(_run, run, rest, stream)
            return functools.partial(self._fill, launch, held, slots)
        return _settled(*recorded, held)

    def _through_triton(self, *tensors: Any) -> None:
        self._kernel[self._grid](*tensors, *self._scalars, **self._constants)

    @staticmethod
    def _fill(
        launch: Callable[..., None],
        tensors: list[Any],
        slots: list[int],
        *given: torch.Tensor,
    ) -> None:
        filled = list(tensors)
        for at, tensor in zip(slots, given, strict=True):
            filled[at] = tensor
        launch(*filled)


def _run(
    run: Callable[..., None], rest: tuple[Any, ...], stream: int, *tensors: Any
) -> None:
    run(*tensors, *rest, stream=stream)


def _are_aligned(tensors: Any) -> bool:
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % _ALIGNMENT == 0


def _record(
    compiled: Any, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """Have Triton prepare a launch, and keep what it would hand to its C launcher.

    Returns:
        The C launcher and its arguments; None for a Triton that is built otherwise.
    """
    recorded: list[tuple[Any, ...]] = []

    def record(*final: Any) -> None:
        recorded.append(final)

    try:
        # A copy, since other threads may launch the same kernel meanwhile.
        launcher = copy.copy(compiled.run)
        target = launcher.launch
        if isinstance(target, FunctionType):
            # It makes what the driver takes of descriptors, then calls the C launcher.
            cells = dict(
                zip(target.__code__.co_freevars, target.__closure__ or (), strict=True)
            )
            raw = cells["launcher"].cell_contents
            cells["launcher"] = type(cells["launcher"])(record)
            launcher.launch = FunctionType(
                target.__code__,
                target.__globals__,
                closure=tuple(cells.values()),
            )
        else:
            raw = target
            launcher.launch = record
        launcher(
            *grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
        )
    except (AttributeError, KeyError, TypeError):
        return None
    return (raw, recorded[0]) if len(recorded) == 1 else None


def _settled(
    launch: Callable[..., None], final: tuple[Any, ...], held: list[Any]
) -> Callable[..., None]:
    """Return a launch of final arguments, of which slots are filled at each call.

    From Triton 3.7 on the kernel's own arguments are one tuple, the last of all.
    """
    is_nested = isinstance(final[-1], tuple | list)
    head = final[:-1] if is_nested else ()
    template = list(final[-1] if is_nested else final)
    places = [i for i, x in enumerate(template) if isinstance(x, Slot)]
    if not places:

        def call_settled() -> None:
            launch(*final)

        call_settled.held = held  # type: ignore[attr-defined]
        return call_settled
    for at in places:
        template[at] = None

    def call(*tensors: torch.Tensor) -> None:
        arguments = template.copy()
        for at, tensor in zip(places, tensors, strict=True):
            arguments[at] = tensor.data_ptr()
        if is_nested:
            launch(*head, tuple(arguments))
        else:
            launch(*arguments)

    call.held = held  # type: ignore[attr-defined]
    return call


@functools.cache
def say_unknown(library: str) -> None:
    """Log once that launches of a library go by its own interface.

    Args:
        library: Its name.
    """
    logger.info(
        "%s is built otherwise than the releases that this package knows: its kernels "
        "are launched by its own interface, with the same results and more time of "
        "the host.",
        library,
    )


def nothing(*tensors: torch.Tensor) -> None:
    """Stand for the launch of a batch without rows."""


def returning(launch: Callable[[], object], out: _T) -> Callable[[], _T]:
    """Return a settled launch as a call that returns what it writes."""

    def call() -> _T:
        launch()
        return out

    return call


def cached_by_layout(function: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a function that asks of tensors only their shapes, strides and dtypes."""
    cache: dict[tuple[Any, ...], _T] = {}

    @functools.wraps(function)
    def cached(*args: Any) -> _T:
        key = tuple(
            [
                (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
                for x in args
            ]
        )
        found = cache.get(key)
        if found is None:
            found = function(*args)
            # After the call: other threads may have added theirs meanwhile.
            while len(cache) >= _MAX_LAYOUTS:
                cache.pop(next(iter(cache)), None)
            cache[key] = found
        return found

    return cached
