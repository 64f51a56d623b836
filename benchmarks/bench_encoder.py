# SPDX-License-Identifier: Apache-2.0
"""Times whole vision towers: stock vLLM by its backends, and the plugin.

`stock-flash_attn` is FLASH_ATTN with the FlashAttention that vLLM picks, on Hopper 3,
and `stock-flash_attn4` with `attention_config.flash_attn_version=4`. With `-q8` at its
end a provider's linear layers are quantised as by `--quantization fp8`.

Every provider has a process of its own, since the plugin would change stock. All hold
the same tower, and take turns on one GPU, one at a time. Outputs are compared with the
tower in fp32 on TORCH_SDPA, with the same weights.

    python benchmarks/bench_encoder.py --models Qwen/Qwen2.5-VL-7B-Instruct
    python benchmarks/bench_encoder.py --models dots.ocr Kimi-K2.5 SigLIP-So400m
    python benchmarks/bench_encoder.py --smoke --output out/encoder.csv   # no GPU

`dots.ocr` and the others of `block_stacks.py` are the blocks alone of towers that only
an engine builds whole.
"""

import argparse
import functools
import math
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from block_stacks import STACKS, StackTower, build_stack
from chosen_rows import QUANTIZED
from correctness import check_error, relative_error
from csv_log import DTYPES, CsvLog, attention_flops, print_row, result_row, results_path
from environment import Environment, device
from failures import Failures
from host_load import load_text, watched_load
from timing import Clock, Run, host_ms, is_host, is_replay, rounds_within
from vllm_flashinfer_vit.choices.clock import capture, order_of_turn

Grids = tuple[tuple[int, int, int], ...]

# Frames, rows and columns of patches of each image. 8160 patches are 1920 x 1080 pixels
# in patches of 16; the mixed images are those of bench_attention.py.
CASES: dict[str, Grids] = {
    "1x256": ((1, 16, 16),),
    "1x1024": ((1, 32, 32),),
    "1x4096": ((1, 64, 64),),
    "1x8160": ((1, 68, 120),),
    "1x15376": ((1, 124, 124),),
    "1x35344": ((1, 188, 188),),
    "8x1024": ((1, 32, 32),) * 8,
    "8x4096": ((1, 64, 64),) * 8,
    "20x400": ((1, 20, 20),) * 20,
    "video16x1024": ((16, 32, 32),),
    "mixed": (
        (1, 16, 16),
        (1, 36, 36),
        (1, 44, 80),
        (1, 68, 120),
        (1, 64, 64),
        (1, 22, 38),
    ),
}
SMOKE_CASES: dict[str, Grids] = {"1x64": ((1, 8, 8),), "video2x48": ((2, 6, 8),)}
MODELS = (
    "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
)
# How the blocks run: vLLM's default, its fused ops on as by `enforce_eager`, compiled.
BLOCKS = ("eager", "fused", "compiled")
MODES = ("eager", "graph", "fused", "fused_graph", "compiled", "compiled_graph")
PACKAGE = "vllm_flashinfer_vit"
REFERENCE = "reference"
# A tower that is wrong is off by more than this; bf16 over 32 blocks by a few percent.
GATE = 0.2
# Stock's own with quantised layers and random weights is off by 23 % (Qwen2.5-VL).
QUANTIZED_GATE = 0.3
# The bar for the plugin's error, in units of the error of stock FLASH_ATTN.
ERROR_BAR = 2.0
# Below this a process is called once unmeasured when its turn comes.
WARM_UP_BELOW_MS = 20.0
# Even, so that half of them run backwards.
TURNS = 6
ANSWER_WITHIN_S = 300.0
# A backend, and a version of FlashAttention where it is not vLLM's choice.
STOCK = re.compile(r"stock-(\w*[a-z])((?<=-flash_attn)\d)?")
# What `QUANTIZED` at a provider's end stands for, as `--quantization`.
QUANTIZATION = "fp8"


