# SPDX-License-Identifier: Apache-2.0
"""A contender's towers in a process of its own, and what is asked of them there."""

import functools
import gc
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from chosen_rows import what_is_timed
from contenders import PACKAGE, Contender, check_promises
from correctness import check_error, relative_error
from csv_log import DTYPES, attention_flops
from environment import device
from failures import Failures
from model_names import STACK_NAMES
from remote import Remote
from timing import Clock, Run, host_ms
from tower_cases import CASES, Grids, of_new_sizes
from vllm_flashinfer_vit.choices.clock import capture

# A tower that is wrong is off by more than this; bf16 over 32 blocks by 1 to 3 percent.
GATE = 0.1
# With random weights GLM-4.1V in FP8 is off by 13 %, where 5 % in a layer add up.
FP8_GATES = {"zai-org/GLM-4.1V-9B-Thinking": 0.2}
# Stock's own with quantised layers and random weights is off by 23 % (Qwen2.5-VL).
QUANTIZED_GATE = 0.3
ANSWER_WITHIN_S = 300.0
# For so long other sizes are encoded before new ones are timed. For the first ones
# memory comes from the driver, and libraries load kernels: a server has done that.
SEEN_S = 1.5


def gate(contender: Contender, model: str) -> float:
    """Return the relative error from which on a contender's tower is not timed."""
    if contender.quantization is not None:
        return QUANTIZED_GATE
    return GATE if contender.attn_dtype is None else FP8_GATES.get(model, GATE)


