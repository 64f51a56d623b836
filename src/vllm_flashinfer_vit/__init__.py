# SPDX-License-Identifier: Apache-2.0
"""The FLASHINFER attention backend for vLLM's multimodal encoders.

Importing this package loads neither vLLM, nor Triton, nor CUDA; vLLM calls
`register` through the entry point group `vllm.general_plugins`.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Activate the plugin in this process; safe to call more than once.

    Called by vLLM in every process that it starts. Initialises no CUDA. A failure
    is logged, or raised if `VLLM_FLASHINFER_VIT_STRICT` is set.
    """
    try:
        # Of a newer vLLM, what this imports may have moved.
        from vllm_flashinfer_vit.plugin import register as register_plugin

        register_plugin()
    except Exception:
        import logging

        from vllm_flashinfer_vit.settings import is_strict

        logging.getLogger("vllm.plugins.flashinfer_vit").exception(
            "vllm-flashinfer-vit is not active in this process; vLLM runs without it"
        )
        if is_strict():
            raise
