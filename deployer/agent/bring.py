"""What a plan needs of files: the trees that are not here yet, asked from the client.

Stdlib only, Python 3.8: this package runs on the host.
"""

import zlib
from typing import Any, Dict, List

from . import tree
from .errors import AgentError
from .store import Store
from .wire import Call


def trees_of(plan: Dict[str, Any]) -> List[str]:
    trees = [plan["tree"]] + [include["tree"] for include in plan["includes"]]
    wheels = plan["python"].get("wheels")
    return trees + ([wheels] if wheels else [])


def bring_trees(store: Store, wanted: List[str], call: Call) -> None:
    """Asks the client for every tree that is not here, then for the blobs that these trees lack."""
    for name in wanted:
        if store.has_tree(name):
            continue
        call.send_event("need_tree", name)
        entries = tree.load_entries(zlib.decompress(b"".join(frame.body for frame in call.receive())))
        if tree.root_hash(entries) != name:
            raise AgentError("host", "the file list that arrived is not the one announced; try again")
        missing = store.missing(entries)
        if missing:
            call.send_event("need_blobs", missing)
            _receive_blobs(store, tree.blobs_of(entries), call)
        store.save_tree(entries)


def _receive_blobs(store: Store, sizes: Dict[str, int], call: Call) -> None:
    writer = None
    try:
        for frame in call.receive():
            name = frame.head.get("blob")
            if name is not None:
                if name not in sizes:
                    raise AgentError("host", "a file arrived that nobody asked for")
                writer = store.writer(name, sizes[name])
            if writer is None:
                raise AgentError("host", "file content arrived without its name")
            if frame.body:
                writer.write(frame.body)
            if frame.head.get("last"):
                writer.finish()
                writer = None
    finally:
        if writer is not None:
            writer.abort()
