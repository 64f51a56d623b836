# SPDX-License-Identifier: Apache-2.0
"""vLLM's vision towers without an engine: which one, its weights, the CPU platform.

For the commands, tests and benchmarks; what engines run never imports it.
It may import every folder below it, not `commands`.
"""
