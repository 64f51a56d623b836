# SPDX-License-Identifier: Apache-2.0
"""Builds at engine start what the first request would wait for, and counts it.

A Triton kernel has a variant for each class of longest lengths, cuDNN a plan for each
bucket of counts and lengths. All are run once while the weights are loaded: in time for
vLLM's measurement of memory, and before the first graph is captured.
"""

import functools
import logging
import time
from typing import Any, NamedTuple, Protocol

import torch

from vllm_flashinfer_vit.kernels._cudnn import PLANS
from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine.per_engine import PerEngine
from vllm_flashinfer_vit.ops.batch import Batch, Layout, Taken, Turning

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

_PACKAGE = f"{__name__.partition('.')[0]}."
# The shortest length that a kernel has a variant for, and where none but the last
# class is left.
_SHORTEST, _LONGEST = 16, 4096
# More images, frames or windows in one call are rare; their plan is built on demand.
_MAX_SEQS = 1024
_DEVICE = "cuda"


class Layer(Protocol):
    """What is warmed up: `FlashInferViTAttention` has it all, and says what it is."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def signature(self) -> tuple[object, ...]: ...

    @property
    def bounds(self) -> tuple[int, ...]: ...

    @property
    def turning(self) -> Turning | None: ...

    @property
    def gets_turned(self) -> bool: ...

    @property
    def layouts(self) -> tuple[Layout, ...]: ...

    def kernel_for(self, max_seqlen: int, mean_len: float | None = None) -> str: ...

    def taken(self, batch: Batch) -> Taken | None: ...

    def attend(self, batch: Batch) -> torch.Tensor: ...


class Counters(NamedTuple):
    """What this process has built since it began to count.

    Attributes:
        triton_kernels: Variants of Triton kernels, of this package or not, compiled or
            loaded from Triton's cache on disk.
        cudnn_plans: Plans that cuDNN built.
        workspace_bytes: Device memory that kernels hold as workspace.
    """

    triton_kernels: int
    cudnn_plans: int
    workspace_bytes: int


class _TritonCount:
    """Chained in front of whoever listens to Triton already."""

    def __init__(self, then: Any) -> None:
        self.count = self.own = 0
        self._then = then

    def __call__(self, **event: Any) -> Any:
        self.count += 1
        module = getattr(event.get("fn"), "module", None) or ""
        self.own += module.startswith(_PACKAGE)
        logger.debug("Triton compiled %s", event.get("repr"))
        return self._then(**event) if self._then is not None else None


@functools.cache
def _triton_count() -> _TritonCount:
    from triton import knobs

    hook = _TritonCount(knobs.runtime.jit_post_compile_hook)
    knobs.runtime.jit_post_compile_hook = hook
    return hook


def counters() -> Counters:
    """Return the counters; the first call begins to count Triton's kernels."""
    return Counters(_triton_count().count, PLANS.built, PLANS.workspace_bytes)


def built() -> tuple[int, int]:
    """Return variants of this package's Triton kernels, and cuDNN's plans, so far."""
    return _triton_count().own, PLANS.built


def lengths(bounds: tuple[int, ...]) -> list[int]:
    """Return longest lengths that meet every variant of every kernel of a plan.

    Args:
        bounds: The lengths up to which other kernels serve.
    """
    found = {*bounds, *(bound + 1 for bound in bounds)}
    length = _SHORTEST
    while length <= _LONGEST:
        found.add(length)
        length *= 2
    return sorted(found)


def plan_shapes(longest: int, shortest: int = 1) -> list[tuple[int, int]]:
    """Return the buckets of counts and lengths that batches of some size can need.

    Args:
        longest: Tokens of a batch, hence of its longest sequence.
        shortest: The shortest longest sequence.
    """
    shapes = []
    below, max_len = shortest - 1, bucket_max_len(shortest)
    while True:
        # One sequence is longer than the bucket below; the others have a token each.
        most = longest - below
        num_seqs = bucket_num_seqs(1)
        while True:
            shapes.append((num_seqs, min(max_len, longest)))
            if num_seqs >= min(most, _MAX_SEQS):
                break
            num_seqs = bucket_num_seqs(num_seqs + 1)
        if max_len >= longest:
            return shapes
        below, max_len = max_len, bucket_max_len(max_len + 1)


