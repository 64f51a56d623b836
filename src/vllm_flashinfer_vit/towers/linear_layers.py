# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a quantised tower: which keep 16 bits, and what runs them."""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm_flashinfer_vit.towers.built import Built
from vllm_flashinfer_vit.towers.spec import Spec, TowerError, TowerSpec


def check_unquantized(
    visual: nn.Module, spec: Spec, unquantized: Sequence[str]
) -> None:
    """Check that each name or pattern of layers to leave out is one of a tower's.

    Args:
        visual: vLLM's module of the tower, or of one that is not quantised.
        spec: What it was built from; one that can be quantised.
        unquantized: As for `build_tower`.

    Raises:
        TowerError: One fits no linear layer.
    """
    if not unquantized:
        return
    assert isinstance(spec, TowerSpec)
    fused = getattr(spec.model_class(), "packed_modules_mapping", {})
    names = [layer.prefix for layer in _linear_layers(visual)]
    for pattern in unquantized:
        if not any(_fits(name, pattern, fused) for name in names):
            raise TowerError(
                f"--unquantized {pattern!r} fits no linear layer of {spec.model}; its "
                f"layers are named as {names[0]}, and patterns are re:PATTERN of names "
                "from their beginning on"
            )


def how_layers_run(tower: Built) -> str:
    """Say in what format a tower's linear layers are, and what runs those in FP8.

    Args:
        tower: Ready to run.
    """
    formats = Counter(map(_format, _linear_layers(tower.visual)))
    parts = [f"{count} in {name}" for name, count in sorted(formats.items())]
    text = f"{formats.total()} linear layers, {', '.join(parts)}"
    if tower.backend != "FLASHINFER" or not formats["FP8"]:
        return f"{text}."
    ours = _run_in_programs(tower.visual)
    return (
        f"{text}. Of those in FP8 {ours} run in this package's block program, "
        f"{formats['FP8'] - ours} as vLLM's own."
    )


def _linear_layers(visual: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.linear import LinearBase

    return [module for module in visual.modules() if isinstance(module, LinearBase)]


def _fits(name: str, pattern: str, fused: Mapping[str, list[str]]) -> bool:
    """Whether vLLM leaves a layer out for a pattern, or for it and others."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )

    # After 0.25.1, as its online quantisation asks for.
    knows_wildcards = "use_fnmatch" in inspect.signature(should_ignore_layer).parameters
    how: dict[str, Any] = {"use_fnmatch": True} if knows_wildcards else {}
    try:
        return should_ignore_layer(name, [pattern], fused, **how)
    except ValueError:
        # It fits a part of a layer that vLLM fuses; others may fit the rest.
        return True


def _format(layer: Any) -> str:
    from vllm_flashinfer_vit.blocks.linear import is_unquantized

    if is_unquantized(layer):
        return f"{8 * layer.weight.element_size()} bits"
    weight = getattr(layer, "weight", None)
    if weight is not None and weight.dtype == torch.float8_e4m3fn:
        return "FP8"
    return f"the format of {type(layer.quant_method).__name__}"


def _run_in_programs(visual: nn.Module) -> int:
    """Return how many layers in FP8 run in block programs."""
    from vllm_flashinfer_vit.blocks.attach import program_of
    from vllm_flashinfer_vit.blocks.program import BlockProgram

    return sum(
        step.startswith("FP8 by ")
        for program in map(program_of, visual.modules())
        # The list of blocks has the tower's.
        if isinstance(program, BlockProgram)
        for step in program.steps.values()
    )
