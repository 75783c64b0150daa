"""Requirements files are read as pip reads them; what cannot be asked of an interpreter counts as unmet."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from pip._internal.req.req_file import parse_requirements, preprocess

from deployer.agent.python.spec import PythonSpec
from deployer.environment.choose import read_needs
from deployer.environment.needs import Tree
from deployer.environment.requirements_txt import logical_lines
from deployer.errors import UsageError

HASH = "--hash=sha256:" + "0" * 64


def tree_of(folder: Path, **ignored: str) -> Tree:
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    return Tree(folder, {path: str(hash((folder / path).read_bytes())) for path in files if path not in ignored})


def spec_of(folder: Path, *files: tuple[str, str | bytes]) -> PythonSpec:
    for name, content in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_needs(tree_of(folder), None).spec()


def asked_of_pip(path: Path) -> tuple[set[str], set[str]]:
    """(requirements, constraints) by name that pip itself finds, from the file on."""
    found = list(parse_requirements(str(path), session=None))
    texts = [(str(Requirement(line.requirement)), line.constraint) for line in found if not line.is_editable]
    return {text for text, limits in texts if not limits}, {text for text, limits in texts if limits}


pieces = st.sampled_from(["a", " ", "#", "\\", "\n", "\r\n", "\t", "-e", "==1", "\\\n", " #", "\x0b"])


@given(st.lists(pieces, max_size=12).map("".join))
def test_lines_are_pip_s(text):
    assert list(logical_lines(text)) == list(preprocess(text))


@pytest.mark.parametrize(
    "text",
    [
        "numpy==1.26.4 \\\n    " + HASH + " \\\n    " + HASH + "\ntorch>=2\t# ours\n",
        "-i https://i.example/simple\n--extra-index-url=https://x.example\n-f ./wheels\n--pre\nnumpy ; os_name!='x'\n",
        "-r more.txt\n-cpins.txt\n--constraint=pins.txt\nattrs[dev,x] >=1,<2\n",
        "name @ https://h.example/name-1.0.tar.gz#sha256=00 ; sys_platform != 'win32'\n",
        "# -r gone.txt\n\n   \nnumpy  # -r gone.txt\n",
        "numpy==1.0 --config-settings x=y --global-option='--a b'\n",
        "--requirement more.txt\n--trusted-host h\n--no-binary :all:\n--require-hashes\n",
    ],
)
def test_what_is_asked_for_is_what_pip_finds(tmp_path, text):
    spec = spec_of(
        tmp_path, ("requirements.txt", text), ("more.txt", "click\n-c pins.txt\n"), ("pins.txt", "click<9\n")
    )
    requires, constraints = asked_of_pip(tmp_path / "requirements.txt")
    shown = {text.replace("#sha256=00", "") for text in requires}
    assert (set(spec.locked), set(spec.constraints)) == (shown, constraints) and not spec.unchecked


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_files_as_editors_write_them(tmp_path, encoding):
    text = "# -*- coding: latin-1 -*-\r\nnumpy  # é\r\n" if encoding == "latin-1" else "numpy  # é\r\n"
    assert spec_of(tmp_path, ("requirements.txt", text.encode(encoding))).locked == ("numpy",)
    assert asked_of_pip(tmp_path / "requirements.txt")[0] == {"numpy"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"requirements.txt": "a\n-r b.txt\n", "b.txt": "\n\n-r requirements.txt\n"},
            "b.txt:3: requirements.txt names itself",
        ),
        ({"requirements.txt": "-r requirements.txt\n"}, "requirements.txt:1: requirements.txt names itself"),
        ({"requirements.txt": "x\n\n-c sub/gone.txt\n"}, "requirements.txt:3: sub/gone.txt does not exist in "),
        ({"requirements.txt": "-r hidden.txt\n", "hidden.txt": "a"}, "hidden.txt is left out of what is sent"),
        ({"requirements.txt": "-r ../x.txt\n"}, "requirements.txt:1: ../x.txt is outside of the project"),
        ({"requirements.txt": "-e ../x\n"}, "requirements.txt:1: ../x is outside of the project"),
        (
            {"requirements.txt": "./gone-1.0-py3-none-any.whl\n"},
            "requirements.txt:1: gone-1.0-py3-none-any.whl does not exist",
        ),
        ({"requirements.txt": "-e ./sub\n"}, "requirements.txt:1: sub does not exist"),
        ({"requirements.txt": "numpy >= one\n"}, "requirements.txt:1: numpy >= one is no requirement"),
        ({"requirements.txt": "a\n--frobnicate\n"}, "requirements.txt:2: --frobnicate: no such option: --frobnicate"),
        ({"requirements.txt": "-r 'a\n"}, "requirements.txt:1: -r 'a: No closing quotation"),
        ({"requirements.txt": b"\xff\xfe\xff"}, "requirements.txt is not utf-16-le"),
        ({"requirements.txt": b"a\xe9"}, "requirements.txt is not utf-8"),
    ],
)
def test_what_pip_cannot_read_is_one_line_with_its_place(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        read_needs(tree_of(tmp_path, **{"hidden.txt": ""}), None)
    assert message in caught.value.message and "\n" not in caught.value.message and len(caught.value.message) < 400


def test_a_file_in_a_diamond_is_read_once(tmp_path):
    files = [(f"{n}.txt", f"-r {n + 1}.txt\n-r {n + 1}.txt\n") for n in range(30)]
    assert spec_of(tmp_path, ("requirements.txt", "-r 0.txt\n"), *files, ("30.txt", "numpy\n")).locked == ("numpy",)


WHEEL = "ferry_a-1.5-py3-none-any.whl"


@pytest.mark.parametrize(
    ("line", "locked", "unchecked"),
    [
        (f"./wheels/{WHEEL}", ("ferry-a==1.5",), ()),
        (f"wheels/{WHEEL} ; python_version > '3'", ('ferry-a==1.5; python_version > "3"',), ()),
        (f"file:wheels/{WHEEL}", ("ferry-a==1.5",), ()),
        (
            f"https://u:secret@h.example/x/{WHEEL}?token=secret#sha256=00",
            (f"ferry-a @ https://h.example/x/{WHEEL}",),
            (),
        ),
        ("git+https://secret@h.example/a/b.git@v1#egg=bee", ("bee @ git+https://h.example/a/b.git@v1",), ()),
        ("-e git+ssh://git@h.example/b.git@v1#egg=bee", ("bee @ git+ssh://h.example/b.git@v1",), ()),
        ("git+https://secret@h.example/b.git", (), ("requirements.txt:1 git+https://h.example/b.git",)),
        ("https://h.example/main.zip", (), ("requirements.txt:1 https://h.example/main.zip",)),
        ("bee @ https://${TOKEN}@h.example/b.zip", ("bee @ https://h.example/b.zip",), ()),
        ("bee==${VERSION}", (), ("requirements.txt:1 bee==${VERSION}",)),
        ("-r https://h.example/r.txt", (), ("requirements.txt:1 https://h.example/r.txt",)),
        ("-r ${WHERE}/r.txt", (), ("requirements.txt:1 ${WHERE}/r.txt",)),
        ("./lib", (), ("requirements.txt:1 ./lib",)),
        ("-e ./lib", ("numpy",), ()),
        ("-e lib[dev]", ("numpy", "click"), ()),
        ("-e ./old", (), ("requirements.txt:1 (setup.py: only a build tells what it needs)",)),
        ("--editable=./old", (), ("requirements.txt:1 (setup.py: only a build tells what it needs)",)),
    ],
)
def test_paths_and_addresses_are_asked_for_by_name_or_count_as_unmet(tmp_path, line, locked, unchecked, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    project = "[project]\nname='lib'\ndependencies=['numpy']\noptional-dependencies.dev=['click']\n"
    others = [
        (f"wheels/{WHEEL}", "w"),
        ("lib/pyproject.toml", project),
        ("old/setup.py", "1"),
        ("old/pyproject.toml", project),
    ]
    spec = spec_of(tmp_path, ("requirements.txt", line + "\n"), *others)
    if "old" in line:
        spec = spec._replace(locked=())
    assert (spec.locked, spec.unchecked) == (locked, unchecked)
    assert "secret" not in repr(spec)
    assert spec.variables == tuple(name for name in ("TOKEN", "VERSION", "WHERE") if "{" + name in line)


def test_an_environment_is_built_anew_for_what_its_build_reads_and_nothing_else(tmp_path):
    files = {
        "requirements.txt": "-r more.txt\n-c pins.txt\n-f links\n./whole\n-e ./lib\n",
        "more.txt": "numpy\n",
        "pins.txt": "numpy<3\n",
        "links/a-1.0.tar.gz": "a",
        "whole/x.py": "a",
        "lib/pyproject.toml": "[project]\nname='lib'\ndependencies=['numpy']\n[tool.ruff]\na=1\n",
        "lib/x.py": "a",
        "train.py": "a",
    }
    first = spec_of(tmp_path, *files.items()).key
    rebuilt = set()
    for name, content in files.items():
        changed = content.replace("numpy", "scipy").replace("-f links\n", "")
        if spec_of(tmp_path, (name, changed if changed != content else "b")).key != first:
            rebuilt.add(name)
        spec_of(tmp_path, (name, content))
    assert set(files) - rebuilt == {"lib/x.py", "train.py"}
    spoken = [
        ("more.txt", "# ours\nnumpy  # fast\n"),
        ("lib/pyproject.toml", files["lib/pyproject.toml"] + "b=2\n# c\n"),
    ]
    assert spec_of(tmp_path, *spoken).key == first