class Worker:
    """Towers in a process of their own, one after another, and what is asked there."""

    def __init__(self, contender: Contender) -> None:
        """Make the process ready for `build`."""
        torch.set_float32_matmul_precision("highest")
        self._contender = contender
        self._dtype = DTYPES.get(contender.dtype, torch.float32)
        self._clock = Clock(device())
        # What calls of the tower need.
        self._held = ExitStack()
        self.tower: Any = None
        self._layer: Any = None
        self._is_stack = False
        self._runs: dict[str, Run] = {}
        self._before: dict[str, Run] = {}
        self._pixels = self._reference = torch.empty(0)
        self._grids: list[list[int]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let go of the last tower at the end."""
        with self._held:
            yield

    def ready(self) -> None:
        """Do nothing: `build` comes first."""

    def build(self, model: str, depth: int | None) -> int:
        """Build a tower in the last one's place, the one that the name promises.

        Compiled blocks are compiled by a large batch. By the first batch Inductor
        decides which weights it pads. An engine's first one, in its profiling run, is
        the largest that it allows.

        Args:
            model: A name or a checkpoint folder.
            depth: Blocks to build; None for all.

        Returns:
            Attention's head dim.
        """
        # They import vLLM, for half a minute, which the pipe's other side can spare.
        from block_stacks import build_stack
        from vllm_flashinfer_vit.towers.spec import resolve_spec
        from vllm_flashinfer_vit.towers.tower import build_tower

        self._let_go()
        contender = self._contender
        how: dict[str, Any] = {
            "backend": contender.backend,
            "dtype": self._dtype,
            "device": device(),
            "compile": contender.blocks == "compiled",
            "fused_ops": contender.blocks == "fused",
            "plugin": not contender.is_stock,
            "attn_dtype": contender.attn_dtype,
            "flash_attn_version": contender.flash_attn_version,
            "quantization": contender.quantization,
        }
        self._is_stack = model in STACK_NAMES
        if self._is_stack:
            self.tower = build_stack(model, depth=depth, **how)
        else:
            is_random = not Path(model).is_dir()
            spec = resolve_spec(model, random_weights=is_random, depth=depth)
            self.tower = build_tower(spec, **how)
        layers = self.tower.attention_layers()
        self._layer = next(iter(layers.values()))
        check_promises(contender, self._layer, self.tower.visual.blocks)
        self._gate = gate(contender, model)
        self._held.enter_context(self.tower.running())
        if contender.blocks == "compiled":
            self.load(CASES["8x4096"], None)
            self._eager()
        return int(self._layer.head_size)

    def _let_go(self) -> None:
        """Give back what the last tower holds."""
        self._held.close()
        self._runs.clear()
        self._before.clear()
        self._pixels = self._reference = torch.empty(0)
        self.tower = self._layer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def load(self, grids: Grids, reference: str | None) -> str:
        """Draw a case's pixels, and read the output that is right for them.

        Returns:
            The kernels that this package picks for the case; empty for stock.
        """
        self._runs.clear()
        self._before.clear()
        if torch.cuda.is_available():
            # The other contenders' processes share this GPU's memory.
            torch.cuda.empty_cache()
        self._grids = [list(grid) for grid in grids]
        patches = sum(math.prod(grid) for grid in grids)
        random = torch.Generator(device()).manual_seed(0)
        shape = (patches, self.tower.spec.patch_dim)
        pixels = torch.randn(shape, device=device(), generator=random)
        # Rounded, so that every dtype sees the same values.
        self._pixels = pixels.bfloat16().to(self._dtype)
        if reference is not None:
            self._reference = load_file(reference, device=str(device()))["output"]
        if not type(self._layer).__module__.startswith(PACKAGE):
            return ""
        kernels = self.tower.kernels(self._grids)
        return ", ".join(f"{layers}: {name}" for layers, name in kernels.items())

    def write_reference(self, path: str) -> float:
        """Write this tower's output; return the operations that it takes."""
        output = self._eager()
        save_file({"output": output.float().contiguous().cpu()}, path)
        del output
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._flops()

    def check(self, mode: str) -> float:
        """Make a mode ready, and return its output's relative error."""
        timed = what_is_timed(mode)
        run = capture(self._with_metadata()) if timed == "graph" else self._eager
        rel_err = relative_error(run(), self._reference)
        check_error(rel_err, self._gate)
        if timed == "new":
            before, run = self._of_new_sizes()
            until = time.monotonic() + SEEN_S
            while time.monotonic() < until:
                # Else its work would be queued for longer than that.
                self._clock.sample_ms(before, mode)
            self._before[mode] = before
        self._runs[mode] = run
        return rel_err

    def sample(self, mode: str, count: int, warm_up: bool) -> list[float]:
        """Return times of `count` calls in milliseconds, of the host for each block."""
        run = self._runs[mode]
        if warm_up:
            # New sizes are for what is timed: else contenders would not get the same.
            self._before.get(mode, run)()
        if what_is_timed(mode) == "host":
            return [host_ms(run) / self.tower.spec.depth for _ in range(count)]
        return [self._clock.sample_ms(run, mode) for _ in range(count)]

    def metadata_ms(self, known: Grids, batches: Sequence[Grids]) -> list[float]:
        """Return the host's time to prepare each batch's metadata, in milliseconds.

        Args:
            known: Prepared first, unmeasured.
            batches: What is prepared once each, in this order.
        """
        visual: Any = self.tower.visual
        first, *calls = (
            functools.partial(visual.prepare_encoder_metadata, list(map(list, grids)))
            for grids in (known, *batches)
        )
        first()
        return [host_ms(call) for call in calls]

    def kernel_times(self, calls: int) -> dict[str, float]:
        """Return the device's time in a call without a graph, by kernel.

        Args:
            calls: How many calls to average.

        Returns:
            Milliseconds by the kernel's name; without a GPU by the op's name.
        """
        on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self._eager()
        with torch.profiler.profile(
            activities=[activity.CUDA if on_gpu else activity.CPU]
        ) as profile:
            for _ in range(calls):
                self._eager()
            if on_gpu:
                torch.cuda.synchronize()
        times = {}
        for event in profile.key_averages():
            time_us = event.self_cpu_time_total
            if on_gpu:
                time_us = event.self_device_time_total
            if time_us > 0:
                times[event.key] = time_us / calls / 1e3
        return times

    def _eager(self) -> torch.Tensor:
        return self.tower.visual(self._pixels, self._grids)

    def _of_new_sizes(self) -> tuple[Run, Run]:
        """Return eager calls that get another size each time: at first, to time."""
        if self._is_stack:
            raise ValueError("the blocks of a stack alone have no sizes of images")
        grids = tuple((t, h, w) for t, h, w in self._grids)
        # More than the largest of them has.
        pixels = self._pixels.repeat(2, 1)
        before, new = of_new_sizes(grids)
        return self._in_turn(before, pixels), self._in_turn(new, pixels)

    def _in_turn(self, sizes: Sequence[Grids], pixels: torch.Tensor) -> Run:
        batches = itertools.cycle(sizes)

        def run() -> torch.Tensor:
            grids = next(batches)
            patches = sum(math.prod(grid) for grid in grids)
            return self.tower.visual(pixels[:patches], [list(grid) for grid in grids])

        return run

    def _with_metadata(self) -> Run:
        # vLLM too prepares the metadata outside its encoder graphs.
        metadata = self.tower.visual.prepare_encoder_metadata(self._grids)
        # A whole tower has all in its metadata.
        grids = self._grids if self._is_stack else None
        return lambda: self.tower.visual(
            self._pixels, grids, encoder_metadata=dict(metadata)
        )

    def _flops(self) -> float:
        visual = self.tower.visual
        patches = self._pixels.shape[0]
        tokens = patches // self.tower.spec.merge_size**2
        total = 0.0
        for name, parameter in visual.named_parameters():
            if parameter.dim() < 2 or name.startswith(("pos_embed", "embeddings.")):
                continue
            per_patch = name.startswith(("blocks.", "patch_embed."))
            total += 2 * parameter.numel() * (patches if per_patch else tokens)
        metadata = visual.prepare_encoder_metadata(self._grids)
        full_blocks = getattr(visual, "fullatt_block_indexes", None)
        for index in range(self.tower.spec.depth):
            is_full = full_blocks is None or index in full_blocks
            ends = metadata.get("cu_seqlens" if is_full else "cu_window_seqlens")
            lens = [h * w for t, h, w in self._grids for _ in range(t)]
            if ends is not None:
                lens = ends.diff().tolist()
            layer = self._layer
            total += attention_flops(lens, layer.num_heads, layer.head_size)
        return total


class RemoteTower(Remote):
    """This side of a contender's process.

    Attributes:
        contender: What it is.
    """

    def __init__(self, contender: Contender) -> None:
        """Start it."""
        environment = contender.environment
        super().__init__(Worker, (contender,), environment, ANSWER_WITHIN_S)
        self.contender = contender
        self._is_ready = False

    def begin(self, model: str, depth: int | None) -> None:
        """Have it build a tower in the last one's place; see `Worker.build`.

        The next answer is the head dim.

        Raises:
            RemoteError: As `call`.
        """
        if not self._is_ready:
            self.wait()
            self._is_ready = True
        self.ask("build", model, depth)


def title_of(remote: RemoteTower) -> str:
    """Return what failures call a process."""
    return f"{remote.contender.provider} {remote.contender.blocks}"


def build_towers(
    remotes: Iterable[RemoteTower],
    model: str,
    depth: int | None,
    failures: Failures,
    what: str,
) -> dict[RemoteTower, int]:
    """Have processes build a model's towers, all at the same time.

    Args:
        remotes: The processes.
        model: A name or a checkpoint folder.
        depth: Blocks to build; None for all.
        failures: Where it is noted what cannot be built.
        what: What they are built for, in words.

    Returns:
        Those that have a tower, in their order, and its head dim.
    """
    begun, built = [], {}
    for remote in remotes:
        with failures.noted(f"{what} {title_of(remote)}"):
            remote.begin(model, depth)
            begun.append(remote)
    for remote in begun:
        with failures.noted(f"{what} {title_of(remote)}"):
            built[remote] = remote.wait()
    return built
