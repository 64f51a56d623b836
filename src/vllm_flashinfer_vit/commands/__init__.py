# SPDX-License-Identifier: Apache-2.0
"""The command line: one file for each command; `job` is what they share.

A command reads its options, calls the rooms below and reports; it decides no kernel.
It imports every other room, and no room imports it.
"""
