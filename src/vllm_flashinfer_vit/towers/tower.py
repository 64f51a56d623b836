# SPDX-License-Identifier: Apache-2.0
"""vLLM's real vision towers, built outside an engine, on a GPU or on the CPU.

The modules, their weights loader and their configuration are vLLM's own; only the
language model, the scheduler and the workers around them are left out.
"""

import importlib
import json
import math
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import vllm_flashinfer_vit
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]

_ARCHITECTURES: Mapping[str, str] = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_TRANSFORMERS: Mapping[str, str] = {
    "qwen2_vl": "Qwen2VisionTransformer",
    "qwen2_5_vl": "Qwen2_5_VisionTransformer",
    "qwen3_vl": "Qwen3_VisionTransformer",
}
_VISUAL_PREFIXES = ("visual.", "model.visual.")
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_DEEPSTACK = re.compile(r"deepstack_merger_list\.(\d+)\.")


class TowerError(ValueError):
    """A tower cannot be built or called as asked; the message says what to change."""


class CheckpointError(TowerError):
    """A checkpoint directory lacks something, or holds something unreadable."""


@dataclass(frozen=True)
class TowerSpec:
    """What to build.

    Attributes:
        family: Model family, as in the checkpoint's `model_type`.
        vision_config: The `vision_config` of a Hugging Face `config.json`.
        model: Model name or checkpoint folder, for people to read.
        checkpoint: Folder to read weights from, or None for seeded random weights.
        full_depth: Number of blocks of the whole tower; `depth` may be fewer.
    """

    family: Family
    vision_config: Mapping[str, Any]
    model: str
    checkpoint: Path | None
    full_depth: int

    @property
    def depth(self) -> int:
        """Number of blocks that are built."""
        return self.vision_config["depth"]

    @property
    def merge_size(self) -> int:
        """Patches per token, in each direction."""
        return self.vision_config.get("spatial_merge_size", 2)

    @property
    def patch_size(self) -> int:
        """Pixels per patch, in each direction."""
        return self.vision_config.get("patch_size", 14)

    @property
    def patch_dim(self) -> int:
        """Values per row of `pixel_values`."""
        channels = self.vision_config.get(
            "in_channels", self.vision_config.get("in_chans", 3)
        )
        frames = self.vision_config.get("temporal_patch_size", 2)
        return channels * frames * self.patch_size**2


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
}


def resolve_spec(
    model: str, *, random_weights: bool = False, depth: int | None = None
) -> TowerSpec:
    """Find out which tower a user means.

    Args:
        model: A local Hugging Face checkpoint folder, or a name in `NAMED_MODELS`.
        random_weights: Seeded random weights instead of a checkpoint's.
        depth: Number of blocks to build, from the first on; None for all.

    Raises:
        TowerError: The model is unknown, or the depth is out of range.
        CheckpointError: The folder's `config.json` is missing or not a Qwen-VL model's.
    """
    folder = Path(model)
    if folder.is_dir():
        family, config = _read_config(folder)
    elif model in NAMED_MODELS:
        if not random_weights:
            raise TowerError(
                f"{model} is a name, and no weights are downloaded: give the folder "
                "of a local checkpoint, or ask for random weights"
            )
        family, config = NAMED_MODELS[model]
    else:
        raise TowerError(
            f"{model!r} is neither a folder nor a known model; known are "
            + ", ".join(NAMED_MODELS)
        )
    full_depth = config["depth"]
    return TowerSpec(
        family=family,
        vision_config=_cut(config, full_depth if depth is None else depth),
        model=model,
        checkpoint=None if random_weights else folder,
        full_depth=full_depth,
    )


def _read_config(folder: Path) -> tuple[Family, Mapping[str, Any]]:
    path = folder / "config.json"
    try:
        family = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; give the folder of a Hugging Face checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a model's config ({error!r}); download it again"
        ) from None
    if family not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: model_type {family!r} is not supported; supported are "
            + ", ".join(_ARCHITECTURES)
        )
    from transformers import AutoConfig

    # A saved config leaves defaults out; the config class puts them back.
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return family, config.vision_config.to_dict()


