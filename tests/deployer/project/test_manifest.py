"""The client's manifest: git's ignore rules compared with git itself, links, modes, hashes, the dirty patch."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer.errors import UsageError
from deployer.project.git import git_state
from deployer.project.manifest import HashCache, Scan, scan, scan_include

# fmt: off
NAMES = [
    "foo", "bar", "a", "b", "foobar", "x.py", "é", "data", "dataset", "ab", "x.log", "[x]", "#h", "!n", "a-b", "Foo",
    "a b", "a\\b", "x ", "FOO", "Data", "B", "X.PY", "Éa", "\udce9", "a\udcff",
]
ATOMS = [
    "foo", "bar", "a", "b", "*", "?", "**", "*.py", "f*", "[ab]", "[!ab]", "[a-c]", "[^a]*", "[[:alpha:]]", "[]a]",
    "\\a", "\\*", "fo?", "??", "foo**", "**foo", "a**b", "***", "[a", "é", "[\\]a]", "data*", "dataset", "x.*",
    "[z-a]", "[[:bogus:]]", "[a-]", "[--b]", "foo\\", "Foo", "[[:digit:][:alpha:]]*", "[[a]", "f[!/]o", "f[o/]o",
    "a-b", "[[:a]", "* *", "\\ ", "x\\ ", "FOO", "F*", "\\F*", "f\\O?", "[F]*", "[!F]*", "[A-M]*", "[!b-z]*", "[Z-c]*",
    "[[:upper:]]*", "[![:upper:]]*", "[![:lower:]]", "D[!a]*", "*.[!L]og", "**X", "É*",
    "\udce9", "[\udce0-\udcff]", "a[!b\udcff]",
]
# fmt: on


@pytest.fixture(autouse=True)
def own_git_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    settings = '[user]\nname = a\nemail = a@b.c\n[protocol "file"]\nallow = always\n'
    (home / ".gitconfig").write_text(settings)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "project")
    return tmp_path / "project"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="surrogateescape").stdout


def write_all(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(text))


def names(result: Scan) -> set[str]:
    return {e.path for e in result.entries}


def scanned(project: Path) -> set[str]:
    return names(scan(project, prefix="", hash_cache=None))


def listed_by_git(project: Path) -> set[str]:
    out = git(project, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return {name for name in out.split("\0") if name and os.path.lexists(project / name)}


def random_pattern(rng: random.Random) -> str:
    pattern = "/".join(rng.choices(ATOMS, k=rng.choice([1, 1, 1, 2, 2, 3])))
    pattern = rng.choice(["", "", "", "/"]) + pattern + rng.choice(["", "", "", "/"])
    return rng.choice(["", "", "", "!"]) + pattern + rng.choice([""] * 16 + [" ", "\\ ", "\r"])


def random_rules(rng: random.Random) -> str:
    end = rng.choice(["\n", "\n", "\n", "\r\n"])
    return rng.choice(["", "", "", "\ufeff"]) + end.join(random_pattern(rng) for _ in range(rng.randint(1, 5)))


def random_tree(rng: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(25):
        yield "/".join(rng.choices(NAMES, k=rng.randint(1, 4))), ""
    for folder in ["", *("/".join(rng.choices(NAMES, k=rng.randint(1, 2))) + "/" for _ in range(6))]:
        yield folder + ".gitignore", random_rules(rng)
    yield ".git/info/exclude", random_rules(rng)
    yield ".git/excludes", random_rules(rng)


def as_on_a_disk_that_folds(name: str, known: dict[str, str]) -> str:
    """The name with each folder spelt as it was when it was made."""
    spelt = ""
    for part in name.split("/"):
        spelt = known.setdefault(f"{spelt}/{part}".lower(), f"{spelt}/{part}")
    return spelt[1:]


@pytest.mark.parametrize("seed", range(8))
def test_random_patterns_and_trees_leave_out_what_git_leaves_out(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for case in range(15):
        folder, known = tmp_path / str(case), dict[str, str]()
        git(tmp_path, "init", "-q", str(folder))
        with (folder / ".git/config").open("a") as config:
            folds = rng.choice([" = off", " = 0", "", " = True", " = yes", " = 2"])
            config.write(f"[core]\nignorecase{folds}\nexcludesfile = .git/excludes\n")
        for name, text in random_tree(rng):
            try:
                write_all(folder, {name if folds in (" = off", " = 0") else as_on_a_disk_that_folds(name, known): text})
            except OSError:  # a file stands where a folder should
                continue
        files = [str(f) for f in folder.rglob("*") if f.is_file() and ".git/" not in str(f)]
        if tracked := rng.choices(files, k=rng.choice([0, 0, 3])):
            git(folder, "--literal-pathspecs", "add", "-f", "--", *tracked)
        if scanned(folder) != listed_by_git(folder):
            rules = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob(".git*") if f.is_file()}
            rules |= {name: (folder / ".git" / name).read_bytes() for name in ("info/exclude", "excludes", "config")}
            assert scanned(folder) == listed_by_git(folder), rules


def test_where_case_is_ignored_a_tracked_file_is_known_under_another_spelling(repo: Path) -> None:
    git(repo, "config", "core.ignoreCase", "yes")
    write_all(repo, {".gitignore": "out/\ndata_[!k]*\n", "Out/Kept.log": "", "out/new.log": ""})
    write_all(repo, {"data_k": "", "DATA_K1": "", "data_A": ""})
    git(repo, "add", "-f", "Out/Kept.log")
    (repo / "Out").rename(repo / "oUT")
    (repo / "oUT/Kept.log").rename(repo / "oUT/kept.log")
    assert scanned(repo) == {".gitignore", "oUT/kept.log", "data_k", "DATA_K1"}


def test_a_pattern_with_a_slash_does_not_reach_a_folder_of_that_name_elsewhere(repo: Path) -> None:
    write_all(repo, {".gitignore": "dataset/*\n", "dataset/a": "", "src/dataset/b.py": ""})
    assert scanned(repo) == {".gitignore", "src/dataset/b.py"}


def test_a_tracked_file_that_is_also_ignored_travels(repo: Path) -> None:
    write_all(repo, {".gitignore": "data/\n", "data/kept.json": "", "data/big.bin": "", "data/deep/kept.txt": ""})
    git(repo, "add", "-f", "data/kept.json", "data/deep/kept.txt")
    assert scanned(repo) == listed_by_git(repo) == {".gitignore", "data/kept.json", "data/deep/kept.txt"}


def test_a_tracked_file_that_was_deleted_does_not_travel(repo: Path) -> None:
    write_all(repo, {"a.py": "", "b.py": ""})
    git(repo, "add", ".")
    (repo / "b.py").unlink()
    assert scanned(repo) == {"a.py"}


def test_global_and_repository_excludes_count(repo: Path) -> None:
    write_all(repo, {"a.swp": "", "b.tmp": "", "c.py": "", ".git/info/exclude": "*.tmp\n"})
    excludes = repo.parent / "excludes"
    excludes.write_text("*.swp\n")
    git(repo, "config", "core.excludesFile", str(excludes))
    assert scanned(repo) == listed_by_git(repo) == {"c.py"}


def test_a_project_inside_a_repository_obeys_the_rules_above_it(repo: Path) -> None:
    write_all(repo, {".gitignore": "*.log\n/sub/x/\ny/\n", "sub/.gitignore": "!keep.log\n"})
    write_all(repo / "sub", {"keep.log": "", "a.log": "", "x/a": "", "z/x/a": "", "z/y/a": "", "b.py": ""})
    assert scanned(repo / "sub") == listed_by_git(repo / "sub") == {".gitignore", "keep.log", "z/x/a", "b.py"}


def test_a_project_that_its_repository_ignores_as_a_whole_travels_all_the_same(repo: Path) -> None:
    write_all(repo, {".venv/.gitignore": "*\n", ".venv/lib/trainer/a.py": "", ".venv/lib/trainer/a.pyc": ""})
    assert scanned(repo / ".venv/lib/trainer") == {"a.py"}


def test_deployignore_is_stronger_than_git_both_ways(repo: Path) -> None:
    write_all(repo, {".gitignore": "*.jsonl\n", ".deployignore": "!small.jsonl\nvideo/\n"})
    write_all(repo, {"small.jsonl": "", "big.jsonl": "", "video/a.mp4": ""})
    git(repo, "add", "video")
    assert scanned(repo) == {".gitignore", ".deployignore", "small.jsonl"}


def test_without_git_the_ignore_files_and_the_built_in_list_hold(tmp_path: Path) -> None:
    write_all(
        tmp_path, {".gitignore": "*.log\n", "a.log": "", "a.py": "", "__pycache__/a.pyc": "", "results/1/log": ""}
    )
    write_all(tmp_path, {"env/pyvenv.cfg": "", "env/lib/x.py": "", "src/results/table.py": "", ".venv/a": ""})
    assert scanned(tmp_path) == {".gitignore", "a.py", "src/results/table.py"}


def test_keys_and_tokens_stay_behind_unless_a_rule_asks_for_them(tmp_path: Path) -> None:
    write_all(tmp_path, {".ssh/id_x": "", "sub/.env": "", "id_ed25519": "", ".netrc": "", "id_ed25519.py": ""})
    write_all(tmp_path, {"node_modules/a.js": "", ".torchferry/jobs/a": ""})
    assert scanned(tmp_path) == {"id_ed25519.py"}
    write_all(tmp_path, {".deployignore": "!.env\n"})
    assert scanned(tmp_path) == {"id_ed25519.py", ".deployignore", "sub/.env"}


def test_a_git_that_cannot_be_run_costs_only_the_tracked_list(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(repo, {".gitignore": "*.log\n", "a.log": "", "a.py": ""})
    monkeypatch.setenv("PATH", "")
    result = scan(repo, prefix="", hash_cache=None)
    assert names(result) == {".gitignore", "a.py"}
    assert "git is not installed" in result.warnings[0]


def test_a_submodule_travels_by_its_own_rules(repo: Path) -> None:
    write_all(repo.parent / "lib", {"code.py": "", "kept.log": "", ".gitignore": "*.tmp\n"})
    git(repo.parent, "init", "-q", "lib")
    git(repo.parent / "lib", "add", ".")
    git(repo.parent / "lib", "commit", "-qm", "x")
    git(repo, "submodule", "add", "-q", str(repo.parent / "lib"), "vendor/lib")
    write_all(repo, {".gitignore": "*.log\nvendor/\n", "vendor/lib/new.tmp": "", "vendor/other": ""})
    inside = {f"vendor/lib/{name}" for name in ("code.py", "kept.log", ".gitignore")}
    assert scanned(repo) == {".gitignore", ".gitmodules"} | inside


def test_a_worktree_travels_without_its_git_file(repo: Path) -> None:
    write_all(repo, {"a.py": ""})
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "x")
    write_all(repo, {".git/info/exclude": "*.tmp\n"})
    git(repo, "worktree", "add", "-q", "../tree")
    write_all(repo.parent / "tree", {"b.py": "", "c.tmp": ""})
    assert scanned(repo.parent / "tree") == {"a.py", "b.py"}


def test_the_report_counts_what_was_left_out_and_names_the_rules(repo: Path) -> None:
    write_all(repo, {".gitignore": "# big\n/data/\n*.log\n", "data/a": "12345", "data/b/c": "123", "x.log": "1"})
    result = scan(repo, hash_cache=None)
    assert (result.ignored.count, result.ignored.size_bytes, result.ignored.at_least) == (3, 9, False)
    assert result.ignored.reasons == ((("/data/", ".gitignore:2"), 2), (("*.log", ".gitignore:3"), 1))
    assert result.why_ignored("data/b/c") == ("/data/", ".gitignore:2")
    assert result.why_ignored("src/a.py") is None


def test_entries_carry_prefix_mode_size_and_the_hash_that_b2sum_prints(tmp_path: Path) -> None:
    write_all(tmp_path, {"run.sh": "echo\n", "a.py": "x = 1\n"})
    (tmp_path / "run.sh").chmod(0o755)
    result = scan(tmp_path, hash_cache=None)
    printed = subprocess.run(["b2sum", "-l", "160", tmp_path / "a.py"], capture_output=True, text=True, check=True)
    assert [(e.path, e.mode, e.size) for e in result.entries] == [("code/a.py", "f", 6), ("code/run.sh", "x", 5)]
    assert result.entries[0].hash == printed.stdout.split()[0]
    assert result.sources[result.entries[0].hash] == str(tmp_path / "a.py")
    assert result.largest == (("a.py", 6), ("run.sh", 5))


def test_links_stay_links_and_one_that_leads_out_is_told(tmp_path: Path) -> None:
    write_all(tmp_path, {"sub/a.py": ""})
    (tmp_path / "sub/near").symlink_to("../sub/a.py")
    (tmp_path / "sub/far").symlink_to("../../elsewhere")
    (tmp_path / "folder").symlink_to("sub")
    result = scan(tmp_path, prefix="", hash_cache=None)
    assert {e.path: e.hash for e in result.entries if e.mode == "l"} == {
        "sub/near": "../sub/a.py",
        "sub/far": "../../elsewhere",
        "folder": "sub",
    }
    assert result.warnings == ("sub/far is a link out of the project, to ../../elsewhere; only the link goes",)


def test_pipes_and_sockets_are_left_out_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        result = scan(tmp_path, hash_cache=None)
    assert result.entries == ()
    assert sorted(result.warnings) == ["pipe is left out: a named pipe", "socket is left out: a socket"]


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).write_text("")
    assert scanned(tmp_path) == {"caf\udce9.py"}


def test_an_unreadable_file_is_an_error_with_its_name() -> None:
    denied = pytest.raises(UsageError, match=r"cannot read .*secret\.key: Permission denied")
    with tempfile.TemporaryDirectory() as folder, another_user(Path(folder)), denied:
        scan(Path(folder), hash_cache=None)


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Nobody instead of root, who reads everything; `secret.key` lies there, readable by no one."""
    folder.chmod(0o755)
    write_all(folder, {"secret.key": "x"})
    (folder / "secret.key").chmod(0)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_missing_project_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        scan(tmp_path / "nothing", hash_cache=None)


