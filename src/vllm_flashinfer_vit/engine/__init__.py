# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls: the answer to a model's question, the layer, the warm-up.

Patches and models are unknown here; `plugin.py` hands the layer what it has to call.
It imports blocks and everything below.
"""
