# SPDX-License-Identifier: Apache-2.0
"""vLLM's real vision towers, built outside an engine, on a GPU or on the CPU.

The modules, their weights loader and their configuration are vLLM's own; only the
language model, the scheduler and the workers around them are left out.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vllm_flashinfer_vit
from vllm_flashinfer_vit.towers.built import Built, kernel_name
from vllm_flashinfer_vit.towers.config import (
    check_quantization,
    compilation_config,
    current_config,
    model_arguments,
    tower_config,
)
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform
from vllm_flashinfer_vit.towers.linear_layers import check_unquantized
from vllm_flashinfer_vit.towers.spec import (
    FAMILIES,
    CheckpointError,
    TowerError,
    TowerSpec,
    model_module,
)
from vllm_flashinfer_vit.towers.weights import (
    fill_with_random_weights,
    load_weights,
    make_room,
)


class Tower(Built):
    """A tower of patches and grids, ready to run; see `Built`."""

    spec: TowerSpec

    def encode(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Encode images, as the engine does.

        Args:
            pixel_values: `[P, patch_dim]` on any device, the image processor's patches
                with `processor_kwargs`: bytes for a tower that normalises them itself,
                else normalised values in any float dtype.
            grid_thw: Frames, rows and columns of patches of each image; P in sum.

        Returns:
            `[tokens, hidden]` in the tower's dtype, images one after another. Qwen3-VL
            appends its deepstack features to the hidden dimension.

        Raises:
            TowerError: The grids are empty, do not fit the patches or the merge size;
                bytes were given in place of normalised values, or the reverse.
        """
        grids = [[int(n) for n in grid] for grid in grid_thw]
        self._check(pixel_values, grids)
        pixels = pixel_values.to(self.device, self.pixel_dtype)
        with self.running():
            return self.visual(pixels, grid_thw=grids)

    def warm_up(self) -> None:
        """Encode a small black image."""
        side = 4 * self.spec.merge_size
        zeros = torch.zeros(side * side, self.spec.patch_dim, dtype=self.pixel_dtype)
        self.encode(zeros, [[1, side, side]])

    def kernels(self, grid_thw: Sequence[Sequence[int]]) -> dict[str, str]:
        """Return the kernel that serves each class of layers, for these images.

        Args:
            grid_thw: As for `encode`.

        Returns:
            Kernel names by layer class: `windows` and `full` for a tower that has
            windowed layers, else `all`. What vLLM runs without this package has its
            backend's name after `in-tree`.
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
            lengths: tuple[float, float | None]
            if full_blocks is None:
                label, lengths = "all", (longest, mean)
            elif block in full_blocks:
                label, lengths = "full", (longest, mean)
            else:
                label, lengths = "windows", (window, None)
            kernels[label] = kernel_name(layer, *lengths)
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
        # vLLM would normalise twice, or not at all, and say nothing.
        if pixel_values.is_floating_point() != self.pixel_dtype.is_floating_point:
            raise TowerError(
                f"pixel_values are {pixel_values.dtype}, and this tower takes "
                f"{self.pixel_dtype}; call the image processor with "
                f"{self.processor_kwargs}"
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
    image_processor: Any | None = None,
    flash_attn_version: int | None = None,
    quantization: str | None = None,
    unquantized: Sequence[str] = (),
) -> Tower:
    """Build a tower with vLLM's own classes and fill in its weights.

    The process becomes a one-rank vLLM process, if it is none yet. On a machine
    without a GPU the first call also puts vLLM on the CPU.

    Args:
        spec: From `resolve`.
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
        image_processor: The model's. With it the tower takes what an engine's takes,
            which may be bytes; see `Tower.pixel_dtype`. None: normalised pixels.
        flash_attn_version: As `attention_config.flash_attn_version`; None for vLLM's
            choice.
        quantization: As `--quantization`, None or one that quantises 16-bit weights
            when they are loaded, such as `fp8_per_channel`.
        unquantized: Layers that keep their 16 bits, as `ignore` names them in
            `--quantization-config`: `visual.blocks.0.mlp.down_proj`, or a pattern
            `re:.*proj` of names from their beginning on.

    Raises:
        TowerError: The backend is unknown or not available on this device; the image
            processor's mean and std cannot be used; the quantisation cannot be had; or
            one of `unquantized` fits no layer.
        CheckpointError: The weights cannot be read or do not fit, or the config names
            an activation that vLLM does not know.
    """
    device = torch.device(device)
    if compile and device.type == "cpu":
        raise TowerError("compiling the tower needs a GPU; leave compile out")
    if fused_ops and (compile or device.type == "cpu"):
        raise TowerError("vLLM's fused ops need a GPU and uncompiled blocks")
    check_backend(backend, device, dtype, plugin=plugin)
    check_quantization(quantization, unquantized, device)
    config, processor_kwargs, norm = tower_config(
        spec,
        dtype=dtype,
        device=device,
        image_processor=image_processor,
        compilation=compilation_config(device, compile, fused_ops),
        flash_attn_version=flash_attn_version,
        **model_arguments(
            backend, attn_dtype, fp8_scale_path, quantization, unquantized
        ),
    )
    with current_config(config):
        init_distributed()
        visual = _build_module(spec, config, dtype, device, norm)
        check_unquantized(visual, spec, unquantized)
        make_room(visual)
        if spec.checkpoint is None:
            fill_with_random_weights(visual, seed)
        else:
            load_weights(visual, spec, spec.checkpoint)
        finish_weights(visual, config, device)
    return Tower(spec, backend, visual.eval(), config, dtype, device, processor_kwargs)


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
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        raise TowerError(
            f"device {str(device)!r} is not available: this process sees {count} GPUs; "
            "use one of them, or cpu"
        )
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise TowerError(
            f"this process runs vLLM on {current_platform.device_type}; build the "
            f"tower for {device} in a process of its own"
        )
    if device.index is not None:
        torch.cuda.set_device(device)


def init_distributed() -> None:
    """Make the process a one-rank vLLM process, if it is none yet."""
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
    spec: TowerSpec,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    norm: nn.Module | None,
) -> nn.Module:
    from vllm.utils.torch_utils import set_default_torch_dtype

    family = FAMILIES[spec.family]
    cls = getattr(model_module(spec.family), family.tower)
    hf_config = config.model_config.hf_config
    # Towers that cannot normalise have no such argument.
    optional: dict[str, Any] = {} if norm is None else {"input_norm": norm}
    configs = [hf_config.vision_config]
    if family.takes_text_config:
        configs.insert(0, hf_config.text_config)
    try:
        with set_default_torch_dtype(dtype), device:
            return cls(
                *configs,
                norm_eps=getattr(hf_config, "rms_norm_eps", family.norm_eps),
                quant_config=config.quant_config,
                prefix="visual",
                **optional,
            )
    except KeyError as error:
        # Of Qwen3-VL, an activation that vLLM does not know.
        raise CheckpointError(
            f"vLLM cannot build the tower of {spec.model}: it does not know {error}, "
            "which the model's config names"
        ) from error


def finish_weights(visual: nn.Module, config: Any, device: torch.device) -> None:
    """Do what vLLM does to weights once they are loaded.

    Args:
        visual: vLLM's module.
        config: The `VllmConfig` that it was built with.
        device: Where it runs.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from vllm_flashinfer_vit.engine.warmup import WarmUp

    WarmUp.of(config).is_wanted = False
    process_weights_after_loading(visual, config.model_config, device)
