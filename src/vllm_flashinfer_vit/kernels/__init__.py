# SPDX-License-Identifier: Apache-2.0
"""One file an op, its plain-PyTorch reference beside it under the same stem.

What both need, and no Triton, is in `formats.py`; what is known of each kernel, in
`catalog.py`. It imports `machine` only.
"""
