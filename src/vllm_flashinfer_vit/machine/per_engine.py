# SPDX-License-Identifier: Apache-2.0
"""Records that the layers of one engine of this process share."""

from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary


class PerEngine:
    """What one engine has one of, such as its counters; a base class.

    Each layer of the engine holds it, so that it goes with the last one.
    """

    # By id of the compilation config, which vLLM hands on to the configs that it
    # derives for parts of a model. Only an index: it keeps no record.
    _records: ClassVar[WeakValueDictionary[int, Any]]

    def __init_subclass__(cls) -> None:
        """Give each kind of record an index of its own."""
        cls._records = WeakValueDictionary()

    def __init__(self, vllm_config: Any) -> None:
        """Begin with nothing; use `of`, which gives all layers of an engine one."""
        # Held, so that its id is not another one's.
        self._compilation_config = vllm_config.compilation_config

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """Return an engine's, made if there is none.

        Args:
            vllm_config: The engine's, or one that vLLM derived from it for a part of
                the model.
        """
        found = cls.find(vllm_config)
        if found is None:
            found = cls(vllm_config)
            cls._records[id(vllm_config.compilation_config)] = found
        return found

    @classmethod
    def find(cls, vllm_config: Any) -> Self | None:
        """Return an engine's, or None if no layer has asked for it.

        Args:
            vllm_config: As for `of`.
        """
        return cls._records.get(id(vllm_config.compilation_config))
