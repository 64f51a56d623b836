# SPDX-License-Identifier: Apache-2.0
"""A stand-in for cudnn-frontend's graph, for FlashInfer's own graph builder.

It attends as it was declared: by the strides, offsets and scale of the plan's building,
not by those of the call. A plan used for the wrong layout gives wrong numbers here.
"""

import torch

from cases import TOLERANCES, Case, relative_error
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

IMAGES = Case("two-images", (100, 28))


class _Tensor:
    """A declared tensor: cudnn-frontend's attributes with chained setters."""

    def __init__(self, dim=(), stride=(), data_type=None):
        self.dim, self.stride, self.data_type = tuple(dim), tuple(stride), data_type
        self.uid = None
        self.ragged = None

    def get_uid(self):
        return self.uid

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_ragged_offset(self, offsets):
        self.ragged = offsets
        return self

    def set_dim(self, dim):
        self.dim = tuple(dim)
        return self

    def set_stride(self, stride):
        self.stride = tuple(stride)
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def set_name(self, name):
        return self

    def set_output(self, is_output):
        return self


class Graph:
    """Stands in for `cudnn.pygraph`; executes in fp32 on CPU tensors."""

    workspace_size = 4096

    def __init__(self):
        self.is_built = False

    def tensor(self, *, name="", dim, stride, data_type):
        return _Tensor(dim, stride, data_type)

    def tensor_like(self, like):
        return _Tensor(like.shape, like.stride(), like.dtype)

    def sdpa(self, *, q, k, v, seq_len_q, seq_len_kv, attn_scale, **options):
        assert options["use_padding_mask"]
        assert not options["generate_stats"]
        assert not options["use_causal_mask_bottom_right"]
        assert q.stride[3] == k.stride[3] == v.stride[3] == 1
        self.q, self.k, self.v, self.lengths = q, k, v, seq_len_q
        self.lengths_kv, self.scale = seq_len_kv, attn_scale
        self.out = _Tensor()
        return self.out, None

    def get_execution_plan_count(self):
        return int(self.is_built)

    def build(self, heur_modes):
        self.is_built = True

    def get_workspace_size(self):
        return self.workspace_size

    def execute(self, tensors, workspace, handle):
        assert self.is_built and handle == "handle"
        assert workspace.numel() >= self.workspace_size
        lengths = tensors[self.lengths.uid].flatten().tolist()
        assert lengths == tensors[self.lengths_kv.uid].flatten().tolist()
        assert len(lengths) == self.q.dim[0]
        assert max(lengths) <= self.q.dim[2] == self.k.dim[2]
        for i, length in enumerate(lengths):
            if length == 0:
                continue
            q, k, v, out = (
                self._sequence(tensors, x, i, length)
                for x in (self.q, self.k, self.v, self.out)
            )
            group = q.shape[0] // k.shape[0]
            k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
            scores = (q.float() @ k.transpose(1, 2)) * self.scale
            out.copy_(scores.softmax(dim=-1) @ v)

    def _sequence(self, tensors, declared, i, length):
        """`[H, L, D]` of sequence i, found only by what was declared."""
        offsets = tensors[declared.ragged.uid]
        assert offsets.dtype == torch.int64 == declared.ragged.data_type
        assert tuple(offsets.shape) == declared.ragged.dim
        _, heads, _, head_dim = declared.dim
        data = tensors[declared.uid]
        return data.as_strided(
            (heads, length, head_dim),
            declared.stride[1:],
            data.storage_offset() + offsets[i].item(),
        )


def assert_close(out, qkv, case, scale):
    q, k, v = qkv
    padded = torch.nn.functional.pad(v, (0, k.shape[2] - v.shape[2]))
    expected = attention_ref(q, k, padded, case.cu_seqlens(), case.max_seqlen, scale)
    expected = expected[: case.tokens, :, : v.shape[2]]
    error = relative_error(out[: case.tokens], expected)
    assert error <= TOLERANCES[q.dtype]