class WarmUp(PerEngine):
    """What one engine has warmed up.

    Attributes:
        is_wanted: Whether there is anything to warm up for: a tower outside an engine
            serves no requests.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Begin with nothing; use `of`."""
        super().__init__(vllm_config)
        self.is_wanted = True
        self._done: set[tuple[object, ...]] = set()

    def run(self, layer: Layer) -> None:
        """Run a layer's op once in each class of calls, unless an equal layer has.

        Args:
            layer: Its weights are loaded; the GPU is the current one.
        """
        key = (*layer.signature, layer.turning, layer.gets_turned, layer.layouts)
        if not self.is_wanted or key in self._done:
            return
        self._done.add(key)
        before, start = counters(), time.perf_counter()
        shapes = shapes_of(layer)
        with torch.inference_mode():
            for shape in shapes:
                _run(layer, *shape)
        torch.cuda.synchronize()
        after = counters()
        logger.info(
            "vllm-flashinfer-vit warmed up %d shapes in %.1f s: %d Triton kernels, %d "
            "cuDNN plans",
            len(shapes),
            time.perf_counter() - start,
            after.triton_kernels - before.triton_kernels,
            after.cudnn_plans - before.cudnn_plans,
        )
        logger.debug("before warm-up: %s; after it: %s", before, after)


def shapes_of(layer: Layer) -> list[tuple[int, int, Layout]]:
    """Return what meets every class of calls.

    Args:
        layer: The layer.

    Returns:
        Counts of sequences, longest lengths, and how q, k and v lie.
    """
    layout, *others = layer.layouts
    found = [(1, length, layout) for length in lengths(layer.bounds)]
    # Batches of many sequences may have a kernel of their own, as graphs do.
    found += [
        (length, length, layout)
        for _, length, _ in found
        if layer.kernel_for(length, 1) != layer.kernel_for(length)
    ]
    shortest = layer.bounds[-1] + 1 if layer.bounds else 1
    last = KERNELS[layer.kernel_for(shortest)]
    if last.builds_plans and (longest := _max_patches()) >= shortest:
        # What is quantised lies in one way, however its input did.
        layouts = (layout,) if last.is_fp8 else (layout, *others)
        shapes = plan_shapes(longest, shortest)
        found += [(*shape, layout) for layout in layouts for shape in shapes]
    return found


def _max_patches() -> int:
    """Return the most patches of one encoder call, of four to a token.

    vLLM never schedules more tokens for the encoder in one step, nor takes an item of
    more. The longest request, in tokens, may be far more.
    """
    from vllm.config import get_current_vllm_config
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Models are loaded with their own dtype as the default, image processors are not.
    with torch.device("cpu"), set_default_torch_dtype(torch.float32):
        budget = MultiModalBudget(get_current_vllm_config(), MULTIMODAL_REGISTRY)
    # It may keep the largest item, which it made to count its tokens.
    budget.reset_cache()
    return 4 * budget.get_encoder_budget()


def _run(layer: Layer, num_seqs: int, length: int, layout: Layout) -> None:
    heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_size
    on: dict[str, Any] = {"dtype": layer.dtype, "device": _DEVICE}
    qkv = torch.zeros(length, heads + 2 * kv_heads, head_dim, **on)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if layout != "views":
        q, k = q.contiguous(), k.contiguous()
    if layout == "packed":
        v = v.contiguous()
    cos = sin = None
    interleaved = False
    if layer.turning is not None:
        on["dtype"], dim, interleaved = layer.turning
        cos = sin = torch.ones(length, dim // 2, **on)
    # One token: what is compiled and built depends on what is declared alone.
    cu_seqlens = torch.ones(num_seqs + 1, dtype=torch.int32, device=_DEVICE)
    cu_seqlens[0] = 0
    max_seqlen = torch.tensor(length, dtype=torch.int32)
    batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen)
    layer.attend(batch._replace(interleaved=interleaved))
    turned = batch._replace(cos=None, sin=None)
    if layer.gets_turned and layer.taken(turned) == "turned":
        layer.attend(turned)
