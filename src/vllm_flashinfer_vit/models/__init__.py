# SPDX-License-Identifier: Apache-2.0
"""One file a family of models: what its blocks are, its patches, and what is its own.

What several families do alike is in `_shared.py` and `metadata.py`, what a block
computes in `blocks`. It imports patches, engine, blocks and everything below.
"""
