"""The settings that OpenSSH's configuration gives for an address, read from `ssh -G`."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deployer.errors import ConnectError, UsageError
from deployer.paths import expanded
from deployer.transport.ssh.config_file import chosen_config
from deployer.transport.ssh.target import Target, parse_target

DEFAULT_PORT = 22
DEFAULT_CONNECT_TIMEOUT_S = 10.0
MAX_HOPS = 8
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_DEFAULT_USER_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_DEFAULT_GLOBAL_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


@dataclass(frozen=True)
class SshOptions:
    """All settings needed to connect to one host; `jump` is the host that the connection goes through."""

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    """Socket of the agent; None: no agent."""
    user_known_hosts: tuple[Path, ...] = ()
    global_known_hosts: tuple[Path, ...] = ()
    revoked_host_keys: Path | None = None
    host_key_alias: str | None = None
    strict_host_key: str = "ask"
    """`ask`, `yes` (refuse unknown keys) or `accept-new`; OpenSSH's `no` counts as `accept-new`."""
    hash_known_hosts: bool = False
    jump: SshOptions | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    address_family: socket.AddressFamily = socket.AF_UNSPEC
    bind_address: str | None = None
    batch_mode: bool = False
    password_auth: bool = True
    pkcs11: bool = False
    certificate_files: tuple[Path, ...] = ()
    gssapi: bool = False
    control_path: str | None = None
    """The path where the user's own ControlMaster would listen, without expanding `%C` and the like."""
    known_hosts_command: bool = False
    proxy_passes_socket: bool = False
    alive_every_s: float = 0.0
    """ServerAliveInterval in seconds; 0: not set by the user."""
    alive_count: int = 3
    tcp_keepalive: bool = True
    connection_attempts: int = 1
    as_read: str = ""
    """The output of `ssh -G`, if reading the configuration runs the user's commands (`Match exec`)."""
    resets: tuple[str, ...] = ()
    """`Keyword=value` for the user's settings that would change the effect of our `ssh HOST COMMAND`."""

    @property
    def hops(self) -> tuple[SshOptions, ...]:
        """The jump hosts, the one nearest to the target first."""
        return () if self.jump is None else (self.jump, *self.jump.hops)

    @property
    def dead_after_s(self) -> float:
        """Seconds without an answer after which the user's settings give the connection up; 0: not set."""
        return self.alive_every_s * self.alive_count

    @property
    def description(self) -> str:
        """`user@host:port`, IPv6 in brackets."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}:{self.port}"


def resolve(
    target: Target,
    ssh_key: str | None = None,
    *,
    config_file: str | None = None,
    connect_timeout_s: float | None = None,
) -> SshOptions:
    """The options that `ssh` itself would use, read from `ssh -G`; without ssh on this machine, a short list of them.

    `ssh_key` is offered to the target (not to its jump hosts) before the identity files of the configuration, as by
    `ssh -i`, and no other keys are. `connect_timeout_s` replaces the ConnectTimeout of all hosts. Raises UsageError if
    the key file is missing or ssh rejects its configuration.
    """
    key = key_path(ssh_key)
    config_file = target.config or chosen_config(config_file)
    if shutil.which("ssh") is None:
        options = _resolve_without_ssh(target, key, config_file)
    else:
        options = _resolve_by_ssh(target, key, config_file, jump=None, depth=0)
    return options if connect_timeout_s is None else _with_timeout(options, connect_timeout_s)


def _with_timeout(options: SshOptions, timeout_s: float) -> SshOptions:
    jump = options.jump and _with_timeout(options.jump, timeout_s)
    return replace(options, jump=jump, connect_timeout_s=timeout_s)


def key_path(ssh_key: str | None) -> Path | None:
    if ssh_key is None:
        return None
    path = expanded(ssh_key)
    if not path.is_file():
        raise UsageError(f"the key file {str(path)!r} does not exist", hint="--ssh-key names a private key file")
    return path


def _resolve_by_ssh(
    target: Target, key: Path | None, config_file: str | None, *, jump: str | None, depth: int
) -> SshOptions:
    if depth > MAX_HOPS:
        raise UsageError(f"{target.text!r} is reached through more than {MAX_HOPS} jump hosts", hint="see ProxyJump")
    output, ran_commands = _ask_ssh(target, config_file, jump=jump, key=key)
    settings = parse_settings(output)
    options = replace(build_options(target, settings), as_read=output if ran_commands else "")
    hops = settings.get("proxyjump", ["none"])[0]
    if hops.lower() == "none":
        return options
    before, _, last = hops.rpartition(",")
    hop = _resolve_by_ssh(parse_target(last), None, config_file, jump=before or None, depth=depth + 1)
    return replace(options, jump=hop, proxy_command=None)


def ssh_argv(*flags: str, target: Target, config_file: str | None, jump: str | None = None) -> list[str]:
    """`ssh` with these flags for a target; a command may follow."""
    argv = ["ssh", *flags, *target.flags]
    for flag, value in (("-F", config_file), ("-J", jump), ("-l", target.user), ("-p", target.port)):
        if value is not None:
            argv += [flag, str(value)]
    return [*argv, "--", target.host]


def key_flags(key: Path | None) -> list[str]:
    """The options of ssh for a key from the command line: it is offered first, and only named keys are offered."""
    return [] if key is None else ["-i", _quoted(key), "-o", "IdentitiesOnly=yes"]


def _quoted(path: Path) -> str:
    """The path, escaped so that ssh expands nothing in it."""
    return str(path).replace("%", "%%")


def _ask_ssh(target: Target, config_file: str | None, *, jump: str | None, key: Path | None) -> tuple[str, bool]:
    """The output of `ssh -G`, and whether ssh ran a command to produce it."""
    argv = ssh_argv("-G", "-v", *key_flags(key), target=target, config_file=config_file, jump=jump)
    try:
        answer = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        raise ConnectError(
            f"`{' '.join(argv)}` did not end within 30 s", hint="a `Match exec` command in ssh_config may hang"
        ) from None
    if answer.returncode != 0:
        said = [line.strip() for line in answer.stderr.splitlines() if not re.match(r"debug\d: |OpenSSH_", line)]
        reason = " ".join(filter(None, said)) or f"exit status {answer.returncode}"
        raise UsageError(f"ssh rejects {target.text!r} or its configuration: {reason}")
    return answer.stdout, "debug1: Executing command: " in answer.stderr


def parse_settings(output: str) -> dict[str, list[str]]:
    """The output of `ssh -G` as a mapping: each key in lower case, with its values in order."""
    settings: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value)
    return settings


def build_options(target: Target, settings: Mapping[str, Sequence[str]]) -> SshOptions:
    """SshOptions from the settings of `ssh -G`, with tokens and `~` expanded as in OpenSSH."""

    def one(name: str, default: str = "none") -> str:
        return settings.get(name, [default])[0]

    def on(name: str, default: str = "no") -> bool:
        return one(name, default).lower() in ("yes", "true")

    def none_or(name: str) -> str | None:
        return None if one(name).lower() == "none" else one(name)

    hostname, port, user = one("hostname", target.host), int(one("port", "22")), one("user", _local_user())
    alias = none_or("hostkeyalias")
    tokens = _tokens(target.host, hostname, port=port, user=user, host_key_alias=alias)
    files = [_expand_path(name, tokens) for name in settings.get("identityfile", ())]
    command, revoked, control = none_or("proxycommand"), none_or("revokedhostkeys"), none_or("controlpath")
    return SshOptions(
        alias=target.host,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(files) if on("pubkeyauthentication", "yes") else (),
        identities_only=on("identitiesonly"),
        identity_agent=_agent_socket(one("identityagent", "SSH_AUTH_SOCK"), tokens),
        user_known_hosts=_split_paths(one("userknownhostsfile", " ".join(_DEFAULT_USER_HOSTS)), tokens),
        global_known_hosts=_split_paths(one("globalknownhostsfile", " ".join(_DEFAULT_GLOBAL_HOSTS)), tokens),
        revoked_host_keys=_expand_path(revoked, tokens) if revoked else None,
        host_key_alias=alias,
        strict_host_key=_STRICTNESS.get(one("stricthostkeychecking", "ask").lower(), "ask"),
        hash_known_hosts=on("hashknownhosts"),
        proxy_command=_expand_tokens(command, tokens) if command else None,
        connect_timeout_s=_seconds(one("connecttimeout")) or DEFAULT_CONNECT_TIMEOUT_S,
        address_family=_FAMILIES.get(one("addressfamily", "any"), socket.AF_UNSPEC),
        bind_address=none_or("bindaddress"),
        batch_mode=on("batchmode"),
        password_auth=on("passwordauthentication", "yes") or on("kbdinteractiveauthentication", "yes"),
        pkcs11=none_or("pkcs11provider") is not None,
        certificate_files=tuple(_expand_path(name, tokens) for name in settings.get("certificatefile", ())),
        gssapi=on("gssapiauthentication"),
        control_path=str(_expand_path(control, tokens)) if control else None,
        known_hosts_command=none_or("knownhostscommand") is not None,
        proxy_passes_socket=on("proxyusefdpass"),
        alive_every_s=_seconds(one("serveraliveinterval", "0")),
        alive_count=max(1, int(_seconds(one("serveralivecountmax", "3")))),
        tcp_keepalive=on("tcpkeepalive", "yes"),
        connection_attempts=max(1, int(_seconds(one("connectionattempts", "1")))),
        resets=tuple(
            f"{name}={value}" for name, value in _RESETS.items() if one(name, value).lower() not in (value, "false")
        ),
    )


def _seconds(value: str) -> float:
    """A number as `ssh -G` prints it; 0 for `none`."""
    return float(value) if value.isascii() and value.isdigit() else 0.0


_RESETS = {
    "remotecommand": "none",
    "sessiontype": "default",
    "stdinnull": "no",
    "forkafterauthentication": "no",
    "tunnel": "no",
}
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_STRICTNESS = {"yes": "yes", "true": "yes"} | dict.fromkeys(("accept-new", "no", "false", "off"), "accept-new")


def _agent_socket(value: str, tokens: Mapping[str, str]) -> str | None:
    if value.lower() == "none":
        return None
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if value.startswith("$") and not value.startswith("${"):
        return os.environ.get(value[1:]) or None
    return str(_expand_path(value, tokens))


def _split_paths(value: str, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    """The files in one line of `ssh -G`, which loses quotes: a space belongs to a name unless a path follows it."""
    if value.lower() == "none":
        return ()
    return tuple(_expand_path(part, tokens) for part in re.split(r" (?=[/~%$])", value) if part != "/dev/null")


def _tokens(alias: str, hostname: str, *, port: int, user: str, host_key_alias: str | None) -> dict[str, str]:
    local = socket.gethostname()
    return {
        "%": "%",
        "d": str(_home()),
        "h": hostname,
        "n": alias,
        "p": str(port),
        "r": user,
        "u": _local_user(),
        "i": str(os.getuid()),
        "k": host_key_alias or alias,
        "l": local,
        "L": local.partition(".")[0],
    }


def _expand_tokens(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), text)


def _expand_path(text: str, tokens: Mapping[str, str]) -> Path:
    text = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], ""), _expand_tokens(text, tokens))
    if text == "~" or text.startswith("~/"):
        return _home() / text[2:]
    return expanded(text)


def _home() -> Path:
    """The home folder that OpenSSH uses: the account's, even if HOME differs."""
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):
        return expanded("~")


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "root"


