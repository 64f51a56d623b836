# SPDX-License-Identifier: Apache-2.0
"""What engines and servers with language models of true size are started with."""

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contenders import Contender
from engines import ENTRY_POINT, compiles_blocks, runner_with_graphs
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES

# As many as one GPU of 80 GB holds with a language model of 8B.
SETUPS = ("stock-flash_attn:graph", "plugin-fp8:graph")
# Enough for what is asked at once; fixed, since several engines share the GPU.
KV_CACHE_BYTES = 5 * 2**30
GPU_SHARE = 0.15
MAX_TOKENS = 16384
# How many threads PyTorch has in each process, the image processor's among them; unset,
# one for each core.
THREADS = "OMP_NUM_THREADS"
# Variables of this process that a row is of.
NOTED = (THREADS, ENV_DISABLE_PATCHES)


@dataclass(frozen=True)
class Setup:
    """An engine.

    Attributes:
        provider: A contender's name, see `contenders.Contender`.
        mode: How its encoder runs, `graph` or `eager`.
    """

    provider: str
    mode: str

    @classmethod
    def of(cls, text: str) -> "Setup":
        """Return the setup that `PROVIDER:MODE` stands for.

        Raises:
            ValueError: There is no such provider or mode.
        """
        provider, _, mode = text.partition(":")
        if mode not in ("graph", "eager"):
            raise ValueError(f"setup {text!r}: write PROVIDER:graph or PROVIDER:eager")
        Contender.of(provider, "bf16")
        return cls(provider, mode)

    def __str__(self) -> str:
        return f"{self.provider}:{self.mode}"

    @property
    def contender(self) -> Contender:
        """What serves attention."""
        return Contender.of(self.provider, "bf16")

    def options(self, model: str, vllm: str) -> list[str]:
        """Return the options of `vllm serve`, of those that every engine has.

        Args:
            model: Name of the model that this is.
            vllm: Version of vLLM.
        """
        contender = self.contender
        compilation: dict[str, Any] = {}
        if self.mode == "graph":
            compilation["cudagraph_mm_encoder"] = True
            if contender.is_stock and compiles_blocks(model, vllm):
                compilation["compile_mm_encoder"] = True
        options = {
            "--load-format": "dummy",
            "--dtype": "bfloat16",
            "--max-model-len": str(MAX_TOKENS),
            "--max-num-batched-tokens": str(MAX_TOKENS),
            # Videos keep vLLM's limit of 999. With a limit of one, its encoder graphs
            # would have room for 512 frames or more in place of 64, for images, too.
            "--limit-mm-per-prompt": json.dumps({"image": 20}),
            "--gpu-memory-utilization": str(GPU_SHARE),
            "--kv-cache-memory-bytes": str(KV_CACHE_BYTES),
            "--mm-encoder-attn-backend": contender.backend,
        }
        if compilation:
            options["--compilation-config"] = json.dumps(compilation)
        if contender.attn_dtype is not None:
            options["--mm-encoder-attn-dtype"] = contender.attn_dtype
        if contender.flash_attn_version is not None:
            version = {"flash_attn_version": contender.flash_attn_version}
            options["--attention-config"] = json.dumps(version)
        if contender.quantization is not None:
            options["--quantization"] = contender.quantization
        return [part for item in options.items() for part in item]

    def variables(self, arguments: Sequence[str]) -> Mapping[str, str]:
        """Return the environment variables that it adds to those of this process.

        Args:
            arguments: All of vLLM's, which may need some.
        """
        runner = runner_with_graphs() if self.mode == "graph" else {}
        needed = {}
        # vLLM refuses tensors in shared memory unless its processes are spawned.
        if any(part.rpartition("=")[2] == "torch_shm" for part in arguments):
            needed["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        return {
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            "VLLM_PLUGINS": ENTRY_POINT,
            **runner,
            **self.contender.environment,
            **noted(),
            **needed,
        }

    def environment(self, arguments: Sequence[str]) -> Mapping[str, str]:
        """Return all environment variables of its process, with these arguments."""
        return {**os.environ, **self.variables(arguments)}

    def printed(self, arguments: Sequence[str]) -> str:
        """Return `vllm` with arguments and its variables, for a shell."""
        given = self.variables(arguments).items()
        variables = (f"{name}={value}" for name, value in given)
        return shlex.join(["env", *variables, "vllm", *arguments])


def noted() -> Mapping[str, str]:
    """Return those of `NOTED` that are set."""
    return {name: os.environ[name] for name in NOTED if os.environ.get(name)}


def with_variables(arguments: str) -> str:
    """Return arguments of vLLM as rows have them: after `noted`."""
    parts = [*(f"{name}={value}" for name, value in noted().items()), arguments]
    return " ".join(part for part in parts if part)


def setup_option(text: str) -> Setup:
    """Return `Setup.of` for argparse, which shows no other error's text.

    Raises:
        ArgumentTypeError: There is no such setup.
    """
    try:
        return Setup.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
