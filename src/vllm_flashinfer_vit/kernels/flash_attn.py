# SPDX-License-Identifier: Apache-2.0
"""Encoder attention by the FlashAttention that vLLM bundles, in two versions.

`prepare` is for the version that vLLM picks; on Hopper that is 3, which computes head
dims 72 and 80 as 96. `prepare_4` is for version 4, in CuTe DSL, whose kernel for Hopper
computes them as 80.

Both add what stock vLLM lacks in a CUDA graph's replay: cu_seqlens may end in zeros,
rows of no sequence come out as zeros, and a NaN in them reaches no sequence. A caller
whose padding can hold none saves a launch in front of each call.

Both do all that is the same for each layer of a tower once: what they return takes the
host a fraction of what vLLM's interfaces take.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from vllm_flashinfer_vit.kernels._alignment import aligned
from vllm_flashinfer_vit.kernels._launch import returning, say_unknown
from vllm_flashinfer_vit.kernels.padding import mask_padding

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

Run = Callable[..., None]
# A compiled function and what it is called with.
Recorded = tuple[Callable[..., Any], tuple[Any, ...]]

# By the head dim that is computed, version 4's queries and keys of a tile, and whether
# the weights stay in registers: the fastest of twelve on an H200
# (docs/experiments.md). It has its own choice for the others.
_TILES_4: Mapping[int, Mapping[str, Any]] = MappingProxyType(
    {80: {"tile_mn": (192, 112), "mma_pv_is_rs": True, "intra_wg_overlap": True}}
)

# What version 3's op takes, in its order, as vLLM passes it for a plain batch.
_ARGUMENTS_3: Mapping[str, Any] = MappingProxyType(
    {
        "q": None,
        "k": None,
        "v": None,
        "k_new": None,
        "v_new": None,
        "q_v": None,
        "out": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "cu_seqlens_k_new": None,
        "seqused_q": None,
        "seqused_k": None,
        "max_seqlen_q": None,
        "max_seqlen_k": None,
        "page_table": None,
        "kv_batch_idx": None,
        "leftpad_k": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "seqlens_rotary": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "softmax_scale": None,
        "is_causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "scheduler_metadata": None,
        "num_splits": 0,
        "pack_gqa": None,
        "sm_margin": 0,
        "s_aux": None,
        "cp_world_size": 1,
        "cp_rank": 0,
        "cp_tot_seqused_k": None,
    }
)


# By head dim, what vLLM picked when it was asked last.
_VERSIONS: dict[int, int] = {}


def fa_version(head_dim: int) -> int:
    """Ask vLLM which FlashAttention it picks for this GPU and head dim.

    Asked while vLLM builds a layer, it follows the engine's
    `attention_config.flash_attn_version`. What is prepared later runs the last answer:
    of engines in one process, the one's that was built last.

    Raises:
        RuntimeError: vLLM has no FlashAttention for this GPU.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version(head_size=head_dim)
    if version is None:
        raise RuntimeError(
            f"vLLM has no FlashAttention for head dim {head_dim} on this GPU; choose "
            "another kernel with VLLM_FLASHINFER_VIT_KERNEL"
        )
    before = _VERSIONS.get(head_dim, version)
    if before != version:
        logger.warning(
            "Encoder attention of head dim %d now runs on FlashAttention %d in this "
            "process, no longer on %d, as the engine picks that is being built. If "
            "an earlier one still serves, give each a process of its own.",
            head_dim,
            version,
            before,
        )
    _VERSIONS[head_dim] = version
    return version


def _version(head_dim: int) -> int:
    """Return the last answer: while an engine runs, no configuration is in force."""
    return _VERSIONS.get(head_dim) or fa_version(head_dim)


@functools.cache
def _varlen_func() -> Callable[..., torch.Tensor]:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    return flash_attn_varlen_func


@functools.cache
def _forward_3() -> Callable[..., Any] | None:
    """Return version 3's op if its arguments are those that are known here."""
    # Importing it registers the op.
    _varlen_func()
    with contextlib.suppress(AttributeError):
        forward = torch.ops._vllm_fa3_C.fwd.default
        names = [argument.name for argument in forward._schema.arguments]
        if names == list(_ARGUMENTS_3):
            return forward
    say_unknown("vLLM's FlashAttention 3")
    return None


@functools.cache
def _forward_4() -> Callable[..., Any]:
    # What it exports has no argument for the tile.
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd


@functools.cache
def _compile_for_capture(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    v = torch.zeros(1, kv_heads, head_dim, dtype=dtype, device=device)
    out = torch.zeros(1, heads, head_dim, dtype=dtype, device=device)
    mask_padding(torch.zeros(2, dtype=torch.int32, device=device), v, out)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    is_clean: bool = False,
) -> Callable[[], torch.Tensor]:
    """Settle attention within each sequence of a packed batch, on buffers that stay.

    Whether a CUDA graph captures the calls is asked here, once.

    Args:
        q: `[T, H, D]` bf16 or fp16, D-stride 1, any other strides.
        k: `[T, H_kv, D]` like q, H a multiple of H_kv.
        v: `[T, H_kv, D]` like k. In a graph its rows of no sequence are zeroed.
        cu_seqlens: `[N + 1] int32` on q's device, token prefix sums; new values need a
            new call of this function. In a graph a tail of zeros or repeated values
            stands for empty sequences.
        max_seqlen: An upper bound of the sequence lengths, in tokens.
        scale: Softmax scale.
        is_clean: Whether v's rows of no sequence are finite in every call, or there are
            none: then a graph's replay mends cu_seqlens and clears the output's rows
            once, for all its calls.

    Returns:
        A call that attends over what q, k and v hold by then. It returns `[T, H, D]`,
        contiguous, q's dtype, the same tensor every time. Rows of no sequence are zeros
        in a captured graph, and unspecified otherwise.

    Raises:
        RuntimeError: vLLM has no FlashAttention for this GPU or these arguments.
    """
    batch = q, k, v, cu_seqlens, max_seqlen, scale
    return _prepare(_run, _settle, *batch, is_clean)


def prepare_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    is_clean: bool = False,
) -> Callable[[], torch.Tensor]:
    """Settle attention as `prepare` does, by FlashAttention 4 on a Hopper GPU.

    The first call for a head dim and dtype compiles the kernel, for some seconds.

    Args:
        q: As for `prepare`, like the other arguments.
        k: See `q`.
        v: See `q`.
        cu_seqlens: See `q`.
        max_seqlen: See `q`.
        scale: See `q`.
        is_clean: See `q`.

    Returns:
        As `prepare`.

    Raises:
        ImportError: vLLM or the machine lacks the kernel or CuTe DSL.
    """
    batch = q, k, v, cu_seqlens, max_seqlen, scale
    return _prepare(_run_4, _settle_4, *batch, is_clean)


def _prepare(
    run: Run,
    settle: Callable[..., Callable[[], object]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    is_clean: bool,
) -> Callable[[], torch.Tensor]:
    num_tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0 or cu_seqlens.shape[0] == 1:
        return out.zero_
    max_seqlen = max(1, min(max_seqlen, num_tokens))
    fixed = {
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": False,
        "out": out,
    }
    if torch.cuda.is_current_stream_capturing():
        # FlashAttention writes no row of no sequence.
        once = mask_padding(cu_seqlens, v, out) if is_clean else None

        def captured() -> torch.Tensor:
            # Each layer writes v anew, its padding too.
            mended = mask_padding(cu_seqlens, v, out) if once is None else once
            run(q, k, v, cu_seqlens_q=mended, cu_seqlens_k=mended, **fixed)
            return out

        return captured

    _compile_for_capture(heads, v.shape[1], head_dim, v.dtype, v.device)
    launch = settle(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **fixed)
    return returning(launch, out)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> None:
    _varlen_func()(q, k, v, fa_version=_version(q.shape[2]), **kwargs)


def _run_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> None:
    q, k, v = aligned(q), aligned(k), aligned(v)
    computed = -(-q.shape[2] // 16) * 16
    _forward_4()(q, k, v, **kwargs, **_TILES_4.get(computed, {}))


def _settle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, **kwargs: Any
) -> Callable[[], object]:
    """Return a call for what the tensors hold by then: the op itself if it is known."""
    forward = _forward_3() if _version(q.shape[2]) == 3 else None
    if forward is None or any(x.stride(-1) != 1 for x in (q, k, v)):
        return functools.partial(_run, q, k, v, causal=causal, **kwargs)
    given = {"q": q, "k": k, "v": v, "is_causal": causal, **kwargs}
    return functools.partial(forward, *{**_ARGUMENTS_3, **given}.values())


def _settle_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
) -> Callable[[], object]:
    """Return a call as `_settle` does: the compiled function if it can be recorded."""
    run = functools.partial(_run_4, q, k, v, **kwargs)
    if not hasattr(_forward_4(), "compile_cache"):
        say_unknown("vLLM's FlashAttention 4")
        return run
    with _recording(_forward_4()) as calls:
        run()
    # With a split of the keys another kernel would have to follow.
    if len(calls) != 1:
        return run
    function, arguments = calls[0]
    read = {x.data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
    # A copy of an input would be that of today's values.
    if any(x.data_ptr() not in read for x in (q, k, v, kwargs["out"])):
        return run
    return functools.partial(function, *arguments)


class _Recorder:
    """Stands in for a cache of compiled functions: what it returns only takes notes."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.calls: list[Recorded] = []

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, function: Any) -> None:
        self.cache[key] = function

    def __getitem__(self, key: Any) -> Callable[..., None]:
        function = self.cache[key]
        return lambda *arguments: self.calls.append((function, arguments))


@contextlib.contextmanager
def _recording(forward: Any) -> Iterator[list[Recorded]]:
    """Have version 4 compile its kernel, but note the launch instead of launching."""
    cache = forward.compile_cache
    forward.compile_cache = recorder = _Recorder(cache)
    try:
        yield recorder.calls
    finally:
        forward.compile_cache = cache