def _cut(config: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    full_depth = config["depth"]
    if not 1 <= depth <= full_depth:
        raise TowerError(
            f"depth {depth} is out of range; this tower has 1 to {full_depth} blocks"
        )
    cut = {**config, "depth": depth}
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


@dataclass(frozen=True, eq=False)
class Tower:
    """A vision tower, ready to run.

    Attributes:
        spec: What was asked for.
        backend: Name of the attention backend in the engine's configuration.
        visual: vLLM's module, as `model.visual` in an engine.
        vllm_config: The `VllmConfig` that it was built with.
        dtype: Dtype of weights and activations.
        device: Where it runs.
    """

    spec: TowerSpec
    backend: str
    visual: nn.Module
    vllm_config: Any
    dtype: torch.dtype
    device: torch.device

    def encode(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Encode images, as the engine does.

        Args:
            pixel_values: `[P, patch_dim]`, the image processor's patches; any float
                dtype and device.
            grid_thw: Frames, rows and columns of patches of each image; P in sum.

        Returns:
            `[tokens, hidden]` in the tower's dtype, images one after another. Qwen3-VL
            appends its deepstack features to the hidden dimension.

        Raises:
            TowerError: The grids are empty, do not fit the patches or the merge size.
        """
        grids = [[int(n) for n in grid] for grid in grid_thw]
        self._check(pixel_values, grids)
        pixels = pixel_values.to(self.device, self.dtype)
        with self.running():
            return self.visual(pixels, grid_thw=grids)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold what a call of `visual` needs: inference mode and vLLM's config."""
        with torch.inference_mode(), _current_config(self.vllm_config):
            yield

    def attention_layers(self) -> dict[str, nn.Module]:
        """Return the attention layers by module name, first block first."""
        from vllm.model_executor.layers.attention.mm_encoder_attention import (
            MMEncoderAttention,
        )

        return {
            name: module
            for name, module in self.visual.named_modules()
            if isinstance(module, MMEncoderAttention)
        }

    def kernels(self, grid_thw: Sequence[Sequence[int]]) -> dict[str, str]:
        """Return the kernel that serves each class of layers, for these images.

        Args:
            grid_thw: As for `encode`.

        Returns:
            Kernel names by layer class: `windows` and `full` for a tower that has
            windowed layers, else `all`. What vLLM runs without this package has its
            backend's name behind `in-tree`.
        """
        longest = max(rows * columns for _, rows, columns in grid_thw)
        patches = sum(math.prod(grid) for grid in grid_thw)
        mean = patches / sum(frames for frames, _, _ in grid_thw)
        side = self.spec.vision_config.get("window_size", 0) // self.spec.patch_size
        window = max(
            min(rows, side) * min(columns, side) for _, rows, columns in grid_thw
        )
        full_blocks = self.spec.vision_config.get("fullatt_block_indexes")
        kernels = {}
        for block, layer in enumerate(self.attention_layers().values()):
            lengths: tuple[float | None, ...]
            if full_blocks is None:
                label, lengths = "all", (longest, mean)
            elif block in full_blocks:
                label, lengths = "full", (longest, mean)
            else:
                label, lengths = "windows", (window, None)
            kernel_for: Any = getattr(layer, "kernel_for", None)
            backend: Any = layer.attn_backend
            kernels[label] = (
                kernel_for(*lengths)
                if kernel_for
                else f"in-tree {backend.name.lower()}"
            )
        return kernels

    def _check(self, pixel_values: torch.Tensor, grids: list[list[int]]) -> None:
        if not grids:
            raise TowerError("the list of grids is empty; give at least one image")
        merge = self.spec.merge_size
        for index, grid in enumerate(grids):
            if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                raise TowerError(
                    f"grid {index} is {grid}; it must be [frames, rows, columns], "
                    f"each at least 1, rows and columns multiples of {merge}"
                )
        rows = sum(t * h * w for t, h, w in grids)
        if tuple(pixel_values.shape) != (rows, self.spec.patch_dim):
            raise TowerError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; these grids need "
                f"({rows}, {self.spec.patch_dim})"
            )


def build_tower(
    spec: TowerSpec,
    *,
    backend: str,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    compile: bool = False,
    fused_ops: bool = False,
    plugin: bool = True,
    attn_dtype: str | None = None,
    fp8_scale_path: Path | None = None,
) -> Tower:
    """Build a tower with vLLM's own classes and fill in its weights.

    The process becomes a one-rank vLLM process, if it is none yet. On a machine
    without a GPU the first call also puts vLLM on the CPU.

    Args:
        spec: From `resolve_spec`.
        backend: A name for `--mm-encoder-attn-backend`; FLASHINFER is this package.
        dtype: Dtype of weights and activations.
        device: `cpu`, or a CUDA device.
        seed: Seeds random weights. The same seed gives the same values for every
            backend, device, dtype and depth; all can be represented in bf16.
        compile: Compile the blocks, as `compile_mm_encoder` does; CUDA only.
        fused_ops: Run vLLM's own fused norms and activations, as `enforce_eager` does;
            CUDA only, and not with `compile`.
        plugin: Activate this package first. Without it the tower is stock vLLM's,
            provided that the process has not activated the package before.
        attn_dtype: As `--mm-encoder-attn-dtype`, None or `fp8`.
        fp8_scale_path: As `--mm-encoder-fp8-scale-path`.

    Raises:
        TowerError: The backend is unknown or not available on this device.
        CheckpointError: The weights cannot be read or do not fit.
    """
    device = torch.device(device)
    if compile and device.type == "cpu":
        raise TowerError("compiling the tower needs a GPU; leave compile out")
    if fused_ops and (compile or device.type == "cpu"):
        raise TowerError("vLLM's fused ops need a GPU and uncompiled blocks")
    check_backend(backend, device, dtype, plugin=plugin)
    attention = {
        "mm_encoder_attn_backend": backend,
        "mm_encoder_attn_dtype": attn_dtype,
    }
    if fp8_scale_path is not None:
        attention["mm_encoder_fp8_scale_path"] = str(fp8_scale_path)
    config = _vllm_config(spec, attention, dtype, device, compile, fused_ops)
    with _current_config(config):
        _init_distributed()
        visual = _build_module(spec, config, dtype, device)
        if spec.checkpoint is None:
            fill_with_random_weights(visual, seed)
        else:
            _load_weights(visual, spec, spec.checkpoint)
        _finish_weights(visual, config, device)
    return Tower(spec, backend, visual.eval(), config, dtype, device)


def check_backend(
    backend: str, device: torch.device, dtype: torch.dtype, *, plugin: bool = True
) -> None:
    """Prepare the process for towers on a device, and check a backend on it.

    Args:
        backend: As for `build_tower`.
        device: As for `build_tower`.
        dtype: Dtype of activations.
        plugin: As for `build_tower`.

    Raises:
        TowerError: The backend is unknown or not available on this device.
    """
    _prepare_device(device)
    if plugin:
        vllm_flashinfer_vit.register()
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    known = AttentionBackendEnum.__members__
    supported = [one.name for one in current_platform.get_supported_vit_attn_backends()]
    good = ", ".join(dict.fromkeys(["FLASHINFER", *supported]))
    if backend not in known:
        raise TowerError(f"backend {backend!r} is unknown to vLLM; use one of {good}")
    if backend not in supported and not (backend == "FLASHINFER" and plugin):
        raise TowerError(
            f"backend {backend} does not run vision encoders on {device}; use one of "
            + good
        )
    if backend == "FLASH_ATTN" and dtype == torch.float32:
        raise TowerError(
            "backend FLASH_ATTN has no fp32 kernel; use bf16 or fp16, or TORCH_SDPA"
        )


def _prepare_device(device: torch.device) -> None:
    if device.type == "cpu":
        use_cpu_platform(force=True)
        return
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if (device.index or 0) >= count:
        raise TowerError(
            f"device {str(device)!r} is not available; use cpu or one of {count} GPUs"
        )
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise TowerError(
            f"this process runs vLLM on {current_platform.device_type}; build the "
            f"tower for {device} in a process of its own"
        )
    if device.index is not None:
        torch.cuda.set_device(device)


@contextmanager
def _current_config(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    # A worker sets the implementations of IR ops for good; a tower only while it runs.
    ir_ops = config.kernel_config.ir_op_priority
    with set_current_vllm_config(config), ir_ops.set_priority():
        yield


def _vllm_config(
    spec: TowerSpec,
    attention: Mapping[str, str | None],
    dtype: torch.dtype,
    device: torch.device,
    compile: bool,
    fused_ops: bool,
) -> Any:
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        DeviceConfig,
        ModelConfig,
        VllmConfig,
    )

    if fused_ops:
        # Without a compiler, vLLM turns its fused ops on.
        compilation = CompilationConfig(
            mode=CompilationMode.NONE, compile_mm_encoder=False
        )
    elif device.type == "cuda":
        compilation = CompilationConfig(compile_mm_encoder=compile)
    else:
        # Without compilation and custom operators, layers run their plain PyTorch code.
        compilation = CompilationConfig(
            mode=CompilationMode.NONE, custom_ops=["none"], compile_mm_encoder=False
        )
    text = json.dumps(_hf_config(spec), sort_keys=True)
    with tempfile.TemporaryDirectory() as folder, _inspected_here(spec.family):
        Path(folder, "config.json").write_text(text)
        model_config = ModelConfig(
            model=folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            **attention,
        )
        config = VllmConfig(
            model_config=model_config,
            compilation_config=compilation,
            device_config=DeviceConfig(device=device.type),
        )
    # The name is a part of vLLM's compile cache key, so it must not be the folder's.
    model_config.model = f"{spec.model}-{zlib.crc32(text.encode()):08x}"
    return config


@contextmanager
def _inspected_here(family: Family) -> Iterator[None]:
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    # vLLM would start a process, which has no CPU platform, to look at the class.
    name = _ARCHITECTURES[family]
    lazy = ModelRegistry.models[name]
    model_cls = getattr(_model_module(family), name)
    ModelRegistry.models[name] = _RegisteredModel.from_model_cls(model_cls)
    try:
        yield
    finally:
        ModelRegistry.models[name] = lazy


def _hf_config(spec: TowerSpec) -> dict[str, Any]:
    # vLLM validates a language model, which no tower ever builds.
    text = {
        "model_type": f"{spec.family}_text",
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    return {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "text_config": text,
        "vision_config": {**spec.vision_config, "model_type": spec.family},
    }


def _init_distributed() -> None:
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )

    if model_parallel_is_initialized():
        return
    if not torch.distributed.is_initialized():
        # One rank never communicates, so no port is opened and no NCCL is needed.
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")


def _build_module(
    spec: TowerSpec, config: Any, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    from vllm.utils.torch_utils import set_default_torch_dtype

    cls = getattr(_model_module(spec.family), _TRANSFORMERS[spec.family])
    hf_config = config.model_config.hf_config
    with set_default_torch_dtype(dtype), device:
        return cls(
            hf_config.vision_config,
            norm_eps=getattr(hf_config, "rms_norm_eps", 1e-6),
            prefix="visual",
        )


def _model_module(family: Family) -> Any:
    return importlib.import_module(f"vllm.model_executor.models.{family}")


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
        values = torch.empty(parameter.shape, dtype=torch.float32).normal_(
            std=std, generator=generator
        )
        parameter.data.copy_(values.to(torch.bfloat16))


def _load_weights(visual: Any, spec: TowerSpec, folder: Path) -> None:
    # What stays NaN was in no file, not even as a part of a stacked parameter.
    for parameter in visual.parameters():
        parameter.data.fill_(float("nan"))
    model_cls = getattr(_model_module(spec.family), _ARCHITECTURES[spec.family])
    weights = _read_weights(spec, folder, model_cls.hf_to_vllm_mapper)
    try:
        visual.load_weights(weights)
    except (KeyError, ValueError, AssertionError, RuntimeError) as error:
        if isinstance(error, TowerError):
            raise
        raise CheckpointError(
            f"the vision weights in {folder} do not fit its config.json "
            f"({error}); download the checkpoint again"
        ) from error
    missing = [
        name for name, parameter in visual.named_parameters() if parameter.isnan().any()
    ]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} vision weights or holds NaN in "
            f"them, the first is {missing[0]}; download the checkpoint again"
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
            raise CheckpointError(
                f"{path} does not exist, but the checkpoint's index lists it; download "
                "the checkpoint again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): it is truncated, or a pointer in "
                "place of the file; download it again"
            ) from error


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
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(folder / file, name) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index_path} is not an index of safetensors files ({error!r}); download "
            "it again"
        ) from None
    files: dict[Path, list[str] | None] = {}
    for path, name in pairs:
        if name.startswith(_VISUAL_PREFIXES):
            names = files.setdefault(path, [])
            assert names is not None
            names.append(name)
    if not files:
        raise CheckpointError(
            f"{index_path} lists no weights of a vision tower; give the folder of the "
            "whole vision-language model"
        )
    return sorted(files.items())


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


def _finish_weights(visual: nn.Module, config: Any, device: torch.device) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from vllm_flashinfer_vit.engine.warmup import without_warm_up

    with without_warm_up():
        process_weights_after_loading(visual, config.model_config, device)
