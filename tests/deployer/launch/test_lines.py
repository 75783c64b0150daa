"""A followed log's lines, taken by one who waits so long and no longer."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from deployer.launch import lines as module
from deployer.launch.follow import Watcher
from deployer.launch.lines import Lines


class NoHost:
    def close(self) -> None:
        pass


def test_lines_that_come_faster_than_they_are_taken_do_not_hold_off_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def floods(*args: Any, view: Any, **how: Any) -> None:
        for number in itertools.count():
            view.out.write(b"%d\n" % number)

    monkeypatch.setattr(module, "follow_to_end", floods)
    host: Any = NoHost()
    lines = Lines(host, "j-1", request={}, bare=True, watcher=Watcher())
    taken = 0
    with pytest.raises(TimeoutError):
        for _ in lines.within(0.2):
            time.sleep(0.01)  # a slow terminal
            taken += 1
            assert taken < 1000
    lines.leave()
    assert taken > 0
