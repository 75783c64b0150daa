"""Series of a metrics.jsonl, whoever wrote it, and their drawing in a terminal."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer.curves import metrics
from deployer.curves.draw import NOTHING, draw_curve
from deployer.curves.metrics import read_metrics
from deployer.curves.points import axis_of, smoothed, thinned


def lines_of(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_numbers_become_series_by_key_with_the_main_ones_first():
    data = lines_of(
        {"step": 1, "zeta": 9, "loss": 3.5, "lr": 1e-3, "mfu": None, "note": "text", "skipped": True},
        {"step": 1, "eval_loss": 3.4},
        {"step": 2, "loss": 3.0, "lr": 2e-3, "mfu": None},
    )
    found = read_metrics(data)
    assert found.keys == ["loss", "eval_loss", "lr", "zeta"]
    assert list(found.get("loss")) == [(1, 3.5), (2, 3.0)]
    assert (found.get("loss").last, found.get("loss").at(1.5), found.get("eval_loss").at(0)) == (3.0, 3.5, None)


def test_later_attempt_replaces_what_it_does_again():
    first = [{"step": step, "loss": 10 - step} for step in range(1, 9)] + [{"step": 8, "eval_loss": 5}]
    found = read_metrics(lines_of(*first, {"step": 5, "loss": 1}, {"step": 5, "eval_loss": 4}, {"step": 6, "loss": 0}))
    assert list(found.get("loss")) == [(1, 9), (2, 8), (3, 7), (4, 6), (5, 1), (6, 0)]
    assert list(found.get("eval_loss")) == [(5, 4)]


def test_evaluation_that_is_written_late_ends_nothing():
    found = read_metrics(lines_of({"step": 5, "loss": 2}, {"step": 6, "loss": 1}, {"step": 5, "eval_loss": 3}))
    assert (len(found.get("loss")), len(found.get("eval_loss"))) == (2, 1)


def test_broken_lines_and_numbers_that_are_none_cost_themselves_alone():
    data = (
        b'{"step": 1, "loss": 3}\nnot json\n[1]\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": Infinity, "big": 1'
        + b"0" * 400
        + b'}\n\n{"step": 4, "long": "'
        + b"x" * metrics.MAX_LINE
        + b'"}\n{"step": 5, "loss": 2}\n{"step": 6, "lo'
    )
    found = read_metrics(data)
    assert [(s, None if math.isnan(v) else v) for s, v in found.get("loss")] == [(1, 3), (2, None), (3, None), (5, 2)]
    assert (found.damaged, found.keys) == (3, ["loss"])


def test_program_without_steps_is_counted_line_by_line():
    assert list(read_metrics(b'{"loss": 3}\n{"loss": 2}').get("loss")) == [(1, 3), (2, 2)]


def test_end_of_a_file_that_is_too_long_is_read(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_BYTES", 60)
    found = read_metrics(lines_of(*({"step": n, "loss": n} for n in range(1, 20))))
    assert found.is_cut and found.damaged == 0
    assert list(found.get("loss")) == [(18, 18), (19, 19)]


def test_keys_are_bounded():
    found = read_metrics(lines_of({"step": 1, "k" * 101: 1}, {f"k{n}": 1 for n in range(500)}))
    assert len(found.series) == metrics.MAX_KEYS


@given(st.binary(max_size=200) | st.lists(st.dictionaries(st.text(), st.floats() | st.integers() | st.none())))
def test_any_bytes_are_read(raw):
    data = raw if isinstance(raw, bytes) else b"\n".join(json.dumps(record).encode() for record in raw)
    for series in read_metrics(data).series.values():
        assert sorted(set(series.steps)) == list(series.steps)


COLOUR = re.compile(r"\x1b\[(0|38;5;\d+)m")
FALLING = [(step, 3 * math.exp(-step / 100)) for step in range(1, 400)]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (200, 50), (1, 1)])
@pytest.mark.parametrize("colour", [True, False])
def test_curves_fit_into_the_room_that_they_are_given(width, height, colour):
    lines = draw_curve({"abc": FALLING, "def": [(x, y + 1) for x, y in FALLING]}, width, height, colour=colour)
    bare = [COLOUR.sub("", line) for line in lines]
    assert len(bare) == max(height, 5)
    assert max(map(len, bare)) <= max(width, 20)
    assert not any("\x1b" in line for line in bare)
    assert (lines != bare) == colour


def test_two_curves_in_ascii():
    lines = draw_curve({"up": [(1, 1), (9, 2)], "down": [(1, 2), (9, 1)]}, 40, 10, colour=False, plain=True)
    assert lines[0] == "* up  + down"
    assert "".join(lines).isascii()
    assert lines[1].lstrip().startswith("2.0|+") and lines[1].endswith("*")
    assert lines[-1].split() == ["2", "4", "6", "8"]


ODD = {
    "one": [(1.0, 2.5)],
    "constant": [(float(n), 2.5) for n in range(9)],
    "zero": [(0.0, 0.0)],
    "gaps": [(1.0, math.nan), (2.0, 1.0), (3.0, math.nan), (4.0, math.inf), (5.0, 2.0)],
    "huge": [(1.0, 1e299), (2.0, -1e299)],
    "beyond": [(1.0, 1e308), (2.0, 1.0)],
    "tiny": [(1.0, 5e-324), (2.0, 1e-323)],
    "near": [(1e18, 1e20), (1e18 + 4096, 1e20 + 1e5)],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_drawn(name):
    lines = draw_curve({name: ODD[name]}, 40, 10, colour=False)
    assert len(lines) == 10
    assert any("\u2800" < letter <= "\u28ff" or letter == "•" for line in lines for letter in line), lines


def test_nothing_is_said_where_nothing_is_to_draw():
    assert draw_curve({}, 40, 10) == draw_curve({"a": [], "b": [(1.0, math.nan)]}, 40, 10) == [NOTHING]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=30), st.integers(0, 90), st.integers(0, 30))
def test_no_numbers_end_the_process(points, width, height):
    points = sorted(points, key=lambda point: point[0] if point[0] == point[0] else 0.0)
    lines = draw_curve({"a\x1b[2J": points, "b": []}, width, height, colour=False)
    assert not any("\x1b" in line for line in lines)


def test_ticks_are_round_and_told_apart():
    def labels(low: float, high: float, most: int = 5, **how: bool) -> list[str]:
        return list(axis_of([low, high], most=most, **how).labels)

    assert labels(0, 1) == ["0.0", "0.5", "1.0"]
    assert labels(1, 3, whole=True) == ["1", "2", "3"]
    assert labels(0, 2e-4) == ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]
    assert labels(0, 250_000) == ["0", "100k", "200k"]
    assert labels(2.1, 2.2) == ["2.10", "2.15", "2.20"]
    assert labels(-0.5, 1.5) == ["-0.5", "0.0", "0.5", "1.0", "1.5"]
    assert labels(7, 7) == ["7"]


def test_thinning_keeps_the_peaks_and_the_gaps():
    points = [(float(n), 0.0) for n in range(10_000)]
    points[5000], points[7000] = (5000.0, 9.0), (7000.0, math.nan)
    kept = thinned(points, axis_of([0, 9999], most=5), 50)
    assert len(kept) <= 5 * 51
    assert (5000.0, 9.0) in kept and any(math.isnan(y) for _, y in kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_smoothing_is_the_mean_of_the_last_values():
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 3.0), (4.0, 5.0)]
    assert [y for _, y in smoothed(points, 2) if y == y] == [1.0, 2.0, 4.0]
    assert smoothed(points, 1)[2] == (3.0, 3.0)
