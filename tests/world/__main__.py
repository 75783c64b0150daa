"""Schedules of the simulated world: `python -m tests.world --seed N` replays one, `--count N` searches.

A failure is told with its seed, the commit, the shortest schedule that still fails, and the command that replays it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
HASH_SEED = "PYTHONHASHSEED"
BATCH = 1000
"""Schedules that one process carries out."""
SAME_ADDRESSES = 0x0040000
"""ADDR_NO_RANDOMIZE of personality(2); where that is refused, a replay may differ now and then."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, nargs="+", metavar="N", help="carry out these, and tell what they are")
    parser.add_argument("--count", type=positive, default=1000, metavar="N", help="how many, from --first on; 1000")
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--seconds", type=float, default=1e9, metavar="S", help="end after so long")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="processes that search; 2")
    parser.add_argument("--plant", default="", metavar="NAME", help="with this bug in the sources: see planted.py")
    parser.add_argument("--most", type=positive, default=5, metavar="N", help="failures after which it ends; 5")
    parser.add_argument(
        "--every", type=positive, metavar="BYTES", help="a crash in each write of a state file, so far apart"
    )
    parser.add_argument("--planted", action="store_true", help="list the bugs that --plant knows, with their seeds")
    parser.add_argument("--trainer", action="store_true", help="schedules of the trainer: ranks, savers, checkpoints")
    options = parser.parse_args(words)
    if options.trainer and options.every:
        parser.error("--every knows no schedules of the trainer")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads any more: its workers end so too
    if os.environ.get(HASH_SEED) != "0":  # the order of a set of texts is a part of a schedule
        os.environ[HASH_SEED] = "0"
        if sys.platform == "linux":
            ctypes.CDLL(None).personality(SAME_ADDRESSES)  # and of a set of what is hashed by its address
        os.execv(sys.executable, [sys.executable, "-m", "tests.world", *words])
    if options.plant or options.planted:
        from tests.world.planted import CHOSEN, PLANTED
        from tests.world.trainer.planted import PLANTED as OF_TRAINER

        known = OF_TRAINER if options.trainer else PLANTED
        if options.planted:
            print(*(f"{fault.seed:>6}  {name}" for name, fault in known.items()), sep="\n")
            return 0
        if options.plant not in known:
            parser.error(f"--plant is one of: {'; '.join(known)}")
        os.environ[CHOSEN] = options.plant
    if options.every is not None:
        return crash_everywhere(options.every)
    if options.seed is not None:
        return max(replay(seed, parts_of(options)) for seed in options.seed)
    return search(options)


