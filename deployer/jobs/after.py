"""Whole IDs for --after from this client's records. The host resolves a word that is not in them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from deployer.agent.host.layout import matching_ids, name_ids
from deployer.connection.host import HERE, Host
from deployer.errors import UsageError
from deployer.jobs.registry import JobRecord, read_records


def whole_ids(words: Sequence[str], host: Host) -> list[str]:
    """The whole IDs, each once; a word that no record matches stays as it is. Raises UsageError for a job of another
    host or remote root."""
    records = read_records()
    return list(dict.fromkeys(_whole_id(word.lower(), host, records) for word in words))


def _whole_id(word: str, host: Host, records: Sequence[JobRecord]) -> str:
    here = matching_ids(word, [r.job_id for r in records if (r.ssh, r.root) == (host.ssh, host.root)])
    if len(here) > 1:
        raise UsageError(f"--after {word} matches {name_ids(here)}", hint="give more of the id, or how it ends")
    if here:
        return here[0]
    elsewhere = {record.job_id: record for record in records}
    found = matching_ids(word, elsewhere)
    if len(found) != 1:
        return word
    other = elsewhere[found[0]]
    there = ["--ssh", other.ssh] if other.ssh else []
    there += ["--remote-root", other.root] if other.root != host.root else []
    what = f"--after {word}: {other.job_id} is a job of {_place(other.ssh, other.root)}"
    raise UsageError(
        f"{what}, and this one is for {_place(host.ssh, host.root)}",
        hint=f"both have to be on the same host, under the same root: launch this one with {shlex.join(there)}"
        if there
        else "both have to be on the same host: launch this one without --ssh",
    )


def _place(ssh: str | None, root: str) -> str:
    return f"{ssh or HERE} ({root})"
