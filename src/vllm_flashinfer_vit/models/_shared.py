# SPDX-License-Identifier: Apache-2.0
"""What several families of models are patched with alike.

vLLM is imported where a patch runs: the list of patches can be read without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.patches.patch import Patch

Function = Callable[..., Any]
Grids = Sequence[Sequence[int]]

MODELS = "vllm.model_executor.models"
# What the `forward` of most blocks takes; those of Qwen2-VL lack the last one.
BLOCK_PARAMETERS = (
    "self",
    "x",
    "cu_seqlens",
    "rotary_pos_emb_cos",
    "rotary_pos_emb_sin",
    "max_seqlen",
    "sequence_lengths",
)
# What those take that turn q and k by `ANGLES`.
ANGLE_PARAMETERS = (
    "self",
    "hidden_states",
    "cu_seqlens",
    "rotary_pos_emb",
    "max_seqlen",
)

# vLLM's linear layers, past whose own methods GEMMs are run.
LINEAR = tuple(
    f"vllm.model_executor.layers.linear:{method}"
    for method in (
        "ColumnParallelLinear.forward",
        "RowParallelLinear.forward",
        "UnquantizedLinearMethod.apply",
    )
)


def module_of(family: str) -> str:
    """Return a family's module: below `MODELS`, or below vLLM if it has dots."""
    return f"vllm.{family}" if "." in family else f"{MODELS}.{family}"


def methods(family: str, *classes: str) -> tuple[str, ...]:
    """Return constructors and forwards of a family's classes, `family:Class.method`."""
    return tuple(
        f"{family}:{name}.{method}"
        for name in classes
        for method in ("__init__", "forward")
    )


def _full(method: str) -> str:
    family, _, path = method.partition(":")
    return f"{module_of(family)}:{path}"


def is_served(attention: Any) -> bool:
    """Whether a vision attention module runs on this package's layer."""
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    return isinstance(attention.attn, FlashInferViTAttention)


def block_program(
    family: str,
    block: str,
    spec: BlockSpec,
    parts: tuple[str, ...],
    parameters: tuple[str, ...] = BLOCK_PARAMETERS,
    name: str | None = None,
    helpers: tuple[str, ...] = (),
) -> Patch:
    """Return the patch that has the blocks of a tower run their programs.

    Args:
        family: vLLM's module of the model; see `module_of`.
        block: The class of the tower's blocks.
        spec: What they are.
        parts: The methods of attention and MLP that a program does the work of, each
            `family:Class.method`, or `family:function`.
        parameters: What their `forward` takes.
        name: What the patch's name begins with, if not the family.
        helpers: See `Patch.helpers`, each like one of `parts`.
    """

    def replace(original: Function) -> Function:
        from vllm_flashinfer_vit.blocks.attach import runs

        return runs(spec, parameters)(original)

    return Patch(
        name=f"{name or family}-blocks",
        target=f"{module_of(family)}:{block}.forward",
        # The constructor says which modules a block has.
        stands_for=(*map(_full, (*methods(family, block), *parts)), *LINEAR),
        helpers=tuple(map(_full, helpers)),
        why="stock takes more kernels for a block's sums, norms and any rotary, and "
        "pays for several layers of Python in front of each of them",
        remove_when="vLLM runs a vision block by as few launches, prepared beforehand",
        parameters=parameters,
        replace=replace,
    )
