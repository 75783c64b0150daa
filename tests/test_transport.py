"""Streams to a real sshd and to this machine: bytes, host keys, keys, jumps, shells, and every way not to get in."""

from __future__ import annotations

import base64
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from deployer.command import build_command
from deployer.errors import ConnectError, FerryError, HostError, LostConnection
from deployer.transport import Stream, Transport, make_transport
from deployer.transport.explain import explain_no_answer
from deployer.transport.known_hosts import append_known_host, hash_name, judge, matches, read_known_keys
from deployer.transport.local import LocalTransport
from tests.sshd import ALIAS, SshServer, free_port, login_user, make_key, start_sshd

MIB = 1 << 20
both_ways = pytest.mark.parametrize("way", ["fabric", "openssh"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with start_sshd(tmp_path_factory.mktemp("ssh")) as running:
        yield running


def connect(server: SshServer, config: str = "", **options: Any) -> Transport:
    """A connected transport, by the server's own client config unless another one is given."""
    transport = make_transport(
        ALIAS, **{"config_file": config or str(server.client_config_path), "way": "fabric", **options}
    )
    transport.connect()
    return transport


def with_config(server: SshServer, folder: Path, **changes: str) -> str:
    """The server's client config with some keywords set to something else."""
    lines = server.client_config_path.read_text().splitlines()
    kept = [line for line in lines if not line.split() or line.split()[0] not in changes]
    kept += [f"    {keyword} {value}" for keyword, value in changes.items()]
    path = folder / "client_config"
    path.write_text("\n".join(kept) + "\n")
    return str(path)


def refusal(config: str, address: str = ALIAS, **options: Any) -> ConnectError:
    """The error of a connection that must not succeed."""
    with pytest.raises(ConnectError) as caught:
        make_transport(address, **{"config_file": config, "way": "fabric", **options}).connect()
    return caught.value


def read_all(stream: Stream) -> bytes:
    parts = []
    while data := stream.read(1 << 16):
        parts.append(data)
    return b"".join(parts)


@pytest.fixture(params=["fabric", "openssh", "local"])
def transport(request: pytest.FixtureRequest, server: SshServer) -> Iterator[Transport]:
    made = connect(server, way=request.param) if request.param != "local" else LocalTransport()
    yield made
    made.close()


# --- streams: the same over SSH and on this machine -------------------------------------------------------------------


def test_stream_of_a_command_gives_output_stderr_and_status(transport: Transport) -> None:
    stream = transport.open("echo out; echo err >&2; exit 7")
    assert read_all(stream) == b"out\n"
    assert stream.exit_status(5) == 7
    assert stream.stderr_text() == "err\n"


def test_stream_echoes_every_byte_value_until_its_input_is_closed(transport: Transport) -> None:
    stream = transport.open("cat")
    sent = bytes(range(256)) * 4096
    writer = threading.Thread(target=lambda: (stream.write(sent), stream.close_write()))
    writer.start()
    assert read_all(stream) == sent
    writer.join()
    assert stream.exit_status(5) == 0


def test_stream_with_ten_mib_on_both_outputs_does_not_stall(transport: Transport) -> None:
    script = "import sys\nfor _ in range(160): sys.stdout.write('o' * 65536); sys.stderr.write('e' * 65536)"
    stream = transport.open(f'{sys.executable} -S -c "{script}"')
    assert len(read_all(stream)) == 10 * MIB
    assert stream.exit_status(5) == 0
    assert stream.stderr_text() == "e" * 65536


def test_stream_gives_the_status_that_follows_fifty_mib(transport: Transport) -> None:
    stream = transport.open("head -c 52428800 /dev/zero; exit 7")
    total = 0
    while data := stream.read(1 << 16):
        total += len(data)
    assert (total, stream.exit_status(5)) == (50 * MIB, 7)


def test_exit_status_of_a_process_that_stays_is_none_within_its_time(transport: Transport) -> None:
    stream = transport.open("exec sleep 30")
    begun = time.monotonic()
    assert stream.exit_status(0.3) is None
    assert time.monotonic() - begun < 3
    stream.close()


def test_close_wakes_a_blocked_read(transport: Transport) -> None:
    stream = transport.open("echo up; exec cat")
    assert stream.read(100) == b"up\n"
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(stream.read(100)))
    reader.start()
    stream.close()
    reader.join(5)
    assert got == [b""]


def test_write_to_a_process_that_has_gone_says_so(transport: Transport) -> None:
    stream = transport.open("exit 0")
    assert read_all(stream) == b""
    stream.exit_status(5)
    with pytest.raises(LostConnection, match="takes no more input"):
        for _ in range(50):
            stream.write(b"x" * 65536)


def test_streams_of_one_transport_run_side_by_side(transport: Transport) -> None:
    streams = [transport.open("cat") for _ in range(3)]
    for number, stream in enumerate(streams):
        stream.write(b"%d" % number)
        stream.close_write()
    assert [read_all(stream) for stream in streams] == [b"0", b"1", b"2"]


def test_local_process_has_a_session_of_its_own() -> None:
    stream = LocalTransport().open(f"{sys.executable} -c 'import os; print(os.getsid(0))'")
    assert int(read_all(stream)) != os.getsid(0)


def test_local_process_ended_by_a_signal_has_a_shells_status() -> None:
    stream = LocalTransport().open("kill -9 $$")
    assert read_all(stream) == b""
    assert stream.exit_status(5) == 137


# --- login shells -----------------------------------------------------------------------------------------------------

SHELLS = ["/bin/bash", "/bin/dash", "/usr/bin/fish", "/bin/tcsh", "/bin/zsh"]


@both_ways
@pytest.mark.parametrize("shell", SHELLS)
def test_constant_command_line_passes_every_login_shell_unchanged(shell: str, tmp_path: Path, way: str) -> None:
    program = base64.b64encode(b"import sys; print(sys.argv); print(sys.stdin.read())").decode()
    loader = 'exec python3 -S -c "import base64,sys; exec(base64.b64decode(sys.argv[1]))" "$0" "a  b"'
    with login_user(shell) as user, start_sshd(tmp_path, user=user) as server:
        transport = connect(server, way=way)
        stream = transport.open(f"/bin/sh -c '{loader}' {program}")
        stream.write("zürich\n".encode())
        stream.close_write()
        lines = read_all(stream).decode().splitlines()
        transport.close()
    assert lines[:2] == [f"['-c', '{program}', 'a  b']", "zürich"]


@pytest.mark.parametrize("shell", SHELLS)
def test_command_of_the_link_starts_python_under_every_login_shell(shell: str, tmp_path: Path) -> None:
    import zlib

    word = base64.b64encode(zlib.compress(b"print('started', len(sys.argv))")).decode()
    with login_user(shell) as user, start_sshd(tmp_path, user=user) as server:
        transport = connect(server)
        assert read_all(transport.open(build_command(word))) == b"started 2\n"
        transport.close()


# --- host keys --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("foreign") / "key")


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def known_hosts_config(server: SshServer, folder: Path, lines: str) -> tuple[str, Path]:
    path = folder / "known"
    path.write_text(lines)
    return with_config(server, folder, UserKnownHostsFile=str(path)), path


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
    assert f"{known}:2" in error.where
    assert known.read_text() == lines


@both_ways
def test_changed_host_keys_hint_removes_exactly_the_line(
    server: SshServer, tmp_path: Path, foreign_key: Path, way: str
) -> None:
    lines = f"other {public(foreign_key)}\n{server.host_name} {public(foreign_key)}\n"
    config, known = known_hosts_config(server, tmp_path, lines)
    command = refusal(config, way=way).hint.splitlines()[-1].strip()
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


def test_five_thousand_hashed_lines_take_less_than_0_3_s(server: SshServer, tmp_path: Path) -> None:
    known = tmp_path / "known"
    lines = [server.host_key_line(hash_name(f"host{n}", b"%020d" % n)) for n in range(5000)]
    known.write_text("".join([*lines, server.host_key_line(hash_name(server.host_name, b"x" * 20))]))
    begun = time.process_time()
    keys = read_known_keys([known], server.host_name)
    assert time.process_time() - begun < 0.3
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

_CLIENT = """
import sys
from deployer.errors import FerryError
from deployer.transport import make_transport
try:
    transport = make_transport(sys.argv[1], config_file=sys.argv[2], way=sys.argv[3])
    transport.connect()
    stream = transport.open("echo in; exec cat >/dev/null")
    print("GOT", stream.read(100), flush=True)
    transport.close()
except FerryError as error:
    print("REFUSED", error.message, flush=True)
"""


def at_terminal(config: str, answers: dict[str, str], *, way: str = "fabric", program: str = _CLIENT) -> str:
    """What a person sees who connects at a terminal and answers each prompt that contains a key of `answers`.

    After two seconds of silence the answer is typed again: a terminal drops what comes while it changes its mode.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program, ALIAS, config, way])
    seen, asked, typed = b"", 0, b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 2)[0]:
            os.write(terminal, typed)
            continue
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        seen += data
        for prompt, answer in answers.items():
            position = seen.find(prompt.encode(), asked)
            if position >= 0:
                asked = len(seen)
                typed = answer.encode() + b"\n"
                os.write(terminal, typed)
    os.close(terminal)
    os.waitpid(pid, 0)
    return seen.decode()


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


_SHELL = """
import sys
from deployer.transport import make_transport
print("STATUS", make_transport(sys.argv[1], config_file=sys.argv[2], way=sys.argv[3]).run_shell(COMMAND))
"""


@both_ways
def test_shell_at_a_terminal_has_a_terminal_there_and_returns_its_status(server: SshServer, way: str) -> None:
    ask = 'test -t 0 && printf "name? " && read x && echo got-$x; exit 3'
    program = _SHELL.replace("COMMAND", repr(f"exec bash -c '{ask}'"))
    screen = at_terminal(str(server.client_config_path), {"name? ": "ada"}, program=program, way=way)
    assert "got-ada" in screen and "STATUS 3" in screen


@both_ways
def test_login_shell_at_a_terminal_takes_what_is_typed(server: SshServer, way: str) -> None:
    program = _SHELL.replace("COMMAND", "None")
    screen = at_terminal(str(server.client_config_path), {"# ": "exit 4", "$ ": "exit 4"}, program=program, way=way)
    assert "STATUS 4" in screen


# --- keys -------------------------------------------------------------------------------------------------------------


def authorise(server: SshServer, key: Path) -> None:
    with (server.key_path.parent / "authorized_keys").open("a") as file:
        file.write(Path(f"{key}.pub").read_text())


@pytest.mark.parametrize("kind", ["ecdsa", "rsa", "rsa PEM", "ecdsa PEM", "rsa PKCS8"])
def test_key_file_of_any_type_lets_us_in(server: SshServer, tmp_path: Path, kind: str) -> None:
    name, _, form = kind.partition(" ")
    key = make_key(tmp_path / "key", name)
    if form:
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-N", "", "-m", form, "-f", str(key)], check=True, capture_output=True
        )
    authorise(server, key)
    connect(server, ssh_key=str(key)).close()


@both_ways
def test_second_identity_file_is_tried_after_the_first(server: SshServer, tmp_path: Path, way: str) -> None:
    wrong = make_key(tmp_path / "wrong")
    config = with_config(server, tmp_path, IdentityFile=f"{wrong}\n    IdentityFile {server.key_path}")
    transport = make_transport(ALIAS, config_file=config, way=way)
    transport.connect()
    assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()


@both_ways
def test_wrong_key_names_the_key_the_user_and_what_the_host_accepts(
    server: SshServer, tmp_path: Path, way: str
) -> None:
    wrong = make_key(tmp_path / "wrong")
    error = refusal(with_config(server, tmp_path, IdentityFile=str(wrong)), way=way)
    assert repr(server.user) in error.message and "publickey" in error.message
    assert str(wrong) in error.where
    assert "authorized_keys" in error.hint


@both_ways
def test_wrong_user_is_a_clear_error(server: SshServer, way: str) -> None:
    error = refusal(str(server.client_config_path), address=f"nobody_here@{ALIAS}", way=way)
    assert "'nobody_here'" in error.message


@both_ways
def test_more_keys_than_the_server_lets_us_try_ends_in_a_clear_error(
    server: SshServer, tmp_path: Path, way: str
) -> None:
    keys = [make_key(tmp_path / f"k{n}") for n in range(8)]
    error = refusal(with_config(server, tmp_path, IdentityFile="\n    IdentityFile ".join(map(str, keys))), way=way)
    assert "Too many authentication failures" in error.where
    assert str(keys[0]) in error.where


@both_ways
def test_no_key_at_all_says_how_to_make_one(server: SshServer, tmp_path: Path, way: str) -> None:
    error = refusal(with_config(server, tmp_path, IdentityFile=f"{tmp_path}/none"), way=way)
    assert "no key" in error.message and "ssh-keygen" in error.hint


def test_encrypted_key_without_a_terminal_is_named(server: SshServer, tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    error = refusal(with_config(server, tmp_path, IdentityFile=str(key)))
    assert f"{key} (it has a passphrase" in error.where


@both_ways
def test_encrypted_key_at_a_terminal_asks_for_its_passphrase_until_it_is_right(
    server: SshServer, tmp_path: Path, way: str
) -> None:
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    authorise(server, key)
    screen = at_terminal(with_config(server, tmp_path, IdentityFile=str(key)), {"assphrase": "open sesame"}, way=way)
    assert "GOT b'in" in screen and "sesame" not in screen


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", "puttygen"),
        ("hello\n", "no private key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", "damaged"),
        ("-----BEGIN DSA PRIVATE KEY-----\nAAAA\n-----END DSA PRIVATE KEY-----\n", "not supported"),
    ],
)
def test_unusable_key_file_is_named_with_the_reason(server: SshServer, tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "odd").write_text(text)
    error = refusal(with_config(server, tmp_path, IdentityFile=f"{tmp_path}/odd"))
    assert f"{tmp_path}/odd" in error.where and reason in error.where


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """An ssh-agent's socket."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    yield path
    process.terminate()
    process.wait()


def add_to_agent(agent: Path, key: Path) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
    subprocess.run(["ssh-add", "-q", str(key)], check=True, env=environment)


def test_key_in_the_agent_lets_us_in_though_a_certificate_lies_beside_it(
    server: SshServer, tmp_path: Path, agent: Path
) -> None:
    authority, key = make_key(tmp_path / "ca"), make_key(tmp_path / "key")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", server.user, f"{key}.pub"]
    subprocess.run(sign, check=True)
    authorise(server, key)
    add_to_agent(agent, key)  # adds the certificate too
    config = with_config(server, tmp_path, IdentityFile="none", IdentitiesOnly="no", IdentityAgent=str(agent))
    transport = make_transport(ALIAS, config_file=config)
    transport.connect()
    transport.close()


def test_identities_only_leaves_other_keys_of_the_agent_alone(server: SshServer, tmp_path: Path, agent: Path) -> None:
    stranger, wanted = make_key(tmp_path / "stranger"), make_key(tmp_path / "wanted")
    add_to_agent(agent, stranger)
    error = refusal(with_config(server, tmp_path, IdentityFile=str(wanted), IdentityAgent=str(agent)))
    assert str(wanted) in error.where and "agent:" not in error.where


@both_ways
def test_certificate_beside_the_key_file_lets_us_in(tmp_path: Path, way: str) -> None:
    authority, key = make_key(tmp_path / "ca"), make_key(tmp_path / "key")
    trust = f"TrustedUserCAKeys {authority}.pub"
    with start_sshd(tmp_path, extra_config=trust) as server:
        sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", server.user, f"{key}.pub"]
        subprocess.run(sign, check=True)
        connect(server, ssh_key=str(key), way=way).close()


# --- jumps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with start_sshd(tmp_path_factory.mktemp("hop"), key_type="ecdsa") as running:
        yield running


def jump_config(server: SshServer, hop: SshServer, folder: Path, **changes: str) -> str:
    config = with_config(server, folder, ProxyJump="hop", **changes)
    hop_config = hop.client_config_path.read_text().replace(f"Host {ALIAS} 127.0.0.1", "Host hop")
    with Path(config).open("a") as file:
        file.write(hop_config)
    Path(config).write_text(Path(config).read_text().replace(f"Host {ALIAS} 127.0.0.1", f"Host {ALIAS}"))
    return config


@both_ways
def test_jump_host_carries_the_connection(server: SshServer, hop: SshServer, tmp_path: Path, way: str) -> None:
    transport = make_transport(ALIAS, config_file=jump_config(server, hop, tmp_path), way=way)
    transport.connect()
    came_from = read_all(transport.open("echo $SSH_CONNECTION; cat /proc/$PPID/cmdline >/dev/null")).split()
    transport.close()
    assert int(came_from[3]) == server.port
    assert "Accepted publickey" in hop.log_path.read_text()


@both_ways
def test_jump_host_that_refuses_our_key_is_named(server: SshServer, hop: SshServer, tmp_path: Path, way: str) -> None:
    config = jump_config(server, hop, tmp_path)
    text = Path(config).read_text().replace(f"IdentityFile {hop.key_path}", f"IdentityFile {server.key_path}")
    Path(config).write_text(text)
    error = refusal(config, way=way)
    assert "jump host" in error.message and str(hop.port) in error.message


@both_ways
def test_jump_host_with_an_unknown_key_is_refused(server: SshServer, hop: SshServer, tmp_path: Path, way: str) -> None:
    config = jump_config(server, hop, tmp_path)
    Path(config).write_text(Path(config).read_text().replace(str(hop.known_hosts_path), str(server.known_hosts_path)))
    error = refusal(config, way=way)
    assert "jump host" in error.message and f"[127.0.0.1]:{hop.port} is not known" in error.message


@both_ways
def test_target_that_the_jump_host_cannot_reach_is_named(
    server: SshServer, hop: SshServer, tmp_path: Path, way: str
) -> None:
    port = free_port()
    error = refusal(jump_config(server, hop, tmp_path, Port=str(port)), way=way)
    assert f"127.0.0.1:{port}" in error.message and "cannot reach" in error.message


@both_ways
def test_proxy_command_carries_the_connection(server: SshServer, tmp_path: Path, way: str) -> None:
    relay = "import socket,sys,threading,shutil\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])))\n" + (
        "def up():\n while d:=__import__('os').read(0,65536): s.sendall(d)\n"
        "threading.Thread(target=up,daemon=True).start()\n"
        "while d:=s.recv(65536): __import__('os').write(1,d)\n"
    )
    (tmp_path / "relay.py").write_text(relay)
    command = f"{sys.executable} '{tmp_path}/relay.py' %h %p"
    transport = make_transport(ALIAS, config_file=with_config(server, tmp_path, ProxyCommand=command), way=way)
    transport.connect()
    assert read_all(transport.open("echo through")) == b"through\n"
    transport.close()


# --- no connection ----------------------------------------------------------------------------------------------------


def address_config(folder: Path, host: str, port: int) -> str:
    path = folder / "client_config"
    path.write_text(f"Host {ALIAS}\n Hostname {host}\n Port {port}\n ConnectTimeout 1\n")
    return str(path)


@both_ways
def test_closed_port_is_a_clear_error(tmp_path: Path, way: str) -> None:
    port = free_port()
    error = refusal(address_config(tmp_path, "127.0.0.1", port), way=way)
    assert error.message == f"127.0.0.1:{port} refuses connections"


@both_ways
def test_unresolvable_host_name_is_a_clear_error(tmp_path: Path, way: str) -> None:
    assert "cannot be resolved" in refusal(address_config(tmp_path, "no-such-host.invalid", 22), way=way).message


@both_ways
def test_silent_port_ends_by_the_connect_timeout(tmp_path: Path, way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        error = refusal(address_config(tmp_path, "127.0.0.1", listener.getsockname()[1]), way=way)
    assert "no SSH handshake came within 1 s" in error.message
    assert time.monotonic() - begun < 5


def serve_once(said: bytes) -> tuple[socket.socket, threading.Thread]:
    """A port that says something to whoever comes, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            peer.sendall(said)
            peer.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener, thread


@both_ways
def test_port_that_speaks_something_else_is_named_so(tmp_path: Path, way: str) -> None:
    listener, _ = serve_once(b"HTTP/1.1 400 Bad Request\r\n" * 101)
    error = refusal(address_config(tmp_path, "127.0.0.1", listener.getsockname()[1]), way=way)
    listener.close()
    assert "does not speak SSH" in error.message


def test_connections_dropped_at_random_are_tried_again(tmp_path: Path) -> None:
    with start_sshd(tmp_path, max_startups="2:70:4") as server:
        transports = [make_transport(ALIAS, config_file=str(server.client_config_path)) for _ in range(8)]
        for transport in transports:
            transport.connect()
        assert [read_all(transport.open("echo in")) for transport in transports] == [b"in\n"] * 8
        for transport in transports:
            transport.close()


@both_ways
def test_connection_that_breaks_raises_in_read_and_connects_again(tmp_path: Path, way: str) -> None:
    with start_sshd(tmp_path) as server:
        transport = connect(server, way=way)
        stream = transport.open("echo up; exec sleep 60")
        assert stream.read(100) == b"up\n"
        hang_up(server)
        with pytest.raises(LostConnection, match="broke"):
            stream.read(100)
        transport.connect()
        assert read_all(transport.open("echo again")) == b"again\n"
        transport.close()


def hang_up(server: SshServer) -> None:
    """Ends the server's sessions, not the server."""
    pid = server.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), 9)


