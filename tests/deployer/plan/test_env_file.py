"""Files of variables: what all tools read alike is read, all else refused with its line, and no value shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.errors import UsageError
from deployer.plan.env_file import EnvFile, env_file_of, parse_env

SECRET = "canary55"


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        ("# a remark\n\n  \n", {}),
        ("A=1\nexport B=2\n  C = 3 \r\n", {"A": "1", "B": "2", "C": "3"}),
        ("A=\nB=''\n", {"A": "", "B": ""}),
        ("A=a b # remark\nB=a#b\n", {"A": "a b", "B": "a#b"}),
        ("A='$x `y` #z \"' # remark\n", {"A": '$x `y` #z "'}),
        (r'A="x\ny \"z\" \\ \$w"', {"A": 'x\ny "z" \\ $w'}),
        ("URL=postgres://u:p=w@h/d?a=b\n", {"URL": "postgres://u:p=w@h/d?a=b"}),
        ("\ufeffA=ä\n", {"A": "ä"}),
        ("A=5$\n", {"A": "5$"}),
    ],
)
def test_what_all_tools_read_alike_is_read(text: str, variables: dict[str, str]) -> None:
    assert parse_env(text.encode(), "a.env") == variables


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"canary55", "has no ="),
        (b"1A=canary55", "names no variable before ="),
        (b"A-B=canary55", "names no variable before ="),
        (b"=canary55", "names no variable before ="),
        (b"A='canary55", "has no end of the quote around A"),
        (b'A="canary55" x', "has no end of the quote around A"),
        (b"A=x'canary55'", "has a quote inside the value of A"),
        (b"A=${canary55}", "has a $ or ` in the value of A"),
        (b'A="$canary55"', "has a $ or ` in the value of A"),
        (b"A=`canary55`", "has a $ or ` in the value of A"),
        (rb'A="\canary55"', "has a \\ in A before a letter"),
        (rb"A='canary55\\'", "has a \\\\ in the single quotes around A"),
        (b"A=#canary55", "begins the value of A with #"),
        (b"A=\xffcanary55", "is not UTF-8"),
        (b"A=canary55\0", "has a NUL byte in A"),
        (b"FIRST=canary55", "sets FIRST again, which line 1 has set"),
        (b"A=canary55" + b"x" * 100_000, "gives A more than 100 kB"),
    ],
)
def test_line_that_is_not_understood_is_named_without_its_value(line: bytes, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_env(b"FIRST=1\n\n" + line + b"\nLAST=2\n", "a.env")
    error = raised.value
    assert error.message.startswith(f"this line {says}") and error.where == ("a.env:3",)
    assert SECRET not in f"{error.message}{error.where}{error.hint}"


@pytest.mark.parametrize("name", ["RANK", "CUDA_VISIBLE_DEVICES", "TORCHFERRY_RUN_DIR"])
def test_launchers_own_variables_are_not_set(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.env").write_text(f"{name}=1\n")
    with pytest.raises(UsageError, match=f"may not set {name}"):
        env_file_of(str(tmp_path / "a.env"))


def test_file_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        env_file_of(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        env_file_of(str(tmp_path))
    (tmp_path / "large").write_bytes(b"A=1\n" * 2_500_000)
    with pytest.raises(UsageError, match="larger than 1 MB"):
        env_file_of(str(tmp_path / "large"))


def test_paths_that_do_not_travel_are_the_name_and_what_it_leads_to(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "keys").mkdir(parents=True)
    (project / "keys" / "real.env").write_text("A=1\n")
    (project / "link.env").symlink_to("keys/real.env")
    (tmp_path / "outside.env").write_text("A=1\n")
    assert EnvFile(str(project / "link.env"), {}).paths_below(project) == ["keys/real.env", "link.env"]
    assert EnvFile(str(tmp_path / "outside.env"), {}).paths_below(project) == []
