"""Faults that are planted in the trainer's shipped sources, one at a time: see tests/world/planted.py."""

from __future__ import annotations

from tests.world.planted import Planted

NAMED = '    on_stage("renamed")\n'

PLANTED = {
    "marker before the shards are synced": Planted(
        "trainer.checkpoint.folders", "super().__init__(path)\n", "super().__init__(path, sync_files=False)\n", seed=18
    ),
    "metadata synced before they leave Python's buffer": Planted(
        "trainer.checkpoint.folders",
        "        self._file.flush()\n        return self._file.fileno()",
        "        return self._file.fileno()",
        seed=42,
    ),
    "random states that are not synced": Planted(
        "trainer.checkpoint.states", "        raw.flush()\n        os.fsync(raw.fileno())\n", "", seed=42
    ),
    "name before the marker": Planted(
        "trainer.checkpoint.folders",
        "    try:\n        aside.rename(final)\n",
        "    (aside / CHECKPOINT_MARKER).unlink()\n    try:\n        aside.rename(final)\n",
        seed=0,
        more=((NAMED, "    write_synced(final / CHECKPOINT_MARKER, render_marker(state))\n" + NAMED),),
    ),
    "name that is not synced before an older one is deleted": Planted(
        "trainer.checkpoint.folders",
        "    sync_folder(final.parent)\n" + NAMED,
        NAMED,
        seed=18,
    ),
    "retention before the new one is complete": Planted(
        "trainer.checkpoint.write",
        "    try:\n        _write_aside(order, state, group, on_stage)\n",
        "    if order.rank == 0 and order.keep.last == 1:\n        prune(order.folder, Keep(), newest=0)\n"
        "    try:\n        _write_aside(order, state, group, on_stage)\n",
        seed=0,
    ),
    "retention that forgets the best": Planted(
        "trainer.checkpoint.retention", "*own[-keep.last :], *best}", "*own[-keep.last :]}", seed=8
    ),
    "checkpoint deleted in place": Planted(
        "trainer.checkpoint.folders",
        "    path.rename(doomed)\n    remove_tree(doomed)\n",
        "    remove_tree(path)\n",
        seed=442,
    ),
    "checksums that are not compared": Planted(
        "trainer.checkpoint.load",
        "        damaged = damages(path, share(read[0].files, *dist.place))\n",
        "        damaged: list[str] = []\n",
        seed=9,
    ),
    "ranks that compare the same files": Planted(
        "trainer.checkpoint.load",
        "share(read[0].files, *dist.place)",
        "share(read[0].files, 0, dist.world_size)",
        seed=9,
    ),
    "newest one or none": Planted(
        "trainer.checkpoint.resume",
        "Choice(list(reversed(steps_in(folder).values())), ",
        "Choice(list(reversed(steps_in(folder).values()))[:1], ",
        seed=2,
    ),
    "incomplete one passed over in silence below a damaged one": Planted(
        "trainer.checkpoint.resume",
        "if path is None or _step_of(bad) > _step_of(path)]\n",
        "if _step_of(bad) > max((_step_of(one) for one in choice.paths), default=-1)]\n",
        seed=5027608,
    ),
    "replaced one that nobody gives back": Planted(
        "trainer.checkpoint.folders", "    path.rename(final)\n    return final\n", "    return None\n", seed=5050274
    ),
    "damaged one passed over in silence": Planted(
        "trainer.checkpoint.resume",
        "    aside = on_keepers(dist, lambda: {bad: set_aside(bad) for bad in reasons if bad.exists()})\n",
        "    return []\n    aside = {}\n",
        seed=12,
    ),
    "damaged one deleted": Planted(
        "trainer.checkpoint.folders",
        "    path.rename(aside)\n    return aside\n",
        "    remove_tree(path)\n    return aside\n",
        seed=12,
    ),
    "each rank looks for itself": Planted(
        "trainer.checkpoint.resume",
        "        own = on_rank0(dist, lambda: _own(run_dir / CHECKPOINTS_DIR))\n",
        "        own = _own(run_dir / CHECKPOINTS_DIR)\n",
        seed=8,
    ),
    "saver that does not hold the run folder": Planted(
        "trainer.saver.process", "(theirs.fileno(), *held_descriptors())", "(theirs.fileno(),)", seed=53
    ),
    "run folder that two starts may have": Planted(
        "trainer.run_folder", "        while not _try_lock(one, fcntl.LOCK_EX):\n", "        while False:\n", seed=0
    ),
    "rank that takes no part in the lock": Planted(
        "trainer.start.rank", "            acquire_shared(run_dir)\n", "            pass\n", seed=1886
    ),
    "lost saver's save taken for written": Planted(
        "trainer.saver.process",
        "return answer if isinstance(answer, Outcome) and not answer.lost else Outcome(lost=self._lost(answer))",
        "return answer if isinstance(answer, Outcome) else Outcome()",
        seed=91,
    ),
    "copy made over the save under way": Planted(
        "trainer.train.saves",
        "                self._wait_for_earlier()\n                self._start(step)\n",
        "                self._start(step)\n",
        seed=220,
    ),
    "save that fails ends the run": Planted(
        "trainer.train.saves", "            if must_succeed:\n                raise\n", "            raise\n", seed=4
    ),
    "outcome written in place": Planted(
        "trainer.run_folder",
        "    replace_text(run_dir / OUTCOME_FILE, ",
        "    (run_dir / OUTCOME_FILE).write_text(",
        seed=0,
    ),
    "outcome that is not synced": Planted(
        "trainer.files", "    write_synced(aside, content)", "    aside.write_bytes(content)", seed=36
    ),
    "lost rank told as silent": Planted(
        "trainer.failures.heartbeat", "    return _gone(running) or _silent(", "    return _silent(", seed=6
    ),
    "nobody judges": Planted(
        "trainer.failures.heartbeat",
        "    return _gone(running) or _silent(running, slow_timeout_s) or _late(running, timeout_s, slow_timeout_s)\n",
        "    return None\n",
        seed=6,
    ),
    "code lost with the terminal": Planted(
        "trainer.console",
        "    except (OSError, ValueError, AttributeError):  # it may be closed, or None\n",
        "    except ImportError:\n",
        seed=10010423,
    ),
    "watchdog that a failing look at /proc ends": Planted(
        "trainer.failures.watchdog",
        "    with suppress(OSError):\n        try:\n            state",
        "    if True:\n        try:\n            state",
        seed=10048363,
    ),
}
