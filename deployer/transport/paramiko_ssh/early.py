"""The first channel of a connection, asked for along with the login instead of after it: one round trip less.

A server may take no such question before it has let somebody in (RFC 4252). OpenSSH's reads on once it has accepted the
login, and answers UNIMPLEMENTED when it has not, so this is for OpenSSH only, and with the key that let us in there the
last time.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from pathlib import Path

import paramiko

from deployer.paths import state_dir, write_whole
from deployer.transport.ssh.ssh_config import SshOptions

OPEN_TIMEOUT_S = 60.0
_SERVER = "SSH-2.0-OpenSSH_"


def may_ask_early(session: paramiko.Transport, options: SshOptions, key: paramiko.PKey) -> bool:
    """Whether this server understands it and this key is the one that let us in the last time."""
    if not session.remote_version.startswith(_SERVER):
        return False
    try:
        return _note_of(options).read_text() == _digest(key)
    except (OSError, UnicodeError):
        return False


def note_key(options: SshOptions, key: paramiko.PKey) -> None:
    """Remembers the key that has let us in."""
    with contextlib.suppress(OSError):
        write_whole(_note_of(options), _digest(key).encode("ascii"))


def _note_of(options: SshOptions) -> Path:
    return state_dir() / "logins" / hashlib.blake2b(options.description.encode(), digest_size=16).hexdigest()


def _digest(key: paramiko.PKey) -> str:
    return hashlib.blake2b(key.asbytes(), digest_size=16).hexdigest()


class EarlyChannel:
    """A channel that is being opened in the background."""

    def __init__(self, session: paramiko.Transport) -> None:
        self._session = session
        self._settled = threading.Event()
        self._channel: paramiko.Channel | None = None
        self._error: Exception | None = None
        # after a refused login no answer comes: then nobody waits for this thread
        threading.Thread(target=self._open, name="ssh-early-channel", daemon=True).start()

    def _open(self) -> None:
        try:
            self._channel = self._session.open_session(timeout=OPEN_TIMEOUT_S)
        except Exception as error:  # handed on to who takes the channel
            self._error = error
        self._settled.set()

    def take(self) -> paramiko.Channel:
        """The channel, or what `open_session` would have raised."""
        self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._channel is not None
        return self._channel
