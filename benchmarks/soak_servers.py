# SPDX-License-Identifier: Apache-2.0
"""The servers of soak.py: two of this package, and a judge of stock vLLM in fp32."""

import argparse
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench_serve import Server, server_command
from server_process import START_TIMEOUT_S, check_free
from setups import Setup

SETUP = Setup.of("plugin-fp8:graph")
# FlashAttention has no fp32.
JUDGE = Setup.of("stock-torch_sdpa:eager")
SERVERS = 2
# What vLLM's monitor of compilation logs once it has warmed up.
_BUILT = re.compile(r"JIT compilation during inference: ([^\s.(]+)")


def scale_file(checkpoint: Path) -> Path:
    """Return where a model's servers save their scales."""
    return checkpoint / "scales" / "scales.json"


def options(scales: Path, serve_args: str) -> list[str]:
    """Return what both servers get besides their setup's options.

    Args:
        scales: The file that they save to.
        serve_args: What the user adds.
    """
    return [
        *_common_options(),
        # A small cache is full soon, so that memory that goes on growing is a leak.
        *("--mm-processor-cache-gb", "0.5"),
        *("--mm-encoder-fp8-scale-save-path", str(scales)),
        *shlex.split(serve_args),
    ]


def judge_options() -> list[str]:
    """Return what the judge gets besides its setup's options."""
    return [
        *_common_options(),
        *("--dtype", "float32"),
        *("--mm-processor-cache-gb", "0"),
        "--enforce-eager",
    ]


def _common_options() -> list[str]:
    # Of options that are given twice, the last one counts.
    return ["--load-format", "auto", "--kv-cache-memory-bytes", str(2**30)]


def commands(
    checkpoint: Path, model: str, vllm: str, args: argparse.Namespace
) -> list[tuple[Setup, int, list[str]]]:
    """Return the setup, the port and the command of each server, the judge last."""
    more = options(scale_file(checkpoint), args.serve_args)
    kinds = [(SETUP, more)] * SERVERS + [(JUDGE, judge_options())]
    return [
        (setup, port, server_command(setup, checkpoint, model, vllm, port, given))
        for port, (setup, given) in enumerate(kinds, args.port)
    ]


@contextmanager
def serving(
    checkpoint: Path, model: str, vllm: str, args: argparse.Namespace
) -> Iterator[list[Server]]:
    """Hold a model's servers, the judge last.

    Raises:
        RuntimeError: One of them does not come up, or something else has its port.
    """
    logs = Path(args.logs or checkpoint).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    scale_file(checkpoint).parent.mkdir()
    with ExitStack() as stack:
        servers = []
        for setup, port, command in commands(checkpoint, model, vllm, args):
            check_free(port)
            stem = f"soak.{model.rpartition('/')[2]}.{port}"
            server = Server(setup, command, port, logs / f"{stem}.log")
            stack.callback(server.stop)
            servers.append(server)
        until = time.monotonic() + START_TIMEOUT_S
        for server in servers:
            try:
                server.wait(until)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{server.setup} on {server.port}: {error}"
                ) from None
            print(f"{model} {server.setup} on {server.port} is up", flush=True)
        yield servers


def built(logs: Sequence[str]) -> list[str]:
    """Return the kernels that were built after start, as servers' logs name them."""
    return [name for log in logs for name in _BUILT.findall(log)]