def test_an_included_file_is_a_tree_of_one(tmp_path: Path) -> None:
    write_all(tmp_path, {"data.jsonl": "{}\n"})
    result = scan_include(tmp_path / "data.jsonl", hash_cache=tmp_path / "cache")
    assert [(e.path, e.size) for e in result.entries] == [("data.jsonl", 3)]


def test_an_included_folder_ignores_no_rule_and_follows_links_out_of_it(tmp_path: Path) -> None:
    write_all(tmp_path, {"blobs/1": "weights", "model/.gitignore": "*\n", "model/config.json": "{}"})
    (tmp_path / "model/weights.bin").symlink_to("../blobs/1")
    (tmp_path / "model/alias.json").symlink_to("config.json")
    (tmp_path / "model/loop").symlink_to(".")
    result = scan_include(tmp_path / "model", hash_cache=None)
    assert {(e.path, e.mode, e.size) for e in result.entries} == {
        (".gitignore", "f", 2),
        ("alias.json", "l", 11),
        ("config.json", "f", 2),
        ("loop", "l", 1),
        ("weights.bin", "f", 7),
    }


def test_a_file_that_changed_with_size_and_mtime_as_before_is_hashed_again(tmp_path: Path) -> None:
    write_all(tmp_path, {"data/a.bin": "one"})
    os.utime(tmp_path / "data/a.bin", (1, 1))
    scan_include(tmp_path / "data", hash_cache=tmp_path / "cache")
    (tmp_path / "data/a.bin").write_text("two")
    os.utime(tmp_path / "data/a.bin", (1, 1))
    again = scan_include(tmp_path / "data", hash_cache=tmp_path / "cache")
    assert again.entries == scan_include(tmp_path / "data", hash_cache=None).entries


