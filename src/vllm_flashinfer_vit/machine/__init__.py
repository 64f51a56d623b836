# SPDX-License-Identifier: Apache-2.0
"""This machine: what is installed, what the GPU is, what is wrong, how to mend it.

Nothing here knows a kernel by name, and nothing creates a CUDA context.
It imports nothing of the package.
"""
