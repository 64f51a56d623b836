# SPDX-License-Identifier: Apache-2.0
"""The blocks of towers that take no patches and grids, at their true size.

A stack is vLLM's own blocks, with random weights and a random stream in place of what
the tower runs in front of them. What comes after the blocks is left out, too.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import gemma4_stack
from gemma4_stack import Gemma4Stack
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower
from vllm_flashinfer_vit.towers.weights import fill_with_random_weights
from vllm_flashinfer_vit.towers.whole import WholeModel
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

Grids = Sequence[Sequence[int]]
Tensors = dict[str, Any]
# Holds the engine's configuration that blocks are built in.
_CONTEXT = TowerSpec(
    family="qwen2_vl",
    vision_config={
        "depth": 1,
        "embed_dim": 128,
        "hidden_size": 32,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    model="context",
    checkpoint=None,
    full_depth=1,
)
_ROPE_BASE = 10000.0


@dataclass(frozen=True)
class Stack:
    """What to build.

    Attributes:
        module: vLLM's module of the model, with its tower's part where it has several.
        block: Builds one of its blocks, from that module.
        depth: Blocks of the tower.
        width: Columns of the stream.
        head_dim: Of its attention.
        shape: The stream's: `T1C`, `1TC`, `TC`, or `BSC` for dense batches.
        rotary: Makes what turns q and k, of angles `[T, D / 2]` and the dtype.
    """

    module: str
    block: Callable[[Any], nn.Module]
    depth: int
    width: int
    head_dim: int
    shape: str
    rotary: Callable[[torch.Tensor, torch.dtype], Tensors] = lambda angles, dtype: {}


_GEMMA_3 = WHOLE_MODELS["google/gemma-3-4b-it"]
_DOTS = WHOLE_MODELS["rednote-hilab/dots.ocr"]
_GLM_OCR = WHOLE_MODELS["zai-org/GLM-OCR"]
_KIMI = WHOLE_MODELS["moonshotai/Kimi-K2.5"]
_PIXTRAL = WHOLE_MODELS["mistral-community/pixtral-12b"]
_INTERN = WHOLE_MODELS["OpenGVLab/InternVL3-8B"]
_ERNIE = WHOLE_MODELS["baidu/ERNIE-4.5-VL-28B-A3B-PT"]
_PADDLE = WHOLE_MODELS["PaddlePaddle/PaddleOCR-VL"]
_OMNI = WHOLE_MODELS["Qwen/Qwen3-Omni-30B-A3B-Instruct"]


def _siglip() -> Any:
    from transformers import SiglipVisionConfig

    return SiglipVisionConfig(**_GEMMA_3.vision)


def _siglip_layer(m: Any) -> nn.Module:
    return m.SiglipEncoderLayer(_siglip(), attn_cls=m.MMEncoderAttention)


def _dots(m: Any) -> nn.Module:
    return m.DotsVisionBlock(SimpleNamespace(**_DOTS.vision))


def _glm_ocr(m: Any) -> nn.Module:
    v = _GLM_OCR.vision
    norm = functools.partial(m.RMSNorm, eps=v["rms_norm_eps"])
    return m.GlmOcrVisionBlock(
        v["hidden_size"], v["num_heads"], v["intermediate_size"], norm
    )


def _kimi(m: Any) -> nn.Module:
    gelu = nn.GELU(approximate="tanh")
    v = _KIMI.vision
    return m.MoonViTEncoderLayer(
        v["num_attention_heads"],
        v["hidden_size"],
        v["intermediate_size"],
        activation=gelu,
        attn_bias=True,
    )


def _ernie(m: Any) -> nn.Module:
    v = _ERNIE.vision
    return m.Ernie4_5_VisionBlock(v["embed_dim"], v["num_heads"], float(v["mlp_ratio"]))


def _omni(m: Any) -> nn.Module:
    v = _OMNI.vision
    return m.Qwen3_VisionBlock(
        v["hidden_size"],
        v["num_heads"],
        v["intermediate_size"],
        m._ACTIVATION_REGISTRY[v["hidden_act"]],
    )


def _kimi_k3(m: Any) -> nn.Module:
    if not hasattr(m, "_make_vision_norm"):
        raise ImportError("Kimi K3's blocks, from vLLM 0.27 on")
    return m.MoonViTEncoderLayer(
        12,
        1024,
        4096,
        activation=nn.GELU(approximate="tanh"),
        qkv_hidden_size=1536,
        norm_type="rmsnorm",
        linear_bias=False,
    )


def _pixtral(m: Any) -> nn.Module:
    return m.TransformerBlock(SimpleNamespace(**_PIXTRAL.vision))


def _intern(m: Any) -> nn.Module:
    return m.InternVisionEncoderLayer(SimpleNamespace(**_INTERN.vision))


def _tables(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}


def _angles(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    return {"rotary_pos_emb": angles}


def _kimi_turns(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    return {"rope_freqs_cis": torch.polar(torch.ones_like(angles), angles)}


def _pixtral_turns(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    from vllm.model_executor.models import pixtral

    turns = torch.polar(torch.ones_like(angles), angles)
    # The sources say which of the two forms a release takes.
    is_real = "freqs_cis.dtype == torch.float32" in inspect.getsource(pixtral)
    return {"freqs_cis": torch.view_as_real(turns) if is_real else turns}


def _stack(
    whole: WholeModel, block: Callable[[Any], nn.Module], shape: str, *rotary: Any
) -> Stack:
    """Return the blocks of a model that the package knows."""
    vision = whole.vision
    width = vision.get("embed_dim", vision["hidden_size"])
    depth = vision[whole.depth]
    return Stack(whole.tower, block, depth, width, whole.head_dim, shape, *rotary)


STACKS: Mapping[str, Stack] = {
    "GLM-OCR": _stack(_GLM_OCR, _glm_ocr, "T1C", _tables),
    "PaddleOCR-VL": _stack(
        _PADDLE, lambda m: m.SiglipEncoderLayer(_siglip()), "1TC", _angles
    ),
    "dots.ocr": _stack(_DOTS, _dots, "TC", _angles),
    "ERNIE-4.5-VL": _stack(_ERNIE, _ernie, "T1C", _angles),
    "Qwen3-Omni": _stack(_OMNI, _omni, "T1C", _tables),
    "Kimi-K2.5": _stack(_KIMI, _kimi, "TC", _kimi_turns),
    "Kimi-K3": Stack("kimi_k25_vit", _kimi_k3, 27, 1024, 128, "TC", _kimi_turns),
    "Pixtral-12B": _stack(_PIXTRAL, _pixtral, "1TC", _pixtral_turns),
    "SigLIP-So400m": _stack(_GEMMA_3, _siglip_layer, "BSC"),
    "Idefics2": Stack(
        "idefics2_vision_model",
        lambda m: m.Idefics2EncoderLayer(_siglip()),
        27,
        1152,
        72,
        "BSC",
    ),
    "InternViT-300M": _stack(_INTERN, _intern, "BSC"),
}


# What `build_stack` can build.
NAMES = frozenset({*STACKS, *gemma4_stack.TOWERS})


class BlockStack(nn.Module):
    """Blocks one after another, called as a tower is."""

    def __init__(self, stack: Stack, depth: int, dtype: torch.dtype) -> None:
        """Build the blocks, in an engine's configuration."""
        super().__init__()
        name, *_ = stack.module.split()
        module = importlib.import_module(f"vllm.model_executor.models.{name}")
        self.blocks = nn.ModuleList([stack.block(module) for _ in range(depth)])
        self._stack, self._dtype = stack, dtype

    def prepare_encoder_metadata(self, grids: Grids) -> Tensors:
        """Return what all blocks are given for images of these grids.

        Raises:
            ValueError: A dense batch needs images of one size.
        """
        stack = self._stack
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        if stack.shape == "BSC":
            if len(set(lengths)) > 1:
                raise ValueError("a dense batch needs images of one size")
            return {}
        on = next(self.parameters()).device
        ends = torch.tensor([0, *lengths]).cumsum(0).to(on, torch.int32)
        metadata = {
            "cu_seqlens": ends,
            "max_seqlen": torch.tensor(max(lengths), dtype=torch.int32),
            **stack.rotary(self._turns(grids).to(on), self._dtype),
        }
        forward = inspect.signature(type(self.blocks[0]).forward).parameters
        # Without a default in some.
        if "sequence_lengths" in forward:
            metadata["sequence_lengths"] = None
        return metadata

    def _turns(self, grids: Grids) -> torch.Tensor:
        """Return angles by rows and columns, half of them each, `[T, D / 2]`."""
        quarter = self._stack.head_dim // 4
        speeds = _ROPE_BASE ** -(torch.arange(quarter) / quarter)
        parts = []
        for frames, height, width in grids:
            rows, columns = torch.meshgrid(
                torch.arange(height), torch.arange(width), indexing="ij"
            )
            places = torch.stack([rows, columns], -1).view(-1, 2, 1)
            parts.append((places * speeds).flatten(1).repeat(frames, 1))
        return torch.cat(parts)

    def forward(
        self,
        pixels: torch.Tensor,
        grids: Grids | None,
        *,
        encoder_metadata: Tensors | None = None,
    ) -> torch.Tensor:
        """Run the blocks on a stream.

        Args:
            pixels: `[T, C]`.
            grids: As for `prepare_encoder_metadata`; for dense batches always given.
            encoder_metadata: What that returned, or None to prepare it.
        """
        if encoder_metadata is None:
            assert grids is not None
            encoder_metadata = self.prepare_encoder_metadata(grids)
        x = pixels.view(self._shape(len(pixels), grids))
        for block in self.blocks:
            found = block(x, **encoder_metadata)
            x = found[0] if isinstance(found, tuple) else found
        return x.reshape(pixels.shape)

    def _shape(self, rows: int, grids: Grids | None) -> tuple[int, ...]:
        width = self._stack.width
        if self._stack.shape == "BSC":
            assert grids is not None
            return sum(t for t, _, _ in grids), -1, width
        shapes = {"TC": (rows, width), "1TC": (1, rows, width)}
        return shapes.get(self._stack.shape, (rows, 1, width))


