# SPDX-License-Identifier: Apache-2.0
"""The custom ops `vllm_flashinfer_vit::attention` and `fp8_attention`.

Both are opaque to torch.compile. Inside them nothing synchronises with the device, and
every device tensor is derived anew from `cu_seqlens`, so a captured graph stays right
when its inputs change.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.formats import DeviceScales, QuantizedQKV
from vllm_flashinfer_vit.ops.batch import Batch, Ready, Taken, ready
from vllm_flashinfer_vit.ops.plan import Plan

# Takes the FP8 state of the layer that it runs for, where layers have one.
Call = Callable[..., torch.Tensor]

_LIBRARY = Library("vllm_flashinfer_vit", "DEF")


class Fp8(NamedTuple):
    """How a batch is attended in FP8; the op's last arguments, in order.

    Attributes:
        method: Where scales come from: `static`, `dynamic` or `block`.
        save: Whether passes count for the history that no FP8 kernel runs.
        state: The layer's; changed in place where passes count. For `static` only its
            scales are read, and blocks are counted. None for `block` where passes do
            not count.
    """

    method: Literal["static", "dynamic", "block"]
    save: bool = False
    state: DeviceScales | None = None


def _no_scales(state: DeviceScales) -> tuple[()]:
    return ()


# What a quantiser is given of a layer's state: scales, and where to count what they cut
# off, which dynamic ones do not, since they know this pass's values.
_GIVEN: dict[str, Callable[[DeviceScales], tuple[torch.Tensor, ...]]] = {
    "static": lambda state: (state.scales, state.clip_counts),
    "dynamic": lambda state: (state.scales,),
    "block": _no_scales,
}


@functools.cache
def _prepare_kernel(name: str) -> Callable[..., Call]:
    return KERNELS[name].load_prepare()


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k as the ops do; see `kernels.rope_ref.rope_ref`."""
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.rope import rope

        return rope(q, k, cos, sin, interleaved)
    from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

    return rope_ref(q, k, cos, sin, interleaved)


def attention(
    batch: Batch, scale: float, plan: Plan, fp8: Fp8 | None = None
) -> torch.Tensor:
    """Attend within each sequence, turning q and k first if cos and sin are given.

    In eager mode the op's function is called past the dispatcher, which takes 9 us a
    layer to match ten arguments to the schema.

    Args:
        batch: The sequences.
        scale: Softmax scale.
        plan: Which kernel serves which batch.
        fp8: Where scales come from, to attend in FP8 where the plan names an FP8
            kernel; None to attend in q's dtype.

    Returns:
        `[T, H, D]`, contiguous, q's dtype.
    """
    # A fake tensor, like any other subclass, is the dispatcher's to handle.
    if torch.compiler.is_compiling() or type(batch.q) is not torch.Tensor:
        op, given = torch.ops.vllm_flashinfer_vit, _as_the_schema_has_it(batch)
        if fp8 is None:
            return op.attention(*given, scale, plan.text)
        state = fp8.state or (None,) * len(DeviceScales._fields)
        return op.fp8_attention(*given, scale, plan.text, fp8.method, fp8.save, *state)
    return _run(batch, scale, plan, fp8)


def kernel_for(batch: Batch, plan: Plan) -> str:
    """Return the name of the kernel that serves a batch."""
    return plan.kernel_for(batch.longest, batch.mean_len)


def taken_by(name: str, fp8: Fp8 | None) -> Taken | None:
    """Return what a kernel takes of a projection that can do more than project.

    Args:
        name: The kernel's.
        fp8: As for `attention`.
    """
    record = KERNELS[name]
    if not record.is_fp8:
        return None if record.rotates else "turned"
    # Scales of the blocks alone follow from what is projected.
    is_alone = fp8 is not None and fp8.method == "block" and fp8.state is None
    return "quantized" if is_alone and record.takes_block_scales else None


def _run(batch: Batch, scale: float, plan: Plan, fp8: Fp8 | None) -> torch.Tensor:
    call = prepare(batch, scale, plan, fp8)
    return call() if fp8 is None or fp8.state is None else call(fp8.state)


def _as_the_schema_has_it(batch: Batch) -> Batch:
    if not isinstance(batch.max_seqlen, int):
        return batch
    longest = torch.tensor(batch.max_seqlen, dtype=torch.int32, device="cpu")
    return batch._replace(max_seqlen=longest)


