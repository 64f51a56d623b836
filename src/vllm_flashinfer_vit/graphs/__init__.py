# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs: the sizes of their buffers, and managers in place of vLLM's.

vLLM's manager decides which items go into a batch and which budget a batch takes.
It imports engine, whose layers know their bounds, and what is below engine.
"""
