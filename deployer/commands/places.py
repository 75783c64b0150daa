"""Which host is meant: the one that the command line names, or the one that a job was launched on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployer.connection.host import Host
    from deployer.jobs.registry import JobRecord

DEFAULT_ROOT = "~/.torchferry"


def host_of(
    ssh: str | None,
    root: str | None,
    *,
    ssh_key: str | None,
    accept_new_host_key: bool,
    transport: str | None,
    connect_timeout_s: float | None,
) -> Host:
    from deployer.connection.host import Host

    return Host(ssh, root or DEFAULT_ROOT, ssh_key, accept_new_host_key, transport or "auto", connect_timeout_s)


def hosts_of(ssh: str | None, root: str | None, **access: Any) -> list[Host]:
    """The named host, or every host that the records name and this machine."""
    from deployer.jobs.registry import read_records

    if ssh is not None or root is not None:
        return [host_of(ssh, root, **access)]
    places = {(r.ssh, r.root): r for r in read_records()}
    hosts = [host_of(where, folder, **_access(record, **access)) for (where, folder), record in places.items()]
    return hosts if (None, DEFAULT_ROOT) in places else [*hosts, host_of(None, DEFAULT_ROOT, **access)]


def find_host(job_id: str | None, ssh: str | None, root: str | None, **access: Any) -> tuple[Host, JobRecord | None]:
    """The host of a job by this client's records; with --ssh or --remote-root (or no id) the host that they name."""
    from deployer.jobs.registry import find_record

    if job_id is None or ssh is not None or root is not None:
        return host_of(ssh, root, **access), None
    record = find_record(job_id)
    return host_of(record.ssh, record.root, **_access(record, **access)), record


def _access(record: JobRecord, **access: Any) -> dict[str, Any]:
    """As the command line says, else as the job was launched."""
    remembered = {"ssh_key": record.ssh_key, "transport": record.transport}
    return {**access, **{name: access[name] or value for name, value in remembered.items()}}
