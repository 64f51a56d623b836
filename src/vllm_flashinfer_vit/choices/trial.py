# SPDX-License-Identifier: Apache-2.0
"""A test run of a kernel on the GPU, before a layer is promised to it."""

from typing import NamedTuple

import torch

from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, DeviceScales
from vllm_flashinfer_vit.ops.attention import Fp8, attention
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan


class _Probe(NamedTuple):
    """A head of a test run: v from N(mean, 1), q and k from N(0, factor^2).

    Attributes:
        mean: Of v.
        factor: On q and k.
        largest_error: Relative, of a kernel that is right.
        name: Where an error is found.
    """

    mean: float
    factor: float
    largest_error: float
    name: str


# e4m3's own error is 0.05 for values around 0, 0.002 around 2 or 0.03 with an output in
# e4m3; there a kernel shows that loses the small terms of a long sum. Scores of 10^6,
# beyond fp16, leave a row its one largest, which e4m3 decides with an error of 0.4.
_PROBES = (
    _Probe(0.0, 1.0, 0.15, "values around 0"),
    _Probe(2.0, 1.0, 0.05, "values around 2"),
    _Probe(0.0, 300.0, 0.7, "large scores"),
)
# The longest first. Some cuDNN returns zeros where keys are split, from 4096 on.
_PROBE_LENGTHS = (4224, 100)


@torch.inference_mode()
def attempt(
    kernel: str, head_dim: int, dtype: torch.dtype, device: str = "cuda"
) -> str | None:
    """Run a kernel once and compare it with plain PyTorch.

    Args:
        kernel: The kernel's name.
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        device: Where to run it.

    Returns:
        What went wrong, or None.
    """
    record = KERNELS[kernel]
    lengths = [min(length, record.max_len or length) for length in _PROBE_LENGTHS]
    longest, num_tokens = lengths[0], sum(lengths)
    try:
        generator = torch.Generator(device).manual_seed(0)
        shape = (num_tokens, 3, len(_PROBES), head_dim)
        qkv = torch.randn(
            shape, generator=generator, device=device, dtype=torch.float32
        )
        factors = torch.tensor([p.factor for p in _PROBES], device=device)
        qkv[:, :2] *= factors[:, None]
        qkv[:, 2] += torch.tensor([p.mean for p in _PROBES], device=device)[:, None]
        q, k, v = qkv.to(dtype).unbind(1)
        cu_seqlens = torch.tensor(
            (0, longest, num_tokens), dtype=torch.int32, device=device
        )
        max_seqlen = torch.tensor(longest, device="cpu")
        scale = head_dim**-0.5
        batch = Batch(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        plan = Plan.of(kernel)
        fp8 = None
        if record.takes_block_scales:
            fp8 = Fp8("block")
        elif record.is_fp8:
            given = qkv.abs().amax((0, 2, 3)) / E4M3_MAX
            state = DeviceScales.on(device)._replace(scales=given)
            fp8 = Fp8("static", state=state)
        out = attention(batch, scale, plan, fp8)
        expected = attention_ref(q, k, v, cu_seqlens, longest, scale).float()
        errors = (out.float() - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
        found = errors.tolist()
    except Exception as caught:
        text = str(caught).strip().partition("\n")[0]
        return f"a test run fails with {type(caught).__name__}: {text}"
    for head, error in zip(_PROBES, found, strict=True):
        if not error < head.largest_error:
            return (
                f"a test run is wrong: its relative error is {error:.2g} for "
                f"{head.name}"
            )
    return None
