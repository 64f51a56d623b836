# SPDX-License-Identifier: Apache-2.0
"""The blocks of vision towers as programs: what a block is, its steps, their launches.

No model is known here, nor whether FLASHINFER was asked for: `models` says what blocks
are, `engine` gives them programs. It imports choices, ops, settings, gemms
and kernels.
"""