@dataclass(frozen=True)
class Contender:
    """What one process holds.

    Attributes:
        provider: Name in the rows, or `REFERENCE`.
        backend: The encoder attention backend that its engine configuration names.
        is_stock: Whether the plugin stays out of the process.
        dtype: A key of `DTYPES`, or `fp32`.
        blocks: One of `BLOCKS`.
        attn_dtype: The engine's encoder attention dtype, None or `fp8`.
        flash_attn_version: FlashAttention's version, None for vLLM's choice.
        quantization: As `--quantization`, None or `QUANTIZATION`.
        environment: Variables of the process.
    """

    provider: str
    backend: str
    is_stock: bool
    dtype: str
    blocks: str = "eager"
    attn_dtype: str | None = None
    flash_attn_version: int | None = None
    quantization: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, provider: str, dtype: str, blocks: str = "eager") -> "Contender":
        """Return the contender of a provider's name.

        Raises:
            ValueError: There is no such provider.
        """
        tower = provider.removesuffix(QUANTIZED)
        quantization = None if tower == provider else QUANTIZATION
        origin, _, kernel = tower.partition("-")
        if stock := STOCK.fullmatch(tower):
            backend, version = stock.groups()
            return cls(
                provider,
                backend.upper(),
                True,
                dtype,
                blocks,
                flash_attn_version=int(version) if version else None,
                quantization=quantization,
                # vLLM then loads no plugin by itself.
                environment={"VLLM_PLUGINS": ""},
            )
        if origin == "plugin":
            attn_dtype = "fp8" if kernel.endswith("fp8") else None
            is_forced = kernel not in ("", "fp8")
            env = {"VLLM_FLASHINFER_VIT_KERNEL": kernel} if is_forced else {}
            return cls(
                provider,
                "FLASHINFER",
                False,
                dtype,
                blocks,
                attn_dtype=attn_dtype,
                quantization=quantization,
                environment=env,
            )
        raise ValueError(
            f"provider {provider!r}: use stock-<backend>, stock-flash_attn4, plugin, "
            f"plugin-fp8 or plugin-<kernel>, and {QUANTIZED} after each for linear "
            "layers in FP8"
        )


def check_promises(
    contender: Contender, layer: Any, blocks: Iterable[torch.nn.Module]
) -> None:
    """Check that a tower is what its contender's name says.

    Args:
        contender: What was asked for.
        layer: One of the tower's attention layers.
        blocks: The tower's blocks.

    Raises:
        RuntimeError: It is not.
    """
    is_stock = not type(layer).__module__.startswith(PACKAGE)
    if is_stock != contender.is_stock:
        raise RuntimeError(
            f"{contender.provider} got attention layers of {type(layer)}"
        )
    version = contender.flash_attn_version
    if version not in (None, layer._fa_version):
        raise RuntimeError(
            f"vLLM runs these layers on FlashAttention {layer._fa_version} here, "
            f"not {version}"
        )
    blocks = list(blocks)
    if contender.quantization is not None:
        modules = [layer for block in blocks for layer in block.modules()]
        linear = [layer for layer in modules if hasattr(layer, "output_size")]
        if {layer.weight.dtype for layer in linear} != {torch.float8_e4m3fn}:
            raise RuntimeError("some linear layers of these blocks are not quantised")
    if contender.blocks == "compiled" and any(
        getattr(block, "do_not_compile", True) for block in blocks
    ):
        raise RuntimeError("this vLLM does not compile the blocks of this tower")


