"""Whom `--ssh` means: the address that the user typed, and what OpenSSH's own configuration says about it."""

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

CONFIG_ENV = "TORCHFERRY_SSH_CONFIG"
"""Names an ssh_config to use instead of ~/.ssh/config, like `ssh -F`."""

DEFAULT_PORT = 22
DEFAULT_CONNECT_TIMEOUT_S = 10.0
MAX_HOPS = 8
_FORBIDDEN = frozenset("'\"`$\\;&<>|(){}[]%/,*?!#")
"""What OpenSSH refuses in a host name, and what would be a pattern or a token in its files."""
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_DEFAULT_USER_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_DEFAULT_GLOBAL_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


@dataclass(frozen=True)
class Target:
    """An address as typed: `host` may be an alias of ssh_config. None means that the configuration decides."""

    host: str
    user: str | None
    port: int | None
    text: str


@dataclass(frozen=True)
class SshOptions:
    """All that is needed to connect to one host; `jump` is the host that the connection goes through."""

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
    """`ask`, `yes` (unknown keys are refused) or `accept-new`; OpenSSH's `no` counts as `accept-new`."""
    hash_known_hosts: bool = False
    jump: SshOptions | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    address_family: socket.AddressFamily = socket.AF_UNSPEC
    bind_address: str | None = None
    batch_mode: bool = False
    password_auth: bool = True
    pkcs11: bool = False

    @property
    def description(self) -> str:
        """`user@host:port`, IPv6 in brackets."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}:{self.port}"


# --- what was typed ---------------------------------------------------------------------------------------------------


def parse_target(text: str) -> Target:
    """The parts of `[user@]host[:port]`, `[::1]:22`, `user@::1`, `ssh://…` or an alias. UsageError when it is none."""
    rest = text.removeprefix("ssh://").rstrip("/") if text.startswith("ssh://") else text
    user, at, address = rest.rpartition("@")
    if at:
        _check_user(user, text)
    host, port = _split_port(address, text)
    _check_host(host, text)
    return Target(host=host, user=user if at else None, port=port, text=text)


def _split_port(address: str, text: str) -> tuple[str, int | None]:
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", address)
    if bracketed:
        return bracketed[1], None if bracketed[2] is None else _parse_port(bracketed[2], text)
    if address.count(":") != 1:  # none, or a bare IPv6 address
        return address, None
    host, _, port = address.partition(":")
    return host, _parse_port(port, text)


def _parse_port(port: str, text: str) -> int:
    if port.isascii() and port.isdigit() and 1 <= int(port) <= 65535:
        return int(port)
    raise UsageError(f"{text!r}: {port!r} is not a port", hint="ports are 1 to 65535, as in root@host:2222")


def _check_host(host: str, text: str) -> None:
    if not host:
        raise UsageError(f"{text!r} names no host", hint="write [user@]host[:port] or an alias of ~/.ssh/config")
    if ":" in host:
        if not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?", host):
            raise UsageError(f"{text!r}: {host!r} is not an address", hint="IPv6 with a port is written [::1]:22")
        return
    _refuse_hostile("host", host, text, forbidden=_FORBIDDEN)


def _check_user(user: str, text: str) -> None:
    if ":" in user:
        raise UsageError(
            f"the address of {text.rpartition('@')[2]!r} carries a password",
            hint="leave it out: a password is asked for on the terminal; better, use a key (ssh-copy-id)",
        )
    if not user:
        raise UsageError(f"{text!r}: the user before @ is empty")
    _refuse_hostile("user", user, text, forbidden=_FORBIDDEN - {"\\"})


def _refuse_hostile(what: str, value: str, text: str, *, forbidden: frozenset[str]) -> None:
    if value.startswith("-"):
        raise UsageError(f"{text!r}: a {what} cannot begin with '-'")
    for char in value:
        if char in forbidden or char.isspace() or not char.isprintable():
            raise UsageError(f"{text!r}: a {what} cannot contain {char!r}")


# --- what the configuration says --------------------------------------------------------------------------------------


def resolve(target: Target, ssh_key: str | None = None, *, config_file: str | None = None) -> SshOptions:
    """The options by which `ssh` itself would connect, asked from `ssh -G`; a short list of them where no ssh exists.

    `ssh_key` replaces the identity files of the target (not those of its jump hosts). UsageError when the key file is
    missing or ssh rejects its configuration.
    """
    key = _key_path(ssh_key)
    config_file = config_file or os.environ.get(CONFIG_ENV) or None
    if shutil.which("ssh") is None:
        return _resolve_without_ssh(target, key, config_file)
    return _resolve_by_ssh(target, key, config_file, jump=None, depth=0)


def _key_path(ssh_key: str | None) -> Path | None:
    if ssh_key is None:
        return None
    path = Path(ssh_key).expanduser()
    if not path.is_file():
        raise UsageError(f"the key file {str(path)!r} does not exist", hint="--ssh-key names a private key file")
    return path


def _resolve_by_ssh(
    target: Target, key: Path | None, config_file: str | None, *, jump: str | None, depth: int
) -> SshOptions:
    if depth > MAX_HOPS:
        raise UsageError(f"{target.text!r} is reached through more than {MAX_HOPS} jump hosts", hint="see ProxyJump")
    settings = parse_settings(_ask_ssh(target, config_file, jump=jump))
    options = build_options(target, settings, key=key)
    hops = settings.get("proxyjump", ["none"])[0]
    if hops.lower() == "none":
        return options
    before, _, last = hops.rpartition(",")
    hop = _resolve_by_ssh(parse_target(last), None, config_file, jump=before or None, depth=depth + 1)
    return replace(options, jump=hop, proxy_command=None)


def ssh_query(target: Target, config_file: str | None, *, jump: str | None = None) -> list[str]:
    """The argument list that makes ssh print its options for a target."""
    argv = ["ssh", "-G"]
    for flag, value in (("-F", config_file), ("-J", jump), ("-l", target.user), ("-p", target.port)):
        if value is not None:
            argv += [flag, str(value)]
    return [*argv, "--", target.host]


def _ask_ssh(target: Target, config_file: str | None, *, jump: str | None) -> str:
    argv = ssh_query(target, config_file, jump=jump)
    try:
        answer = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        raise ConnectError(
            f"`{' '.join(argv)}` did not end within 30 s", hint="a `Match exec` command in ssh_config may hang"
        ) from None
    if answer.returncode != 0:
        reason = answer.stderr.strip() or f"exit status {answer.returncode}"
        raise UsageError(f"ssh rejects {target.text!r} or its configuration: {reason}")
    return answer.stdout


def parse_settings(output: str) -> dict[str, list[str]]:
    """What `ssh -G` printed: each lower-case key with its values in order."""
    settings: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value)
    return settings


def build_options(target: Target, settings: Mapping[str, Sequence[str]], *, key: Path | None = None) -> SshOptions:
    """SshOptions out of the settings of `ssh -G`, tokens and `~` expanded as OpenSSH does."""

    def one(name: str, default: str = "none") -> str:
        return settings.get(name, [default])[0]

    def on(name: str, default: str = "no") -> bool:
        return one(name, default).lower() in ("yes", "true")

    def none_or(name: str) -> str | None:
        return None if one(name).lower() == "none" else one(name)

    hostname, port, user = one("hostname", target.host), int(one("port", "22")), one("user", _local_user())
    alias = none_or("hostkeyalias")
    tokens = _tokens(target.host, hostname, port=port, user=user, host_key_alias=alias)
    files = [key] if key else [_expand_path(name, tokens) for name in settings.get("identityfile", ())]
    timeout = one("connecttimeout")
    command, revoked = none_or("proxycommand"), none_or("revokedhostkeys")
    return SshOptions(
        alias=target.host,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(files) if on("pubkeyauthentication", "yes") else (),
        identities_only=on("identitiesonly") or key is not None,
        identity_agent=_agent_socket(one("identityagent", "SSH_AUTH_SOCK"), tokens),
        user_known_hosts=_split_paths(one("userknownhostsfile", " ".join(_DEFAULT_USER_HOSTS)), tokens),
        global_known_hosts=_split_paths(one("globalknownhostsfile", " ".join(_DEFAULT_GLOBAL_HOSTS)), tokens),
        revoked_host_keys=_expand_path(revoked, tokens) if revoked else None,
        host_key_alias=alias,
        strict_host_key=_STRICTNESS.get(one("stricthostkeychecking", "ask").lower(), "ask"),
        hash_known_hosts=on("hashknownhosts"),
        proxy_command=_expand_tokens(command, tokens) if command else None,
        connect_timeout_s=float(timeout) if timeout.isdigit() and int(timeout) > 0 else DEFAULT_CONNECT_TIMEOUT_S,
        address_family=_FAMILIES.get(one("addressfamily", "any"), socket.AF_UNSPEC),
        bind_address=none_or("bindaddress"),
        batch_mode=on("batchmode"),
        password_auth=on("passwordauthentication", "yes") or on("kbdinteractiveauthentication", "yes"),
        pkcs11=none_or("pkcs11provider") is not None,
    )


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
    """The files of one line of `ssh -G`, which loses quotes: a space belongs to a name unless a path follows it."""
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
    return Path(text).expanduser()


def _home() -> Path:
    """The home that OpenSSH uses: the account's, whatever HOME says."""
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):
        return Path.home()


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "root"


# --- no ssh on this machine -------------------------------------------------------------------------------------------

_KNOWN_WITHOUT_SSH = ("hostname", "port", "user", "identityfile", "identitiesonly", "userknownhostsfile")


def _resolve_without_ssh(target: Target, key: Path | None, config_file: str | None) -> SshOptions:
    path = Path(config_file) if config_file else _home() / ".ssh" / "config"
    settings: dict[str, list[str]] = {"identityfile": list(_DEFAULT_KEYS)}
    if path.is_file():
        settings.update(_read_config(path, target.host))
    for name, value in (("user", target.user), ("port", target.port)):
        if value is not None:
            settings[name] = [str(value)]
    return build_options(target, settings, key=key)


def _read_config(path: Path, host: str) -> dict[str, list[str]]:
    from deployer.transport.paramiko_import import import_paramiko

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
