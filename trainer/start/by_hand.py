"""Starts one node of a training on several, where the user starts `train.py` on each; imports no torch.

Node 0 chooses the run folder. The other nodes learn of it when all meet (trainer.start.meeting), just before torchrun
starts there.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trainer.config.load import num_processes
from trainer.failures.comm_errors import read_interfaces
from trainer.schema import CONFIG_FILE, RUN_DIR_ENV, Config
from trainer.start import launch
from trainer.start.place import Node, note_on_processes

PROGRAM_ENV = "TORCHFERRY_PROGRAM"
"""The variable with the name of the program that started this one: usage and errors show it."""
MEET_TIMEOUT_ENV = "TORCHFERRY_MEET_TIMEOUT_S"
"""Seconds that a node waits for the others (default 600)."""
MEET_TIMEOUT_S = 600.0
RENDEZVOUS_S = 120
"""torchrun's own wait. The nodes have met before, and it does not say whom it waits for."""
GLOO_ENV = "GLOO_SOCKET_IFNAME"


def build_node_argv(
    python: str, script: str, config_path: Path, node: Node, *, processes: int, debug: bool
) -> list[str]:
    """The command that starts this node's ranks; ranks and ports are fixed by the node's number."""
    address = f"[{node.address}]" if ":" in node.address else node.address
    where = [f"--nnodes={node.nodes}", f"--node-rank={node.rank}", f"--master-addr={address}"]
    where += [f"--master-port={node.port}", f"--rdzv-conf=timeout={RENDEZVOUS_S}"]
    torchrun = [python, launch.TORCHRUN, *where, f"--nproc-per-node={processes}", "--max-restarts=0"]
    return [*torchrun, script, str(config_path), *(["--debug"] if debug else [])]


def start_node(config: Config, node: Node, run_dir: Path | None, *, debug: bool) -> NoReturn:
    """Replace this process by this node's torchrun. `run_dir`: made by the caller on node 0; on another node only if
    the user has named one."""
    folder = run_dir
    if node.rank > 0 or folder is None:
        folder = Path(tempfile.mkdtemp(prefix="torchferry-node-"))  # until node 0 tells the run folder
        launch.write_config(config, folder)
    argv = build_node_argv(
        sys.executable, sys.argv[0], folder / CONFIG_FILE, node, processes=num_processes(config), debug=debug
    )
    launch.relaunch(argv, run_dir)


def prepare_node(config: Config, node: Node, program: str, *, tell: Callable[[str], None]) -> None:
    """Set the variables for this node's torchrun and ranks. Calls `tell` with a note on one without effect."""
    note = note_on_processes(os.environ, num_processes(config))
    if note is not None:
        tell(note)
    os.environ.update(gloo_env(config, node, os.environ))
    os.environ[PROGRAM_ENV] = program


def meet_timeout_s(environ: Mapping[str, str]) -> float:
    """Seconds that a node waits for the others."""
    with suppress(ValueError):
        return float(environ.get(MEET_TIMEOUT_ENV, MEET_TIMEOUT_S))
    return MEET_TIMEOUT_S


def gloo_env(config: Config, node: Node, environ: Mapping[str, str]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME with the interface towards node 0, unless it is set.

    gloo would take the address of the host's name, which is 127.0.1.1 on many systems: the other nodes could not reach
    it.
    """
    if GLOO_ENV in environ or GLOO_ENV in config.target.env:
        return {}
    name = interface_of(own_address(node), read_interfaces())
    return {GLOO_ENV: name} if name else {}


def interface_of(address: str, interfaces: list[str]) -> str | None:
    """The name in `eth0 10.0.0.5` for the address; None for an address of this machine alone and for a name that gloo
    would not understand."""
    if not address or address.startswith("127.") or address == "::1":
        return None
    found = [name for name, _, of in (line.partition(" ") for line in interfaces) if of == address]
    return found[0] if found else None


def own_address(node: Node) -> str:
    """This machine's address as node 0 sees it; empty if that is not known. Sends nothing."""
    with suppress(OSError):
        kind, _, _, _, where = socket.getaddrinfo(node.address, node.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return ""


def adopt_run_dir(config_path: Path, node: Node, told: str) -> tuple[Path, Path]:
    """On a node other than 0: create the run folder, and move the config into it. Returns both paths.

    `told`: node 0's run folder, which is used if this node has been given none. Raises OSError.
    """
    run_dir = Path(os.environ.get(RUN_DIR_ENV) or told)
    kept = run_dir / "control" / f"config.node_{node.rank}.yaml"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(config_path.read_bytes())
    forget_config(config_path)
    os.environ[RUN_DIR_ENV] = str(run_dir)
    return run_dir, kept


def forget_config(config_path: Path) -> None:
    """Remove the temporary folder of `start_node`."""
    if config_path.parent.name.startswith("torchferry-node-"):
        with suppress(OSError):
            config_path.unlink()
            config_path.parent.rmdir()
