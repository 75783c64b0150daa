"""SSH by the system's own `ssh`, with all that its configuration supports, such as hardware keys and Kerberos.

One ssh process holds the connection and listens on a control socket. Each stream is another ssh process that uses it,
so a person is asked, and a security key touched, only once. A live ControlMaster of the user replaces it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from deployer.errors import ConnectError, FerryError, LostConnection
from deployer.printable import shown
from deployer.terminal import notice
from deployer.transport.local import PipeStream
from deployer.transport.protocol import Drain
from deployer.transport.ssh.attempt import AT_TERMINAL, Attempt, has_terminal, retry_cuts
from deployer.transport.ssh.explain import LOST, blame_hop, explain_no_exec, explain_no_session, without_escapes
from deployer.transport.ssh.frozen import freeze
from deployer.transport.ssh.known_hosts import host_name_in_files
from deployer.transport.ssh.ssh_config import SshOptions, key_flags, key_path, ssh_argv
from deployer.transport.ssh.target import Target
from deployer.transport.ssh_program.control import control_path
from deployer.transport.ssh_program.stderr import HopFailed, NeedsPerson, SshWords, explain_late, explain_ssh

ALIVE_EVERY_S, ALIVE_COUNT = 15, 2
PERSON_TIMEOUT_S = 300.0
"""Seconds for a step in which a person may have to find a password or a security key."""
OPEN_TIMEOUT_S = 60.0
USERS_MASTER_TIMEOUT_S = 5.0
"""Seconds; if the user's own master opens no session within them, it has lost its connection and has not noticed
yet."""
DYING_S = 1.0
REAP_AFTER_S = 10.0

# Runs ssh beside a shell that waits for the end of its input, which comes when we end, for any reason. A background
# command ignores the terminal's interrupt, so Ctrl-C does not break the connection by which the host learns of it.
# ssh overlooks a signal that arrives just before it begins to wait, so there are two; after a signal in its first
# moments, ssh leaves the socket behind.
_WATCHED = (
    'trap "" INT QUIT; "$@" </dev/null & p=$!; exec 2>/dev/null; '
    'read -r _; kill $p; sleep 1; kill $p; wait $p; rm -f -- "$0"'
)


class OpenSSHTransport:
    """A connection to one SSH host. `start_connect` begins it in the background; `connect` waits for it."""

    def __init__(
        self,
        target: Target,
        options: SshOptions,
        *,
        config_file: str | None = None,
        ssh_key: str | None = None,
        accept_new_host_key: bool = False,
        users_master: bool = False,
        jump: str | None = None,
    ) -> None:
        self.description = options.description
        self.options = options
        self._target = target
        self._jump = jump
        self._config_file = config_file
        self._key = key_path(ssh_key)
        self._accept_new = accept_new_host_key
        self._users_master = users_master
        self._master: _Master | None = None
        self._attempt: Attempt | None = None
        self._streams: list[SshStream] = []

    def start_connect(self) -> None:
        """Begins to connect, unless connected. `connect` raises the errors."""
        if self._attempt is None and not self._users_master and (self._master is None or not self._master.alive(0)):
            self._attempt = Attempt(lambda _: self._connect(ask=False))

    def connect(self) -> None:
        """See Transport. If a person is needed, tries again in this thread, where ssh asks at the terminal."""
        self.start_connect()
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        try:
            attempt.finish()
        except NeedsPerson:
            if not has_terminal() or self.options.batch_mode:
                raise
            with AT_TERMINAL:
                self._connect(ask=True)

    def open(self, command: str) -> SshStream:
        """See Transport. Raises HostError if the server runs no commands."""
        if self._users_master:
            stream = SshStream(self._argv_over_users_master(command), self)
            if stream.wait_open(USERS_MASTER_TIMEOUT_S):
                return self._keep(stream)
            stream.kill()
            self._users_master = False
            self.connect()
        if self._master is None or not self._master.alive(0):
            raise LostConnection(self.why_lost())
        stream = SshStream(self._master.argv(self._target.host, command), self)
        if stream.wait_open(OPEN_TIMEOUT_S):
            return self._keep(stream)
        stream.kill()
        raise self._no_session(stream.stderr_text())

    def run_shell(self, command: str | None) -> int:
        """Runs `command` (None: the login shell) with terminals on both sides. Returns its exit status."""
        self.connect()
        if self._users_master:
            argv = self._argv_over_users_master(command, terminal=True)
        else:
            assert self._master is not None
            argv = self._master.argv(self._target.host, command, terminal=True)
        return subprocess.call(argv)

    def _keep(self, stream: SshStream) -> SshStream:
        self._streams = [*(other for other in self._streams if not other.closed), stream]
        return stream

    def _no_session(self, said: str) -> FerryError:
        if not self.alive(DYING_S):
            return LostConnection(self.why_lost())
        if "session request failed" in said:
            return explain_no_session(self.description)
        return explain_no_exec()

    def close(self) -> None:
        """See Transport."""
        for stream in self._streams:
            stream.close()
        self._streams = []
        if self._master is not None:
            self._master.stop()

    def alive(self, timeout_s: float) -> bool:
        """Whether the connection is alive; it may take `timeout_s` to notice that it has just broken."""
        if self._users_master:
            return users_master_lives(self._target, self._config_file)
        return self._master is not None and self._master.alive(timeout_s)

    def why_lost(self) -> str:
        """The error text for a lost connection."""
        reason = self._master.last_words() if self._master is not None else ""
        return f"the connection to {self.description} broke" + (f": {reason}" if reason else "")

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _connect(self, *, ask: bool) -> None:
        try:
            self._master = retry_cuts(lambda: self._connect_once(ask=ask))
        except HopFailed as error:
            raise self._reason_of_hop(error) from None

    def _reason_of_hop(self, failed: HopFailed) -> ConnectError:
        """Why a jump host failed, from a connection to this host alone."""
        hop = failed.hop
        if hop.proxy_command is not None:
            return failed  # the user's command runs only once
        jump = ",".join(_target_of(before).address for before in reversed(hop.hops)) or None
        alone = OpenSSHTransport(
            _target_of(hop), hop, config_file=self._config_file, accept_new_host_key=self._accept_new, jump=jump
        )
        try:
            alone.connect()
        except ConnectError as error:
            return blame_hop(error, before=failed.before)
        finally:
            alone.close()
        return failed

    def _connect_once(self, *, ask: bool) -> _Master:
        socket_path = control_path()
        config, frozen = self._config_file, Path(f"{socket_path}.config")
        if self.options.as_read and self.options.jump is None and freeze(self.options.as_read, frozen):
            config = str(frozen)
        master = _Master(self._argv_to_connect(socket_path, config, ask=ask), socket_path, ask=ask)
        timeout_s = PERSON_TIMEOUT_S if ask else self.options.connect_timeout_s * (1 + len(self.options.hops))
        try:
            words = master.words
            if not words.settled.wait(timeout_s) and words.accepted and has_terminal():
                words.settled.wait(PERSON_TIMEOUT_S)  # the key is on a token that a person has to touch
            if words.ready:
                self._tell_new_key(master)
                return master
            if words.ended.is_set():
                raise explain_ssh(master.said(), words, self.options, asked=ask)
            raise explain_late(words, master.said(), self.options, timeout_s=timeout_s)
        except BaseException:
            master.stop()
            raise
        finally:
            frozen.unlink(missing_ok=True)

    def _tell_new_key(self, master: _Master) -> None:
        if "Permanently added" in master.said() and self._accept_new:
            name = host_name_in_files(self.options)
            notice(shown(f"New host key of {name} accepted: {master.words.host_key}"))

    def _argv_to_connect(self, socket_path: str, config: str | None, *, ask: bool) -> list[str]:
        strictness = "accept-new" if self._accept_new else self.options.strict_host_key
        options = [
            *self._common_options(),
            "LogLevel=DEBUG1",
            "ControlMaster=yes",
            f"ControlPath={socket_path}",
            "ControlPersist=no",
            f"BatchMode={'no' if ask else 'yes'}",
            f"StrictHostKeyChecking={strictness}",
            f"ConnectTimeout={max(1, round(self.options.connect_timeout_s))}",
            *self._alive_options(),
        ]
        argv = ["-N", "-T", *_set(options), *key_flags(self._key)]
        return ssh_argv(*argv, target=self._target, config_file=config, jump=self._jump)

    def _alive_options(self) -> list[str]:
        if self.options.alive_every_s:
            return []  # the user's own settings
        return [f"ServerAliveInterval={ALIVE_EVERY_S}", f"ServerAliveCountMax={ALIVE_COUNT}"]

    def _argv_over_users_master(self, command: str | None, *, terminal: bool = False) -> list[str]:
        options = [*self._common_options(), *_stream_options(terminal)]
        argv = ssh_argv(*_set(options), target=self._target, config_file=self._config_file)
        return [*argv, *([command] if command is not None else [])]

    def _common_options(self) -> list[str]:
        off = ("ClearAllForwardings", "ForwardAgent", "ForwardX11", "PermitLocalCommand")
        return [*self.options.resets, f"{off[0]}=yes", *(f"{name}=no" for name in off[1:])]


def _target_of(options: SshOptions) -> Target:
    """The address for which the configuration gave these options."""
    return Target(options.alias, options.user, options.port, options.description)


def _stream_options(terminal: bool) -> list[str]:
    """Options of an ssh that uses an existing connection."""
    own = ["RequestTTY=yes", "LogLevel=ERROR"] if terminal else ["RequestTTY=no", "EscapeChar=none", "LogLevel=DEBUG1"]
    return ["ControlMaster=no", "BatchMode=yes", *own]


def _set(options: list[str]) -> list[str]:
    return [word for option in options for word in ("-o", option)]


class _Master:
    """The ssh process that holds a connection."""

    def __init__(self, argv: list[str], socket_path: str, *, ask: bool) -> None:
        self.words = SshWords(_show if ask else None)
        self._socket_path = socket_path
        env = os.environ if ask else {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, socket_path, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=env,
                start_new_session=not ask,  # with a terminal, ssh asks on it
            )
        except OSError as error:
            raise ConnectError(f"ssh cannot be started on this machine: {error}") from None
        assert self._process.stdin and self._process.stderr
        self._stdin = self._process.stdin
        stderr = self._process.stderr
        self._stderr = Drain(lambda: os.read(stderr.fileno(), 1 << 15), self.words.sift)

    def argv(self, host: str, command: str | None, *, terminal: bool = False) -> list[str]:
        """The ssh command line that runs a command through this connection, and cannot connect in another way."""
        options = [f"ControlPath={self._socket_path}", "ProxyCommand=false", *_stream_options(terminal)]
        argv = ["ssh", "-F", "/dev/null", *_set(options), "--", host]
        return [*argv, *([command] if command is not None else [])]

    def alive(self, timeout_s: float) -> bool:
        return self.words.ready and not self.words.ended.wait(timeout_s)

    def said(self) -> str:
        return self._stderr.text()

    def last_words(self) -> str:
        lines = [line.strip() for line in without_escapes(self.said()).splitlines() if line.strip()]
        return lines[-1][:200] if lines and self.words.ended.is_set() else ""

    def stop(self) -> None:
        """Ends the connection: the shell beside ssh ends it."""
        self._stdin.close()
        threading.Thread(target=self._process.wait, name="ssh-reaper", daemon=True).start()


def _show(line: str) -> None:
    """Shows the output of ssh and the server while a person logs in."""
    if line.strip():
        notice(shown(without_escapes(line)))


class SshStream(PipeStream):
    """Stdin and stdout of one command on the host."""

    def __init__(self, argv: list[str], transport: OpenSSHTransport) -> None:
        self._words = SshWords()
        self._transport = transport
        super().__init__(argv, host=transport.description, sift=self._words.sift)

    @property
    def closed(self) -> bool:
        return self._closed

    def wait_open(self, timeout_s: float) -> bool:
        """Whether the server opens the session within this time."""
        self._words.settled.wait(timeout_s)
        return self._words.ready

    def kill(self) -> None:
        """Ends the ssh process at once."""
        self._process.kill()
        self.close()

    def read(self, size: int) -> bytes:
        """See Stream."""
        data = super().read(size)
        if not data and not self._closed and self._broke():
            raise LostConnection(self._transport.why_lost())
        return data

    def exit_status(self, timeout_s: float) -> int | None:
        """See Stream. None also for a process that was ended by a signal: ssh's 255 may mean that, or the status
        255."""
        code = super().exit_status(timeout_s)
        return None if code == LOST else code

    def _broke(self) -> bool:
        """Whether the connection broke; False if the process closed its output."""
        code = super().exit_status(DYING_S)
        return code is not None and (code == LOST or code > 128) and not self._transport.alive(DYING_S)

    def _cannot_write(self, error: Exception) -> LostConnection:
        if not self._closed and not self._transport.alive(DYING_S):
            return LostConnection(self._transport.why_lost())
        return super()._cannot_write(error)

    def _reap(self) -> None:
        try:
            self._process.wait(REAP_AFTER_S)
        except subprocess.TimeoutExpired:  # its connection is dead, or the host does not end the command
            self._process.kill()
            self._process.wait()


def users_master_lives(target: Target, config_file: str | None) -> bool:
    """Whether the user's ControlMaster answers for this target within a second."""
    argv = ssh_argv("-O", "check", target=target, config_file=config_file)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=1.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
