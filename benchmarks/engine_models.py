# SPDX-License-Identifier: Apache-2.0
"""What engine_check.py asks a model, and what it reads from it.

Functions that take a model run in the engine's processes, by `LLM.apply_model`, and
those that take a worker by `LLM.collective_rpc`.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from correctness import relative_error
from engines import encoder_parts, manager_of, random_pixels
from make_checkpoint import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    make_checkpoint,
)
from other_checkpoints import make_other_checkpoint
from other_dense import DENSE_MODELS
from other_packed import PACKED_MODELS
from tower_cases import MODELS as QWEN_MODELS
from vllm_flashinfer_vit.towers.weights import GEMMA4_ATTENTION

OTHER_MODELS = {**PACKED_MODELS, **DENSE_MODELS}
MODELS = (*QWEN_MODELS, *OTHER_MODELS)
# Images of Qwen's towers that are compared: frames, rows and columns of patches.
GRIDS = [[1, 16, 16], [1, 26, 38], [1, 64, 64]]
# Attribute of a model: arguments of `embed_multimodal`.
_INPUTS = "engine_check_inputs"


def write_checkpoint(folder: Path, model: str) -> None:
    """Write the folder without weights that an engine of a model starts from."""
    if model in OTHER_MODELS:
        make_other_checkpoint(folder, OTHER_MODELS[model])
    else:
        make_checkpoint(folder, model)


def prompts(model: str) -> dict[str, dict[str, Any]]:
    """Return an image, a multi-image and perhaps a video prompt for `LLM.generate`.

    The image is the first to be asked; a model without `video` has no such prompt.
    """
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)

    def pixels(*shape: int) -> "np.ndarray":
        return random.integers(0, 256, (*shape, 3), dtype=np.uint8)

    modality = "image"
    if model in OTHER_MODELS:
        this = OTHER_MODELS[model]
        image, video, modality = this.image, this.video, this.modality
    else:
        image, video = (
            f"{VISION_START}{token}{VISION_END}" for token in (IMAGE_TOKEN, VIDEO_TOKEN)
        )

    def given(*images: "np.ndarray") -> dict[str, Any]:
        # InternVL's processor takes no arrays.
        items: list[Any] = [Image.fromarray(each) for each in images]
        if modality == "vision_chunk":
            items = [{"type": "image", "image": each, "uuid": None} for each in items]
        return {modality: items}

    one, frames = pixels(448, 672), pixels(8, 168, 224)
    several = [pixels(336, 448), pixels(112, 112), pixels(224, 560)]
    asked: dict[str, dict[str, Any]] = {
        "image": {
            "prompt": f"{image}What is this?",
            "multi_modal_data": given(one),
        },
        "multi": {
            "prompt": f"{image * 3}Compare.",
            "multi_modal_data": given(*several),
        },
    }
    if video:
        about = {
            "fps": 2.0,
            "duration": 4.0,
            "total_num_frames": len(frames),
            "frames_indices": list(range(len(frames))),
            "video_backend": "opencv",
            "do_sample_frames": False,
        }
        # Newer vLLM needs a video's metadata for Qwen2.5-VL, too.
        clip: Any = frames if "Qwen2-VL" in model else (frames, about)
        asked["video"] = {
            "prompt": f"{video}What happens?",
            "multi_modal_data": {"video": clip},
        }
    return asked


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return what attends in the tower: vLLM's layers or, in Gemma 4's, the plugin's.

    Stock's tower of Gemma 4 has none.
    """
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )

    return [
        module
        for part in encoder_parts(model).values()
        for module in part.modules()
        if isinstance(module, MMEncoderAttention)
    ]


