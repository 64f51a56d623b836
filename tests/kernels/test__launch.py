# SPDX-License-Identifier: Apache-2.0
"""Launches that are settled once: what Triton compiles, and what they run later.

Stubs stand for both ways in which Triton's `CudaLauncher` hands arguments to its C
launcher: as arguments of their own (3.6), and from 3.7 on as one tuple, the last.
"""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_flashinfer_vit.kernels import _launch
from vllm_flashinfer_vit.kernels._launch import Launch, Slot, nothing, returning

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

SCALARS = (5, 0.5)
CONSTANTS = {"D": 80, "num_warps": 4, "H": 16}
# The kernel's own constants, in the order of its parameters.
REST = (*SCALARS, 16, 80)
GRID = (7, 1, 1)


class Raw:
    """A C launcher: notes what it is given."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __call__(self, *args: Any) -> None:
        self._calls.append(("raw", *args))


def expand(arguments: tuple[Any, ...]) -> list[Any]:
    """Replace descriptors by what the driver takes of them."""
    expanded: list[Any] = []
    for x in arguments:
        if isinstance(x, SimpleNamespace):
            expanded += ["map", x.base.data_ptr(), *x.base.shape]
        else:
            expanded.append(x)
    return expanded


class Flat:
    """Triton 3.6's `CudaLauncher`, as far as its arguments go."""

    def __init__(self, launcher: Callable[..., None], has_descriptors: bool) -> None:
        def inner(*args: Any) -> None:
            launcher(*args[:13], *expand(args[13:]))

        self.launch = inner if has_descriptors else launcher

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, *args: Any
    ) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *args)

    @staticmethod
    def read(final: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return grid, stream, metadata and arguments of what reached C."""
        assert final[4:9] == ("function", False, False, None, None)
        # Profilers' hooks are left out.
        assert final[10:13] == (None, None, None)
        return final[:3], final[3], final[9], final[13:]


class Nested:
    """Triton 3.8's likewise."""

    def __init__(self, launcher: Callable[..., None], has_descriptors: bool) -> None:
        def inner(*args: Any) -> None:
            launcher(*args[:-1], expand(args[-1]))

        self.launch = inner if has_descriptors else launcher

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: Any,
        metadata: Any,
        record: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        base = (x, y, z, stream, function, False, False)
        hooks = (record, enter, leave)
        self.launch(*base, metadata, *hooks, None, None, ("O",), b"OO", args)

    @staticmethod
    def read(final: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `Flat`."""
        assert final[4:7] == ("function", False, False)
        assert final[8:15] == (None,) * 5 + (("O",), b"OO")
        assert len(final) == 16
        return final[:3], final[3], final[7], tuple(final[15])


class Kernel:
    """What `triton.jit` makes of a function; it notes warm-ups and launches."""

    arg_names = ("x_ptr", "y_ptr", "size", "scale", "H", "D")

    def __init__(self, form: type | None = Flat, has_descriptors: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._form, self._has_descriptors = form, has_descriptors

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.calls.append(
            ("triton", grid, *args, constants)
        )

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        self.calls.append(("warmup", grid, *args, constants))
        return Compiled(self, self._form, self._has_descriptors)

    def ways(self) -> list[str]:
        return [call[0] for call in self.calls]


class Compiled:
    """Triton's `CompiledKernel`; without a form, one that is built otherwise."""

    function, packed_metadata = "function", "metadata"

    def __init__(
        self, kernel: Kernel, form: type | None, has_descriptors: bool
    ) -> None:
        self._calls = kernel.calls
        if form is not None:
            self.run = form(Raw(kernel.calls), has_descriptors)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def runner(*args: Any, stream: int | None = None) -> None:
            self._calls.append(("compiled", grid, *args, stream))

        return runner


FORMS = [Flat, Nested]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that launches nothing; its current device and stream can be set."""
    machine = SimpleNamespace(device=0, stream=77)
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(_launch, "triton", SimpleNamespace(knobs=knobs))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.device)
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda device: 1000 * device + machine.stream,
        raising=False,
    )
    return machine


def make(kernel: Kernel) -> Launch:
    return Launch(kernel, GRID[0], *SCALARS, **CONSTANTS)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("form", FORMS)
def test_the_first_launch_compiles_and_all_run_what_it_compiled(form) -> None:
    kernel = Kernel(form)
    launch = make(kernel)
    pairs = [(torch.zeros(8), torch.zeros(8)) for _ in range(3)]
    for x, y in pairs:
        launch(x, y)
    warmup, *launches = kernel.calls
    assert warmup == ("warmup", GRID, *pairs[0], *SCALARS, CONSTANTS)
    for (way, *final), (x, y) in zip(launches, pairs, strict=True):
        assert way == "raw"
        expected = (GRID, 77, "metadata", (x.data_ptr(), y.data_ptr(), *REST))
        assert form.read(tuple(final)) == expected


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("form", FORMS)
def test_slots_are_filled_in_order(form) -> None:
    kernel = Kernel(form)
    x, y, other = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    launch = make(kernel)
    last = launch.settle(x, Slot(other))
    first = launch.settle(Slot(other), y)
    both = launch.settle(Slot(other), Slot(other))
    last(y)
    first(x)
    both(x, y)
    both(y, x)
    # One variant serves all.
    assert kernel.ways() == ["warmup"] + ["raw"] * 4
    found = [form.read(tuple(final))[3][:2] for _, *final in kernel.calls[1:]]
    pair = x.data_ptr(), y.data_ptr()
    assert found == [pair, pair, pair, pair[::-1]]
    for given in ((), (x,), (x, y, x)):
        with pytest.raises(ValueError, match="zip"):
            both(*given)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("form", FORMS)
def test_launches_that_overlap_do_not_fill_each_others_slots(form) -> None:
    """As those of two threads: one is called while the other looks at its tensors."""
    kernel = Kernel(form)
    x, y = torch.zeros(8), torch.zeros(8)
    call = make(kernel).settle(Slot(x), Slot(x))

    def launch_another() -> int:
        call(y, y)
        return x.data_ptr()

    late: Any = SimpleNamespace(data_ptr=launch_another)
    call(x, late)
    found = [form.read(tuple(final))[3][:2] for _, *final in kernel.calls[1:]]
    assert found == [(tensor.data_ptr(),) * 2 for tensor in (y, x)]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("form", FORMS)
def test_a_launch_without_slots_takes_nothing(form) -> None:
    kernel = Kernel(form)
    x, y = torch.zeros(8), torch.zeros(8)
    call = make(kernel).settle(x, y)
    assert kernel.ways() == ["warmup"]
    for _ in range(2):
        call()
    first, second = (form.read(tuple(final)) for _, *final in kernel.calls[1:])
    assert (
        first == second == (GRID, 77, "metadata", (x.data_ptr(), y.data_ptr(), *REST))
    )


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("form", FORMS)
def test_descriptors_are_made_once_and_nothing_stays_nothing(form) -> None:
    kernel = Kernel(form, has_descriptors=True)
    desc = SimpleNamespace(base=torch.zeros(3, 8))
    call = make(kernel).settle(desc, None)
    call()
    assert kernel.calls[0][2] is desc and kernel.calls[0][3] is None
    arguments = form.read(kernel.calls[1][1:])[3]
    assert arguments == ("map", desc.base.data_ptr(), 3, 8, None, *REST)
    # A slot after it is found where the descriptor has moved it to.
    slotted = make(kernel).settle(desc, Slot(torch.zeros(8)))
    x = torch.zeros(8)
    slotted(x)
    arguments = form.read(kernel.calls[-1][1:])[3]
    assert arguments == ("map", desc.base.data_ptr(), 3, 8, x.data_ptr(), *REST)


@pytest.mark.parametrize("form", [*FORMS, None])
def test_each_device_has_its_own_variant_and_each_stream_its_launch(
    form, machine
) -> None:
    kernel = Kernel(form)
    launch = make(kernel)
    x = torch.zeros(8)
    streams = []
    for machine.device, machine.stream in [(0, 77), (1, 77), (0, 78), (1, 77), (0, 77)]:
        launch(x, x)
        final = kernel.calls[-1][1:]
        streams.append(final[-1] if form is None else form.read(final)[1])
    assert streams == [77, 1077, 78, 1077, 77]
    assert kernel.ways().count("warmup") == 2


@pytest.mark.usefixtures("machine")
def test_tensors_that_are_not_aligned_go_through_triton() -> None:
    kernel = Kernel()
    launch = make(kernel)
    x = torch.zeros(9)
    for tensor in (x[1:], x[:8], x[1:], x[:8]):
        launch(x[:8], tensor)
    assert kernel.ways() == ["triton", "warmup", "raw", "triton", "raw"]
    _, grid, *arguments, constants = kernel.calls[0]
    assert grid == GRID and constants == CONSTANTS
    assert arguments[0].data_ptr() == x.data_ptr()
    assert arguments[1].data_ptr() == x.data_ptr() + 4
    assert tuple(arguments[2:]) == SCALARS


@pytest.mark.usefixtures("machine")
def test_a_settled_launch_that_is_not_aligned_goes_through_triton() -> None:
    kernel = Kernel()
    x = torch.zeros(9)
    call = make(kernel).settle(x[1:], Slot(x))
    call(x)
    call(x)
    assert kernel.ways() == ["triton", "triton"]
    assert all(made[3] is x for made in kernel.calls)


def _no_cell() -> Any:
    """A launcher whose function has no C launcher in a cell of that name."""
    return SimpleNamespace(launch=lambda *args: None)


def _two_calls() -> Any:
    """One that calls C twice, say because it splits the grid."""

    class Twice(Flat):
        def __call__(self, *args: Any) -> None:
            super().__call__(*args)
            super().__call__(*args)

    return Twice(Raw([]), False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "run",
    [pytest.param(object, id="no launch"), _no_cell, _two_calls],
)
def test_a_triton_that_is_built_otherwise_runs_what_it_compiled(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(None)
    monkeypatch.setattr(Compiled, "run", run(), raising=False)
    launch = make(kernel)
    x, y = torch.zeros(8), torch.zeros(8)
    call = launch.settle(x, Slot(x))
    call(y)
    launch(y, x)
    launch(x, y)
    assert kernel.ways() == ["warmup"] + ["compiled"] * 3
    pairs = [(x, y), (y, x), (x, y)]
    for (_, grid, *arguments, stream), pair in zip(
        kernel.calls[1:], pairs, strict=True
    ):
        assert grid == GRID and stream == 77
        assert all(a is b for a, b in zip(arguments[:2], pair, strict=True))
        assert tuple(arguments[2:]) == REST


@pytest.mark.usefixtures("machine", "little_to_collect")
@pytest.mark.parametrize("form", [*FORMS, None])
def test_memory_is_held_of_what_was_settled_and_of_no_slot(form) -> None:
    """A launch is kept for a layout: it must not keep the first batch's tensors."""

    def settle() -> tuple[Any, ...]:
        x, y, z = torch.zeros(8), torch.zeros(8), torch.zeros(8)
        launch = make(Kernel(form))
        launch._kernel.calls = []
        call = launch.settle(x, Slot(y))
        launch(z, z)
        alone = torch.zeros(8)
        calls = call, launch.settle(alone, alone)
        launch._kernel.calls.clear()
        return launch, calls, *map(weakref.ref, (x, alone, y, z))

    launch, calls, fixed, alone, slot, given = settle()
    gc.collect()
    assert fixed() is not None and alone() is not None
    assert slot() is None and given() is None
    del calls
    gc.collect()
    assert fixed() is None and alone() is None
    assert launch is not None


@pytest.mark.usefixtures("machine")
def test_a_record_leaves_tritons_launcher_as_it_is() -> None:
    """Other threads may be launching the same kernel."""
    kernel = Kernel(Nested, has_descriptors=True)
    launch = make(kernel)
    x = torch.zeros(8)
    launch(x, x)
    compiled = launch._variants[0]
    kernel.calls.clear()
    compiled.run(*GRID, 5, "function", "metadata", "record", "enter", "leave", x, x)
    ((way, *final),) = kernel.calls
    assert way == "raw" and final[8:11] == ["record", "enter", "leave"]


@no_gpu
def test_the_interpreter_runs_settled_launches_and_slots() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def add(x_ptr, y_ptr, out_ptr, amount, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        total = tl.load(x_ptr + offs) + tl.load(y_ptr + offs) + amount
        tl.store(out_ptr + offs, total)

    launch = Launch(add, 1, 3.0, BLOCK=8, num_warps=1)
    x, y, out = torch.arange(8.0), torch.ones(8), torch.zeros(8)
    launch(x, y, out)
    assert torch.equal(out, x + 4)
    settled = launch.settle(x, y, out)
    x += 1
    settled()
    assert torch.equal(out, x + 4)
    slotted = launch.settle(Slot(x), y, Slot(out))
    other, written = torch.full((8,), 10.0), torch.zeros(8)
    slotted(other, written)
    assert torch.equal(written, other + 4)
    assert torch.equal(out, x + 4)


def test_what_a_settled_launch_returns() -> None:
    launched = []
    out = torch.zeros(2)
    call = returning(lambda: launched.append(1), out)
    assert not launched
    assert call() is out and call() is out
    assert len(launched) == 2
    assert nothing() is None
