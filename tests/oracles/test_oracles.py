"""Whatever can be compared with code nobody here wrote agrees with it. `python -m tests.oracles` prints the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.measure import Measured, Oracle, worst
from tests.oracles.page import PAGE, row_begin
from tests.oracles.table import ORACLES


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: f"{oracle.name}: {oracle.input}".replace(" ", "-"))
def test_ours_is_within_the_tolerance_of_the_oracle(oracle: Oracle, tmp_path: Path):
    measured = oracle.measure(tmp_path)
    assert measured.holds, measured


def test_a_comparison_that_is_not_a_number_does_not_hold():
    assert not Measured("ours", "theirs", "input", 1.0, worst([0.0, float("nan"), 0.5])).holds


def test_correctness_page_names_every_oracle_with_its_tolerance_and_the_command():
    page = PAGE.read_text()
    rows = [row_begin(Measured(o.name, o.oracle, o.input, o.tolerance, 0.0)) for o in ORACLES]
    assert [row for row in rows if row not in page] == []
    assert sum(line.startswith("| ") for line in page.splitlines()) == len(ORACLES) + 1  # and the head of the table
    assert "python -m tests.oracles" in page
