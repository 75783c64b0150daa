"""Host keys: who is known, who is asked about, and who is refused, over both transports."""

from __future__ import annotations

import base64
import subprocess
import time
from pathlib import Path

import pytest

from deployer.connection.host import make_transport
from deployer.transport.ssh.known_hosts import append_known_host, hash_name, judge, matches, read_known_keys
from tests.support.sshd import ALIAS, SshServer, make_key
from tests.support.ways import at_terminal, both_ways, connect, known_hosts_config, public, refusal, with_config

# --- host keys --------------------------------------------------------------------------------------------------------


@both_ways
def test_unknown_host_key_without_a_terminal_is_refused_with_its_fingerprint(
    server: SshServer, tmp_path: Path, way: str
) -> None:
    config, known = known_hosts_config(server, tmp_path, "")
    error = refusal(config, way=way)
    printed = subprocess.run(["ssh-keygen", "-lf", f"{server.host_key_path}.pub"], capture_output=True, text=True)
    assert printed.stdout.split()[1] in error.message
    assert "--accept-new-host-key" in error.hint and f"ssh-keyscan -p {server.port} 127.0.0.1" in error.hint
    assert known.read_text() == ""


@both_ways
def test_unknown_host_key_accepted_by_option_is_written_down_once(server: SshServer, tmp_path: Path, way: str) -> None:
    known = tmp_path / "new" / "known"
    if way == "openssh":  # which makes no folder but ~/.ssh
        known.parent.mkdir(mode=0o700)
    config = with_config(server, tmp_path, UserKnownHostsFile=str(known))
    for _ in range(2):
        transport = make_transport(ALIAS, config_file=config, accept_new_host_key=True, way=way)
        transport.connect()
        transport.close()
    assert known.read_text() == server.host_key_line()
    if way == "fabric":
        assert (known.stat().st_mode & 0o777, known.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    check = ["ssh", "-F", config, "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", ALIAS, "true"]
    assert subprocess.run(check, stdin=subprocess.DEVNULL).returncode == 0


@both_ways
@pytest.mark.parametrize("accept_new", [False, True])
def test_changed_host_key_is_always_refused(
    server: SshServer, tmp_path: Path, foreign_key: Path, accept_new: bool, way: str
) -> None:
    lines = f"# a comment\n{server.host_name} {public(foreign_key)}\n"
    config, known = known_hosts_config(server, tmp_path, lines)
    error = refusal(config, accept_new_host_key=accept_new, way=way)
    assert "changed" in error.message
    assert f"{known}:2" in " ".join(error.where)
    assert known.read_text() == lines


@both_ways
def test_changed_host_keys_hint_removes_exactly_the_line(
    server: SshServer, tmp_path: Path, foreign_key: Path, way: str
) -> None:
    lines = f"other {public(foreign_key)}\n{server.host_name} {public(foreign_key)}\n"
    config, known = known_hosts_config(server, tmp_path, lines)
    command = refusal(config, way=way).hint.rpartition(": ")[2]
    assert command.startswith("ssh-keygen ")
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert known.read_text() == f"other {public(foreign_key)}\n"


@both_ways
def test_host_known_by_another_type_of_key_counts_as_changed(server: SshServer, tmp_path: Path, way: str) -> None:
    ecdsa = make_key(tmp_path / "ecdsa", "ecdsa")
    config, _ = known_hosts_config(server, tmp_path, f"{server.host_name} {public(ecdsa)}\n")
    assert "changed" in refusal(config, accept_new_host_key=True, way=way).message


@both_ways
def test_revoked_host_key_is_refused_though_also_known(server: SshServer, tmp_path: Path, way: str) -> None:
    config, _ = known_hosts_config(
        server, tmp_path, server.host_key_line() + "@revoked * " + public(server.host_key_path)
    )
    assert "revoked" in refusal(config, way=way).message


@both_ways
@pytest.mark.parametrize("form", ["text", "KRL"])
def test_host_key_in_a_revoked_keys_file_is_refused(
    server: SshServer, tmp_path: Path, foreign_key: Path, form: str, way: str
) -> None:
    revoked = tmp_path / "revoked"
    config = with_config(server, tmp_path, RevokedHostKeys=str(revoked))

    def revoke(key: Path) -> None:
        revoked.write_text(public(key) + "\n")
        if form == "KRL":
            subprocess.run(["ssh-keygen", "-qkf", str(revoked), f"{key}.pub"], check=True)

    revoke(foreign_key)
    connect(server, config=config, way=way).close()
    revoke(server.host_key_path)
    assert "revoked" in refusal(config, way=way).message


def test_certificate_authority_line_does_not_make_a_host_known(server: SshServer, tmp_path: Path) -> None:
    config, _ = known_hosts_config(server, tmp_path, "@cert-authority * " + public(server.host_key_path))
    assert "not known" in refusal(config).message


@both_ways
@pytest.mark.parametrize("form", ["hashed", "pattern", "port-less", "second file", "alias"])
def test_host_key_known_in_any_form_lets_us_in(server: SshServer, tmp_path: Path, form: str, way: str) -> None:
    changes: dict[str, str] = {}
    line = server.host_key_line()
    if form == "hashed":
        line = server.host_key_line(hash_name(server.host_name, b"0123456789abcdefghij"))
    elif form == "pattern":
        line = server.host_key_line(f"!other,[127.0.0.?]:{server.port}")
    elif form == "port-less":
        line = server.host_key_line("127.0.0.1")
    elif form == "alias":
        line, changes = server.host_key_line("the-box"), {"HostKeyAlias": "the-box"}
    known = tmp_path / "known"
    known.write_text(line)
    files = f"{tmp_path}/none {known}" if form == "second file" else str(known)
    config = with_config(server, tmp_path, UserKnownHostsFile=files, **changes)
    transport = make_transport(ALIAS, config_file=config, way=way)
    transport.connect()
    transport.close()


def test_hashed_line_is_what_ssh_keygen_finds(server: SshServer, tmp_path: Path) -> None:
    known = tmp_path / "known"
    kind, blob = public(server.host_key_path).split()
    known.write_text("# no newline at the end")
    append_known_host(known, server.host_name, key_type=kind, blob=base64.b64decode(blob), hashed=True)
    found = subprocess.run(["ssh-keygen", "-F", server.host_name, "-f", str(known)], capture_output=True, text=True)
    assert found.returncode == 0 and "line 2" in found.stdout


def test_five_thousand_hashed_lines_take_little_more_than_their_hashes(server: SshServer, tmp_path: Path) -> None:
    known = tmp_path / "known"
    begun = time.process_time()
    lines = [server.host_key_line(hash_name(f"host{n}", b"%020d" % n)) for n in range(5000)]
    known.write_text("".join([*lines, server.host_key_line(hash_name(server.host_name, b"x" * 20))]))
    hashed_s, begun = time.process_time() - begun, time.process_time()
    keys = read_known_keys([known], server.host_name)
    assert time.process_time() - begun < 5 * hashed_s
    assert [key.line for key in keys] == [5001]


@pytest.mark.parametrize(
    ("field", "name", "expected"),
    [
        ("box", "box", True),
        ("Box,other", "box", True),
        ("*.example.org", "a.example.org", True),
        ("*.example.org,!b.example.org", "b.example.org", False),
        ("!b.example.org,*.example.org", "b.example.org", False),
        ("b?x", "box", True),
        ("[box]:22", "box", False),
        ("b.x", "box", False),
        ("|1|broken", "box", False),
        ("|1|AAAA|AAAA", "box", False),
    ],
)
def test_known_hosts_field_matches_as_in_sshd_manual(field: str, name: str, expected: bool) -> None:
    assert matches(field, name) is expected


def test_judge_of_a_host_without_lines_is_unknown() -> None:
    assert judge([], b"key")[0].value == "unknown"


# --- a person at a terminal -------------------------------------------------------------------------------------------


@both_ways
def test_unknown_host_key_at_a_terminal_is_asked_and_remembered(server: SshServer, tmp_path: Path, way: str) -> None:
    config, known = known_hosts_config(server, tmp_path, "")
    screen = at_terminal(config, {"(yes/no": "yes", "[yes/no": "yes"}, way=way)
    assert "SHA256:" in screen and "GOT b'in" in screen
    assert known.read_text() == server.host_key_line()


@both_ways
def test_unknown_host_key_at_a_terminal_answered_no_is_refused(server: SshServer, tmp_path: Path, way: str) -> None:
    config, known = known_hosts_config(server, tmp_path, "")
    assert "REFUSED" in at_terminal(config, {"(yes/no": "no", "[yes/no": "no"}, way=way)
    assert known.read_text() == ""


@both_ways
def test_changed_host_key_at_a_terminal_is_refused_without_a_question(
    server: SshServer, tmp_path: Path, foreign_key: Path, way: str
) -> None:
    config, _ = known_hosts_config(server, tmp_path, f"{server.host_name} {public(foreign_key)}\n")
    screen = at_terminal(config, {"(yes/no": "yes", "[yes/no": "yes"}, way=way)
    assert "REFUSED" in screen and "yes/no" not in screen
