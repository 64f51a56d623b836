# SPDX-License-Identifier: Apache-2.0
"""The custom ops that a layer calls, and the types that they carry.

Inside an op nothing synchronises with the device. It imports kernels and machine.
"""
