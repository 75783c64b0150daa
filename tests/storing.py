"""Trees in a host's store, for tests."""

from __future__ import annotations

from deployer.agent.layout import Root
from deployer.agent.store import Store
from deployer.agent.tree import EXECUTABLE, FILE, Entry, content_hash, entry_of_link, root_hash


def keep(root: Root, files: dict[str, bytes | str]) -> str:
    """A tree in the store: bytes are files (executable below bin/), text is a link's target."""
    entries = []
    for path, content in files.items():
        if isinstance(content, str):
            entries.append(entry_of_link(path, content))
            continue
        mode = EXECUTABLE if "/bin/" in path else FILE
        entries.append(Entry(path, mode, len(content), content_hash(content)))
        writer = Store(root).writer(content_hash(content), len(content))
        writer.write(content)
        writer.finish()
    Store(root).save_tree(entries)
    return root_hash(entries)
