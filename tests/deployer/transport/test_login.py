"""Getting in: keys, passphrases, agents, certificates, and every way not to be let in, over both transports."""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from deployer.connection.host import make_transport
from tests.support.sshd import ALIAS, SshServer, make_key, start_sshd
from tests.support.ways import add_to_agent, at_terminal, authorise, both_ways, connect, read_all, refusal, with_config

# --- keys -------------------------------------------------------------------------------------------------------------


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


def test_channel_asked_for_along_with_the_login_opens_like_any_other(server: SshServer) -> None:
    for _ in range(3):  # the first login notes the key, the next ones ask early
        transport = connect(server)
        assert read_all(transport.open("echo in")) == b"in\n"
        assert read_all(transport.open("echo again")) == b"again\n"
        transport.close()
    assert "dispatch_protocol_error" not in server.log_path.read_text()


def test_channel_asked_for_along_with_a_login_that_is_refused_costs_nothing_but_the_question(tmp_path: Path) -> None:
    with start_sshd(tmp_path) as server:
        usual = make_key(tmp_path / "usual")
        authorise(server, usual)
        config = with_config(server, tmp_path, IdentityFile=f"{usual}\n    IdentityFile {server.key_path}")
        connect(server, config).close()
        keys = server.home.parent / "authorized_keys"
        keys.write_text(keys.read_text().replace(Path(f"{usual}.pub").read_text(), ""))
        transport = connect(server, config)
        assert read_all(transport.open("echo in")) == b"in\n"
        assert "dispatch_protocol_error: type 90" in server.log_path.read_text()  # it had been asked too early
        transport.close()


@both_ways
def test_wrong_key_names_the_key_the_user_and_what_the_host_accepts(
    server: SshServer, tmp_path: Path, way: str
) -> None:
    wrong = make_key(tmp_path / "wrong")
    error = refusal(with_config(server, tmp_path, IdentityFile=str(wrong)), way=way)
    assert repr(server.user) in error.message and "publickey" in error.message
    assert str(wrong) in " ".join(error.where)
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
    assert "Too many authentication failures" in " ".join(error.where)
    assert str(keys[0]) in " ".join(error.where)


@both_ways
def test_no_key_at_all_says_how_to_make_one(server: SshServer, tmp_path: Path, way: str) -> None:
    error = refusal(with_config(server, tmp_path, IdentityFile=f"{tmp_path}/none"), way=way)
    assert "no key" in error.message and "ssh-keygen" in error.hint


def test_encrypted_key_without_a_terminal_is_named(server: SshServer, tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    error = refusal(with_config(server, tmp_path, IdentityFile=str(key)))
    assert f"{key} (it has a passphrase" in " ".join(error.where)


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
    (tmp_path / "odd").chmod(0o600)
    error = refusal(with_config(server, tmp_path, IdentityFile=f"{tmp_path}/odd"))
    assert f"{tmp_path}/odd" in " ".join(error.where) and reason in " ".join(error.where)


class AgentWithToken:
    """Relays to a real agent and adds one identity on a security key, for which a token would be needed."""

    def __init__(self, path: Path, agent: Path) -> None:
        self.asked_for_token = False
        self._agent = agent
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client = self._listener.accept()[0]
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as real, client.makefile("rb") as requests:
            real.connect(str(self._agent))
            answers = real.makefile("rb")
            while size := requests.read(4):
                request = requests.read(*struct.unpack(">I", size))
                self.asked_for_token |= request[0] == 13 and TOKEN in request
                real.sendall(size + request)
                answer = answers.read(*struct.unpack(">I", answers.read(4)))
                if request[0] == 11:  # list the identities
                    count = struct.unpack(">I", answer[1:5])[0]
                    answer = b"\x0c" + struct.pack(">I", count + 1) + text(TOKEN) + text(b"token") + answer[5:]
                client.sendall(text(answer))


def text(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


TOKEN = text(b"sk-ssh-ed25519@openssh.com") + text(bytes(32)) + text(b"ssh:")


@pytest.mark.parametrize(("way", "trusts"), [("fabric", "key"), ("openssh", "key"), ("auto", "certificate")])
def test_agent_with_a_security_key_a_certificate_and_a_plain_key_lets_us_in(
    tmp_path: Path, agent: Path, way: str, trusts: str
) -> None:
    authority, key = make_key(tmp_path / "ca"), make_key(tmp_path / "key")
    trust = f"TrustedUserCAKeys {authority}.pub" if trusts == "certificate" else ""
    with start_sshd(tmp_path, extra_config=trust) as server:
        subprocess.run(["ssh-keygen", "-qs", str(authority), "-I", "me", "-n", server.user, f"{key}.pub"], check=True)
        if trusts == "key":
            authorise(server, key)
        add_to_agent(agent, key)  # the certificate too
        held = AgentWithToken(tmp_path / "relay", agent)
        files = {"IdentityFile": f"{tmp_path}/none", "IdentitiesOnly": "no", "IdentityAgent": str(tmp_path / "relay")}
        transport = connect(server, config=with_config(server, tmp_path, **files), way=way)
        assert read_all(transport.open("echo in")) == b"in\n"
        transport.close()
    assert not held.asked_for_token


def test_identities_only_leaves_other_keys_of_the_agent_alone(server: SshServer, tmp_path: Path, agent: Path) -> None:
    stranger, wanted = make_key(tmp_path / "stranger"), make_key(tmp_path / "wanted")
    add_to_agent(agent, stranger)
    error = refusal(with_config(server, tmp_path, IdentityFile=str(wanted), IdentityAgent=str(agent)))
    assert str(wanted) in " ".join(error.where) and "agent:" not in " ".join(error.where)


@both_ways
def test_certificate_beside_the_key_file_lets_us_in(tmp_path: Path, way: str) -> None:
    authority, key = make_key(tmp_path / "ca"), make_key(tmp_path / "key")
    trust = f"TrustedUserCAKeys {authority}.pub"
    with start_sshd(tmp_path, extra_config=trust) as server:
        sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", server.user, f"{key}.pub"]
        subprocess.run(sign, check=True)
        connect(server, ssh_key=str(key), way=way).close()


# --- a shell ----------------------------------------------------------------------------------------------------------

_SHELL = """
import sys
from deployer.connection.host import make_transport
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
