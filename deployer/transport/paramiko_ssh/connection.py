"""SSH by paramiko: one connection, and a stream for each command. paramiko is loaded while the connection is being
made."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from deployer.errors import FerryError, LostConnection
from deployer.transport.paramiko_ssh.sockets import connect_tcp
from deployer.transport.protocol import WRITE_TIMEOUT_S, Drain
from deployer.transport.ssh.attempt import Attempt, Deadline, Questions
from deployer.transport.ssh.explain import explain_no_exec, explain_no_session
from deployer.transport.ssh.ssh_config import SshOptions

if TYPE_CHECKING:
    import paramiko

    from deployer.transport.paramiko_ssh.session import Session

OPEN_TIMEOUT_S = 60.0
DYING_S = 1.0
"""Seconds within which a broken connection is known to be broken."""


class FabricTransport:
    """A connection to one SSH host. `start_connect` begins it in the background; `connect` waits for it."""

    def __init__(
        self,
        options: SshOptions,
        *,
        accept_new_host_key: bool = False,
    ) -> None:
        self.description = options.description
        self.options = options
        self._accept_new = accept_new_host_key
        self._session: Session | None = None
        self._spare: paramiko.Channel | None = None
        self._attempt: Attempt | None = None
        self._lock = threading.Lock()

    @property
    def session(self) -> Session:
        """The live connection. Raises LostConnection if there is none, or none any more."""
        if self._session is None or not self._session.is_active():
            raise LostConnection(self.why_lost())
        return self._session

    def start_connect(self) -> None:
        """Begins to connect, unless connected. `connect` raises the errors."""
        if self._attempt is None and (self._session is None or not self._session.is_active()):
            self._attempt = Attempt(self._connect)

    def connect(self) -> None:
        """See Transport. Connects again if the connection was lost."""
        self.start_connect()
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            attempt.finish()

    def open(self, command: str) -> SshStream:
        """See Transport. Raises HostError if the server runs no commands."""
        import paramiko

        with self._lock:
            channel, self._spare = self._spare, None
        try:
            channel = channel or self._open_channel(self.session)
            _start(channel, command)
        except (paramiko.SSHException, EOFError, OSError):
            if self._session is not None and _outlives_this(self._session):
                raise explain_no_exec() from None
            raise LostConnection(self.why_lost()) from None
        return SshStream(channel, self)

    def run_shell(self, command: str | None) -> int:
        """Runs `command` (None: the login shell) with terminals on both sides. Returns its exit status."""
        self.connect()
        from deployer.transport.paramiko_ssh.shell import run_shell

        return run_shell(self.session, command)

    def close(self) -> None:
        """See Transport."""
        if self._session is not None:
            self._session.close()

    def why_lost(self) -> str:
        """The error text for a lost connection."""
        reason = self._session.goodbye if self._session is not None else ""
        return f"the connection to {self.description} broke" + (f": {reason}" if reason else "")

    # --- in the background ------------------------------------------------------------------------------------------

    def _connect(self, questions: Questions) -> None:
        importer = threading.Thread(target=import_dial, name="paramiko-import", daemon=True)
        importer.start()
        options, begun = self.options, None
        if options.jump is None and options.proxy_command is None:
            deadline = Deadline(options.connect_timeout_s)
            begun = connect_tcp(options, timeout_s=options.connect_timeout_s), deadline
            begun[0].greet()
        importer.join()
        from deployer.transport.paramiko_ssh.dial import dial

        self._session = dial(options, accept_new=self._accept_new, ask=questions.ask, begun=begun, wants_channel=True)
        self._spare = self._open_channel(self._session)

    def _open_channel(self, session: Session) -> paramiko.Channel:
        import paramiko

        try:
            early, session.early = session.early, None
            return early.take() if early is not None else session.open_session(timeout=OPEN_TIMEOUT_S)
        except paramiko.ChannelException:
            raise explain_no_session(self.description) from None
        except (paramiko.SSHException, EOFError, OSError):  # it broke just after the login
            raise LostConnection(self.why_lost()) from None


def _start(channel: paramiko.Channel, command: str) -> None:
    """Requests an exec. If the server never answers, closes the channel, which ends the wait."""
    patience = threading.Timer(OPEN_TIMEOUT_S, channel.close)
    patience.daemon = True
    patience.start()
    try:
        channel.exec_command(command)
    finally:
        patience.cancel()


def import_dial() -> None:
    """Loads the modules that connecting needs, which takes a tenth of a second."""
    from deployer.transport.ssh.paramiko_import import import_paramiko

    import_paramiko()
    import deployer.transport.paramiko_ssh.dial  # noqa: F401


class SshStream:
    """Stdin and stdout of one command on the host."""

    def __init__(self, channel: paramiko.Channel, transport: FabricTransport) -> None:
        self._channel = channel
        self._transport = transport
        self._closed = False
        channel.settimeout(1.0)  # how often a blocked call checks for a change; reads and writes continue after it
        self._stderr = Drain(self._read_stderr)

    def read(self, size: int) -> bytes:
        """See Stream."""
        while True:
            try:
                data = self._channel.recv(size)
            except TimeoutError:
                continue
            except Exception:  # paramiko enlarges the window after it has read, and raises EOFError if it cannot
                raise LostConnection(self._transport.why_lost()) from None
            if not data and not self._ended_in_order():
                raise LostConnection(self._transport.why_lost())
            return data

    def write(self, data: bytes) -> None:
        """See Stream."""
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while data:
            sent = self._write_some(data)
            if sent:
                data, deadline = data[sent:], time.monotonic() + WRITE_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise LostConnection(f"{self._transport.description} took no data for {WRITE_TIMEOUT_S:g} s")

    def _write_some(self, data: bytes) -> int:
        try:
            sent = self._channel.send(data)
        except TimeoutError:
            return 0
        except Exception as error:  # paramiko raises OSError, EOFError, SSHException
            raise self._cannot_write(error) from None
        if sent == 0:
            raise self._cannot_write(None)
        return sent

    def _cannot_write(self, error: Exception | None) -> FerryError:
        if not self._channel.get_transport().is_active():
            return LostConnection(self._transport.why_lost())
        reason = f": {error}" if error is not None and str(error) != "Socket is closed" else ""
        return LostConnection(f"the process on {self._transport.description} takes no more input{reason}")

    def close_write(self) -> None:
        """See Stream."""
        self._quietly(self._channel.shutdown_write)

    def close(self) -> None:
        """See Stream."""
        self._closed = True
        self._quietly(self._channel.close)

    def stderr_text(self) -> str:
        """See Stream."""
        self._stderr.wait(0.2 if self._channel.eof_received else 0)
        return self._stderr.text()

    def exit_status(self, timeout_s: float) -> int | None:
        """See Stream; None also for a process that a signal ended."""
        self._channel.status_event.wait(timeout_s)
        return self._channel.exit_status if self._channel.exit_status >= 0 else None

    def _ended_in_order(self) -> bool:
        """Whether the process closed its output; False if the connection broke."""
        if self._closed or self._channel.eof_received:
            return True
        return _outlives_this(self._channel.get_transport())

    def _read_stderr(self) -> bytes:
        while True:
            try:
                return self._channel.recv_stderr(1 << 15)
            except TimeoutError:
                continue
            except Exception:  # as in `read`, which reports it
                return b""

    @staticmethod
    def _quietly(action: Any) -> None:
        try:
            action()
        except Exception:  # the connection is gone already, and with it the thing to close
            return


def _outlives_this(connection: paramiko.Transport) -> bool:
    """Whether a connection is still active DYING_S after a failure on it.

    paramiko ends the channels of a broken connection a moment before it calls the connection inactive.
    """
    deadline = time.monotonic() + DYING_S
    while connection.is_active() and time.monotonic() < deadline:
        time.sleep(0.01)
    return connection.is_active()
