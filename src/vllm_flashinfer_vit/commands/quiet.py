# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM and what it runs on quiet, whose logs are for engines."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """Keep vLLM's log off standard output, and down to what a user can act on."""
    verbose = os.environ.get("VLLM_LOGGING_LEVEL", "").upper() in ("DEBUG", "INFO")
    with ExitStack() as stack:

        def set_level(name: str, level: int) -> None:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)

        if not verbose:
            # Its import sets the level, too; it warns of language models that no tower
            # has.
            import transformers.utils.logging  # noqa: F401

            set_level("torch", logging.ERROR)
            set_level("transformers", logging.ERROR)
        # Its import sets level and stream of vLLM's logger.
        import vllm.logger  # noqa: F401

        for handler in logging.getLogger("vllm").handlers:
            if getattr(handler, "stream", None) is sys.stdout:
                assert isinstance(handler, logging.StreamHandler)
                stack.callback(handler.setStream, sys.stdout)
                handler.setStream(sys.stderr)
        if not verbose:
            set_level("vllm", logging.ERROR)
            set_level("vllm.plugins.flashinfer_vit", logging.WARNING)
        yield
