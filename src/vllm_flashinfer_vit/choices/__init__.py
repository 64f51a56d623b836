# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves which calls: measured tables, and what this machine can run.

Also how tables are made: measuring, deriving classes, and a kernel's test run.
It imports ops, settings, gemms, kernels and machine.
"""
