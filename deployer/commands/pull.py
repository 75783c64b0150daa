"""`pull`."""

from __future__ import annotations

from pathlib import Path

from deployer import jobs, pulling, render
from deployer.host import Host


def pull(host: Host, job_id: str, *, target: Path | None, checkpoints: bool, limit: int | None) -> None:
    """Brings results home, to results/ID unless a target is given, and says what came and what stayed."""
    if target is None:  # the id may be the beginning of one
        job_id = jobs.read_status(host, job_id)["job_id"]
        pulling.check_name(job_id)
        target = Path("results") / job_id
    parts = (*pulling.RESULT_PARTS, *(pulling.CHECKPOINT_PARTS if checkpoints else ()))
    with render.progress("pulled") as update:
        pulled = pulling.pull(host, job_id, target=target, parts=parts, max_bytes=limit, progress=update)
    render.notice(f"results: {target} ({pulled.files} files, {render.size(pulled.size_bytes)})")
    if pulled.left_out:
        total = sum(file.size for file in pulled.left_out)
        render.notice(
            f"left on the host: {len(pulled.left_out)} files, {render.size(total)}; "
            f"bring them home with: {render.invoked_as()} pull {job_id} --pull-max {total / 1e9 + 1:.0f}GB"
        )