# --- endpoints that run no commands -----------------------------------------------------------------------------------


@both_ways
def test_forced_command_is_seen_by_who_waits_for_an_answer(tmp_path: Path, way: str) -> None:
    relay = 'echo "Error: Your SSH client doesn\'t support PTY"; exit 1'
    with start_sshd(tmp_path, extra_config=f"ForceCommand {relay}") as server:
        transport = connect(server, way=way)
        stream = transport.open("anything")
        error = explain_no_answer(stream.stderr_text(), read_all(stream), stream.exit_status(5))
        transport.close()
    assert isinstance(error, HostError)
    assert "runs no commands" in error.message and "direct SSH address" in error.hint


class RelayServer(paramiko.ServerInterface):
    """Lets everybody in and opens sessions; paramiko's default is to refuse every exec."""

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


@pytest.fixture
def relay(tmp_path: Path, foreign_key: Path) -> Iterator[str]:
    """The client config of a server that is not OpenSSH and runs no commands."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            server = paramiko.Transport(listener.accept()[0])
            server.add_server_key(paramiko.Ed25519Key.from_private_key_file(str(foreign_key)))
            server.start_server(server=RelayServer())
            server.join()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        config = address_config(tmp_path, "127.0.0.1", listener.getsockname()[1])
        settings = f" IdentityFile {foreign_key}\n IdentityAgent none\n UserKnownHostsFile {tmp_path}/known\n"
        Path(config).write_text(Path(config).read_text() + settings)
        yield config
        thread.join(10)


@both_ways
def test_server_that_refuses_to_run_commands_is_named_a_relay(relay: str, way: str) -> None:
    transport = make_transport(ALIAS, config_file=relay, accept_new_host_key=True, way=way)
    transport.connect()
    with pytest.raises(HostError, match="runs no commands"):
        stream = transport.open("echo in")
        raise explain_no_answer(stream.stderr_text(), read_all(stream), stream.exit_status(5))
    transport.close()


@pytest.mark.parametrize(
    ("stderr", "noise", "status", "expected"),
    [
        ("", b"Error: Your SSH client doesn't support PTY\n", 1, "runs no commands"),
        ("", b"", None, "runs no commands"),
        ("This account is currently not available.\n", b"", 1, "may not log in"),
        ("", b"torchferry-no-python\n", 127, "no Python 3.8"),
        ("sh: /bin/sh: No such file or directory\n", b"", 127, "no /bin/sh"),
        ("", b'Please login as the user "ubuntu" rather than the user "root".\n', 142, "another user"),
        ("Your password has expired.\n", b"", 1, "expired"),
        ("", b"\x1b[31mhello\x1b[0m\x07\r\n", 3, "exit status 3"),
    ],
)
def test_explain_no_answer_names_the_reason(stderr: str, noise: bytes, status: int | None, expected: str) -> None:
    error: FerryError = explain_no_answer(stderr, noise, status)
    assert expected in error.message
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", error.message + error.where)


@both_ways
def test_client_that_ends_with_open_streams_says_nothing(server: SshServer, way: str) -> None:
    code = (
        "import sys\nfrom deployer.transport import make_transport\n"
        "transport = make_transport(sys.argv[1], config_file=sys.argv[2], way=sys.argv[3])\ntransport.connect()\n"
        "stream = transport.open('echo up; exec cat')\nprint(stream.read(10))"
    )
    argv = [sys.executable, "-c", code, ALIAS, str(server.client_config_path), way]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'up\\n'\n", "")


# --- imports ----------------------------------------------------------------------------------------------------------


def test_local_transport_and_addresses_load_no_ssh_library() -> None:
    code = (
        "import sys\nfrom deployer.transport import make_transport\nimport deployer.target\nmake_transport(None)\n"
        "print(sorted({'paramiko', 'fabric', 'cryptography'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_fabric_can_be_loaded_after_paramiko_was_loaded_without_invoke() -> None:
    code = (
        "import sys\nfrom deployer.transport.paramiko_import import import_paramiko\nimport_paramiko()\n"
        "assert 'invoke' not in sys.modules\nimport fabric\nprint(fabric.Connection('box').host)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "box\n"