def describe_tower(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attention layers' class and kernels, and what is compiled."""
    layers: list[Any] = attention_layers(model)
    kernels = {
        layer.kernel_for(length)
        for layer in layers
        if hasattr(layer, "kernel_for")
        for length in (64, 1024, 16384)
    }
    return {
        "layer_class": " ".join(sorted({type(layer).__name__ for layer in layers})),
        "kernels": " ".join(sorted(kernels)),
        "compiled_modules": sum(
            not getattr(module, "do_not_compile", True)
            for part in encoder_parts(model).values()
            for module in part.modules()
        ),
    }


def draw_inputs(model: Any) -> None:
    """Have `embed` encode images of `GRIDS`, drawn from a fixed seed."""
    patches = sum(t * h * w for t, h, w in GRIDS)
    pixels = random_pixels(model.visual, patches, torch.Generator().manual_seed(0))
    vars(model)[_INPUTS] = {
        "pixel_values": pixels.to(model.visual.device),
        "image_grid_thw": torch.tensor(GRIDS),
    }


def record_inputs(model: Any) -> None:
    """Have `embed` encode what the engine has encoded first from now on."""
    original = model.embed_multimodal

    def embed_multimodal(**inputs: Any) -> Any:
        vars(model).setdefault(_INPUTS, inputs)
        return original(**inputs)

    model.embed_multimodal = embed_multimodal


def record_graph_inputs(worker: Any) -> None:
    """As `record_inputs`, in an engine whose encoder graphs come before the model."""
    runner = worker.model_runner
    model, manager = runner.get_model(), manager_of(runner)
    original = manager.execute

    def execute(mm_kwargs: dict[str, Any]) -> Any:
        vars(model).setdefault(_INPUTS, mm_kwargs)
        return original(mm_kwargs)

    manager.execute = execute


def graphs_and_eager(worker: Any) -> dict[str, Any]:
    """Compare what graphs return with eager mode, on what was encoded first.

    A graph holds one kernel for every batch that fits it, and its GEMMs have its rows:
    bits may differ.

    Returns:
        Columns of engine_check.py.
    """
    runner = worker.model_runner
    model, manager = runner.get_model(), manager_of(runner)
    inputs = vars(model)[_INPUTS]
    hits = manager.graph_hits
    with torch.inference_mode():
        items = list(model.embed_multimodal(**inputs))
        # It leaves a large batch to the model.
        padded = manager.execute(dict(inputs)) or items
    # Gemma 4's graphs return an image's padding, too. An engine leaves it: it takes as
    # many rows as the prompt has placeholders, from the first on.
    served = [rows[: len(item)] for rows, item in zip(padded, items, strict=True)]
    ours, eager = torch.cat(served).float(), torch.cat(items).float()
    return {
        "graph_hits": manager.graph_hits - hits,
        "graph_rel_err": f"{relative_error(ours, eager):.2e}",
        "graph_bitwise": int(torch.equal(ours, eager)),
    }


def embed(model: Any) -> torch.Tensor:
    """Return the embeddings of the same images in each engine, `[tokens, hidden]`.

    Raises:
        RuntimeError: The engine has encoded nothing.
    """
    inputs = vars(model).get(_INPUTS)
    if inputs is None:
        raise RuntimeError("no image has reached the model: see its answers in the log")
    with torch.inference_mode():
        return torch.cat(list(model.embed_multimodal(**inputs))).float().cpu()


def embed_without_attention(model: torch.nn.Module) -> torch.Tensor:
    """Return what `embed` does if every attention layer gives zeros."""

    def no_output(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    def no_attention(layer: object, attend: object, batch: Any) -> torch.Tensor:
        return torch.zeros_like(batch.q, memory_format=torch.contiguous_format)

    # Gemma 4's is the whole of it, whose last projection has no bias.
    layers: list[Any] = attention_layers(model) or [
        module
        for module in model.modules()
        if type(module).__name__ == GEMMA4_ATTENTION
    ]
    with ExitStack() as undo:
        for layer in layers:
            if hasattr(layer, "watched"):
                # The plugin's blocks run past the layers of vLLM's.
                undo.enter_context(layer.watched(no_attention))
            else:
                hook = layer.register_forward_hook(no_output)
                undo.callback(hook.remove)
        return embed(model)
