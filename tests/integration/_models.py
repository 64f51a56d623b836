# SPDX-License-Identifier: Apache-2.0
"""What tests build vLLM's own encoders with, and how they call them.

A builder takes the module that holds the encoder and returns it with a call on fixed
inputs: true head dims, two or three heads, few blocks. Several images of unequal size
go in wherever an encoder packs them. `_encoders.py` lists the builders.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, Self
from unittest.mock import patch

import pytest
import torch
from _towers import SMALL
from torch import nn

from vllm_flashinfer_vit.blocks.program import BlockProgram
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

Call = Callable[[], Any]
Builder = Callable[[Any], tuple[nn.Module, Call]]
Turns = Literal["nothing", "a part", "all"]

# Two images, a row of one merged patch, a video of three frames.
GRIDS = [[1, 4, 6], [1, 10, 2], [1, 2, 2], [3, 4, 4]]
LENGTHS = [13, 40, 1, 22]

LAYERS = {"FlashInferViTAttention", "MMEncoderAttention", "WhisperEncoderAttention"}

CONTEXT = TowerSpec(SMALL["qwen2_vl"] | {"depth": 1}, "context", 1, family="qwen2_vl")


def engine(
    backend: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tower:
    """Return a tower, whose `running()` holds what an engine holds for any encoder."""
    return build_tower(CONTEXT, backend=backend, dtype=dtype, device=device)


def noise(*shape: int) -> torch.Tensor:
    """Return N(0, 1) that bf16 can hold, the same values for the same shape."""
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randn(
        shape, generator=generator, device="cpu", dtype=torch.float32
    ).bfloat16()
    return values.to(torch.get_default_device(), torch.get_default_dtype())


def offsets(lengths: list[int]) -> torch.Tensor:
    """Return prefix sums `[N + 1] int32`."""
    zero = torch.zeros(1, dtype=torch.int32)
    return torch.cat([zero, torch.tensor(lengths).cumsum(0).int()])


def patches(grids: list[list[int]]) -> int:
    """Return the number of patches of all grids."""
    return sum(t * h * w for t, h, w in grids)


def encode(encoder: "Encoder", tower: Tower) -> "Result":
    """Build an encoder as an engine does, with seeded weights, and call it once."""
    module = encoder.load()
    # Nothing can be pinned where the default device is a GPU.
    pins = {"PIN_MEMORY": False} if hasattr(module, "PIN_MEMORY") else {}
    with (
        tower.running(),
        _defaults(tower.device, tower.dtype),
        patch.multiple(module, **pins) if pins else nullcontext(),
    ):
        encoder_module, call = encoder.build(module)
        _finish(encoder_module, tower)
        with (
            OpCount() as count,
            _counted_programs() as programs,
            _noted_layouts() as layouts,
        ):
            out = call()
    layers = {type(m).__name__ for m in encoder_module.modules()} & LAYERS
    turns = [
        _turns(layer)
        for layer in encoder_module.modules()
        if type(layer).__name__ == "FlashInferViTAttention"
    ]
    return Result(_flat(out), layers, count.calls, len(programs), layouts, turns)


def _turns(layer: Any) -> Turns:
    if layer.turning is None:
        return "nothing"
    return "all" if layer.turning.dim == layer.head_size else "a part"


@contextmanager
def _counted_programs() -> Iterator[list[int]]:
    """Collect the places of the blocks that run as programs."""
    places: list[int] = []
    run = BlockProgram.run

    def noting(self: Any, *args: Any) -> torch.Tensor:
        places.append(self._index)
        return run(self, *args)

    with patch.object(BlockProgram, "run", noting):
        yield places


@contextmanager
def _noted_layouts() -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """Collect how q, k and v lie for cuDNN, and how the layer says that they may."""
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
    from vllm_flashinfer_vit.kernels.cudnn import _are_read

    found: list[tuple[str, tuple[str, ...]]] = []
    check = FlashInferViTAttention._check

    def noting(self: Any, batch: Batch) -> None:
        q, k, v = batch[:3]
        if batch.cos is not None:
            q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
        width = sum(x.shape[1] for x in (q, k, v)) * v.shape[2]
        are_views = [
            is_read and x.stride(0) == width
            for x, is_read in zip((q, k, v), _are_read(q, k, v), strict=True)
        ]
        layout = "views" if all(are_views) else "turned" if are_views[2] else "packed"
        layouts = self.layouts
        if self.turning is not None:
            layouts = tuple("turned" if x == "views" else x for x in layouts)
        found.append((layout, layouts))
        check(self, batch)

    with patch.object(FlashInferViTAttention, "_check", noting):
        yield found


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(dtype), device:
        yield


def _finish(module: nn.Module, tower: Tower) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    generator = torch.Generator()
    for index, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.dim() < 2:
            mean = 0.0 if name.endswith("bias") else 1.0
            parameter.copy_(mean + 0.1 * noise(*parameter.shape))
            continue
        generator.manual_seed(index)
        values = torch.empty(parameter.shape, device="cpu", dtype=torch.float32)
        values.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        parameter.copy_(values.bfloat16())
    process_weights_after_loading(module, tower.vllm_config.model_config, tower.device)


def _flat(out: Any) -> torch.Tensor:
    parts = out if isinstance(out, (list, tuple)) else [out]
    return torch.cat([part.flatten() for part in parts]).float().cpu()


class OpCount:
    """Counts how often layers attend, and how often that is prepared.

    Eager layers do it past the dispatcher.

    Attributes:
        calls: How often layers attended.
        prepared: For how many calls, which blocks of a pass may share.
    """

    def __enter__(self) -> Self:
        self.calls = self.prepared = 0
        prepare = ops.prepare

        def counted(*args: Any) -> ops.Call:
            self.prepared += 1
            call = prepare(*args)

            def attend(*scales: Any) -> torch.Tensor:
                self.calls += 1
                return call(*scales)

            return attend

        self._patch = patch.object(ops, "prepare", counted)
        self._patch.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.__exit__(*exc)


def choices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the lengths that kernels are chosen by, from now on."""
    asked: list[int] = []
    kernel_for = Plan.kernel_for

    def noting(self: Plan, *args: Any) -> str:
        asked.append(args[0])
        return kernel_for(self, *args)

    monkeypatch.setattr(Plan, "kernel_for", noting)
    return asked


