# SPDX-License-Identifier: Apache-2.0
"""Each provider's vision attention layer for bench_host.py: what it times as a call."""

import functools
import os
from collections.abc import Mapping, Sequence
from unittest import mock

from contenders import Contender
from correctness import check_error, relative_error
from csv_log import DTYPES
from environment import device
from failures import Failures
from op_problems import Problem, reference
from op_providers import gate
from timing import Run
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import build_tower

DTYPE = "bf16"


class Layer:
    """A provider's vision attention module, its GEMMs replaced by tensors.

    A block of the plugin's does not call that module: its launches are prepared once in
    a pass, and what is timed is what each block then calls.
    """

    def __init__(self, provider: str, model: str) -> None:
        """Build a tower of one block."""
        contender = Contender.of(provider, DTYPE)
        with mock.patch.dict(os.environ, contender.environment):
            tower = build_tower(
                resolve_spec(model, random_weights=True, depth=1),
                backend=contender.backend,
                attn_dtype=contender.attn_dtype,
                flash_attn_version=contender.flash_attn_version,
                dtype=DTYPES[DTYPE],
                device=device(),
                plugin=not contender.is_stock,
            )
        self._module = tower.visual.get_submodule("blocks.0.attn")
        # Kept now: the plugin patches the class when it builds its first layer.
        self._forward = type(self._module).forward
        self._is_stock = contender.is_stock
        del self._module.qkv, self._module.proj
        self._module.proj = lambda context: (context, None)

    @property
    def head_dim(self) -> int:
        """D, in elements."""
        return self._module.hidden_size_per_attention_head

    def call(self, problem: Problem) -> Run:
        """Return the call on a case, until another is asked for; `[T, 1, H * D]`."""
        if not self._is_stock:
            tables = problem.cos, problem.sin, problem.cu_seqlens, problem.max_seqlen
            attention = self._module.attn
            call = attention.prepare(Batch(*problem.parts(), *tables))
            scales = attention.own_scales
            return call if scales is None else functools.partial(call, scales)
        projection = problem.qkv.unsqueeze(1)
        self._module.qkv = lambda hidden: (projection, None)
        return functools.partial(
            self._forward,
            self._module,
            projection[..., : projection.shape[2] // 3],
            problem.cu_seqlens,
            problem.cos,
            problem.sin,
            problem.max_seqlen,
            None,
        )


def provider_names() -> list[str]:
    """Return the providers that this machine offers."""
    if device().type == "cpu":
        return ["stock-torch_sdpa", "plugin"]
    forced = [f"plugin-{name}" for name, k in KERNELS.items() if not k.is_reference]
    return ["stock-flash_attn", "plugin", *forced]


def serves(provider: str, lens: Sequence[int]) -> bool:
    """Return whether a provider's kernel takes sequences of these lengths."""
    kernel = KERNELS.get(provider.partition("-")[2])
    return kernel is None or kernel.max_len is None or max(lens) <= kernel.max_len


def build_layers(
    providers: Sequence[str], models: Sequence[str], failures: Failures
) -> dict[str, dict[str, Layer]]:
    """Build the layers by model and provider, stock's before the plugin is active."""
    layers: dict[str, dict[str, Layer]] = {model: {} for model in models}
    for provider in sorted(providers, key=lambda name: not name.startswith("stock-")):
        for model in models:
            with failures.noted(f"{model} {provider}"):
                layers[model][provider] = Layer(provider, model)
    return layers


def ready_calls(
    layers: Mapping[str, Layer], problem: Problem, what: str, failures: Failures
) -> tuple[dict[str, Run], dict[str, float]]:
    """Return each provider's call and its relative error; wrong ones are left out."""
    ref = reference("qkv_attention", problem)
    runs, errors = {}, {}
    for provider, layer in layers.items():
        with failures.noted(f"{what} {provider}"):
            run = layer.call(problem)
            rel_err = relative_error(run().view(problem.q.shape), ref)
            check_error(rel_err, gate(provider, DTYPE))
            runs[provider], errors[provider] = run, rel_err
    return runs, errors