def prepare(
    batch: Batch,
    scale: float,
    plan: Plan,
    fp8: Fp8 | None = None,
    is_clean: bool = False,
    quantized: QuantizedQKV | None = None,
) -> Call:
    """Settle all of an attention but what its tensors hold.

    The layers of a tower have batches of one shape. Where their tensors are the same,
    too, one call serves them all, and takes the host little more than its launches:
    what layers have of their own, their FP8 state, is handed to each call.

    Args:
        batch: The sequences. q, k and v are read by each call; the others must hold
            what they hold now.
        scale: Softmax scale.
        plan: Which kernel serves which batch.
        fp8: Where scales come from, and what the states of calls are like; None for
            attention in q's dtype.
        is_clean: Whether v's rows of no sequence are finite in every call; see `Ready`.
        quantized: What is attended over, for a kernel that has `taken_by` a projection
            what it quantised; q, k and v are not read then.

    Returns:
        The call, for the current stream, and for a graph's capture if there is one now.
        It takes a layer's state if there is one in `fp8`, else nothing. It returns
        `[T, H, D]`, contiguous, q's dtype; the next call may overwrite it.
    """
    q, k, v = batch.q, batch.k, batch.v
    if q.shape[0] == 0:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return lambda *state: out
    if quantized is not None:
        inputs = ready(batch, is_clean)
        return _attend_blocks(kernel_for(batch, plan), inputs, scale, quantized)
    if not q.stride(2) == k.stride(2) == v.stride(2) == 1:
        # Copies: made anew by every call.
        return lambda *state: prepare(
            batch._replace(q=q.contiguous(), k=k.contiguous(), v=v.contiguous()),
            scale,
            plan,
            fp8,
            is_clean,
        )(*state)
    inputs = ready(batch, is_clean)
    name = kernel_for(batch, plan)
    if fp8 is None:
        return _prepare(name, inputs, scale)
    return _prepare_fp8(name, inputs, scale, fp8)


def _prepare(name: str, inputs: Ready, scale: float) -> Call:
    """Prepare a kernel that computes in q's dtype."""
    kernel = _prepare_kernel(name)
    q, k, v, cos, sin, interleaved, cu_seqlens, longest, is_clean = inputs
    if KERNELS[name].clears:
        kernel = functools.partial(kernel, is_clean=is_clean)
    if cos is None or sin is None:
        return kernel(q, k, v, cu_seqlens, longest, scale)
    if KERNELS[name].rotates and 2 * cos.shape[1] == q.shape[2]:
        return kernel(q, k, v, cu_seqlens, longest, scale, cos, sin, interleaved)
    turns = q, k, cos, sin, interleaved
    if not q.is_cuda:
        return lambda: kernel(*rotate(*turns), v, cu_seqlens, longest, scale)()
    from vllm_flashinfer_vit.kernels.rope import prepare as prepare_rope

    turn, turned = prepare_rope(*turns)
    return _after(turn, kernel(*turned, v, cu_seqlens, longest, scale))


def _after(first: Callable[[], object], then: Call) -> Call:
    def call() -> torch.Tensor:
        first()
        return then()

    return call


def _prepare_fp8(name: str, inputs: Ready, scale: float, fp8: Fp8) -> Call:
    record, given = KERNELS[name], _GIVEN[fp8.method]
    if not record.is_fp8:
        attend, given = _prepare(name, inputs, scale), _no_scales
    elif record.quantized == "rows":
        attend = functools.partial(_attend_rows, name, inputs, scale)
    else:
        attend = _prepare_blocks(name, inputs, scale, fp8)
    if fp8.state is None:
        assert fp8.method == "block"
        return attend
    observe: Callable[[DeviceScales], None] | None = None
    if fp8.save or (record.is_fp8 and fp8.method == "dynamic"):
        observe = _prepare_observing(inputs, fp8.state)

    # Of the state that it was prepared with it holds nothing.
    def call(state: DeviceScales) -> torch.Tensor:
        if observe is not None:
            observe(state)
        return attend(*given(state))

    return call


