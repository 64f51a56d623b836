# SPDX-License-Identifier: Apache-2.0
"""What the commands that run a tower on images share: options and report."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_flashinfer_vit.commands.images import (
    ImageFile,
    JobError,
    image_files,
    not_looked_at,
)
from vllm_flashinfer_vit.kernels.formats import dtype_name
from vllm_flashinfer_vit.machine.versions import installed
from vllm_flashinfer_vit.towers import model_tower
from vllm_flashinfer_vit.towers.built import Built
from vllm_flashinfer_vit.towers.resolve import resolve
from vllm_flashinfer_vit.towers.spec import Spec
from vllm_flashinfer_vit.towers.weights import is_out_of_memory

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# Five images then take two CPU cores about a minute, most of it vLLM's imports.
CPU_DEPTH = 4
CPU_MAX_PIXELS = 512 * 512
# A tower takes about as long to build as these many images take to encode.
BUILD_STEPS = 2


@dataclass(frozen=True)
class Inputs:
    """Images, and the tower that they go through.

    Attributes:
        images: Image files, and folders of them.
        model: A local checkpoint folder, or a name that `resolve` knows.
        random_weights: Seeded random weights instead of a checkpoint's.
        depth: Blocks of the tower, from the first on. None: all of them, but
            `CPU_DEPTH` for random weights on the CPU.
        dtype: `bf16`, `fp16`, `fp32`; `auto` is bf16 where the device has it.
        device: `cpu`, `cuda` or `auto`.
        max_pixels: Larger images are shrunk to it. None: the processor's own limit,
            but `CPU_MAX_PIXELS` for random weights on the CPU.
        seed: Seeds random weights.
    """

    images: Sequence[Path]
    model: str
    random_weights: bool = False
    depth: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_pixels: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """What the options come to.

    Attributes:
        device: Where the tower runs.
        dtype: Of weights and activations.
        files: The images.
        spec: The tower.
        max_pixels: The largest image; None for the processor's own limit.
        notes: What was decided, sentences for the user.
    """

    device: torch.device
    dtype: torch.dtype
    files: Sequence[ImageFile]
    spec: Spec
    max_pixels: int | None
    notes: Sequence[str]

    @property
    def reads(self) -> list[Path]:
        """The files that are read, and must not be written."""
        folder = Path(self.spec.model)
        # Random weights, too, are made by its config and image processor.
        checkpoint = sorted(folder.iterdir()) if folder.is_dir() else []
        return [*(file.path for file in self.files), *checkpoint]


@dataclass(frozen=True)
class JobReport:
    """What all reports say.

    Attributes:
        model: Model name or checkpoint folder.
        weights: Where the weights are from.
        depth: Blocks that ran, of `full_depth`.
        full_depth: Blocks of the whole tower.
        dtype: Of weights and activations.
        device: Its name.
        max_pixels: Larger images were shrunk to it; None: the processor's own limit.
        notes: What was decided, sentences for the user.
        failures: What was left out, sentences for the user.
        versions: By package.
    """

    model: str
    weights: str
    depth: int
    full_depth: int
    dtype: str
    device: str
    max_pixels: int | None
    notes: Sequence[str]
    failures: Sequence[str]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return asdict(self)

    @property
    def exit_status(self) -> int:
        """0, or 1 if something was left out."""
        return 1 if self.failures else 0

    def table(self, *details: str) -> Table:
        """Return an empty table with a title.

        Args:
            details: Stand in the title before the dtype.
        """
        parts = (
            self.model,
            self.weights,
            f"{self.depth} of {self.full_depth} blocks",
            *details,
            self.dtype,
            self.device,
        )
        return Table(
            title=Text(", ".join(parts)),
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )

    def print_rest(self, console: Console, saved: Mapping[str, str | None]) -> None:
        """Print notes, failures, and what was saved where."""
        for line in (*self.notes, *self.failures):
            console.print(Text(line))
        for what, path in saved.items():
            if path is not None:
                console.print(Text(f"{what} saved to {path}."), soft_wrap=True)


def report_header(
    job: Job, options: Inputs, notes: Sequence[str], failures: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of a `JobReport`."""
    weights = f"random weights of seed {options.seed}"
    return {
        "model": job.spec.model,
        "weights": weights if job.spec.checkpoint is None else "checkpoint weights",
        "depth": job.spec.depth,
        "full_depth": job.spec.full_depth,
        "dtype": dtype_name(job.dtype),
        "device": device_name(job.device),
        "max_pixels": job.max_pixels,
        "notes": [*job.notes, *notes],
        "failures": failures,
        "versions": versions(),
    }


@contextmanager
def memory_hint(
    device: torch.device, advice: str = "use a smaller --max-pixels"
) -> Iterator[None]:
    """Say what to do where the device has too little memory.

    Raises:
        JobError: It has.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise JobError(
            f"{device_name(device)} has too little memory ({error}); {advice}"
        ) from error


def build(spec: Spec, *, device: torch.device, **how: Any) -> Built:
    """Build a tower as `model_tower.build` does.

    Raises:
        TowerError: See there; or the device has too little memory.
    """
    # No image is there yet: it is the weights, or another process.
    advice = "free it from other processes, or use --device cpu"
    with memory_hint(device, advice):
        return model_tower.build(spec, device=device, **how)


def pick_device(name: str) -> torch.device:
    """Return the device of a name, `auto` included.

    Raises:
        JobError: The name is unknown.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise JobError(f"device {name!r} is unknown; use auto, cpu or cuda") from None


def device_name(device: torch.device) -> str:
    """Return a device's name for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name, `auto` included.

    Raises:
        JobError: The name is unknown.
    """
    if name == "auto":
        # A CPU without instructions for bf16 is several times slower in it.
        native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise JobError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def prepare(options: Inputs) -> Job:
    """Find out what options come to.

    Raises:
        TowerError: An option or checkpoint cannot be used.
    """
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    files = image_files(options.images)
    spec, max_pixels, notes = _resolve_tower(options, device)
    notes = [*notes, *not_looked_at(options.images)]
    return Job(device, dtype, files, spec, max_pixels, notes)


def _resolve_tower(
    options: Inputs, device: torch.device
) -> tuple[Spec, int | None, list[str]]:
    notes = []
    depth, max_pixels = options.depth, options.max_pixels
    if options.random_weights:
        notes.append(
            "Weights are random: times and errors are real, embeddings mean nothing."
        )
    if device.type == "cpu" and options.random_weights:
        if depth is None:
            full = resolve(options.model, random_weights=True).full_depth
            depth = min(CPU_DEPTH, full)
            if depth < full:
                notes.append(
                    f"On a CPU only {depth} of {full} blocks run; --depth {full} runs "
                    "all."
                )
        if max_pixels is None:
            max_pixels = CPU_MAX_PIXELS
            notes.append(
                f"On a CPU images are shrunk to {max_pixels:,} pixels; --max-pixels "
                "sets another limit."
            )
    if max_pixels is not None and max_pixels < 1:
        raise JobError(f"--max-pixels is {max_pixels}: use 1 or more")
    spec = resolve(options.model, random_weights=options.random_weights, depth=depth)
    return spec, max_pixels, notes


def progress_bar(console: Console | None) -> Progress:
    """Return a bar that shows what is being done; without a terminal, none."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        # rich would leave an empty line in a log.
        disable=console is None or not console.is_terminal,
        transient=True,
        redirect_stdout=False,
    )


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on, by package name."""
    names = "vllm-flashinfer-vit", "vllm", "torch", "transformers", "flashinfer-python"
    return {name: found for name in names if (found := installed(name))}
