"""docs/neighbours.md: every line of ours is understood by the command line as it stands."""

import re
import shlex

import pytest

from deployer.cli import cli
from deployer.errors import UsageError
from tests.support.ferry import REPO

PAGE = (REPO / "docs" / "neighbours.md").read_text()
ROWS = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE) if not row.startswith("there | ")]
OURS = [line for row in ROWS for line in re.findall(r"`torchferry ([^`]*)`", row[-1])]


def understand(words: list[str]) -> None:
    """UsageError for what the command line does not take."""
    with cli.make_context("torchferry", list(words)) as ctx:
        name, command, rest = cli.resolve_command(ctx, ctx._protected_args + ctx.args)
        assert command is not None
        command.make_context(name, rest, parent=ctx).close()


@pytest.mark.parametrize("line", dict.fromkeys(OURS))
def test_each_line_of_ours_is_understood(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    understand(shlex.split(line))


def test_page_has_a_line_for_each_neighbour_and_a_wrong_one_is_seen():
    assert re.findall("^## (.*)", PAGE, re.MULTILINE)[1:] == ["accelerate", "TRL", "SkyPilot", "dstack", "submitit"]
    assert len(OURS) > 25
    with pytest.raises(UsageError):
        understand(["run", "--no-such-option", "x"])
