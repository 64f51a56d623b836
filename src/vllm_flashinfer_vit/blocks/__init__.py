# SPDX-License-Identifier: Apache-2.0
"""What runs between two attention layers: linear layers, activations, sums and norms.

Nothing here knows a model or whether FLASHINFER was asked for: `models` decides.
It imports kernels and machine.
"""