@dataclass(frozen=True)
class StackTower:
    """What `tower_worker` asks of a tower, of a stack.

    Attributes:
        spec: Its depth and the width of its stream.
        visual: The stack.
        context: The tower whose configuration it was built in.
    """

    spec: Any
    visual: BlockStack | Gemma4Stack
    context: Tower

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `Tower.running`."""
        with self.context.running():
            yield

    def attention_layers(self) -> dict[str, Any]:
        """See `Tower.attention_layers`; where Transformers attends, only the sizes."""
        from vllm.model_executor.layers.attention.mm_encoder_attention import (
            MMEncoderAttention,
        )

        layers = {
            name: module
            for name, module in self.visual.named_modules()
            if isinstance(module, MMEncoderAttention)
        }
        if not layers and isinstance(self.visual, Gemma4Stack):
            return {"all": self.visual.sizes}
        return layers

    def kernels(self, grids: Grids) -> dict[str, str]:
        """See `Tower.kernels`."""
        layer: Any = next(iter(self.attention_layers().values()))
        longest = max(h * w for _, h, w in grids)
        patches = sum(math.prod(grid) for grid in grids)
        return {"all": layer.kernel_for(longest, patches / sum(t for t, _, _ in grids))}


def build_stack(
    name: str,
    *,
    depth: int | None,
    dtype: torch.dtype,
    device: torch.device,
    **how: Any,
) -> StackTower:
    """Build the blocks of a tower in `NAMES`.

    Args:
        name: The tower's.
        depth: Blocks to build, None for all.
        dtype: Of weights and stream.
        device: Where they are.
        **how: As for `build_tower`.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    stack = STACKS.get(name) or gemma4_stack.TOWERS[name]
    depth = stack.depth if depth is None else min(depth, stack.depth)
    context = build_tower(_CONTEXT, dtype=dtype, device=device, **how)
    with context.running(), set_default_torch_dtype(dtype), torch.device(device):
        visual: BlockStack | Gemma4Stack
        if isinstance(stack, Stack):
            visual = BlockStack(stack, depth, dtype)
        else:
            visual = Gemma4Stack(stack, depth, context.vllm_config)
        fill_with_random_weights(visual, seed=0)
        if isinstance(visual, Gemma4Stack):
            visual.shrink_scores()
        model_config = context.vllm_config.model_config
        process_weights_after_loading(visual, model_config, torch.device(device))
    spec = SimpleNamespace(depth=depth, patch_dim=stack.width, merge_size=1)
    return StackTower(spec, visual.eval(), context)
