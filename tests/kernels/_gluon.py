# SPDX-License-Identifier: Apache-2.0
"""Runs this package's Gluon kernels on CPU tensors, which Triton's interpreter cannot.

A kernel's functions run as the Python that they are, on a stand-in for Gluon's
language: each partition of specialised warps in a thread, all of them with PyTorch's
tensors. Layouts are nothing, so a value that would have to move between threads is not
seen. Barriers count as the hardware's do: what waits for ever fails, and so does an
arrival that no phase has room for.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.runtime.jit import ConstexprFunction, JITCallable

# Of a wait; a whole test takes a second or two.
_PATIENCE_S = 60.0


class _Layout:
    """Any layout: all of its parts are it."""

    def __getattr__(self, name: str) -> "_Layout":
        return self


_LAYOUT = _Layout()


class _Values(torch.Tensor):
    """A tensor of a program's, which stays what it is: others may hold it."""

    __iadd__ = torch.Tensor.__add__
    type = property(lambda self: SimpleNamespace(layout=_LAYOUT))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


def _values(x: Any, dtype: torch.dtype | None = None) -> Any:
    return torch.as_tensor(x, dtype=dtype).as_subclass(_Values)


class _Pointer:
    """Elements of a tensor, by their offsets from its first one."""

    def __init__(self, tensor: torch.Tensor, offsets: Any = 0) -> None:
        self._flat = tensor.view(-1)
        self._offsets = offsets
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offsets: Any) -> "_Pointer":
        return _Pointer(self._flat, self._offsets + offsets)

    def _at(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.as_tensor(self._offsets, dtype=torch.int64)
        real = torch.as_tensor(True if mask is None else mask).expand(at.shape)
        asked = at[real]
        assert not asked.numel() or 0 <= asked.min() <= asked.max() < len(self._flat)
        return at, real

    def load(self, mask: Any, other: Any) -> Any:
        at, real = self._at(mask)
        found = torch.full(at.shape, other or 0, dtype=self._flat.dtype)
        found[real] = self._flat[at[real]]
        return _values(found)

    def store(self, value: Any, mask: Any) -> None:
        at, real = self._at(mask)
        value = torch.as_tensor(value, dtype=self._flat.dtype).expand(at.shape)
        self._flat[at[real]] = value[real].as_subclass(torch.Tensor)


class _Shared:
    """Tiles in shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = list(tensor.shape)

    def index(self, i: Any) -> "_Shared":
        return _Shared(self.tensor[int(i)])

    def permute(self, order: Sequence[int]) -> "_Shared":
        return _Shared(self.tensor.permute(order))

    def reshape(self, shape: Sequence[int]) -> "_Shared":
        return _Shared(self.tensor.view(shape))

    def slice(self, first: int, length: int, dim: int) -> "_Shared":
        return _Shared(self.tensor.narrow(dim, int(first), length))

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value.as_subclass(torch.Tensor))


class _Barrier:
    """A barrier of the hardware's, or several in a row."""

    def __init__(self, count: int) -> None:
        self.shape = [count, 1]
        self._parts = [self] if count == 1 else [_Barrier(1) for _ in range(count)]
        self._changed = threading.Condition()
        self._arrivals = self._missing = self._bytes = self._phases = 0

    def index(self, i: Any) -> "_Barrier":
        return self._parts[int(i)]

    def init(self, arrivals: int) -> None:
        self._arrivals = self._missing = arrivals

    def arrive(self, expected: int = 0) -> None:
        with self._changed:
            assert self._missing > 0, "a phase has more arrivals than it has room for"
            self._missing -= 1
            self._bytes += expected
            self._end_phase()

    def receive(self, count: int) -> None:
        with self._changed:
            self._bytes -= count
            self._end_phase()

    def _end_phase(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self._missing = self._arrivals
            self._phases += 1
            self._changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._phases % 2 != int(parity), _PATIENCE_S
            )
            assert ended, "a partition waits for ever"


def _copy(desc: Any, at: Sequence[Any], barrier: _Barrier, target: _Shared) -> None:
    """What TMA does: what lies outside is 0."""
    source = torch.as_strided(desc.base, desc.shape, desc.strides)
    box = [
        slice(int(i), max(int(i), min(int(i) + n, size)))
        for i, n, size in zip(at, desc.block_shape, source.shape, strict=True)
    ]
    found = source[tuple(box)]
    target.tensor.zero_()
    target.tensor[tuple(slice(n) for n in found.shape)] = found
    barrier.receive(target.tensor.numel() * target.tensor.element_size())


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False):
    left, right = (x.tensor if isinstance(x, _Shared) else x for x in (a, b))
    product = left.float() @ right.float()
    return _values(product + acc if use_acc else product, acc.dtype)


