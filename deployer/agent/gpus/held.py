"""The GPUs of one job in its supervisor's hands: waited for in the queue, held while the job lives, let go at its end.

Stdlib only, Python 3.8, Linux.
"""

import os
import subprocess
import time
from typing import Any, Collection, Dict, List, Optional, Sequence

from ..host.errors import AgentError
from .claim import lease, of_others, see_for
from .leases import LEASE, SHARED, TICKET, Claim, Held, claiming, read_claims, take_over
from .nvidia import Sight
from .queue import grant, queue_view

POLL_S = 1.0
"""So often a waiting job looks who holds its GPUs."""
SIGHT_S = 10.0
"""nvidia-smi is asked again so often while leases alone keep a job waiting; before a start it is asked always."""
KEEP_S = 0.5
"""A job that runs waits no longer than this for the folder of claims."""


class JobGpus:
    """`look` until it is no longer `waiting`; then `slots` and `stdin` are what the job is started with."""

    def __init__(self, plan: Dict[str, Any], env: Dict[str, str], handed: Optional[Dict[str, Any]]) -> None:
        """handed: the claim that the agent made (see leases.Held); None for a job without GPUs."""
        self.view: Dict[str, Any] = {}
        """Why it waits: see queueing.queue_view."""
        self._plan = plan
        self._env = env
        self._held = take_over(handed) if handed else None
        self._sight: Optional[Sight] = None
        self._seen_at = self._looked_at = self._keep_again_at = float("-inf")

    @property
    def waiting(self) -> bool:
        return self._held is not None and self._held.claim.kind == TICKET

    @property
    def slots(self) -> Dict[str, str]:
        return {"gpus": self._held.visible} if self._held is not None else {}

    @property
    def devices(self) -> List[str]:
        return list(self._held.claim.devices) if self._held is not None else []

    @property
    def stdin(self) -> int:
        """For what is started for the job, which torchrun hands on to its ranks: it reads as an empty file, and the
        GPUs are held as long as one of them lives."""
        return self._held.fd if self._held is not None and self._held.fd >= 0 else subprocess.DEVNULL

    def look(self) -> None:
        """Takes the GPUs if it is the job's turn. To be called often: it does no more than is due.

        What keeps us from looking (a driver that hangs) is no reason to give up the place.
        """
        if self._held is None or time.monotonic() - self._looked_at < POLL_S:
            return
        self._looked_at = time.monotonic()
        self.keep()
        try:
            self._look(self._held)
        except AgentError as e:
            self.view = {**self.view, "trouble": e.message}

    def hold_again(self, devices: Sequence[str], slots: Dict[str, str]) -> None:
        """For a job whose supervisor was killed: its ranks hold the first claim, and end before it does."""
        if not devices:
            return
        claim = Claim(SHARED if self._plan["allow_busy"] else LEASE, self._plan["job_id"], tuple(devices))
        try:
            with claiming() as claims:
                self._held = claims.hold(claim)
        except AgentError:
            self._held = Held(claim, -1)  # the ranks hold them
        self._held.visible = slots.get("gpus", "")

    def keep(self) -> None:
        """Makes the claim again where its file was removed. To be called often. The ranks hold the old one, which
        nobody sees; this one the supervisor holds, and what it starts from now on."""
        if self._held is None or not self._held.is_lost or time.monotonic() < self._keep_again_at:
            return
        self._keep_again_at = time.monotonic() + POLL_S
        try:
            with claiming(timeout_s=KEEP_S) as claims:
                again = claims.hold(self._held.claim)
        except AgentError:
            return  # the next call tries again
        again.visible = self._held.visible
        os.close(self._held.fd)
        self._held = again

    def release(self) -> None:
        if self._held is not None:
            self._held.release()

    def _look(self, ticket: Held) -> None:
        claims = self._others(read_claims(), ticket)
        sight = self._sight
        perhaps = sight is None or self._granted(claims, sight, busy=()) is not None
        if sight is None or perhaps or time.monotonic() - self._seen_at > SIGHT_S:
            sight = self._sight = see_for(self._plan, self._env)
            self._seen_at = time.monotonic()
        if perhaps:
            self._take(ticket, sight)
        if self.waiting:
            self.view = queue_view(ticket.claim, claims, sight, memory=False)

    def _take(self, ticket: Held, sight: Sight) -> None:
        with claiming() as claims:
            chosen = self._granted(self._others(claims.read(), ticket), sight, busy=sight.busy())
            if chosen is None:
                return
            self._held = lease(claims, self._plan, chosen, sight)
        ticket.release()

    def _others(self, claims: Sequence[Claim], ticket: Held) -> List[Claim]:
        return of_others(claims, self._plan, but=ticket.claim.file)

    def _granted(self, claims: Sequence[Claim], sight: Sight, *, busy: Collection[str]) -> Any:
        assert self._held is not None
        return grant(claims, sight.gpus, busy).get(self._held.claim.file)
