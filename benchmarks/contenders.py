# SPDX-License-Identifier: Apache-2.0
"""Who is compared: providers' names, how blocks run, and what a tower then must be."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chosen_rows import QUANTIZATIONS, quantized_end, what_is_timed
from vllm_flashinfer_vit.settings import ENV_KERNEL

# How the blocks run: vLLM's default, its fused ops on as by `enforce_eager`, compiled.
BLOCKS = ("eager", "fused", "compiled")
MODES = (
    *("eager", "new", "graph"),
    *("fused", "fused_new", "fused_graph"),
    *("compiled", "compiled_new", "compiled_graph"),
)
PACKAGE = "vllm_flashinfer_vit"
REFERENCE = "reference"
# A backend, and a version of FlashAttention where it is not vLLM's choice.
STOCK = re.compile(r"stock-(\w*[a-z])((?<=-flash_attn)\d)?")


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
        quantization: As `--quantization`, None or one of `QUANTIZATIONS`.
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
        end = quantized_end(provider)
        tower, quantization = provider.removesuffix(end), QUANTIZATIONS.get(end)
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
            forced = kernel if kernel not in ("", "fp8") else "auto"
            return cls(
                provider,
                "FLASHINFER",
                False,
                dtype,
                blocks,
                attn_dtype=attn_dtype,
                quantization=quantization,
                # Whatever the user's own environment forces.
                environment={ENV_KERNEL: forced},
            )
        raise ValueError(
            f"provider {provider!r}: use stock-<backend>, stock-flash_attn4, plugin, "
            f"plugin-fp8 or plugin-<kernel>, and {' or '.join(QUANTIZATIONS)} after "
            "each for linear layers in FP8"
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
    if version is not None and layer._fa_version != version:
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


def blocks_of(mode: str) -> str:
    """Return which of `BLOCKS` a mode runs, eager ones if it names none."""
    return mode.removesuffix(what_is_timed(mode)).removesuffix("_") or "eager"


def default_providers(on_gpu: bool) -> tuple[str, ...]:
    """Return the providers that can run here: stock by its backends, and the plugin."""
    if not on_gpu:
        return "stock-torch_sdpa", "plugin"
    from vllm.v1.attention.backends.fa_utils import is_fa_version_supported

    four = ("stock-flash_attn4",) if is_fa_version_supported(4) else ()
    return "stock-flash_attn", *four, "stock-flashinfer", "plugin"
