# SPDX-License-Identifier: Apache-2.0
"""Launches and their cache, and the search for a block's sequence."""

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels import _triton, flash
from vllm_flashinfer_vit.kernels._triton import (
    Launch,
    cached_by_layout,
    find_sequence,
    last_row,
    split_width,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class FakeKernel:
    """Notes its launches, through Triton and of what Triton compiled."""

    arg_names = ("x_ptr", "y_ptr", "size", "scale", "H", "D")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.calls.append(("triton", grid, *args, constants))
            return self.compiled()

        return launch

    def compiled(self) -> Any:
        class Compiled:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args: self.calls.append(("compiled", grid, *args))

        return Compiled()


CONSTANTS = {"D": 80, "num_warps": 4, "H": 16}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the number of the current device."""

    def set_device(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: number)

    set_device(0)
    return set_device


@pytest.mark.usefixtures("device")
def test_later_launches_run_what_the_first_compiled() -> None:
    kernel = FakeKernel()
    launch = Launch(kernel, 7, 5, 0.5, **CONSTANTS)
    pairs = [(torch.zeros(8), torch.zeros(8)) for _ in range(3)]
    for x, y in pairs:
        launch(x, y)
    first, *later = kernel.calls
    assert first == ("triton", (7, 1, 1), *pairs[0], 5, 0.5, CONSTANTS)
    for call, (x, y) in zip(later, pairs[1:], strict=True):
        assert call[:2] == ("compiled", (7, 1, 1))
        assert call[2] is x and call[3] is y
        # The scalars, then the constants in the order of the kernel's parameters.
        assert call[4:] == (5, 0.5, 16, 80)


@pytest.mark.usefixtures("device")
def test_a_tensor_that_is_not_aligned_goes_to_triton() -> None:
    kernel = FakeKernel()
    launch = Launch(kernel, 1, 5, 0.5, **CONSTANTS)
    x = torch.zeros(9)
    for tensor in (x[1:], x[:8], x[1:], x[:8]):
        launch(x[:8], tensor)
    ways = [call[0] for call in kernel.calls]
    assert ways == ["triton", "triton", "triton", "compiled"]


@pytest.mark.usefixtures("device")
def test_descriptors_and_nothing_are_handed_on() -> None:
    kernel = FakeKernel()
    launch = Launch(kernel, 1, 5, 0.5, **CONSTANTS)
    desc = SimpleNamespace(base=torch.zeros(9)[1:])
    launch(desc, None)
    launch(desc, None)
    assert [call[0] for call in kernel.calls] == ["triton", "compiled"]
    assert kernel.calls[1][2] is desc and kernel.calls[1][3] is None


def test_each_device_has_its_own_variant(device: Callable[[int], None]) -> None:
    kernel = FakeKernel()
    launch = Launch(kernel, 1, 5, 0.5, **CONSTANTS)
    x = torch.zeros(8)
    for number in (0, 1, 0, 1):
        device(number)
        launch(x, x)
    ways = [call[0] for call in kernel.calls]
    assert ways == ["triton", "triton", "compiled", "compiled"]


@pytest.mark.usefixtures("device")
def test_nothing_compiled_is_nothing_to_remember(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So is Triton's interpreter."""
    kernel = FakeKernel()
    monkeypatch.setattr(kernel, "compiled", lambda: None)
    launch = Launch(kernel, 1, 5, 0.5, **CONSTANTS)
    x = torch.zeros(8)
    for _ in range(2):
        launch(x, x)
    assert [call[0] for call in kernel.calls] == ["triton", "triton"]


# Compiles for a GPU that need not exist, and notes what reaches its driver.
LAUNCHES = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget

calls = []

class Utils:
    def load_binary(self, name, kernel, shared, device):
        return name, name, 64, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}
    def unload_module(self, module):
        pass

class Launcher:
    def __init__(self, source, metadata):
        pass
    def __call__(self, *args):
        calls.append([str(x.data_ptr() if hasattr(x, "data_ptr") else x) for x in args])

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 77

triton.runtime.driver.set_active(Driver())
torch.cuda.current_device = lambda: 0

from vllm_flashinfer_vit.kernels import (flash, rope, seqlens, window)

# One memory for all outputs, so that equal launches are equal in every argument.
memory = torch.zeros(1 << 20, dtype=torch.bfloat16)
torch.empty_like = lambda x, **kwargs: memory[: x.numel()].view(x.shape)
torch.empty = lambda shape, dtype, device: memory.view(dtype)
q, k, v = torch.zeros(200, 3, 4, 80, dtype=torch.bfloat16).unbind(1)
cos = torch.zeros(200, 40)
cu_seqlens = torch.tensor([0, 100, 200], dtype=torch.int32)
runs = {
    "flash": lambda: flash.attention(q, k, v, cu_seqlens, 100, 0.1),
    "rope": lambda: rope.rope(q, k, cos, cos),
    "seqlens": lambda: seqlens.derive_seqlens(cu_seqlens, 200, 8, (960, 960, 960, 320)),
    "window": lambda: window.attention(q, k, v, cu_seqlens, 100, 0.1, cos, cos),
}
found = {}
for name, run in runs.items():
    calls.clear()
    run()
    run()
    found[name] = list(calls)
print(json.dumps(found))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests launch for real")
def test_the_short_launch_hands_the_driver_what_tritons_does(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES],
        capture_output=True,
        text=True,
        env={"PATH": "", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"flash", "rope", "seqlens", "window"}
    for name, (first, second) in found.items():
        # Triton makes the record for a profiler's hooks anew for every launch.
        record = 6
        assert len(first) > 12, name
        assert first[:record] == second[:record], name
        assert first[record + 1 :] == second[record + 1 :], name


