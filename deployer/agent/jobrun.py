"""One job's life: begun, attempted, swept, and its final status written.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Any, Dict, List, Optional

from . import state
from .attempt import SWEEP_S, Attempt
from .children import Children
from .ending import FAILED, STOPPED, Ending
from .layout import Job
from .procs import Process, command_of, end_all
from .statusfile import StatusFile, say


class JobRun:
    """One job's life, from preparing to its final status."""

    def __init__(self, job: Job, agent_dir: str, launch_input: Dict[str, Any]) -> None:
        self.job = job
        self.agent_dir = agent_dir
        self.input = launch_input
        self.plan: Dict[str, Any] = launch_input["plan"]
        self.adopted = bool(launch_input.get("adopt"))
        self.children = Children()
        self.status = StatusFile(job, (state.read_status(job) or {}) if self.adopted else {})
        self.attempt: Optional[Attempt] = None
        self._swept = 0
        self._remaining: List[Process] = []

    def run(self) -> None:
        """Returns when the job has ended; at once when the status cannot even be begun (`spawn` then says so)."""
        if not self._begin():
            return
        try:
            ending = self._live()
        except BaseException as e:
            import traceback

            say(traceback.format_exc())
            ending = Ending(FAILED, state.TOOL_FAILED, "the supervisor failed: %r" % e)
        self._finish(ending)

    def _begin(self) -> bool:
        self.status.save(
            state=self.status.values.get("state", state.PREPARING),
            supervisor=state.own_identity()._asdict(),
            attempt=int(self.status.values.get("attempt") or self.input["attempt"]),
            nproc=int(self.plan.get("nproc") or 1),
        )
        if self.status.unsaved:
            return False
        self.status.reserve()
        return True

    def _live(self) -> Ending:
        """The attempts, up to the last one's ending."""
        self.attempt = Attempt(
            self.job,
            self.agent_dir,
            self.input,
            self.status.values["attempt"],
            status=self.status,
            children=self.children,
        )
        return self.attempt.adopt() if self.adopted else self.attempt.run()

    def _sweep(self) -> None:
        """Ends what the attempt left running."""
        if self.attempt is None:
            return
        told, self._remaining = end_all(self.attempt.leftovers, term_s=self.attempt.term_s(), idle=self.children.reap)
        self._swept += told

    def _finish(self, ending: Ending) -> None:
        """Sweeps, then writes the last word."""
        self._sweep()
        final = {
            **ending._asdict(),
            "ended_at": state.utc(time.time()),
            "swept": self._swept,
            "remaining": [{"pid": p.pid, "cmdline": command_of(p.pid)} for p in self._remaining],
            "phase": None,
        }
        if ending.state == STOPPED:
            final["gpus_free"] = _gpus_free(self.plan, self.input.get("base_env") or dict(os.environ))
        self.status.save_last(**final)


def _gpus_free(plan: Dict[str, Any], env: Dict[str, str]) -> Optional[bool]:
    """Whether nobody holds the job's GPUs any more; None when the job has none or nobody can tell."""
    if plan.get("device") != "cuda":
        return None
    from . import gpus

    deadline = time.monotonic() + SWEEP_S
    while True:  # the driver frees a dead process's memory a little later
        try:
            wanted = {gpu.uuid for gpu in gpus.check_gpus(plan["gpus"], env, True)}
            free = not any(h.gpu_uuid in wanted for h in gpus.holders(env))
        except Exception:  # whatever nvidia-smi does, the job's verdict must be written
            return None
        if free or time.monotonic() >= deadline:
            return free
        time.sleep(0.2)