@contextmanager
def plain(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """On a CPU, have a function stand for a Triton kernel that a module calls."""
    on_gpu = torch.get_default_device().type == "cuda"
    with nullcontext() if on_gpu else patch.object(module, name, function):
        yield


def through(blocks: nn.ModuleList, x: torch.Tensor, **given: Any) -> torch.Tensor:
    """Call one block after the other."""
    for block in blocks:
        x = block(x, **given)
    return x


def config_of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def siglip_config(**fields: Any) -> Any:
    from transformers import SiglipVisionConfig

    common = {
        "hidden_size": 144,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 42,
        "patch_size": 14,
    }
    return SiglipVisionConfig(**{**common, **fields})


def intern_config() -> SimpleNamespace:
    return config_of(
        hidden_size=160,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        qkv_bias=True,
        qk_normalization=True,
        layer_norm_eps=1e-6,
        norm_type="layer_norm",
        hidden_act="gelu",
        initializer_factor=1.0,
        image_size=28,
        patch_size=14,
    )


@dataclass(frozen=True)
class Result:
    """What an encoder did.

    Attributes:
        out: All of its output, `[-1] float32` on the CPU.
        layers: Names of the classes of its attention layers.
        ops: Calls of this package's custom op.
        programs: Blocks that ran as programs.
        layouts: How q, k and v lay in each call, and how the layer says they may.
        turns: How much of q and k each layer of this package turns.
    """

    out: torch.Tensor
    layers: set[str]
    ops: int
    programs: int
    layouts: list[tuple[str, tuple[str, ...]]]
    turns: list[Turns]


@dataclass(frozen=True)
class Encoder:
    """One encoder of vLLM.

    Attributes:
        module: Where it is, below `vllm`.
        build: Builds it from that module.
        ops: Calls of the custom op in one forward pass.
        programs: Blocks that run as programs in it.
        turns: How much of each head of q and k its attention turns.
    """

    module: str
    build: Builder
    ops: int = 2
    programs: int = 0
    turns: Turns = "nothing"

    def load(self) -> ModuleType:
        """Import the module; ImportError if this vLLM lacks it.

        Without a GPU, a vLLM built for one does not load its operations, and the
        package of a whole model can ask for them as it is imported.
        """
        try:
            return import_module(f"vllm.{self.module}")
        except AttributeError as error:
            if "_OpNamespace" not in str(error):
                raise
            raise ImportError(f"vllm.{self.module} needs a GPU: {error}") from error
