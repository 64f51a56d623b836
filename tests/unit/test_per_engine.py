# SPDX-License-Identifier: Apache-2.0
"""Records that are one for each engine."""

from types import SimpleNamespace

from vllm_flashinfer_vit.machine.per_engine import PerEngine


class First(PerEngine):
    pass


class Second(PerEngine):
    pass


def config(compilation_config: object) -> SimpleNamespace:
    return SimpleNamespace(compilation_config=compilation_config)


def test_layers_of_an_engine_share_a_record() -> None:
    engine, other = SimpleNamespace(), SimpleNamespace()
    assert First.find(config(engine)) is None
    record = First.of(config(engine))
    # Derived configs are others, with the same compilation config.
    assert First.of(config(engine)) is First.find(config(engine)) is record
    assert First.of(config(other)) is not record


def test_kinds_of_records_are_apart() -> None:
    engine = SimpleNamespace()
    first = First.of(config(engine))
    assert Second.find(config(engine)) is None
    second = Second.of(config(engine))
    assert type(second) is Second and First.find(config(engine)) is first


def test_a_record_goes_with_its_last_layer() -> None:
    engine = SimpleNamespace()
    record = First.of(config(engine))
    del record
    assert First.find(config(engine)) is None


def test_an_id_is_not_taken_while_its_record_lives() -> None:
    record = First.of(config(SimpleNamespace()))
    # Objects made now would get the id of one that is gone.
    assert all(First.find(config(SimpleNamespace())) is not record for _ in range(99))