def test_the_cache_sees_layouts_and_no_addresses() -> None:
    seen = []

    @cached_by_layout
    def function(x: torch.Tensor, y: torch.Tensor | None, size: int) -> int:
        seen.append((x, y, size))
        return len(seen)

    x = torch.zeros(4, 6)
    assert function(x, None, 1) == 1
    assert function(torch.ones(4, 6), None, 1) == 1
    assert function(x, None, 2) == 2
    assert function(x, x, 1) == 3
    assert function(x.half(), None, 1) == 4
    assert function(torch.zeros(4, 7)[:, :6], None, 1) == 5
    assert function(x[:3], None, 1) == 6
    assert function(x, None, 1) == 1


def test_the_cache_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_MAX_LAYOUTS", 2)
    seen = []
    function = cached_by_layout(lambda size: seen.append(size) or len(seen))
    for size in (1, 2, 3, 3, 2, 1):
        function(size)
    assert seen == [1, 2, 3, 1]


def test_the_cache_keeps_no_error() -> None:
    @cached_by_layout
    def function(x: torch.Tensor) -> None:
        raise ValueError(f"got {tuple(x.shape)}")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"got \(3,\)"):
            function(torch.zeros(3))


@triton.jit(do_not_specialize=["num_seqs"])
def _find_kernel(cu_seqlens_ptr, blocks_ptr, found_ptr, num_seqs, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    block = tl.load(blocks_ptr + pid)
    found = find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK)
    tl.store(found_ptr + pid, found)


def _blocks_ref(cu_seqlens: list[int], block: int, num_blocks: int) -> list[int]:
    """The sequence of each block, by counting."""
    found = [-1] * num_blocks
    for n, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        if start < end:
            found[start // block + n :] = [n] * (num_blocks - start // block - n)
    return found


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    "cu_seqlens",
    [
        pytest.param([0], id="no-sequence"),
        pytest.param([0, 0, 0], id="nothing"),
        pytest.param([0, 1], id="one-token"),
        pytest.param([0, 128, 256, 384], id="whole-blocks"),
        pytest.param([0, 129, 200, 457, 458], id="ragged"),
        pytest.param([0, 0, 0, 70, 70, 300], id="empty-first-and-inside"),
        pytest.param([0, 64, 300, 300, 300, 300], id="repeated-tail"),
        pytest.param([0, 64, 300, 0, 0, 0], id="zero-tail"),
        pytest.param([*range(0, 4400, 4), 0, 0], id="more-than-a-tile"),
        pytest.param([0] * 1100 + [5, 400] + [0] * 1000, id="far-from-the-front"),
    ],
)
def test_blocks_find_their_sequence(cu_seqlens: list[int], block: int) -> None:
    num_seqs = len(cu_seqlens) - 1
    num_blocks = max(cu_seqlens) // block + num_seqs + 1
    expected = _blocks_ref(cu_seqlens, block, num_blocks)
    # Of many blocks some are enough: a program takes the interpreter milliseconds.
    asked = torch.arange(0, num_blocks, 1 + num_blocks // 60, dtype=torch.int32)
    found = torch.empty_like(asked, device=DEVICE)
    _find_kernel[(len(asked),)](
        torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE),
        asked.to(DEVICE),
        found,
        num_seqs,
        BLOCK=block,
    )
    assert found.tolist() == [expected[i] for i in asked]
    # Each sequence has the blocks that its rows fill.
    for n, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        assert expected.count(n) >= -((start - end) // block) or end <= start


@triton.jit(do_not_specialize=["num_seqs"])
def _last_kernel(cu_seqlens_ptr, found_ptr, num_seqs):
    tl.store(found_ptr, last_row(cu_seqlens_ptr, num_seqs))


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        pytest.param([0], id="no-sequence"),
        pytest.param([0, 7, 9], id="two"),
        pytest.param([0, 7, 9, 0, 0], id="zero-tail"),
        pytest.param([0, 7, 9, 9, 9], id="repeated-tail"),
        pytest.param([*range(1024), 0], id="the-last-of-a-tile"),
        pytest.param([*range(1025)], id="the-first-of-the-next-tile"),
        pytest.param([*range(0, 4400, 4), 0, 0], id="more-than-a-tile"),
        pytest.param([0] * 2100 + [5, 400] + [0] * 1000, id="far-from-the-front"),
    ],
)
def test_the_last_row_is_found_in_any_tile(cu_seqlens: list[int]) -> None:
    found = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    _last_kernel[(1,)](offsets, found, len(cu_seqlens) - 1)
    assert found.item() == max(cu_seqlens)


@pytest.mark.parametrize(
    ("width", "least", "parts"),
    [
        (64, 16, (64, 0)),
        (80, 16, (64, 16)),
        (72, 16, (64, 16)),
        (96, 16, (64, 32)),
        (72, 32, (64, 32)),
        (120, 16, (64, 64)),
    ],
)
def test_a_width_is_cut_into_powers_of_two(
    width: int, least: int, parts: tuple[int, int]
) -> None:
    assert split_width(width, least) == parts


def test_a_padded_graph_launches_no_block_per_slot_and_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids = []

    def noted(kernel: Any, grid: int, *args: Any, **constants: Any) -> Launch:
        grids.append(grid)
        return Launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(flash, "Launch", noted)
    qkv = torch.randn(1000, 3, 1, 64, dtype=torch.float16, device=DEVICE)
    cu_seqlens = torch.tensor([0, 300] + [0] * 62, dtype=torch.int32, device=DEVICE)
    flash.attention(*qkv.unbind(1), cu_seqlens, 1000, 0.125)
    # 15 and one for each slot, and 16 that clear rows; 63 * 16 before.
    assert grids == [1000 // 64 + 63 + 16]