class Worker:
    """A tower in its own process, and what is asked of it there."""

    def __init__(self, contender: Contender, model: str, depth: int | None) -> None:
        """Build the tower and make sure that it is the one that the name promises."""
        from vllm_flashinfer_vit.towers.spec import resolve_spec
        from vllm_flashinfer_vit.towers.tower import build_tower

        torch.set_float32_matmul_precision("highest")
        self._dtype = DTYPES.get(contender.dtype, torch.float32)
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
        self.tower: Any
        if model in STACKS:
            self.tower = build_stack(model, depth=depth, **how)
        else:
            is_random = not Path(model).is_dir()
            spec = resolve_spec(model, random_weights=is_random, depth=depth)
            self.tower = build_tower(spec, **how)
        layers = self.tower.attention_layers()
        self._layer = next(iter(layers.values()))
        check_promises(contender, self._layer, self.tower.visual.blocks)
        self._blocks = contender.blocks
        self._gate = GATE if contender.quantization is None else QUANTIZED_GATE
        self._clock = Clock(device())
        self._runs: dict[str, Run] = {}
        self._pixels = self._reference = torch.empty(0)
        self._grids: list[list[int]] = []

    def compile(self) -> None:
        """Compile the blocks, if they are to be, by a large batch.

        By the first batch Inductor decides which weights it pads. An engine's first
        one, in its profiling run, is the largest that it allows.
        """
        if self._blocks == "compiled":
            self.load(CASES["8x4096"], None)
            self._eager()

    def head_dim(self) -> int:
        """Return the attention's head dim."""
        return self._layer.head_size

    def load(self, grids: Grids, reference: str | None) -> str:
        """Draw a case's pixels, and read the output that is right for them.

        Returns:
            The kernels that this package picks for the case; empty for stock.
        """
        self._runs.clear()
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
        run = capture(self._with_metadata()) if is_replay(mode) else self._eager
        rel_err = relative_error(run(), self._reference)
        check_error(rel_err, self._gate)
        self._runs[mode] = run
        return rel_err

    def sample(self, mode: str, count: int, warm_up: bool) -> list[float]:
        """Return times of `count` calls in milliseconds, of the host for each block."""
        run = self._runs[mode]
        if warm_up:
            run()
        if is_host(mode):
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

    def _with_metadata(self) -> Run:
        # vLLM too prepares the metadata outside its encoder graphs.
        metadata = self.tower.visual.prepare_encoder_metadata(self._grids)
        # A whole tower has all in its metadata.
        grids = self._grids if isinstance(self.tower, StackTower) else None
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


def serve(
    contender: Contender, model: str, depth: int | None, pipe: Connection
) -> None:
    """Run a worker: answer `(method, arguments)` until the other end closes."""
    try:
        worker = Worker(contender, model, depth)
        with worker.tower.running():
            worker.compile()
            pipe.send((True, worker.head_dim()))
            while True:
                method, arguments = pipe.recv()
                try:
                    pipe.send((True, getattr(worker, method)(*arguments)))
                except Exception as error:
                    pipe.send((False, f"{type(error).__name__}: {error}"))
    except EOFError:
        return
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))


class RemoteError(RuntimeError):
    """A worker could not do what it was asked, or is gone."""


