# SPDX-License-Identifier: Apache-2.0
"""What a block's `forward` is given, as its spec says, in the form of a `Batch`."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import Pass


class Inputs:
    """Finds in what one block is given what attention reads."""

    def __init__(self, spec: BlockSpec, block: torch.nn.Module) -> None:
        """Take a block and what it is."""
        self._spec, self._block = spec, block

    def build(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what a capture may need, for a stream of `width` columns."""
        if device.type == "cuda" and dtype == torch.bfloat16:
            from vllm_flashinfer_vit.kernels.padding import compile_clearing

            compile_clearing(width, dtype, device)

    def offsets(self, now: Pass, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Return `cu_seqlens`, None for a dense batch without padding."""
        mask = self.mask_in(given)
        return given.get("cu_seqlens") if mask is None else now.offsets(mask)

    def clear_padding(
        self, now: Pass, x: torch.Tensor, given: Mapping[str, Any]
    ) -> None:
        """Clear a graph's padding in the stream, so that no block has to in its v.

        What follows from zeros is finite in bf16, which holds what fp32 does.
        """
        if not (x.is_cuda and x.dtype == torch.bfloat16):
            return
        cu_seqlens = self.offsets(now, given)
        # Offsets in elements are attention's to read.
        if cu_seqlens is None or given.get("sequence_lengths") is not None:
            return
        if torch.cuda.is_current_stream_capturing():
            from vllm_flashinfer_vit.kernels.padding import clear_padding

            clear_padding(cu_seqlens, x.view(now.normed.shape))
            now.is_clean = True

    def mask_in(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the mask of padded keys, see `BlockSpec.key_mask`, or None."""
        name = self._spec.key_mask
        return None if name is None else given.get(name)

    def lengths(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """Return `cu_seqlens`, `max_seqlen` and `seq_len` of a `Batch`."""
        if self._spec.is_packed:
            seq_len = len(x) if cu_seqlens is None else 0
            return cu_seqlens, max_seqlen, seq_len
        if cu_seqlens is None:
            return None, None, x.shape[1]
        if max_seqlen is None:
            # Of rows that are padded.
            max_seqlen = torch.tensor(x.shape[1], dtype=torch.int32, device="cpu")
        return cu_seqlens, max_seqlen, 0

    def own_in(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what `Rotary.own` reads of what `forward` was given."""
        rotary = self._spec.rotary
        if rotary is None or rotary.own is None:
            return ()
        return tuple(given.get(name) for name in rotary.parameters)

    def tables(
        self, now: Pass, x: torch.Tensor, given: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Return what turns q and k: cosines and sines, `[T, R / 2]` each, or None."""
        rotary, found = self._spec.rotary, self.tables_in(given)
        if rotary is not None and rotary.own is not None:
            make = functools.partial(rotary.own, self._block, x)
            return now.own_tables(rotary, make, self.own_in(given))
        if rotary is None or found is None:
            return None, None
        return now.tables(rotary, found)

    def tables_in(self, given: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
        """Return what the spec's rotary names, or None where nothing turns."""
        rotary = self._spec.rotary
        if rotary is None or rotary.own is not None:
            return None
        if given.get(rotary.parameters[0]) is None:
            return None
        return tuple(given[name] for name in rotary.parameters)
