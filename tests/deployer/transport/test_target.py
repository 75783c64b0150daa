"""Addresses as people type them, and what OpenSSH's configuration makes of them."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.errors import UsageError
from deployer.transport.ssh.ssh_config import parse_settings, resolve, ssh_argv
from deployer.transport.ssh.target import Target, parse_target

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None and "CI" not in os.environ, reason="no ssh here")


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("gpu", None, "gpu", None),
        ("root@203.0.113.7:22022", "root", "203.0.113.7", 22022),
        ("box.example.org:2222", None, "box.example.org", 2222),
        ("::1", None, "::1", None),
        ("root@::1", "root", "::1", None),
        ("[::1]:22", None, "::1", 22),
        ("ada@[fe80::1%eth0]:2200", "ada", "fe80::1%eth0", 2200),
        ("ssh://root@box:40022/", "root", "box", 40022),
        ("ssh://[2001:db8::1]", None, "2001:db8::1", None),
        ("ada@example.org@relay", "ada@example.org", "relay", None),
        ("CORP\\ada@box", "CORP\\ada", "box", None),
        ("4f1a_b-2@ssh.relay.io", "4f1a_b-2", "ssh.relay.io", None),
    ],
)
def test_parse_target_of_an_address_gives_its_parts(text: str, user: str | None, host: str, port: int | None) -> None:
    assert parse_target(text) == Target(host=host, user=user, port=port, text=text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "@box", "root@", "box:", "box:0", "box:65536", "box:22x", "box:²²", "[::1", "[::1]x", "[]:22"),
        *("-oProxyCommand=id", "root@-oProxyCommand=id", "-l@box", "a b", "box\n", "bo\x07x", "$(id)", "a;id", "a|id"),
        *("a`id`", "box%h", "a/b", "us er@box", "u;id@box", "root:secret@box", "gg::1", "*", "a,b", "ssh://"),
        "bo\u202ex",
    ],
)
def test_parse_target_of_a_hostile_or_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_target(text)


def test_parse_target_with_a_password_does_not_repeat_it() -> None:
    with pytest.raises(UsageError) as caught:
        parse_target("root:hunter2@box")
    assert "hunter2" not in f"{caught.value.message}{caught.value.hint}"


@given(st.text(max_size=30))
def test_ssh_argv_of_any_accepted_text_has_no_word_that_ssh_takes_for_an_option(text: str) -> None:
    try:
        target = parse_target(text)
    except UsageError:
        return
    argv = ssh_argv("-G", target=target, config_file=None)
    assert argv[-2] == "--"
    assert not any(word.startswith("-") for word in (target.host, target.user or ""))


def test_parse_settings_keeps_repeated_keys_in_order() -> None:
    output = "user ada\nidentityfile ~/.ssh/a key\nidentityfile ~/.ssh/b\n"
    assert parse_settings(output) == {"user": ["ada"], "identityfile": ["~/.ssh/a key", "~/.ssh/b"]}


def write_config(folder: Path, text: str) -> str:
    path = folder / "config"
    path.write_text(text)
    return str(path)


@needs_ssh
def test_resolve_of_an_alias_in_an_included_file_gives_its_settings(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "gpu").write_text(
        f"Host gpu\n HostName 203.0.113.7\n Port 2222\n User ada\n IdentityFile {tmp_path}/one\n"
        f' IdentityFile "{tmp_path}/two %r"\n'
        f" UserKnownHostsFile {tmp_path}/k1 {tmp_path}/k2\n ConnectTimeout 3\n"
    )
    options = resolve(parse_target("gpu"), config_file=write_config(tmp_path, f"Include {tmp_path}/more/*\n"))
    assert (options.hostname, options.port, options.user) == ("203.0.113.7", 2222, "ada")
    assert options.identity_files == (tmp_path / "one", tmp_path / "two ada")
    assert options.user_known_hosts == (tmp_path / "k1", tmp_path / "k2")
    assert options.connect_timeout_s == 3.0


@needs_ssh
def test_resolve_with_user_and_port_typed_prefers_them_to_the_configuration(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Host gpu\n HostName 203.0.113.7\n Port 2222\n User ada\n")
    options = resolve(parse_target("bob@gpu:99"), config_file=config)
    assert options.description == "bob@203.0.113.7:99"


@needs_ssh
def test_resolve_with_a_negated_match_exec_agrees_with_ssh(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        'Match host gpu !exec "test -e /nonexistent/vpn"\n HostName 203.0.113.8\nHost *\n HostName 203.0.113.9\n',
    )
    assert resolve(parse_target("gpu"), config_file=config).hostname == "203.0.113.8"


@needs_ssh
def test_resolve_of_a_jump_chain_uses_the_same_file_for_every_hop(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        "Host gpu\n HostName 10.0.0.5\n ProxyJump jim@inner:2201,outer\n"
        "Host inner\n HostName 10.0.0.2\nHost outer\n HostName 203.0.113.1\n User eve\n",
    )
    gpu = resolve(parse_target("ada@gpu"), config_file=config)
    assert gpu.jump is not None and gpu.jump.jump is not None
    assert gpu.jump.description == "eve@203.0.113.1:22"
    assert gpu.jump.jump.description == "jim@10.0.0.2:2201"
    assert gpu.jump.jump.jump is None


@needs_ssh
def test_resolve_of_a_jump_host_with_a_jump_of_its_own_follows_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Host gpu\n ProxyJump inner\nHost inner\n ProxyJump outer\n")
    gpu = resolve(parse_target("gpu"), config_file=config)
    assert gpu.jump is not None and gpu.jump.jump is not None
    assert gpu.jump.jump.hostname == "outer"


@needs_ssh
def test_resolve_of_a_host_that_jumps_through_itself_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(UsageError, match="jump"):
        resolve(parse_target("a"), config_file=config)


@needs_ssh
def test_resolve_of_a_proxy_command_expands_its_tokens(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Host gpu\n HostName 10.0.0.5\n User ada\n ProxyCommand nc -x %n %h %p %r 100%%\n")
    assert resolve(parse_target("gpu"), config_file=config).proxy_command == "nc -x gpu 10.0.0.5 22 ada 100%"


@needs_ssh
def test_resolve_with_a_key_named_offers_it_first_as_ssh_does(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    config = write_config(tmp_path, f"Host gpu\n IdentityFile {tmp_path}/other\n ProxyJump hop\n")
    options = resolve(parse_target("gpu"), str(key), config_file=config)
    assert options.identity_files == (key, tmp_path / "other") and options.identities_only
    assert options.jump is not None and key not in options.jump.identity_files


def test_resolve_with_a_missing_key_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        resolve(parse_target("gpu"), str(tmp_path / "nowhere"))


@needs_ssh
def test_resolve_with_a_broken_configuration_repeats_what_ssh_says(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?i)bad configuration option"):
        resolve(parse_target("gpu"), config_file=write_config(tmp_path, "Nonsense yes\n"))


@needs_ssh
@pytest.mark.parametrize(
    ("word", "strictness"), [("yes", "yes"), ("no", "accept-new"), ("accept-new", "accept-new"), ("ask", "ask")]
)
def test_resolve_never_lets_strict_host_key_checking_be_off(tmp_path: Path, word: str, strictness: str) -> None:
    config = write_config(tmp_path, f"StrictHostKeyChecking {word}\n")
    assert resolve(parse_target("gpu"), config_file=config).strict_host_key == strictness


@pytest.fixture
def no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an ssh program."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.mark.usefixtures("no_ssh")
def test_resolve_without_ssh_reads_host_port_user_and_key(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, f"Host gpu\n HostName 10.0.0.5\n Port 2222\n User ada\n IdentityFile {tmp_path}/k\n"
    )
    options = resolve(parse_target("gpu"), config_file=config)
    assert options.description == "ada@10.0.0.5:2222"
    assert options.identity_files == (tmp_path / "k",)


@pytest.mark.usefixtures("no_ssh")
def test_resolve_without_ssh_refuses_what_it_cannot_follow(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="proxyjump"):
        resolve(parse_target("gpu"), config_file=write_config(tmp_path, "Host gpu\n ProxyJump hop\n"))


@needs_ssh
def test_resolve_runs_no_shell_for_the_host_name(tmp_path: Path) -> None:
    spy = tmp_path / "ssh"
    spy.write_text('#!/bin/sh\nfor word; do echo "$word" >> "$0.argv"; done\n')
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    old = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}:{old}"
    try:
        resolve(parse_target("ada@gpu:7"))
    finally:
        os.environ["PATH"] = old
    assert (tmp_path / "ssh.argv").read_text().split() == ["-G", "-v", "-l", "ada", "-p", "7", "--", "gpu"]
