# SPDX-License-Identifier: Apache-2.0
"""One file a family of models: what its blocks are, its patches, and what is its own.

Families of one spec share a file. `families` lists them all; `transformers_towers` has
towers that vLLM takes from Transformers. What families do alike: `_shared` makes the
patch of blocks, `ends` those of patch embedding and merger, `metadata` and `longest`
those of what follows from sizes; `own_rotary` tells what attention turns by;
`exact_graphs` lists models that encoder graphs hold exactly. `positions` is GLM-4.xV's
alone. What a block computes is in `blocks`. It imports patches, graphs, engine, blocks
and everything below.
"""
