"""Which texts can be the name of a file, and of one below a folder."""

from __future__ import annotations

import pytest

from deployer.agent.host.files import is_name, is_path_below


@pytest.mark.parametrize(
    ("text", "name", "below"),
    [
        ("a/b c.txt", True, True),
        ("日本/\udce4", True, True),  # a byte that is not UTF-8
        ("..a/.b", True, True),
        ("/etc/passwd", True, False),
        ("a//b", True, False),
        ("a/../b", True, False),
        (".", True, False),
        ("", True, False),
        ("a\0b", False, False),
        ("é\0", False, False),
        ("\ud800", False, False),  # half a character
    ],
)
def test_what_a_file_can_be_called(text: str, name: bool, below: bool) -> None:
    assert (is_name(text), is_path_below(text)) == (name, below)
