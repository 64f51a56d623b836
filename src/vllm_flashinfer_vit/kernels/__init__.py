# SPDX-License-Identifier: Apache-2.0
"""One file an op, and beside it, as `STEM_ref.py`, its plain-PyTorch reference if any.

What both need, and no Triton, is in `formats.py`. The `entry` of a kernel's record in
`catalog.py` says which file has it: `flash.py` has `triton`. It imports `machine` only.
"""