class Remote:
    """This side of a worker's pipe."""

    def __init__(self, contender: Contender, model: str, depth: int | None) -> None:
        """Start the process; `wait` says whether its tower could be built."""
        self.contender = contender
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(contender, model, depth, theirs)
        )
        with _environment(contender.environment):
            self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: object) -> Any:
        """Return what a method of `Worker` returns.

        Raises:
            RemoteError: It raised, took too long, or the process is gone.
        """
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._gone() from None
        return self.wait()

    def wait(self) -> Any:
        """Return the next answer; the first one, the head dim, means ready.

        Raises:
            RemoteError: As `call`.
        """
        try:
            if not self._pipe.poll(ANSWER_WITHIN_S):
                self._process.kill()
                raise RemoteError(f"no answer within {ANSWER_WITHIN_S:.0f} s")
            done, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not done:
            raise RemoteError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _gone(self) -> RemoteError:
        self._process.join(10)
        return RemoteError(f"its process ended with {self._process.exitcode}")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Bench:
    """One run of this script."""

    log: CsvLog
    environment: Environment
    failures: Failures
    modes: Sequence[str]
    stock_modes: Sequence[str]
    dtype: str
    budget_s: float
    bench: str = "encoder"
    error_ratios: dict[str, float] = field(default_factory=dict)

    def run_model(
        self,
        model: str,
        providers: Sequence[str],
        cases: Mapping[str, Grids],
        depth: int | None,
    ) -> None:
        """Time one model's towers on every case."""
        with self.towers(model, providers, depth) as (head_dim, remotes):
            self.run_cases(model, head_dim, remotes, cases)

    @contextmanager
    def towers(
        self, model: str, providers: Sequence[str], depth: int | None
    ) -> Iterator[tuple[int, list[Remote]]]:
        """Hold the reference's process and those that a mode needs.

        Yields:
            The head dim, and the processes with a tower, the reference's first; none
            without the reference.
        """
        sdpa = Contender.of("stock-torch_sdpa", "fp32")
        contenders = [replace(sdpa, provider=REFERENCE)]
        modes = (*self.modes, *self.stock_modes)
        for blocks in BLOCKS:
            for name in providers:
                contender = Contender.of(name, self.dtype, blocks)
                if any(self.runs(contender, mode) for mode in modes):
                    contenders.append(contender)
        # All at once, since importing and building take longer than measuring.
        remotes = [Remote(contender, model, depth) for contender in contenders]
        try:
            ready, head_dim = [], 0
            for remote in remotes:
                with self.failures.noted(f"{model} {_title(remote)}"):
                    head_dim = remote.wait()
                    ready.append(remote)
            has_reference = ready and ready[0].contender.provider == REFERENCE
            yield head_dim, ready if has_reference else []
        finally:
            for remote in remotes:
                remote.close()

    def run_cases(
        self,
        model: str,
        head_dim: int,
        remotes: Sequence[Remote],
        cases: Mapping[str, Grids],
    ) -> None:
        """Time towers of `towers` on every case."""
        if not remotes:
            return
        reference, *others = remotes
        for case, grids in cases.items():
            print(f"{model} {case}", flush=True)
            with (
                self.failures.noted(f"{model} {case} {REFERENCE}"),
                tempfile.TemporaryDirectory() as folder,
            ):
                path = str(Path(folder, "reference.safetensors"))
                reference.call("load", grids, None)
                flops = reference.call("write_reference", path)
                self._run_case(model, case, grids, others, path, flops, head_dim)

    def _run_case(
        self,
        model: str,
        case: str,
        grids: Grids,
        remotes: Sequence[Remote],
        reference: str,
        flops: float,
        head_dim: int,
    ) -> None:
        loaded = []
        for remote in remotes:
            with self.failures.noted(f"{model} {case} {_title(remote)}"):
                if kernels := remote.call("load", grids, reference):
                    print(f"  {_title(remote)} runs {kernels}")
                loaded.append(remote)
        for mode in (*self.modes, *self.stock_modes):
            errors: dict[Remote, float] = {}
            for remote in loaded:
                if self.runs(remote.contender, mode):
                    with self.failures.noted(f"{model} {case} {_title(remote)} {mode}"):
                        errors[remote] = remote.call("check", mode)
            with self.failures.noted(f"{model} {case} {mode}"):
                # A replay does not wait for the host.
                watched = errors and not is_replay(mode)
                with watched_load() if watched else nullcontext():
                    samples = self._take_turns(list(errors), mode)
                for remote, taken in samples.items():
                    row = result_row(
                        self.environment,
                        bench=self.bench,
                        case=case,
                        provider=remote.contender.provider,
                        model=model,
                        head_dim=head_dim,
                        dtype=self.dtype,
                        mode=mode,
                        samples_ms=taken,
                        flops=0 if is_host(mode) else flops,
                        rel_err=errors[remote],
                    )
                    self.log.add(row)
                    print_row(row)
                self._compare(f"{model} {case} {mode}", errors)

    def runs(self, contender: Contender, mode: str) -> bool:
        """Whether a contender is to be timed in a mode."""
        is_wanted = mode in self.modes or (
            contender.is_stock and mode in self.stock_modes
        )
        return is_wanted and contender.blocks == _blocks(mode)

    def _take_turns(
        self, remotes: Sequence[Remote], mode: str
    ) -> dict[Remote, list[float]]:
        samples: dict[Remote, list[float]] = {remote: [] for remote in remotes}
        if not remotes:
            return samples
        slow_ms = {r: r.call("sample", mode, 1, True)[0] for r in remotes}
        rounds = rounds_within(sum(slow_ms.values()), self.budget_s, TURNS, 50)
        for turn in range(TURNS):
            count = len(range(turn, rounds, TURNS))
            for remote in order_of_turn(remotes, turn):
                warm_up = slow_ms[remote] < WARM_UP_BELOW_MS
                samples[remote] += remote.call("sample", mode, count, warm_up)
        return samples

    def _compare(self, what: str, errors: Mapping[Remote, float]) -> None:
        by_name = {remote.contender.provider: err for remote, err in errors.items()}
        stock = by_name.get("stock-flash_attn", by_name.get("stock-torch_sdpa"))
        if stock and "plugin" in by_name:
            self.error_ratios[what] = by_name["plugin"] / stock

    def summary(self) -> None:
        """Print how the plugin's errors compare with stock's, then what did not run."""
        if self.error_ratios:
            worst = max(self.error_ratios, key=lambda what: self.error_ratios[what])
            over = sum(ratio > ERROR_BAR for ratio in self.error_ratios.values())
            print(
                f"\nError of the plugin over that of stock: at most "
                f"{self.error_ratios[worst]:.2f} ({worst}); {over} of "
                f"{len(self.error_ratios)} over the bar of {ERROR_BAR}"
            )
        self.failures.summary()


