"""Several hosts on this machine that share one file system: each a network namespace with a host name of its own.

    with start_hosts(tmp_path, 3) as hosts:
        ferry.env["TORCHFERRY_SSH_CONFIG"] = str(hosts[0].config)
        ferry.ssh = hosts[1].ssh

They also share the process numbers, so that a pid of another host names a process here too, as it does by accident
between real hosts. Needs root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.sshd import start_sshd


@dataclass(frozen=True)
class SharedHost:
    """A host that can be reached as `ssh`, with the client config `config`, and calls itself `name`."""

    name: str
    ssh: str
    config: Path


@contextmanager
def start_hosts(folder: Path, number: int) -> Iterator[list[SharedHost]]:
    """Hosts gpu1, gpu2, ... that listen when they are handed out."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    config = folder / "ssh_config"
    with ExitStack() as undo:
        hosts = []
        for n in range(1, number + 1):
            space, net = f"tfhost{os.getpid()}x{n}", f"198.18.{os.getpid() % 60 * 4 + n}"  # the range for tests
            undo.enter_context(_namespace(space, f"tf{os.getpid()}x{n}", net))
            named = ("unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', f"gpu{n}")
            server = start_sshd(
                folder, name=f"sshd{n}", address=f"{net}.2", run_by=("ip", "netns", "exec", space, *named)
            )
            undo.enter_context(server)
            with config.open("a") as f:
                f.write(server.client_config_path.read_text())
            hosts.append(SharedHost(f"gpu{n}", server.address, config))
        yield hosts


@contextmanager
def _namespace(space: str, link: str, net: str) -> Iterator[None]:
    if subprocess.run(["ip", "netns", "add", space], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no network namespaces")
    try:
        for words in (
            f"link add {link} type veth peer name eth0 netns {space}",
            f"addr add {net}.1/24 dev {link}",
            f"link set {link} up",
            f"-n {space} addr add {net}.2/24 dev eth0",
            f"-n {space} link set eth0 up",
            f"-n {space} link set lo up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "del", space], check=True)
