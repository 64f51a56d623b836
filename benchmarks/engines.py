# SPDX-License-Identifier: Apache-2.0
"""Real engines without any weights, each in a process of its own."""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from contenders import Contender
from vllm_flashinfer_vit.machine.versions import ENV_V2_RUNNER, runner_note

ENTRY_POINT = "flashinfer_vit"


def compiles_blocks(model: str, vllm: str) -> bool:
    """Whether a version of vLLM compiles the blocks of a model's tower, if asked to.

    Args:
        model: Name of a Qwen model.
        vllm: The version.
    """
    if "Qwen3-VL" in model:
        return Version(vllm) >= Version("0.28")
    return "Qwen2.5-VL" in model


@dataclass(frozen=True)
class Job:
    """One engine to start."""

    model: str
    config: str
    provider: str

    @property
    def contender(self) -> Contender:
        """What serves attention."""
        return Contender.of(self.provider, "bf16")

    @property
    def stem(self) -> str:
        """A file name for what the engine leaves."""
        return f"{self.model.rpartition('/')[2]}.{self.config}.{self.provider}"


def start(
    script: str,
    job: Job,
    arguments: Sequence[str],
    folder: Path,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `script --one JOB ARGUMENTS... FOLDER` with an engine's environment.

    Args:
        script: A file that takes such a command line.
        job: Handed on as JSON; only the plugin's engines load this package.
        arguments: Handed on as they are.
        folder: Where the process leaves its log, and whatever else it writes.
        timeout_s: Seconds the process may take.
        variables: Environment variables to set for it.

    Raises:
        RuntimeError: The process failed; the message is the last error in its log.
        subprocess.TimeoutExpired: It took longer than `timeout_s`.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "VLLM_PLUGINS": ENTRY_POINT,
        **job.contender.environment,
        **(variables or {}),
    }
    log = folder / f"{job.stem}.log"
    one = ["--one", json.dumps(asdict(job)), *arguments, str(folder)]
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, script, *one],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode:
        lines = log.read_text().splitlines()
        print("\n".join(lines[-20:]), flush=True)
        errors = [line for line in lines if "Error" in line]
        said = errors[-1].strip() if errors else "no error in its log"
        raise RuntimeError(f"exit status {done.returncode}: {said}")


def encoder_parts(model: Any) -> dict[str, torch.nn.Module]:
    """Return what encodes images, by its name in the model: all but the language model.

    Args:
        model: A multimodal model of vLLM.
    """
    language_model = model.get_language_model()
    return {
        name: part
        for name, part in model.named_children()
        if part is not language_model
    }


def fill_tower(model: torch.nn.Module) -> None:
    """Give the tower weights with which attention matters; in each engine the same.

    Dummy weights are so small that the biases alone make up the embeddings.
    """
    for part in encoder_parts(model).values():
        _fill(part)


def _fill(part: torch.nn.Module) -> None:
    from vllm_flashinfer_vit.blocks.aligned_linear import AlignedLinearMethod
    from vllm_flashinfer_vit.towers.weights import (
        fill_with_random_weights,
        make_attention_matter,
    )

    with ExitStack() as stack:
        # What the package padded must get the values that stock's weights get.
        for module in part.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, AlignedLinearMethod):
                for parameter in module.parameters(recurse=False):
                    if hasattr(parameter, "stock_weight_loader"):
                        stack.enter_context(method.in_stock_size(parameter))
        fill_with_random_weights(part, seed=0)
    make_attention_matter(part)
    for name, module in part.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dtype == torch.float8_e4m3fn:
            _fill_quantized(name, module)


def _fill_quantized(name: str, layer: Any) -> None:
    """Give an FP8 layer the weights of `fill_with_random_weights`, with one scale.

    What vLLM or this package has padded stays 0.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    std = 0.04 if name.endswith("qkv") else 0.02
    values = torch.empty(layer.weight.shape).normal_(std=std, generator=generator)
    inputs, outputs = layer.weight.shape
    values[getattr(layer, "input_size_per_partition", inputs) :] = 0
    values[:, getattr(layer, "output_size_per_partition", outputs) :] = 0
    scale = values.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    layer.weight.data.copy_(values / scale)
    layer.weight_scale.data.fill_(scale)


def random_pixels(
    visual: torch.nn.Module, patches: int, generator: torch.Generator
) -> torch.Tensor:
    """Return random pixels as a tower takes them, bytes where it normalises them.

    Args:
        visual: vLLM's tower.
        patches: How many.
        generator: Its device is the pixels'.

    Returns:
        `[patches, patch_dim]`, uint8 or the tower's dtype.
    """
    weight = visual.patch_embed.proj.weight
    shape = (patches, weight[0].numel())
    where = {"generator": generator, "device": generator.device}
    norm = getattr(visual, "input_norm", None)
    if getattr(norm, "input_dtype", None) is torch.uint8:
        return torch.randint(256, shape, dtype=torch.uint8, **where)
    # Drawn in fp32, so that every dtype sees the same values.
    return torch.randn(shape, **where).to(weight.dtype)


def runner_with_graphs() -> dict[str, str]:
    """Return the variable without which this vLLM would ignore encoder graphs, if any.

    Its engines run on vLLM's default runner where that has graphs.
    """
    return {ENV_V2_RUNNER: "0"} if runner_note(version("vllm"), os.environ) else {}


def manager_of(runner: Any) -> Any:
    """Return the manager of encoder graphs of vLLM's V1 or V2 model runner.

    Raises:
        RuntimeError: The runner has none.
    """
    state = getattr(runner, "model_state", None)
    if state is None:
        manager = runner.encoder_cudagraph_manager
    else:
        manager = state.encoder_runner.cudagraph_manager
    if manager is None:
        raise RuntimeError(f"{type(runner).__name__} has no encoder CUDA graphs here")
    return manager
