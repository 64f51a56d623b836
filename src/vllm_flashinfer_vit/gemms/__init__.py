# SPDX-License-Identifier: Apache-2.0
"""GEMMs of linear layers: of libraries, and QuACK's with this package's epilogues.

`catalog.py` names those of rows in FP8, which `scaled_mm.py` launches. `cublaslt.py`
calls cuBLASLt, in 16 bits, too, and `quack.py` QuACK's own kernels. `NAME_gemm.py`
builds and launches what `NAME_kernel.py` computes on the device; `epilogue` is what the
others begin with. Which layers run by them, `blocks` says. It imports kernels.
"""