def _attend_rows(
    name: str,
    inputs: Ready,
    scale: float,
    scales: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with nothing settled: cuDNN is handed all tensors in every call."""
    from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows

    q, k, v, cos, sin, interleaved, cu_seqlens, longest, _ = inputs
    head_dim = q.shape[2]
    width = KERNELS[name].padded_head_dim(head_dim, q.device)
    turns = cos, sin, interleaved
    rows = quantize_rows(q, k, v, cu_seqlens, scales, width, *turns, counts)
    return _prepare_kernel(name)(
        *rows, scales, cu_seqlens, longest, scale, head_dim, q.dtype
    )()


def _attend_blocks(
    name: str, inputs: Ready, scale: float, quantized: QuantizedQKV
) -> Call:
    num_tokens, _, head_dim = inputs.q.shape
    sizes = num_tokens, inputs.longest, scale, head_dim, inputs.q.dtype
    return _prepare_kernel(name)(quantized, inputs.cu_seqlens, *sizes)


def _prepare_blocks(name: str, inputs: Ready, scale: float, fp8: Fp8) -> Call:
    """Prepare a call that takes what its quantiser is given; see `_GIVEN`."""
    q, k, v, cos, sin, interleaved, cu_seqlens, *_ = inputs
    read = q, k, v, cu_seqlens, cos, sin
    if not q.is_cuda:
        from vllm_flashinfer_vit.kernels.quantize_ref import quantize_blocks_ref

        def plain(
            scales: torch.Tensor | None = None, counts: torch.Tensor | None = None
        ) -> torch.Tensor:
            quantized = quantize_blocks_ref(*read, scales, interleaved, counts)
            return _attend_blocks(name, inputs, scale, quantized)()

        return plain
    from vllm_flashinfer_vit.kernels.quantize import prepare as prepare_quantizer

    like = () if fp8.state is None else _GIVEN[fp8.method](fp8.state)
    scales, counts = (*like, None, None)[:2]
    quantize, quantized = prepare_quantizer(*read, scales, interleaved, counts)
    attend = _attend_blocks(name, inputs, scale, quantized)
    if not like:
        return _after(quantize, attend)

    # Apart from `_after`, where handing nothing on would take time, too.
    def call(*given: torch.Tensor) -> torch.Tensor:
        quantize(*given)
        return attend()

    return call


def _prepare_observing(
    inputs: Ready, like: DeviceScales
) -> Callable[[DeviceScales], None]:
    """Prepare to enter the abs-max of real rows into histories, and to renew scales."""
    q, k, v, cos, sin, interleaved, cu_seqlens, *_ = inputs
    turns = cos, sin, interleaved
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels import absmax

        observe = absmax.prepare(q, k, v, cu_seqlens, like.amax, *turns)
        update = absmax.update
    else:
        from vllm_flashinfer_vit.kernels import absmax_ref

        update = absmax_ref.update_ref

        def observe(amax: torch.Tensor) -> None:
            absmax_ref.absmax_ref(q, k, v, cu_seqlens, amax, *turns)

    def call(state: DeviceScales) -> None:
        observe(state.amax)
        update(state)

    return call


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
    interleaved: bool,
    scale: float,
    plan: str,
) -> torch.Tensor:
    batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen, seq_len, interleaved)
    return _run(batch, scale, Plan.decode(plan), None)


def _fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
    interleaved: bool,
    scale: float,
    plan: str,
    method: str,
    save: bool,
    amax: torch.Tensor | None,
    history: torch.Tensor | None,
    position: torch.Tensor | None,
    scales: torch.Tensor | None,
    clip_counts: torch.Tensor | None,
) -> torch.Tensor:
    batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen, seq_len, interleaved)
    state = None
    if scales is not None:
        assert amax is not None and history is not None
        assert position is not None and clip_counts is not None
        state = DeviceScales(amax, history, position, scales, clip_counts)
    fp8 = Fp8(method, save, state)  # type: ignore[arg-type]
    return _run(batch, scale, Plan.decode(plan), fp8)


def _fake(q: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


direct_register_custom_op(
    op_name="attention",
    op_func=_attention,
    fake_impl=_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)

direct_register_custom_op(
    op_name="fp8_attention",
    op_func=_fp8_attention,
    mutates_args=["amax", "history", "position", "scales", "clip_counts"],
    fake_impl=_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)


def schemas() -> tuple[str, ...]:
    """Return the custom ops with their arguments, as compiled code calls them."""
    found = torch.ops.vllm_flashinfer_vit
    return tuple(
        str(op.default._schema) for op in (found.attention, found.fp8_attention)
    )
