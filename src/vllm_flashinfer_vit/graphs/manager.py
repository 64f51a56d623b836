# SPDX-License-Identifier: Apache-2.0
"""Which manager takes the place of the one that vLLM has built."""

from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_flashinfer_vit.graphs.exact import ExactManager
from vllm_flashinfer_vit.graphs.padded import PaddedManager

EXACT = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Glm4vForConditionalGeneration",
    }
)
# Derived from one of them, with a tower that takes no metadata: nothing to share.
_OTHERS = frozenset({"GlmOcrForConditionalGeneration"})


def adopt(manager: EncoderCudaGraphManager, flashinfer: bool) -> None:
    """Turn a manager that vLLM has just built into one of this package's.

    Args:
        manager: Nothing is captured yet.
        flashinfer: Whether the engine asks for FLASHINFER.
    """
    names = {cls.__name__ for cls in type(manager.model).__mro__}
    is_known = names & EXACT and not names & _OTHERS
    is_exact = flashinfer and manager.config.modalities and is_known
    # Runners name vLLM's class, and import it before anything could take its place.
    manager.__class__ = ExactManager if is_exact else PaddedManager
    manager.adopt()
