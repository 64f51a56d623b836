# SPDX-License-Identifier: Apache-2.0
"""Which tower: the models that are known by name, and those of checkpoint folders."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field

from vllm_flashinfer_vit.machine.json_files import Strict, read_json, validated

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm4v_moe"]
# Of a file of a checkpoint that `wants_own_code`.
OWN_CODE = (
    "asks for code of the checkpoint's own to run (auto_map), which this package never "
    "does; use that file of the model that the checkpoint was made from"
)


class Classes(NamedTuple):
    """A family in vLLM.

    Attributes:
        module: The module of its classes.
        model: The model's class.
        tower: The tower's class.
        takes_text_config: Whether the tower is built from the text config, too.
        norm_eps: What the model gives the tower, unless its config has another.
    """

    module: str
    model: str
    tower: str
    takes_text_config: bool = False
    norm_eps: float = 1e-6


FAMILIES: Mapping[Family, Classes] = {
    "qwen2_vl": Classes(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VisionTransformer"
    ),
    "qwen2_5_vl": Classes(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VisionTransformer"
    ),
    "qwen3_vl": Classes(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3_VisionTransformer"
    ),
    "glm4v": Classes(
        "glm4_1v",
        "Glm4vForConditionalGeneration",
        "Glm4vVisionTransformer",
        takes_text_config=True,
        norm_eps=1e-5,
    ),
    "glm4v_moe": Classes(
        "glm4_1v",
        "Glm4vMoeForConditionalGeneration",
        "Glm4vVisionTransformer",
        takes_text_config=True,
        norm_eps=1e-5,
    ),
}


class TowerError(ValueError):
    """A tower cannot be built or called as asked; the message says what to change."""


class CheckpointError(TowerError):
    """A checkpoint directory lacks something, or holds something unreadable."""


def cause(error: Exception) -> str:
    """Return what an error of another library says, in one line."""
    text = " ".join(str(error).split())
    # Others may say no more than a key.
    named = isinstance(error, OSError | ValueError)
    return text if named else f"{type(error).__name__}: {text}"


def wants_own_code(error: Exception) -> bool:
    """Return whether Transformers cannot go on without the checkpoint's own code."""
    # The error has no class of its own; it names the argument that is False here.
    return "trust_remote_code" in str(error)


def not_allowed(path: Path) -> str:
    """Return what to say of a file that is there and cannot be opened."""
    return f"{path} may not be read by this user; change its permissions"


@dataclass(frozen=True)
class Spec:
    """What all specs say.

    Attributes:
        vision_config: The fields of the tower in a config, for the blocks to build.
        model: Model name or checkpoint folder, for people to read.
        full_depth: Number of blocks of the whole tower; `depth` may be fewer.
        checkpoint: Folder to read weights from, or None for seeded random weights.
    """

    vision_config: Mapping[str, Any]
    model: str
    full_depth: int
    checkpoint: Path | None = None

    @property
    def name(self) -> str:
        """The model, and that its weights are random, for people and in files."""
        return self.model if self.checkpoint else f"{self.model} (random weights)"

    @property
    def depth(self) -> int:
        """Number of blocks that are built."""
        raise NotImplementedError


@dataclass(frozen=True)
class TowerSpec(Spec):
    """What to build of a family whose towers take patches and grids; see also `Spec`.

    Attributes:
        family: Model family, as in the checkpoint's `model_type`.
    """

    family: Family = field(kw_only=True)

    @property
    def depth(self) -> int:
        """Number of blocks that are built."""
        return self.vision_config["depth"]

    def model_class(self) -> Any:
        """Return vLLM's class of the model. The process has to have a platform."""
        return getattr(model_module(self.family), FAMILIES[self.family].model)

    @property
    def merge_size(self) -> int:
        """Patches per token, in each direction."""
        return self.vision_config.get("spatial_merge_size", 2)

    @property
    def patch_size(self) -> int:
        """Pixels per patch, in each direction."""
        return self.vision_config.get("patch_size", 14)

    @property
    def temporal_patch_size(self) -> int:
        """Frames per patch."""
        return self.vision_config.get("temporal_patch_size", 2)

    @property
    def patch_dim(self) -> int:
        """Values per row of `pixel_values`."""
        return (
            _channels(self.vision_config)
            * self.temporal_patch_size
            * self.patch_size**2
        )


