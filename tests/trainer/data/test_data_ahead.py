"""Steps that are laid out ahead of their turn."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from tests.support.limits import HANG_S
from trainer.data.batches.steps import Ahead


@dataclass(frozen=True)
class Alone:
    rank: int = 0
    world_size: int = 1


@dataclass
class Builder:
    """Builds a step as its number, and notes the order."""

    built: list[int] = field(default_factory=list)
    done: threading.Condition = field(default_factory=threading.Condition)

    def build(self, step: int) -> list:
        with self.done:
            self.built.append(step)
            self.done.notify_all()
        if step == 6:
            raise ValueError("a broken row")
        return [step]

    def wait_for(self, count: int) -> list[int]:
        with self.done:
            assert self.done.wait_for(lambda: len(self.built) >= count, timeout=HANG_S)
            return list(self.built)


@pytest.mark.parametrize(("depth", "built"), [(1, [0, 1]), (3, [0, 1, 2, 3])])
def test_so_many_steps_are_laid_out_before_they_are_asked_for(depth, built):
    builder = Builder()
    ahead = Ahead(builder.build, Alone(), depth=depth)
    assert ahead.take(0, total_steps=9) == [0]
    assert builder.wait_for(len(built)) == built
    ahead.close()


def test_every_step_is_built_once_and_none_behind_the_last():
    builder = Builder()
    ahead = Ahead(builder.build, Alone(), depth=3)
    assert [ahead.take(step, total_steps=5) for step in range(5)] == [[0], [1], [2], [3], [4]]
    assert builder.built == [0, 1, 2, 3, 4]
    ahead.close()


def test_another_step_than_the_next_is_built_when_it_is_asked_for():
    builder = Builder()
    ahead = Ahead(builder.build, Alone(), depth=2)
    assert [ahead.take(step, total_steps=99) for step in (0, 9, 3, 4)] == [[0], [9], [3], [4]]
    ahead.forget()
    assert ahead.take(5, total_steps=99) == [5]
    ahead.close()


def test_a_step_that_cannot_be_built_fails_at_its_own_turn():
    ahead = Ahead(Builder().build, Alone(), depth=3)
    assert [ahead.take(step, total_steps=9) for step in (4, 5)] == [[4], [5]]
    with pytest.raises(ValueError, match="a broken row"):
        ahead.take(6, total_steps=9)
    ahead.close()