@pytest.mark.parametrize(("still_s", "remembered"), [(10, ("ab", 3)), (1, None)])
def test_the_hash_cache_remembers_files_that_had_been_still(
    tmp_path: Path, still_s: int, remembered: tuple[str, int] | None
) -> None:
    write_all(tmp_path, {"a.bin": "one"})
    status = (tmp_path / "a.bin").stat()
    cache = HashCache(tmp_path / "cache", tmp_path, now_ns=status.st_ctime_ns + still_s * 10**9)
    cache.put(b"a.bin", status, "ab", 3)
    cache.save()
    assert HashCache(tmp_path / "cache", tmp_path).get(b"a.bin", status) == remembered


def test_git_state_of_a_dirty_tree_has_commit_branch_and_patch(repo: Path) -> None:
    write_all(repo, {"a.py": "x = 1\n", ".env": "TOKEN=1\n", "b.cfg": "1\n", ".gitignore": "b.cfg\n"})
    git(repo, "add", "-f", ".", "b.cfg")
    git(repo, "commit", "-qm", "x")
    git(repo, "checkout", "-qb", "work")
    write_all(repo, {"a.py": "x = 2\n", ".env": "TOKEN=abc\n", "b.cfg": "password\n"})
    state = git_state(repo)
    assert state is not None
    assert (state["commit"], state["branch"], state["dirty"]) == (git(repo, "rev-parse", "HEAD").strip(), "work", True)
    assert state["patch"] == git(repo, "diff", "HEAD", "--", "a.py")


def test_git_state_of_a_clean_tree_has_no_patch(repo: Path) -> None:
    git(repo, "commit", "-qm", "x", "--allow-empty")
    state = git_state(repo)
    assert state is not None
    assert (state["dirty"], state["patch"]) == (False, "")


def test_git_state_cuts_a_long_patch(repo: Path) -> None:
    write_all(repo, {"a.txt": "\n"})
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "x")
    write_all(repo, {"a.txt": "line\n" * 400_000})
    state = git_state(repo)
    assert state is not None
    assert str(state["patch"]).endswith("# patch cut here: it is longer than 1048576 bytes\n")


def test_git_state_outside_of_a_repository_is_none(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
