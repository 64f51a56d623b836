# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls: the answer to a model's question, the layer, the warm-up.

Also vLLM's form of a batch, and what operators read (`counting`, `metrics`). It knows
no patch and no model: `plugin.py` hands it what to call. It imports blocks and below.
"""