# --- no ssh on this machine -------------------------------------------------------------------------------------------

_KNOWN_WITHOUT_SSH = ("hostname", "port", "user", "identityfile", "identitiesonly", "userknownhostsfile")


def _resolve_without_ssh(target: Target, key: Path | None, config_file: str | None) -> SshOptions:
    path = Path(config_file) if config_file else _home() / ".ssh" / "config"
    settings: dict[str, list[str]] = _read_config(path, target.host) if path.is_file() else {}
    if key is not None:
        settings.update(identityfile=[_quoted(key), *settings.get("identityfile", ())], identitiesonly=["yes"])
    settings.setdefault("identityfile", list(_DEFAULT_KEYS))
    for option in target.flags[1::2]:
        name, _, text = option.partition("=")
        if name.lower() == "proxyjump":
            raise UsageError(f"{target.text!r}: a jump host needs ssh here", hint="install the OpenSSH client")
        settings[name.lower()] = [text]
    for name, value in (("user", target.user), ("port", target.port)):
        if value is not None:
            settings[name] = [str(value)]
    return build_options(target, settings)


def _read_config(path: Path, host: str) -> dict[str, list[str]]:
    from deployer.transport.ssh.paramiko_import import import_paramiko

    paramiko = import_paramiko()
    try:
        found = paramiko.SSHConfig.from_path(str(path)).lookup(host)
    except Exception as error:
        raise UsageError(f"{path} cannot be read without ssh: {error}", hint="install the OpenSSH client") from None
    odd = sorted({"proxyjump", "proxycommand"} & set(found))
    if odd:
        raise UsageError(f"{path} uses {odd[0]} for {host!r}", hint="install the OpenSSH client, which resolves it")
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in found.items()
        if name in _KNOWN_WITHOUT_SSH
    }
