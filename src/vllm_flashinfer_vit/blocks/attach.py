# SPDX-License-Identifier: Apache-2.0
"""Which blocks get a program, and how their `forward` runs it."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase

from vllm_flashinfer_vit.blocks import norms
from vllm_flashinfer_vit.blocks.program import BlockProgram
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import TowerProgram
from vllm_flashinfer_vit.settings import Settings

logger = init_logger("vllm.plugins.flashinfer_vit")

# Attribute of a block and of the list that it is in.
_PROGRAM = "vllm_flashinfer_vit_program"
# Attribute of a tower whose blocks have programs, and of its other parts.
_SERVED = "vllm_flashinfer_vit_served"
# Attribute of the `forward` of a class of blocks.
_SPEC = "vllm_flashinfer_vit_spec"


def attach(
    spec: BlockSpec,
    blocks: torch.nn.Module,
    index: int,
    block: torch.nn.Module,
    settings: Settings,
) -> BlockProgram | None:
    """Give a block its program, as it takes its place in a tower.

    Args:
        spec: What it is.
        blocks: The list of the tower's blocks.
        index: Its place there.
        block: The block, its weights not loaded.
        settings: Which of `OPTIMISATIONS` are left out, and where measurements are.

    Returns:
        The program; None if vLLM's own steps run the block, which the log says.

    Raises:
        ImportError: This vLLM lacks what a program needs, and the settings are strict.
    """
    older = spec.older_qkv
    if older is not None and older in dict(block.named_modules()):
        spec = dataclasses.replace(spec, qkv=older)
    try:
        reason = _unfit(spec, block)
        if reason is None:
            tower = vars(blocks).get(_PROGRAM) or TowerProgram(settings.tuned_dir)
            place, left_out = (tower, index), settings.disabled_patches
            program = BlockProgram(spec, block, place, left_out)
            vars(blocks)[_PROGRAM], vars(block)[_PROGRAM] = tower, program
            return program
    except ImportError as error:
        if settings.strict:
            raise
        # A newer one may have moved it.
        reason = str(error)
    logger.info_once("The vision tower's blocks run as vLLM's own: %s.", reason)
    return None


def mark_served(module: torch.nn.Module, child: torch.nn.Module) -> None:
    """Mark a tower, and its parts, as `child` takes its place in `module`.

    A tower is served once it has a list of blocks with programs.
    """
    if _PROGRAM in vars(child) and isinstance(child, torch.nn.ModuleList):
        vars(module)[_SERVED] = True
        parts = list(module.children())
    else:
        parts = [child]
    if is_served_part(module):
        for part in parts:
            for inner in part.modules():
                vars(inner)[_SERVED] = True


def is_served_part(module: torch.nn.Module) -> bool:
    """Whether a module belongs to a tower whose blocks have programs."""
    return _SERVED in vars(module)


def has_programs(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether blocks among a model's modules run programs."""
    return any(_PROGRAM in vars(module) for module in modules)


def runs(
    spec: BlockSpec, parameters: tuple[str, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a block's `forward` run its program, where it has one.

    Args:
        spec: What the block is.
        parameters: What its `forward` takes, self and x first.
    """

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        stream = parameters[1]

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            program = program_of(self)
            if program is None:
                return original(self, *args, **kwargs)
            given: Mapping[str, Any] = kwargs
            if args:
                given = {**kwargs, **dict(zip(parameters[1:], args, strict=False))}
            if spec.packed_by is not None:
                given = _with_lengths(given, spec.packed_by)
            if not program.takes(given[stream], given):
                program.count_refused(given[stream])
                return original(self, *args, **kwargs)
            out = program.run(given[stream], given)
            after = spec.returned_with
            return out if after is None else (out, *after)

        vars(forward)[_SPEC] = spec
        return forward

    return replace


def _with_lengths(given: Mapping[str, Any], packed_by: str) -> Mapping[str, Any]:
    """Return what `forward` was given, an object's lengths in the object's place."""
    lengths = given.get(packed_by)
    if lengths is None:
        return given
    return {
        **given,
        packed_by: None,
        "cu_seqlens": lengths.cu_seqlens,
        "max_seqlen": lengths.max_seqlen,
    }


@contextmanager
def told_lengths(
    blocks: torch.nn.ModuleList,
    full: Collection[int] | None,
    whole: torch.Tensor | None,
    windowed: torch.Tensor | None,
) -> Iterator[None]:
    """Tell blocks the longest length of a call, whose `forward` takes none.

    Args:
        blocks: Those of a tower, with programs or without.
        full: The places of those that attend to whole images; all do without.
        whole: `[] int32` on the CPU, which bounds each image's; None if unknown.
        windowed: The same of windows.
    """
    tower = vars(blocks).get(_PROGRAM)
    if tower is None:
        yield
        return
    tower.told = {
        index: longest
        for index in range(len(blocks))
        if (longest := whole if not full or index in full else windowed) is not None
    }
    try:
        yield
    finally:
        tower.told = {}


def spec_of(block_class: type) -> BlockSpec | None:
    """Return what the blocks of a class are, if its `forward` runs programs."""
    return getattr(getattr(block_class, "forward", None), _SPEC, None)


def program_of(block: torch.nn.Module) -> BlockProgram | None:
    """Return a block's program, if it has one."""
    return vars(block).get(_PROGRAM)


def _unfit(spec: BlockSpec, block: torch.nn.Module) -> str | None:
    from vllm import envs
    from vllm.compilation.decorators import should_torch_compile_mm_encoder
    from vllm.config import get_current_vllm_config

    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set"
    if not getattr(block, "do_not_compile", True):
        return "they are compiled (compile_mm_encoder)"
    if spec.is_compiled_whole and should_torch_compile_mm_encoder(
        get_current_vllm_config()
    ):
        return "their tower is compiled (compile_mm_encoder)"
    layers = (spec.qkv, spec.proj, spec.first, spec.act, spec.second)
    try:
        attention = block.get_submodule(spec.attention.rpartition(".")[0])
        for path in (spec.attention, spec.norm1, spec.norm2, *layers):
            block.get_submodule(path)
    except AttributeError as error:
        return str(error)
    if spec.qk_norms is None and getattr(attention, "q_norm", None) is not None:
        return "they normalise q and k"
    if spec.is_clamped_in_fp16:
        dtype = block.get_submodule(spec.attention).dtype
        if dtype == torch.float16:
            return f"{type(block).__name__} clamps values in fp16"
    # Its tower hands tables over all the same.
    if spec.rotary is not None and not getattr(attention, "use_rope", True):
        return "they do not turn q and k"
    for path in (spec.norm1, spec.norm2):
        module = block.get_submodule(path)
        if not norms.is_known(module, spec.own_norm):
            return f"{path} is a {type(module).__name__} that is unknown here"
    for path in (spec.qkv, spec.proj, spec.first, spec.second):
        module = block.get_submodule(path)
        if not isinstance(module, LinearBase):
            return f"{path} is a {type(module).__name__}, no linear layer of vLLM's"
    return None
