"""Python's collection of objects that hold each other in a cycle, kept out of the steps.

A full collection goes through every object there is, beside torch and what its compiler made for some 250 ms, in which
no kernel is launched (docs/performance.md); it comes now and then, and on each rank at another step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def long_lived() -> Iterator[Callable[[], None]]:
    """Give a function that sets what lives now aside, to be called once that is most of what will: until the end of the
    block collections go through younger objects alone. What is set aside is freed as ever once nothing refers to it."""

    def set_aside() -> None:
        gc.collect()  # a cycle that is garbage already would stay
        gc.freeze()

    try:
        yield set_aside
    finally:
        gc.unfreeze()
