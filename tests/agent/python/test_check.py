"""What an interpreter is asked, with packaging at hand or without it: what cannot be told counts as unmet."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from deployer.agent import checkpy

PARSERS = [Requirement, None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, of which this interpreter sees no others."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def add(site: Path, name: str, version: str, *requires: str, url: dict | None = None) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps(url))


def unmet(text: str, parser: object, **more: bool) -> list[str]:
    return checkpy.unmet(text, parser, {}, **more)


@pytest.mark.parametrize("parser", PARSERS)
def test_extras_are_looked_into(site: Path, parser: object) -> None:
    add(
        site,
        "web",
        "1.0",
        'click>=8; extra == "cli"',
        'all; extra == "all"',
        "plain>=99",
        'web[cli,all]; extra == "all"',
    )
    add(site, "click", "7.0")
    add(site, "all", "1.0")
    assert unmet("web", parser) == []
    assert unmet("web[cli]>=1", parser) == ['click>=8; extra == "cli" (has 7.0)']
    assert unmet("web[all]", parser) == ['click>=8; extra == "cli" (has 7.0)']
    assert unmet("web[gone]", parser) == []  # as pip, which warns


GIT = {"url": "https://h.example/bee.git", "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "0123"}}


@pytest.mark.parametrize("parser", PARSERS)
def test_an_address_is_met_by_what_was_installed_from_there(site: Path, parser: object) -> None:
    add(site, "bee", "1.0", url=GIT)
    add(site, "cee", "1.0", url={"url": "https://u:p@h.example/c.whl", "archive_info": {}})
    add(site, "dee", "1.0")
    for text in (
        "bee @ git+https://h.example/bee.git@v1",
        "bee @ git+https://h.example/bee.git@0123",
        "bee @ git+https://h.example/bee.git",
    ):
        assert unmet(text, parser) == []
    assert unmet("cee @ https://h.example/c.whl", parser) == []
    for text in (
        "bee @ git+https://h.example/bee.git@v2",
        "cee @ https://h.example/d.whl",
        "dee @ https://h.example/d.whl",
    ):
        assert unmet(text, parser) == [f"{text} (has 1.0, not from there)"]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_constraint_is_met_by_what_is_not_there(site: Path, parser: object) -> None:
    add(site, "bee", "1.0")
    assert unmet("gone<1", parser, constraint=True) == [] == unmet("bee<2", parser, constraint=True)
    assert unmet("bee<1", parser, constraint=True) == ["bee<1 (has 1.0)"]


@pytest.mark.parametrize(
    ("text", "version", "parser"),
    [
        ("bee>=1", "1.0rc1", None),
        ("bee>=1", "1!2.0", None),
        ("bee>1.0", "1.0.post1", None),
        ("bee>=1.0rc1", "1.0", None),
        ("bee; python_version ~= '3.8'", "1.0", None),
        ("bee; platform_release > '1'", "1.0", None),
        ("bee; print(1)", "1.0", None),
        ("bee; print(1)", "1.0", Requirement),
        ("bee >< 1", "1.0", Requirement),
        ("bee >< 1", "1.0", None),
        ("bee>=1", "nonsense", None),
    ],
)
def test_what_cannot_be_told_counts_as_unmet(site: Path, text: str, version: str, parser: object) -> None:
    add(site, "bee", version)
    assert unmet(text, parser) == [f"{text} (cannot be checked)"]


def test_markers_without_packaging_agree_with_packaging() -> None:
    names = ["python_version", "python_full_version", "implementation_version"]
    versions = ["3", "3.8", "3.11", "3.9.1", "4", "2.7"]
    texts = [f'{n} {op} "{v}"' for n, op, v in itertools.product(names, [">=", "<=", "==", "!=", ">", "<"], versions)]
    texts += [f'"{v}" {op} python_version' for op, v in itertools.product([">=", "<", "!="], versions)]
    words = ["sys_platform", "os_name", "platform_machine", "platform_system", "implementation_name"]
    texts += [
        f'{n} {op} "{v}"'
        for n, op, v in itertools.product(words, ["==", "!=", "in", "not in"], ["linux", "posix", "x86_64"])
    ]
    texts += [f"({a}) and {b} or {c}" for a, b, c in zip(texts, texts[7:], texts[20:], strict=False)]
    texts += ['extra == "a"', 'extra != "a"', 'python_version in "3.8 3.11"']
    for text in texts:
        found = checkpy.parse_simply(f"bee; {text}").applies("a")
        assert found == Marker(text).evaluate({"extra": "a"}), text
