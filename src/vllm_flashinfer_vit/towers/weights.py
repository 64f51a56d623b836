# SPDX-License-Identifier: Apache-2.0
"""A tower's weights: seeded random ones, or those of a checkpoint folder."""

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import AfterValidator, BaseModel
from torch import nn

from vllm_flashinfer_vit.machine.json_files import read_json, validated
from vllm_flashinfer_vit.towers.spec import (
    CheckpointError,
    TowerError,
    TowerSpec,
    not_allowed,
)

# Transformers' class, which stock attends by where others have MMEncoderAttention.
GEMMA4_ATTENTION = "Gemma4VisionAttention"
# Names that towers other than Qwen's give the projections to Q, K and V.
_PROJECTIONS = re.compile(r"\.(qkv_proj|q_proj|k_proj|v_proj|wqkv)\.")
_VISUAL_PREFIXES = ("visual.", "model.visual.")
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_DEEPSTACK = re.compile(r"deepstack_merger_list\.(\d+)\.")


def make_room(visual: nn.Module) -> None:
    """Give a tower's parameters memory, those that are quantised once they are loaded.

    vLLM has them on the meta device, and quantises a layer as its last weight arrives.
    Here all are loaded in 16 bits first, and quantised together.

    Args:
        visual: vLLM's module.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in visual.modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            continue
        layerwise.materialize_layer(layer, info)
        for parameter in layerwise.get_layer_tensors(layer).values():
            parameter.weight_loader = layerwise._get_original_loader(parameter)
        info.reset()


def fill_with_random_weights(visual: nn.Module, seed: int) -> None:
    """Fill a tower's parameters with seeded random values, of bf16's precision.

    Args:
        visual: vLLM's module; parameters of the checkpoint's size.
        seed: With a parameter's name and shape, decides its values.
    """
    generator = torch.Generator()
    for name, parameter in visual.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):
            parameter.data.fill_(1.0)
            continue
        # Seeded by name, so that values depend on no other parameter.
        generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        # Twice the usual width for Q and K: attention is peaked, as after training.
        std = 0.04 if ".qkv." in name else 0.02
        values = torch.empty(
            parameter.shape, dtype=torch.float32, device="cpu"
        ).normal_(std=std, generator=generator)
        parameter.data.copy_(values.to(torch.bfloat16))


def make_attention_matter(module: nn.Module) -> None:
    """Do what `fill_with_random_weights` leaves out in towers other than Qwen's.

    Args:
        module: A model or a part of one, with its values.
    """
    for name, parameter in module.named_parameters():
        if _PROJECTIONS.search(name) and parameter.dtype.itemsize > 1:
            # As wide as those that are named qkv.
            parameter.data.mul_(2)
    for part in module.modules():
        if type(part).__name__ == GEMMA4_ATTENTION:
            # Its scores are not scaled: norms of weight 1 make them so large that
            # rounding alone decides what comes out.
            norm: Any = part.q_norm
            norm.weight.data.fill_(float(cast(Any, part).head_dim) ** -0.5)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device has too little memory for tensors, the CPU included."""
    # PyTorch has no class for the CPU's; the message names what allocates.
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def load_weights(visual: Any, spec: TowerSpec, folder: Path) -> None:
    """Fill a tower's parameters with a checkpoint's.

    Args:
        visual: vLLM's module.
        spec: What it was built from; weights of blocks that were not are skipped.
        folder: A Hugging Face checkpoint with safetensors weights.

    Raises:
        CheckpointError: Weights are missing, do not fit or are not finite.
    """
    # What stays NaN was in no file, not even as a part of a stacked parameter.
    for parameter in visual.parameters():
        parameter.data.fill_(float("nan"))
    mapper = spec.model_class().hf_to_vllm_mapper
    last = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in _read_weights(spec, folder, mapper):
            last = f"{name} of shape {tuple(tensor.shape)}"
            yield name, tensor

    try:
        visual.load_weights(weights())
    except (LookupError, ValueError, AssertionError, RuntimeError) as error:
        if isinstance(error, TowerError) or is_out_of_memory(error):
            raise
        # vLLM's own assertions say nothing.
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"the vision weights in {folder} do not fit its config.json (at {last}: "
            f"{reason}); download the checkpoint again"
        ) from error
    bad = [
        (name, parameter.dtype)
        for name, parameter in visual.named_parameters()
        if not parameter.isfinite().all()
    ]
    if bad:
        name, dtype = bad[0]
        raise CheckpointError(
            f"{folder} lacks {len(bad)} vision weights, or they are not finite in "
            f"{dtype}; the first is {name}. Download the checkpoint again, or use "
            "another dtype"
        )


def _read_weights(
    spec: TowerSpec, folder: Path, mapper: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path, names in _files_with_vision_weights(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in names if names is not None else file.keys():
                    if not name.startswith(_VISUAL_PREFIXES):
                        continue
                    (mapped,) = mapper.apply_list([name])
                    own_name = mapped.removeprefix("visual.")
                    if _is_built(own_name, spec):
                        tensor = file.get_tensor(name)
                        _refuse_quantized(path, name, tensor)
                        yield own_name, tensor
        except FileNotFoundError:
            # safetensors says so, too, where it may not read.
            if path.exists():
                raise CheckpointError(not_allowed(path)) from None
            raise CheckpointError(
                f"{path} does not exist, but the checkpoint's index lists it; download "
                "the checkpoint again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): it is truncated, or a pointer in "
                "place of the file; download it again"
            ) from error


def _in_its_folder(name: str) -> str:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError("a safetensors file beside the index is wanted")
    return name


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, AfterValidator(_in_its_folder)]]


def _files_with_vision_weights(
    folder: Path,
) -> list[tuple[Path, list[str] | None]]:
    index_path = folder / "model.safetensors.index.json"
    single_path = folder / "model.safetensors"
    if not index_path.exists():
        if single_path.exists():
            return [(single_path, None)]
        raise CheckpointError(
            f"{folder} holds neither {single_path.name} nor {index_path.name}; only "
            "safetensors weights are read. Random weights need no file"
        )
    try:
        weight_map = validated(_Index, read_json(index_path)).weight_map
    except PermissionError:
        raise CheckpointError(not_allowed(index_path)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{index_path} is not an index of safetensors files ({error}); download "
            "it again"
        ) from None
    files = defaultdict(list)
    for name, file in weight_map.items():
        if name.startswith(_VISUAL_PREFIXES):
            files[folder / file].append(name)
    if not files:
        raise CheckpointError(
            f"{index_path} lists no weights of a vision tower; give the folder of the "
            "whole vision-language model"
        )
    return [*sorted(files.items())]


def _is_built(name: str, spec: TowerSpec) -> bool:
    taps = len(spec.vision_config.get("deepstack_visual_indexes", ()))
    for pattern, count in ((_BLOCK, spec.depth), (_DEEPSTACK, taps)):
        if (match := pattern.match(name)) and int(match[1]) >= count:
            return False
    return True


def _refuse_quantized(path: Path, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise CheckpointError(
            f"{path}: {name} is {tensor.dtype}; quantized vision weights are not "
            "supported here, give an unquantized checkpoint"
        )
