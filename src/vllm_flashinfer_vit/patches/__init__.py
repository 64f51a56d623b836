# SPDX-License-Identifier: Apache-2.0
"""The Patch mechanism, and patches of what is no model.

That is: platforms, images, graphs, the worker.

`plugin.py` says when each is applied. Nothing here is applied by being imported.
It imports graphs and everything below.
"""
