"""Which folders another account could change: tried with real ones."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer.agent.doctor.check_root import check_root
from deployer.agent.guard import OURS, Refused, correct_home, find_root, secure, secure_root
from deployer.agent.host.layout import Root
from tests.support.accounts import MALLORY, ROOT_ONLY, VICTIM, as_account, public_folder

pytestmark = ROOT_ONLY


@pytest.fixture
def sticky() -> Iterator[Path]:
    with public_folder(0o1777) as folder:
        yield folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def make(path: Path, owner: int, mode: int = 0o755) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def secure_as_victim(path: Path, home: Path | str = "/nonexistent") -> None:
    as_account(VICTIM, secure_root, str(path), home=home)


def test_root_is_made_private_with_all_that_is_missing_above_it(sticky: Path) -> None:
    secure_as_victim(sticky / "a" / "b")
    assert [mode_of(sticky / "a"), mode_of(sticky / "a" / "b")] == [0o700, 0o700]
    assert (sticky / "a").stat().st_uid == VICTIM
    assert list((sticky / "a" / "b").iterdir()) == []  # in a closed root nobody else can plant one


def test_what_others_may_write_to_is_refused_with_its_path_and_mode() -> None:
    with (
        public_folder(0o777) as folder,
        pytest.raises(Refused, match=r"other users can write into it \(mode 777\)") as e,
    ):
        secure_as_victim(folder / "root")
    assert e.value.filename == str(folder)
    assert not folder.exists() or list(folder.glob("*")) == []


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_own_root_open_to_others_is_refused(sticky: Path, mode: int) -> None:
    root = make(sticky / "root", VICTIM, mode)
    with pytest.raises(Refused, match="other users can write"):
        secure_as_victim(root)


def test_own_root_with_the_sticky_bit_is_used_with_all_its_folders_made(sticky: Path) -> None:
    """As /workspace of a rented machine may be: nobody can replace what is ours there."""
    root = make(sticky / "root", VICTIM, 0o1777)
    secure_as_victim(root)
    assert sorted(path.name for path in root.iterdir()) == sorted(OURS)
    assert {mode_of(path) for path in root.iterdir()} == {0o700}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_planted_folder_of_a_shared_root_is_refused(sticky: Path, name: str, kind: str) -> None:
    root = make(sticky / "root", VICTIM, 0o1777)
    if kind == "folder":
        make(root / name, MALLORY)
    else:
        make(sticky / "elsewhere", VICTIM)
        (root / name).symlink_to(sticky / "elsewhere")
        os.lchown(root / name, MALLORY, MALLORY)
    with pytest.raises(Refused, match="belongs to another user") as e:
        secure_as_victim(root)
    assert e.value.filename == str(root / name)


def test_link_of_ones_own_is_followed_when_it_leads_somewhere_safe(sticky: Path) -> None:
    root = make(sticky / "root", VICTIM, 0o700)
    big = make(sticky / "big", VICTIM, 0o700)
    as_account(VICTIM, os.symlink, str(big / "envs"), str(root / "envs"))
    secure_as_victim(root)
    assert mode_of(big / "envs") == 0o700

    as_account(MALLORY, os.mkdir, str(sticky / "theirs"))
    as_account(VICTIM, os.symlink, "../theirs", str(root / "cache"))
    with pytest.raises(Refused, match="another user") as e:
        secure_as_victim(root)
    assert e.value.filename == str(sticky / "theirs")


def test_links_in_a_circle_end(sticky: Path) -> None:
    as_account(VICTIM, os.symlink, str(sticky / "b"), str(sticky / "a"))
    as_account(VICTIM, os.symlink, str(sticky / "a"), str(sticky / "b"))
    with pytest.raises(OSError, match="symbolic links"):
        secure_as_victim(sticky / "a" / "root")


def test_file_in_the_way_is_named(sticky: Path) -> None:
    (sticky / "root").touch()
    os.chown(sticky / "root", VICTIM, VICTIM)
    with pytest.raises(NotADirectoryError) as e:
        secure_as_victim(sticky / "root")
    assert e.value.filename == str(sticky / "root")


@pytest.fixture
def account() -> Iterator[str]:
    name = f"tfg{os.getpid()}"
    subprocess.run(["useradd", "-U", "-M", "-d", "/nonexistent", name], check=True, capture_output=True)
    yield name
    subprocess.run(["userdel", "--force", name], check=False, capture_output=True)
    subprocess.run(["groupdel", name], check=False, capture_output=True)  # it stays where it has other members


def test_group_of_a_user_alone_is_nobody_else(sticky: Path, account: str) -> None:
    me = pwd.getpwnam(account)
    home = make(sticky / "home", me.pw_uid, 0o775)
    os.chown(home, me.pw_uid, me.pw_gid)
    as_account(me.pw_uid, secure_root, str(home / "root"))
    lab = make(sticky / "lab", MALLORY, 0o777)
    trusted = home / ".torchferry-trusted"  # as a shell with umask 002 makes it
    trusted.write_text(f"{lab}\n")
    os.chown(trusted, me.pw_uid, me.pw_gid)
    trusted.chmod(0o664)
    assert as_account(me.pw_uid, secure_root, str(lab / "root"), home=home)
    subprocess.run(["usermod", "-aG", account, "nobody"], check=True)
    with pytest.raises(Refused, match=r"other users can write into it \(mode 775\)"):
        as_account(me.pw_uid, secure_root, str(home / "root"))


def test_user_whose_first_group_it_is_counts_though_the_group_does_not_name_them(sticky: Path, account: str) -> None:
    import pwd

    me, other = pwd.getpwnam(account), f"{account}b"
    home = make(sticky / "home", me.pw_uid, 0o775)
    os.chown(home, me.pw_uid, me.pw_gid)
    subprocess.run(["useradd", "-M", "-g", account, "-d", "/nonexistent", other], check=True, capture_output=True)
    try:
        with pytest.raises(Refused, match=r"other users can write into it \(mode 775\)"):
            as_account(me.pw_uid, secure_root, str(home / "root"))
    finally:
        subprocess.run(["userdel", "--force", other], check=False, capture_output=True)


def test_user_without_a_name_may_share_the_group_of_root(sticky: Path) -> None:
    """As a container of a cluster has it: any number as its user, all folders of root's group."""
    home = make(sticky / "home", 0, 0o775)
    (home / "root").mkdir()
    os.chown(home / "root", VICTIM, 0)
    (home / "root").chmod(0o770)
    secure_as_victim(home / "root")