def _wait(pending: int, deps: Sequence[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _in_threads(partitions: Sequence[tuple[Callable[..., None], Any]], *_: Any) -> None:
    errors: list[BaseException] = []

    def run(part: Callable[..., None], arguments: Any) -> None:
        try:
            part(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=partition, daemon=True)
        for partition in partitions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _language(
    program: int, programs: int, assembly: Mapping[str, Callable[..., Any]]
) -> Any:
    """Return the stand-in for `triton.experimental.gluon.language` of a program."""

    def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return _values(torch.full(shape, float(value))).to(dtype)

    def either(name: str) -> Callable[..., Any]:
        of = getattr(torch, name)
        return lambda a, b, **_: of(_values(a), _values(b))

    def of_rows(name: str) -> Callable[..., Any]:
        of = getattr(torch, name)
        return lambda x, axis=None: of(x, **({} if axis is None else {"dim": axis}))

    layouts = "NVMMADistributed", "Slice", "DotOperand", "Blocked"
    shared = SimpleNamespace(get_default_for=lambda *_: None)
    return SimpleNamespace(
        **{f"{name}Layout": lambda *_: _LAYOUT for name in layouts},
        NVMMASharedLayout=shared,
        **{name: getattr(torch, name) for name in ("int32", "int64", "uint8")},
        **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")},
        float8e4nv=torch.float8_e4m3fn,
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        num_warps=lambda: 4,
        static_range=range,
        cdiv=lambda a, b: (a + b - 1) // b,
        load=lambda at, mask=None, other=None: at.load(mask, other),
        store=lambda at, value, mask=None: at.store(value, mask),
        arange=lambda a, b, layout: _values(torch.arange(a, b, dtype=torch.int32)),
        full=full,
        zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
        cast=lambda x, dtype: _values(x, dtype),
        where=lambda which, a, b: torch.where(_values(which), _values(a), _values(b)),
        maximum=either("maximum"),
        minimum=either("minimum"),
        max=of_rows("amax"),
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        reduce=lambda x, axis, combine: x.amax(axis),
        associative_scan=lambda x, axis, combine: x.cumsum(axis, dtype=x.dtype),
        abs=torch.abs,
        exp2=torch.exp2,
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        inline_asm_elementwise=lambda text, constraints, given, dtype, **_: assembly[
            text
        ](*given),
        allocate_shared_memory=lambda dtype, shape, layout: (
            _Barrier(shape[0])
            if dtype == torch.int64
            else _Shared(torch.zeros(shape).to(dtype))
        ),
        warp_specialize=_in_threads,
    )


_STAND_INS: Mapping[str, Any] = {
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, arrivals: barrier.init(arrivals),
        expect=lambda barrier, count: barrier.arrive(count),
        arrive=lambda barrier: barrier.arrive(),
        wait=lambda barrier, parity: barrier.wait(parity),
    ),
    "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _wait,
    "fence_async_shared": lambda: None,
}


@contextmanager
def _as_python(modules: Sequence[ModuleType], gl: Any) -> Iterator[None]:
    """Have functions of modules run as Python, on a stand-in for Gluon's language."""
    stand_ins = {**_STAND_INS, "gl": gl}
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if name in stand_ins:
                    patch.setattr(module, name, stand_ins[name])
                elif isinstance(value, JITCallable | ConstexprFunction):
                    patch.setattr(module, name, value.fn)
                elif isinstance(value, gluon.language.constexpr):
                    patch.setattr(module, name, value.value)
        yield


def run(
    modules: Sequence[ModuleType],
    name: str,
    programs: int,
    arguments: Sequence[Any],
    constants: dict[str, Any],
    assembly: Mapping[str, Callable[..., Any]],
) -> None:
    """Run a kernel, one program after the other.

    Args:
        modules: Those of its functions, its own first.
        name: Its name there.
        programs: How many programs to run.
        arguments: Tensors, descriptors of CPU tensors, and scalars.
        constants: Its constants.
        assembly: What computes the same, by the text of `gl.inline_asm_elementwise`.
    """
    given = [_Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    for program in range(programs):
        with _as_python(modules, _language(program, programs, assembly)):
            getattr(modules[0], name)(*given, **constants)