def positive(text: str) -> int:
    """A number of a command line: a search of nothing would say that nothing fails."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


class Parts(NamedTuple):
    """What is searched: how a seed becomes a schedule, how one is carried out, and which are shorter."""

    make: Callable[[int], Any]
    run: Callable[[Any], Any]
    carry_out: Callable[..., str | None]
    shorter: Callable[[Any], Iterable[Any]]


def parts_of(options: Any) -> Parts:
    if options.trainer:
        from tests.world.trainer import run as of_trainer
        from tests.world.trainer import schedule as schedules

        return Parts(schedules.make_schedule, of_trainer.Run, of_trainer.carry_out, schedules.shorter)
    from tests.world.run import Run, carry_out
    from tests.world.schedule import make_schedule
    from tests.world.shrink import shorter

    return Parts(make_schedule, Run, carry_out, shorter)


def crash_everywhere(stride: int) -> int:
    from tests.world.every import first_broken

    count, why = first_broken(stride)
    print(why or f"{count:,} crashes in the writes of state files, and all invariants hold")
    return 1 if why else 0


def replay(seed: int, parts: Parts) -> int:
    schedule = parts.make(seed)
    run = parts.run(schedule)
    why = parts.carry_out(schedule, run)
    print(schedule)
    print(f"seed {seed}: {why or 'all invariants hold'}")
    print(f"{run.kernel.steps:,} calls, {(run.kernel.now_ns - run.began_ns) / 1e9:.3f} virtual seconds")
    return 1 if why else 0


def search(options: Any) -> int:
    """Spreads the seeds over processes. A failure is told when it is found; a line of JSON at the end says what was
    done."""
    began, pids, reports = time.monotonic(), [], selectors.DefaultSelector()
    for worker in range(options.workers):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the search tells of it
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1) as out:
                _work(options, worker, began, out)
            os._exit(0)
        os.close(writing)
        pids.append(pid)
        reports.register(os.fdopen(reading), selectors.EVENT_READ)
    done = failed = 0
    interrupted = False
    try:
        with Progress("{task.completed:,} schedules", console=Console(stderr=True), transient=True) as progress:
            shown = progress.add_task("")
            while reports.get_map():
                for key, _ in reports.select():
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        reports.unregister(key.fileobj)
                        continue
                    told = json.loads(line)
                    done += told["done"]
                    progress.advance(shown, told["done"])
                    for seed, why, schedule in told["failures"]:
                        failed += 1
                        _tell(seed, why, schedule, options)
    except KeyboardInterrupt:  # it has ended its workers too, or they end as soon as nobody reads
        interrupted = True
    if not interrupted:
        ends = [os.waitpid(pid, 0)[1] for pid in pids]
        interrupted = signal.SIGINT in ends  # as it is itself, and has not heard of it yet
        failed += sum(end not in (0, signal.SIGINT) for end in ends)
    seconds = time.monotonic() - began
    print(json.dumps({"schedules": done, "first": options.first, "failed": failed, "seconds": round(seconds, 1)}))
    return 130 if interrupted else 1 if failed else 0


def _work(options: Any, worker: int, began: float, out: Any) -> None:
    """Carries out every n-th seed, in batches, each in a process of its own: what a schedule leaves in this process
    must not reach a later one for long."""
    seeds, failed = range(options.first + worker, options.first + options.count, options.workers), 0
    gc.freeze()  # the modules stay; a schedule's own rubbish is small: 14 % quicker
    parts_of(options)
    for start in range(0, len(seeds), BATCH):
        if time.monotonic() - began > options.seconds or failed >= options.most:
            break
        pid = os.fork()
        if pid == 0:
            os._exit(_batch(options, seeds[start : start + BATCH], began, options.most - failed, out))
        end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if end < 0:
            os.kill(os.getpid(), -end)
        failed += end


def _batch(options: Any, seeds: Sequence[int], began: float, most: int, out: Any) -> int:
    """Returns how many have failed; ends when `most` have."""
    from tests.world.shrink import shrink

    parts, failed = parts_of(options), 0
    gc.set_threshold(100_000, 50, 1000)
    for number, seed in enumerate(seeds):
        if number % 200 == 199:
            gc.collect()  # what outlived its schedule, 0.1 MB each
        if time.monotonic() - began > options.seconds or failed >= most:
            break
        schedule = parts.make(seed)
        try:
            why = parts.carry_out(schedule)
        except Exception as error:  # the world's own fault: it is told with its seed, and the search goes on
            why = f"the world broke: {error!r}"
        failures: list[tuple[int, str, str]] = []
        if why is not None:
            failed += 1
            shortest = schedule
            if not why.startswith("the world broke"):
                shortest, why = shrink(schedule, parts.carry_out, parts.shorter)
            failures.append((seed, why, str(shortest)))
        out.write(json.dumps({"done": 1, "failures": failures}) + "\n")
    return min(failed, 127)


def _tell(seed: int, why: str, schedule: str, options: Any) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    more = " --trainer" * options.trainer + (f" --plant {options.plant!r}" if options.plant else "")
    print(f"seed {seed}, commit {commit or 'unknown'}: {why}")
    print("  the shortest schedule that still fails:", *schedule.splitlines(), sep="\n    ")
    print(f"  python -m tests.world --seed {seed}{more}\n", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
