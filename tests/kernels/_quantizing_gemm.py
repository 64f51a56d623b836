# SPDX-License-Identifier: Apache-2.0
"""QKV projections that write e4m3: towers' sizes, and what they write of a batch."""

import itertools

import torch

from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.kernels.formats import BLOCK

# Heads and inputs.
TOWERS = [
    (Heads(80, 16, 16, False), 1280),
    (Heads(72, 16, 16, False), 1152),
    (Heads(72, 12, 12, True), 1536),
    (Heads(64, 16, 16, True), 1024),
    (Heads(64, 12, 12, False), 768),
    (Heads(88, 2, 2, False), 256),
    (Heads(96, 4, 4, False), 384),
    (Heads(112, 3, 3, True), 224),
    (Heads(128, 12, 12, False), 1536),
    # Grouped queries.
    (Heads(80, 12, 4, False), 1280),
]


def block_lengths(case):
    """How many tokens each block of a batch has, 0 for one of no sequence."""
    ends = case.cu_seqlens().tolist()
    found = [0] * (case.rows // BLOCK + len(ends) - 1)
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        for i, first in enumerate(range(start, end, BLOCK)):
            found[start // BLOCK + n + i] = min(BLOCK, end - first)
    return torch.tensor(found)


def used(tensor, lengths, dim):
    """What belongs to blocks of sequences, of as many parts along a dimension."""
    parts = tensor.unflatten(dim, (len(lengths), -1))
    return parts.transpose(0, dim)[(lengths > 0).to(tensor.device)]