def _channels(vision_config: Mapping[str, Any]) -> int:
    return vision_config.get("in_channels", vision_config.get("in_chans", 3))


def _qwen2_vl(hidden_size: int) -> dict[str, Any]:
    return {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": hidden_size,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen2_5_vl(out_hidden_size: int, intermediate_size: int = 3420) -> dict[str, Any]:
    return {
        "depth": 32,
        "hidden_size": 1280,
        "hidden_act": "silu",
        "intermediate_size": intermediate_size,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": out_hidden_size,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }


def _qwen3_vl(
    out_hidden_size: int, hidden_size: int, intermediate_size: int, deepstack: list[int]
) -> dict[str, Any]:
    return {
        "depth": 27 if hidden_size == 1152 else 24,
        "hidden_size": hidden_size,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": intermediate_size,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": out_hidden_size,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": deepstack,
    }


def _glm4v(intermediate_size: int) -> dict[str, Any]:
    return {
        "depth": 24,
        "hidden_size": 1536,
        "hidden_act": "silu",
        "image_size": 336,
        "intermediate_size": intermediate_size,
        "num_heads": 12,
        "in_channels": 3,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


_SMALL_QWEN3 = (1024, 4096, [5, 11, 17])
_LARGE_QWEN3 = (1152, 4304, [8, 16, 24])

NAMED_MODELS: Mapping[str, tuple[Family, Mapping[str, Any]]] = {
    "Qwen/Qwen2-VL-2B-Instruct": ("qwen2_vl", _qwen2_vl(1536)),
    "Qwen/Qwen2-VL-7B-Instruct": ("qwen2_vl", _qwen2_vl(3584)),
    "Qwen/Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", _qwen2_5_vl(2048)),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", _qwen2_5_vl(3584)),
    "Qwen/Qwen2.5-VL-72B-Instruct": ("qwen2_5_vl", _qwen2_5_vl(8192, 3456)),
    "Qwen/Qwen3-VL-2B-Instruct": ("qwen3_vl", _qwen3_vl(2048, *_SMALL_QWEN3)),
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen3_vl", _qwen3_vl(2560, *_SMALL_QWEN3)),
    "Qwen/Qwen3-VL-8B-Instruct": ("qwen3_vl", _qwen3_vl(4096, *_LARGE_QWEN3)),
    "Qwen/Qwen3-VL-32B-Instruct": ("qwen3_vl", _qwen3_vl(5120, *_LARGE_QWEN3)),
    "zai-org/GLM-4.1V-9B-Thinking": ("glm4v", _glm4v(13696)),
    "zai-org/GLM-4.5V": ("glm4v_moe", _glm4v(10944)),
    "zai-org/GLM-4.6V": ("glm4v_moe", _glm4v(10944)),
}


def resolve_spec(
    model: str, *, random_weights: bool = False, depth: int | None = None
) -> TowerSpec:
    """Return what to build of a family; `resolve` checks what a user gives.

    Args:
        model: A local Hugging Face checkpoint folder; or, with random weights, a name
            in `NAMED_MODELS`.
        random_weights: As for `resolve`.
        depth: As for `resolve`.

    Raises:
        TowerError: The depth is out of range.
        CheckpointError: The folder's `config.json` is missing or not of a known family.
    """
    folder = Path(model)
    family, config = _read_config(folder) if folder.is_dir() else NAMED_MODELS[model]
    return TowerSpec(
        family=family,
        vision_config=cut_blocks(config, depth),
        model=model,
        checkpoint=None if random_weights else folder,
        full_depth=config["depth"],
    )


def model_module(family: Family) -> ModuleType:
    """Import vLLM's module of a family."""
    module = FAMILIES[family].module
    return importlib.import_module(f"vllm.model_executor.models.{module}")


_Size = Annotated[int, Field(ge=1)]


class _VisionConfig(Strict):
    """What a tower is built from; what is left out gets a default by transformers."""

    depth: _Size = 1
    embed_dim: _Size = 1
    hidden_size: _Size = 1
    intermediate_size: _Size = 1
    num_heads: _Size = 1
    in_channels: _Size = 1
    in_chans: _Size = 1
    out_hidden_size: _Size = 1
    patch_size: _Size = 1
    spatial_merge_size: _Size = 1
    temporal_patch_size: _Size = 1
    window_size: _Size = 1
    num_position_embeddings: _Size = 1
    fullatt_block_indexes: list[int] = []
    deepstack_visual_indexes: list[int] = []


class _Config(Strict):
    model_type: str
    vision_config: _VisionConfig = _VisionConfig()


def _read_config(folder: Path) -> tuple[Family, Mapping[str, Any]]:
    path = folder / "config.json"
    try:
        document = read_json(path)
        family = validated(_Config, document).model_type
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; give the folder of a Hugging Face checkpoint"
        ) from None
    except PermissionError:
        raise CheckpointError(not_allowed(path)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a model's config ({error}); download it again"
        ) from None
    if family not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type {family!r} is not supported; supported are "
            + ", ".join(FAMILIES)
        )
    from transformers import AutoConfig

    try:
        # A saved config leaves defaults out; the config class puts them back.
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        vision_config = config.vision_config.to_dict()
    except ImportError:
        # A package is missing, and no file.
        raise
    except Exception as error:
        if wants_own_code(error):
            raise CheckpointError(
                f"{path}, or one of its configuration_files, {OWN_CODE}"
            ) from error
        raise CheckpointError(
            f"{path} is not a model's config ({cause(error)}); download it again"
        ) from error
    width = vision_config.get("embed_dim", vision_config["hidden_size"])
    # Rotary turns a half of each head by rows and one by columns, in pairs.
    if width % (4 * vision_config["num_heads"]):
        raise CheckpointError(
            f"{path}: vision_config has {width} channels, which "
            f"{vision_config['num_heads']} heads cannot share in fours; download it "
            "again"
        )
    if (colours := _channels(vision_config)) != 3:
        raise CheckpointError(
            f"{path}: vision_config has pixels of {colours} channels, and those of "
            "images have 3; download it again"
        )
    token = vision_config["patch_size"] * vision_config["spatial_merge_size"]
    window = vision_config.get("window_size", token)
    if window < token:
        raise CheckpointError(
            f"{path}: vision_config has windows of {window} pixels, smaller than a "
            f"token's {token}; download it again"
        )
    return cast(Family, family), vision_config


def cut_blocks(
    config: Mapping[str, Any], depth: int | None, key: str = "depth"
) -> Mapping[str, Any]:
    """Return the `vision_config` of a tower's first blocks.

    Args:
        config: Of the whole tower.
        depth: How many; None for all.
        key: Where it has the number.

    Raises:
        TowerError: The tower has fewer, or none were wanted.
    """
    full_depth = config[key]
    if depth is None:
        depth = full_depth
    if not 1 <= depth <= full_depth:
        raise TowerError(
            f"depth {depth} is out of range; this tower has 1 to {full_depth} blocks"
        )
    cut = {**config, key: depth}
    if depth == full_depth:
        return cut
    if "fullatt_block_indexes" in cut:
        # The whole tower ends with a full-attention block, so a part of it does too.
        kept = {index for index in cut["fullatt_block_indexes"] if index < depth}
        cut["fullatt_block_indexes"] = sorted(kept | {depth - 1})
    if "deepstack_visual_indexes" in cut:
        kept = {index for index in cut["deepstack_visual_indexes"] if index < depth}
        cut["deepstack_visual_indexes"] = sorted(kept)
    return cut
