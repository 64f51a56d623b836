# SPDX-License-Identifier: Apache-2.0
"""This machine: what is installed, the GPU, what is wrong, and how to mend it.

Also files (`files`, `json_files`), child processes (`child`), and records that are one
for each engine of this process (`per_engine`). It judges libraries that kernels run on,
and creates no CUDA context. It imports nothing of the package.
"""
