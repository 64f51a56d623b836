# SPDX-License-Identifier: Apache-2.0
"""The blocks of vision towers as programs: what a block is, its steps, their launches.

`spec` says what a block is, `attach` which blocks get a `program`. Its steps are
`attention`, which has the projection (`qkv`), `mlp` or `fp8_mlp`, and `norms`. `layers`
finds what runs a linear layer, `quack_turn`, `quack_quantize` and `quack_act` which
layers get a GEMM with an epilogue of this package. `tower_pass` has what the blocks of
a tower share.

No model is known here, nor whether FLASHINFER was asked for: `models` says what blocks
are, `engine` gives them programs. It imports choices, ops, settings, gemms and kernels.
"""
