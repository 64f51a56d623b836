# SPDX-License-Identifier: Apache-2.0
"""FP8 attention: what settings mean for a layer, the scales it keeps, and their files.

A layer of the engine asks for its policy and its state here, and the kernels compute.
It imports choices, ops, settings, kernels and machine.
"""