def _blocks(mode: str) -> str:
    """Return which of `BLOCKS` a mode runs, eager ones if it names none."""
    blocks = mode.removesuffix("graph").removesuffix("host").removesuffix("_")
    return blocks or "eager"


def _title(remote: Remote) -> str:
    return f"{remote.contender.provider} {remote.contender.blocks}"


def default_providers(on_gpu: bool) -> tuple[str, ...]:
    """Return the providers that can run here: stock by its backends, and the plugin."""
    if not on_gpu:
        return "stock-torch_sdpa", "plugin"
    from vllm.v1.attention.backends.fa_utils import is_fa_version_supported

    four = ("stock-flash_attn4",) if is_fa_version_supported(4) else ()
    return "stock-flash_attn", *four, "stock-flashinfer", "plugin"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="names or checkpoint folders")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SMOKE_CASES])
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument(
        "--stock-modes", nargs="+", choices=MODES, default=(), help="more for stock"
    )
    parser.add_argument(
        "--providers",
        nargs="+",
        help="stock-<backend>, stock-flash_attn4, plugin, plugin-fp8, plugin-<kernel>",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--depth", type=int, help="blocks to build; default all")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=1.0,
        help="time per case and mode, all providers together",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = parse_args()
    on_gpu = device().type == "cuda"
    if not on_gpu and not args.smoke:
        raise SystemExit("no GPU here: only --smoke runs on the CPU")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    known = {**CASES, **SMOKE_CASES}
    names = args.cases or (SMOKE_CASES if args.smoke else CASES)
    print(load_text())
    environment = Environment.probe()
    output = results_path("encoder", environment.gpu, args.output)
    bench = Bench(
        log=CsvLog(output),
        environment=environment,
        failures=Failures(),
        modes=args.modes or (("eager", "graph") if on_gpu else ("eager",)),
        stock_modes=args.stock_modes,
        dtype=args.dtype,
        budget_s=args.budget_s,
    )
    try:
        for model in args.models or (MODELS[1:2] if args.smoke else MODELS):
            bench.run_model(
                model,
                args.providers or default_providers(on_gpu),
                {name: known[name] for name in names},
                args.depth or (2 if args.smoke else None),
            )
    finally:
        bench.summary()
    print(f"rows in {output}")


if __name__ == "__main__":
    main()
