# SPDX-License-Identifier: Apache-2.0
"""One file a family of models: its patches, and what is its own in them.

What several families do alike is in `_shared.py`, what a block computes in `blocks`.
It imports patches, engine, blocks and everything below.
"""