def test_trusted_folders_count_when_only_the_user_can_have_named_them(sticky: Path) -> None:
    home = make(sticky / "home", VICTIM, 0o700)
    lab = make(sticky / "lab", MALLORY, 0o777)
    trusted = home / ".torchferry-trusted"
    with pytest.raises(Refused):
        secure_as_victim(lab / "root", home)
    trusted.write_text(f"{lab}\n")
    os.chown(trusted, VICTIM, VICTIM)
    assert as_account(VICTIM, secure_root, str(lab / "root"), home=home)
    assert (lab / "root").stat().st_uid == VICTIM
    found = as_account(VICTIM, check_root, Root(str(lab / "root")), home=home)
    assert found["status"] == "warn" and "can write there" in found["detail"]

    trusted.chmod(0o622)
    with pytest.raises(OSError, match="no folder that it names counts: make it yours and chmod 600 it") as e:
        secure_as_victim(lab / "root", home)
    assert e.value.filename == str(trusted) and not isinstance(e.value, Refused)  # no hint to trust it
    trusted.chmod(0o600)
    trusted.write_text(f"# the lab's\n\n relative\n  ~/../{lab.name}/ \r\n")
    assert as_account(VICTIM, secure_root, str(lab / "root"), home=home)
    home.chmod(0o777)  # somebody else could put the file there
    with pytest.raises(Refused, match="can write into it") as e:
        secure_as_victim(lab / "root", home)
    assert e.value.filename == str(home)
    home.chmod(0o700)
    other = make(sticky / "lab-2", MALLORY, 0o777)  # beside it, with its name in front
    with pytest.raises(Refused):
        secure_as_victim(other / "root", home)


def test_secure_returns_the_path_without_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert secure(f"{tmp_path}/./link/../link/x/") == str(tmp_path / "real" / "x")


def test_doctor_names_the_folder_that_others_may_write_to() -> None:
    with public_folder(0o777) as folder:
        found = as_account(VICTIM, check_root, Root(str(folder / "root")))
    assert (found["status"], found["detail"]) == (
        "fail",
        f"{folder} cannot be used: other users can write into it (mode 777)",
    )


def home_of(named: str | None, must_be_ours: bool) -> tuple[str | None, str]:
    os.environ.pop("HOME", None)
    if named is not None:
        os.environ["HOME"] = named
    correct_home(must_be_ours=must_be_ours)
    return os.environ.get("HOME"), find_root("~/x")


@pytest.mark.parametrize("must_be_ours", [True, False])
def test_unusual_home_is_replaced_by_the_accounts_own(tmp_path: Path, must_be_ours: bool) -> None:
    own = pwd.getpwuid(0).pw_dir
    odd = make(tmp_path / "a\nb", 0)
    foreign = make(tmp_path / "foreign", MALLORY)
    table = {None: own, "": own, "relative": own, "/": own, "//": own, str(odd): str(odd), f"{odd}/": f"{odd}/"}
    table |= dict.fromkeys(("/no/folder", f"{own}\n", "/etc/passwd", str(foreign)), own if must_be_ours else "")
    for named, home in table.items():
        expected = home or str(named)
        assert as_account(0, home_of, named, must_be_ours) == (expected, f"{expected.rstrip('/')}/x"), named


def test_account_without_an_entry_and_a_home_is_told_so() -> None:
    for named in (None, "", "relative"):
        with pytest.raises(OSError, match="this account has no home folder"):
            as_account(VICTIM, home_of, named, True)
    assert as_account(VICTIM, home_of, "/nonexistent", True) == ("/nonexistent", "/nonexistent/x")
    with pytest.raises(OSError, match="there is no such user"):
        find_root("~nosuchuser/x")
    assert find_root("~root/x") == "/root/x"
