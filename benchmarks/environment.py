# SPDX-License-Identifier: Apache-2.0
"""The machine, the versions and the commit that a row of the benchmarks comes from."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
_OWN_VARIABLES = "VLLM_FLASHINFER_VIT_"


@dataclass(frozen=True)
class Environment:
    """Where a row comes from; the fields are the last columns of a row.

    Attributes:
        gpu: The GPU's name, or `none`.
        vllm: Installed version, as for the next four.
        torch: See `vllm`.
        triton: See `vllm`.
        flashinfer: See `vllm`.
        quack: See `vllm`.
        cudnn: Version of the cuDNN that is loaded, not of the wheel; `none` if none is.
        commit: Short commit of the measured tree, `+dirty` if it has changes.
        command: What to type to measure again.
    """

    gpu: str
    vllm: str
    torch: str
    triton: str
    flashinfer: str
    quack: str
    cudnn: str
    commit: str
    command: str

    @classmethod
    def probe(cls) -> "Environment":
        """Ask this machine."""
        from vllm_flashinfer_vit.machine.probe import probe
        from vllm_flashinfer_vit.machine.versions import format_cudnn

        stack = probe()
        return cls(
            gpu=stack.gpus[0].name if stack.gpus else "none",
            vllm=stack.vllm or "none",
            torch=torch.__version__,
            triton=stack.triton or "none",
            flashinfer=stack.flashinfer or "none",
            quack=stack.quack or "none",
            cudnn=format_cudnn(stack.cudnn_backend),
            commit=commit(),
            command=command_line(sys.argv),
        )


ENVIRONMENT_COLUMNS = tuple(field.name for field in fields(Environment))
# What a measurement may depend on besides the commit.
STACK_COLUMNS = tuple(
    name for name in ENVIRONMENT_COLUMNS if name not in ("commit", "command")
)


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpus_to_use(count: int) -> list[str]:
    """Return GPUs by their names in CUDA_VISIBLE_DEVICES.

    Raises:
        SystemExit: There are fewer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count_here = torch.cuda.device_count()
    names = visible.split(",") if visible else [str(i) for i in range(count_here)]
    if count > len(names):
        raise SystemExit(f"--gpus {count}, but there are {len(names)} here")
    return names[:count]


def commit() -> str:
    """Return `BENCH_COMMIT`, or what git says of the tree, or `unknown`."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        # The results are no part of what is measured, or tested.
        results = ":!benchmarks/results", ":!tests/results"
        changes = git("status", "--porcelain", "--", ".", *results)
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def is_clean(commit: str) -> bool:
    """Whether a commit, as `commit` returns it, says all of what was measured."""
    return commit != "unknown" and not commit.endswith("+dirty")


def command_line(argv: Sequence[str]) -> str:
    """Return the command that repeats a run, without where it wrote what.

    This package's variables stand in front: what `plugin` runs goes by them.
    """
    names = sorted(name for name in os.environ if name.startswith(_OWN_VARIABLES))
    given = [f"{name}={shlex.quote(os.environ[name])}" for name in names]
    kept = []
    words = iter(argv[1:])
    for word in words:
        if word in ("--output", "--logs"):
            next(words, None)
        elif not word.startswith(("--output=", "--logs=")):
            kept.append(word)
    command = shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *kept])
    return " ".join([*given, command])
