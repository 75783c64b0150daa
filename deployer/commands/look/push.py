"""`push`: copies files of this machine into a job's folder on its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.agent.requests.files.view import Pushed
from deployer.agent.store.tree import LINK, Entry, blobs_of
from deployer.connection.host import Host, ReconnectBackoff
from deployer.errors import ConnectError, HostError, LostConnection, UsageError
from deployer.launch.delta import send_blobs, send_tree
from deployer.printable import shown
from deployer.project.manifest import scan_include

MOST_LINES = 8


def push(
    host: Host, job_id: str, files: Sequence[str], *, into: str, force: bool, give_up_s: float, as_json: bool
) -> None:
    """Sends the files; reconnects if the connection breaks. Files that the host already has are not sent again."""
    entries, sources, links = _read(files)
    backoff = ReconnectBackoff(terminal.notice, give_up_after_s=give_up_s)
    with terminal.progress(shown("pushed")) as update:

        def sent(done: int, total: int) -> None:
            backoff.progressed()
            update(done, total)

        while True:
            try:
                pushed = _push_once(host, job_id, entries, sources, into=into, force=force, sent=sent)
                break
            except (LostConnection, ConnectError) as error:
                backoff.wait(error)
    if as_json:
        files_there = [f"{into}/{entry.path}" if into else entry.path for entry in entries]
        terminal.say_json({"id": pushed.job_id, **to_json(pushed), "files": files_there, "left_out": links})
        return
    for path in links[:MOST_LINES]:
        terminal.notice(shown(f"left out: {path}: a link; links are not pushed"))
    if links[MOST_LINES:]:
        terminal.notice(shown(f"left out: {len(links) - MOST_LINES} more links"))
    there = f" ({pushed.there} were there already)" if pushed.there else ""
    where = f"{pushed.path}/{into}" if into else pushed.path
    terminal.notice(shown(f"{terminal.counted(len(entries), 'file')} in {where} on {host.name}{there}"))


def _read(files: Sequence[str]) -> tuple[tuple[Entry, ...], dict[str, str], list[str]]:
    """The entries for the job's folder, the local source of their content, and the links, which are not sent."""
    entries: dict[str, Entry] = {}
    sources: dict[str, str] = {}
    links: list[str] = []
    for given in files:
        path = Path(given)
        name = path.resolve().name if path.name in ("", ".", "..") else path.name
        if not path.exists():
            raise UsageError(f"{given} does not exist", hint="push takes files and folders of this machine")
        scan = scan_include(path, hash_cache=None)
        is_folder = path.is_dir()
        for entry in scan.entries:
            below = f"{name}/{entry.path}" if is_folder else name
            if entry.mode == LINK:
                links.append(below)
            elif below in entries:
                raise UsageError(
                    f"{given} would be {below} twice", hint="push them one after the other, with --into DIR"
                )
            else:
                entries[below] = entry._replace(path=below)
        sources.update(scan.sources)
    if not entries:
        raise UsageError("there is no file to push in " + ", ".join(files))
    return tuple(sorted(entries.values())), sources, links


def _push_once(
    host: Host,
    job_id: str,
    entries: tuple[Entry, ...],
    sources: dict[str, str],
    *,
    into: str,
    force: bool,
    sent: Callable[[int, int], None],
) -> Pushed:
    with host.connect() as link:
        call = link.call("push", job=job_id, into=into, force=force)
        call.max_event = max(call.max_event, 100 * len(entries))
        for name, value, _ in call.events():
            if name == "need_tree":
                send_tree(call, entries)
            elif name == "need_blobs":
                send_blobs(call, call.read(value, list[str], name), sources, blobs_of(entries), sent)
            elif name == "pushed":
                return call.read(value, Pushed, name)
    raise HostError(f"{host.name} ended the push without an answer")
