"""Many kinds of servers and logins, each by both ways: the same verdict, and the same words."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deployer.transport.logins import Kind, Logins, Told, ask_agent, key_exchange, many_logins
from tests.support.limits import PATIENCE
from tests.support.sshd import make_key

MENU = '#!/bin/sh\necho "1) train"; echo "2) leave"; printf "Your choice: "; read x; echo bye\n'
SILENT_S = 2.0 * PATIENCE
WORDS = "sh -c 'echo token expired >&2; exit 3'"
FIVE = "\n    IdentityFile ".join(f"{{root}}/key{n}" for n in range(5))
AGENT = {"IdentityAgent": "{root}/agent"}
SECOND = "PasswordAuthentication yes\nAuthenticationMethods publickey,password"
NOT_IN = "for user"
UNKNOWN = "is not known: ssh-ed25519"
OURS = "has not come to our command"

KINDS = [
    Kind("plain", 0),
    # --- logins that never come to our command
    Kind(
        "forced command",
        125,
        "with exit status 3 | host: token expired",
        sshd="ForceCommand echo token expired; exit 3",
    ),
    Kind("command of the key", 125, "with exit status 0 | host: menu of jobs", key='command="echo menu of jobs"'),
    Kind("forced command that waits", 125, OURS, sshd="ForceCommand cat >/dev/null"),
    Kind("start-up file exits", 125, "with exit status 0", rc="exit 0\n"),
    Kind("start-up file that a signal ends", 125, "runs no commands", rc="kill -9 $$\n"),
    Kind("quota", 125, "disk space | host: Disk quota exceeded", rc="echo Disk quota exceeded; exit 1\n"),
    Kind("start-up file waits", 125, OURS, rc="sleep 60\n"),
    Kind("start-up file becomes something else", 125, OURS, rc="exec sleep 60\n"),
    Kind("start-up file with a menu", 125, f"{OURS} | host: 1) shell", rc='echo "1) shell"; read x; exit\n'),
    Kind("stdout led away", 125, "leads the output of commands elsewhere", rc="exec >/dev/null\n"),
    Kind("stdout and stderr led away", 125, "leads the output of commands elsewhere", rc="exec >~/all 2>&1\n"),
    Kind("slow, but talking", 0, rc="for n in 1 2 3 4 5 6; do echo $n; sleep 0.7; done\n"),
    Kind("slow, but complaining", 0, rc="for n in 1 2 3 4 5 6; do echo $n >&2; sleep 0.7; done\n"),
    Kind("noise without end", 125, "prints more than 256 KiB", rc="yes noise | head -c 400000\n"),
    Kind("sftp only", 125, "runs no commands | host: This service allows sftp", sshd="ForceCommand internal-sftp"),
    Kind("bare root folder", 125, "runs no commands", sshd="ChrootDirectory /var/empty"),
    Kind("no sessions", 125, "opens no session", sshd="MaxSessions 0"),
    Kind("no terminals", 0, sshd="PermitTTY no"),
    Kind("password has expired", 125, "has expired", sshd="ForceCommand echo Your password has expired. >&2; exit 1"),
    Kind("other user wanted", 125, "use --ssh ubuntu@", rc="echo 'Please login as the user \"ubuntu\"'; exit 142\n"),
    Kind("shell nologin", 125, "may not log in | host: This account", shell="/usr/sbin/nologin"),
    Kind("shell false", 125, "with exit status 1", shell="/bin/false"),
    Kind("shell is a menu", 125, f"{OURS} | host: 1) train | host: 2) leave", shell=MENU),
    Kind("shell is restricted", 125, "/bin/sh: restricted", shell="/bin/rbash"),
    Kind("first python fails", 0, sshd="SetEnv PATH={root}/wrapper:/usr/bin:/bin HOME={home}"),
    # --- nobody let in
    Kind(
        "key not authorised",
        125,
        f"{NOT_IN} | offered: ROOT/id (ED25519) | authorized_keys",
        sshd="AuthorizedKeysFile none",
    ),
    Kind("key over its time", 125, NOT_IN, key='expiry-time="20200101"'),
    Kind("key for elsewhere", 125, NOT_IN, key='from="10.0.0.1"'),
    Kind("users denied", 125, NOT_IN, sshd="DenyUsers *"),
    Kind("others allowed", 125, NOT_IN, sshd="AllowUsers somebody"),
    Kind(
        "banner",
        125,
        f"{NOT_IN} | host: this account is disabled | have the account enabled",
        sshd="Banner {root}/banner\nAuthorizedKeysFile none",
    ),
    Kind("second factor", 125, "takes the key and wants more: password", sshd=SECOND),
    Kind("account locked", 125, NOT_IN, shell="/bin/sh", account=("passwd", "-l")),
    Kind("account over its time", 125, NOT_IN, shell="/bin/sh", account=("chage", "-E", "0")),
    Kind("no such user", 125, "'nobody_here'", client={"User": "nobody_here"}),
    Kind(
        "no key",
        125,
        "no key to log in with; login methods it allows: publickey | ssh-keygen",
        client={"IdentityFile": "{root}/none"},
    ),
    Kind("no key wanted", 125, "no key to log in with", client={"PubkeyAuthentication": "no"}),
    Kind("locked key", 125, "it has a passphrase", client={"IdentityFile": "{root}/locked"}),
    Kind("key open to others", 125, "its mode 0644 opens it to others", client={"IdentityFile": "{root}/open"}),
    Kind("damaged key", 125, "the file is damaged", client={"IdentityFile": "{root}/damaged"}),
    Kind("key of PuTTY", 125, "puttygen", client={"IdentityFile": "{root}/putty"}),
    Kind(
        "too many files",
        125,
        "more than 3 keys | offered: ROOT/key2 | IdentitiesOnly",
        sshd="MaxAuthTries 3",
        client={"IdentityFile": FIVE},
    ),
    Kind(
        "too many keys of the agent",
        125,
        "more than 3 keys | (ED25519, agent) | IdentitiesOnly",
        sshd="MaxAuthTries 3",
        client={"IdentitiesOnly": "no", **AGENT},
    ),
    Kind(
        "locked key that the agent has",
        0,
        sshd="AuthorizedKeysFile {root}/held.pub",
        client={"IdentityFile": "{root}/held", **AGENT},
    ),
    Kind(
        "key of the agent refused", 125, "ROOT/held (ED25519, agent)", client={"IdentityFile": "{root}/held", **AGENT}
    ),
    Kind(
        "no agent",
        125,
        "agent at ROOT/absent (No such file",
        client={"IdentityAgent": "{root}/absent", "IdentityFile": "{root}/none"},
    ),
    Kind("wrong key named", 125, "any of 2 keys", ssh_key="{root}/key0", sshd="AuthorizedKeysFile none"),
    Kind("wrong key named, right one configured", 0, ssh_key="{root}/key0"),
    # --- who the host is
    Kind("unknown host", 125, UNKNOWN, client={"UserKnownHostsFile": "/dev/null"}),
    Kind(
        "unknown host, strictly",
        125,
        UNKNOWN,
        client={"UserKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes"},
    ),
    Kind(
        "unknown host accepted",
        0,
        client={"UserKnownHostsFile": "{root}/new{way}", "StrictHostKeyChecking": "accept-new"},
    ),
    Kind("changed host", 125, "has changed", client={"UserKnownHostsFile": "{root}/changed"}),
    Kind("revoked host", 125, "is marked as revoked", client={"RevokedHostKeys": "{root}/revoked"}),
    # --- no server to talk to
    Kind("closed port", 125, "refuses connections", client={"Port": "1"}),
    Kind("unknown name", 125, "cannot be resolved", client={"Hostname": "no-such-host.invalid"}),
    Kind("silent port", 125, "no SSH handshake came", says=b"", stays=True, client={"ConnectTimeout": "1"}),
    Kind(
        "web server", 125, "does not speak SSH | host: HTTP/1.1 400", says=b"HTTP/1.1 400 Bad Request\r\nA: b\r\n\r\n"
    ),
    Kind("SSH 1", 125, "version 1", says=b"SSH-1.5-old\r\n", stays=True),
    Kind(
        "foreign key exchange",
        125,
        "no key exchange method that this side has: foo",
        says=key_exchange(kex="foo"),
        stays=True,
    ),
    Kind(
        "foreign host key",
        125,
        "no host key type that this side has: foo",
        says=key_exchange(host_key="foo"),
        stays=True,
    ),
    Kind("foreign cipher", 125, "no cipher that this side has: foo", says=key_exchange(cipher="foo"), stays=True),
    Kind("foreign MAC", 125, "no MAC that this side has: foo", says=key_exchange(mac="foo"), stays=True),
    Kind("proxy with words", 125, "ended amid | host: token expired", client={"ProxyCommand": WORDS}),
    Kind(
        "proxy that speaks no SSH",
        125,
        "ended amid | host: token expired",
        client={"ProxyCommand": "sh -c 'echo token expired; read x; exit 3'"},
    ),
    Kind("silent proxy", 125, "ended amid", client={"ProxyCommand": "sh -c 'exit 3'"}),
    Kind("proxy that is cut", 125, "ended amid", client={"ProxyCommand": "printf 'SSH-2.0-x\\r\\n'"}),
    Kind(
        "proxy that hangs",
        125,
        "brought no SSH handshake within 2 s",
        client={"ProxyCommand": "sleep 60", "ConnectTimeout": "2"},
    ),
    Kind("no proxy", 125, "host: | /nonexistent/proxy: ", client={"ProxyCommand": "/nonexistent/proxy %h"}),
    # --- jump hosts
    Kind("jump host with nologin", 0, jump=True, shell="/usr/sbin/nologin"),
    Kind("jump host with a forced command", 0, jump=True, sshd="ForceCommand echo no; exit 3"),
    Kind(
        "jump host that refuses",
        125,
        f"jump host | {NOT_IN} | offered: ROOT/id",
        jump=True,
        sshd="AuthorizedKeysFile none",
    ),
    Kind("jump host that forwards nothing", 125, "cannot reach", jump=True, sshd="AllowTcpForwarding no"),
    Kind("jump host with a second factor", 125, "jump host | wants more: password", jump=True, sshd=SECOND),
    Kind("jump host behind a proxy", 125, "jump host | host: token expired", jump=True, client={"ProxyCommand": WORDS}),
    Kind("unknown jump host", 125, f"jump host | {UNKNOWN}", jump=True, client={"UserKnownHostsFile": "/dev/null"}),
    Kind(
        "jump host is a web server", 125, "jump host | does not speak SSH", jump=True, says=b"HTTP/1.1 400 Bad\r\n\r\n"
    ),
    Kind("jump host is down", 125, "jump host | refuses connections", jump=True, client={"Port": "1"}),
]


@pytest.fixture(scope="module")
def logins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logins]:
    """The server for all kinds, and the client's files that they name."""
    with many_logins(tmp_path_factory.mktemp("logins"), KINDS) as running:
        root, server = running.root, running.server
        for name in ("key0", "key1", "key2", "key3", "key4", "open", "held"):
            make_key(root / name)
        make_key(root / "locked", passphrase="open sesame")
        (root / "open").chmod(0o644)
        for name, text in (("damaged", _damaged(root / "key0")), ("putty", "PuTTY-User-Key-File-3: ssh-ed25519\n")):
            (root / name).write_text(text)
            (root / name).chmod(0o600)
        (root / "banner").write_text("This account is disabled.\n".lower())
        (root / "changed").write_text(f"{server.host_name} {(root / 'key0.pub').read_text()}")
        (root / "revoked").write_text(server.host_key_path.with_suffix(".pub").read_text())
        (root / "wrapper").mkdir()
        (root / "wrapper" / "python3").write_text("#!/bin/sh\necho 'python3: load a module first' >&2\nexit 1\n")
        (root / "wrapper" / "python3").chmod(0o755)
        with subprocess.Popen(["ssh-agent", "-D", "-a", str(root / "agent")], stdout=subprocess.DEVNULL) as agent:
            while not (root / "agent").exists():
                time.sleep(0.01)
            keys = [str(root / name) for name in ("key0", "key1", "key2", "key3", "held")]
            subprocess.run(
                ["ssh-add", "-q", *keys], check=True, env={**os.environ, "SSH_AUTH_SOCK": str(root / "agent")}
            )
            lock = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(root / "held")]
            subprocess.run(lock, check=True, capture_output=True)
            yield running
            agent.terminate()


def _damaged(key: Path) -> str:
    first, second, *_, last = key.read_text().splitlines()
    return f"{first}\n{second[:30]}\n{last}\n"


def test_both_ways_give_the_same_verdict_and_words_for_every_kind_of_server_and_login(logins: Logins) -> None:
    def ask(kind: Kind) -> list[Told]:
        key = kind.ssh_key.format(root=logins.root) or None
        root = logins.root / "remote" / kind.name.replace(" ", "_")
        return [
            ask_agent(logins.config(kind, way), way, root, ssh_key=key, login_s=SILENT_S)
            for way in ("fabric", "openssh")
        ]

    with ThreadPoolExecutor(4) as pool:
        told = list(zip(KINDS, pool.map(ask, KINDS), strict=True))
    wrong = []
    for kind, (fabric, openssh) in told:
        words = " | ".join([fabric.message, *fabric.where, fabric.hint])
        missing = [part for part in kind.words.split(" | ") if part.replace("ROOT", str(logins.root)) not in words]
        if fabric != openssh or fabric.code != kind.code or missing or not words.isprintable():
            wrong.append(f"{kind.name}: {missing}\n  {fabric}\n  {openssh}")
    assert not wrong, "\n".join(wrong)
