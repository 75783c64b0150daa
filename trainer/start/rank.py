"""Runs one rank: joins the others, runs the recipe, and ends with an exit code and at most one message."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from trainer.console import write_error, write_line
from trainer.dist import Dist, control_timeout_s, gather, on_keepers, on_rank0, start_dist, stop_dist
from trainer.errors import ConfigError, UserError
from trainer.failures import diagnose
from trainer.failures.heartbeat import SILENT_S
from trainer.failures.termination import outlasting_sigterm
from trainer.failures.watchdog import leave, watching
from trainer.metrics.trackers import check_trackers
from trainer.nodes import Nodes
from trainer.run_folder import IN_USE_HINT, acquire_run_folder, acquire_shared, release_all
from trainer.schema import OUTCOME_FILE, Config
from trainer.start import launch
from trainer.start.storage import find_storages, render_storage
from trainer.startup import Startup
from trainer.words import first_few

FAILURES = (Exception, KeyboardInterrupt, SystemExit)
COMM_MARGIN_S = 60
"""Seconds. A collective times out after the watchdog has reported, whose message names the late rank."""
LOST_PEER_S = SILENT_S + 5
"""Seconds that the watchdog has to find the lost rank behind a broken connection."""


def run_rank(config: Config, run_dir: Path | None, *, debug: bool, startup: Startup) -> int:
    """Run the configured recipe as the rank that the environment describes, and return the exit code.

    Without a run folder rank 0 creates one for all. If one of several ranks fails, this does not return there: the
    process ends at once, because a clean-up would wait for ranks that wait for this one.
    """
    dist = None
    _show_fatal_signals()
    try:
        check_trackers(config)
        startup.enter("ranks")
        dist = start_dist(usable_device(config), comm_timeout_s=comm_timeout_s(config.train.hang_timeout_s))
        dist = replace(dist, startup=startup)
        if dist.nodes is not None:
            at_rank_0 = on_rank0(dist, lambda: run_dir or _new_run_dir(config))
            run_dir = run_dir or at_rank_0
            dist = find_storages(dist, run_dir)
        taken = _taken(dist, run_dir)
        if taken:
            run_dir = None  # it belongs to the other run: record no failure there
            raise ConfigError(taken, hint=IN_USE_HINT)
        if run_dir and not dist.is_keeper:
            acquire_shared(run_dir)
        run_dir = on_keepers(dist, lambda: _open_run_dir(config, run_dir))
        if dist.is_main:
            _tell_start(dist)
        code = run_recipe(config, run_dir, dist, debug=debug)
    except FAILURES as error:  # run_recipe handles failures inside the recipe
        code = tell_failure(error, run_dir, debug=debug)
        if dist is not None and dist.world_size > 1:
            leave(code)
        return code
    stop_dist()
    release_all()
    return code


def _show_fatal_signals() -> None:
    """Make SIGBUS, SIGSEGV and similar signals print the stack: no exception shows which library caused them."""
    with suppress(OSError, ValueError, AttributeError):  # stderr may be no file
        if not faulthandler.is_enabled():
            faulthandler.enable()


def run_recipe(config: Config, run_dir: Path, dist: Dist, *, debug: bool) -> int:
    """Run the configured recipe under the watchdog. Ends the process after Ctrl-C, or if one of several ranks fails."""
    with (
        watching(dist, run_dir, timeout_s=config.train.hang_timeout_s) as watchdog,
        outlasting_sigterm(watchdog, several=dist.nodes is not None),
    ):
        try:
            dist.startup.enter("imports")
            recipe = import_module(f"trainer.recipes.{config.recipe}")
            return int(recipe.run(config, run_dir, dist))
        except FAILURES as error:
            if watchdog is not None and diagnose.is_lost_peer(error) and watchdog.await_verdict(LOST_PEER_S):
                leave(1)  # reported already, with the rank's number
            code = tell_failure(error, run_dir, debug=debug)
            if watchdog is not None:
                watchdog.tell_failure(diagnose.describe(error))
            # an orderly end would wait for a save in progress; after Ctrl-C the user does not want to wait for it
            if dist.world_size > 1 or isinstance(error, KeyboardInterrupt):
                leave(code)
            return code


def comm_timeout_s(hang_timeout_s: float) -> float:
    """Seconds until a collective on the devices counts as hung; without a watchdog, the barriers' timeout."""
    return hang_timeout_s + COMM_MARGIN_S if hang_timeout_s > 0 else control_timeout_s()


def usable_device(config: Config) -> launch.DeviceKind:
    """The kind of device that the ranks run on. Raises ConfigError if torch finds no such device."""
    kind = launch.device_kind(config)
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no usable GPU on this host", hint="train on the CPU with target.device=cpu")
    return kind


def _taken(dist: Dist, run_dir: Path | None) -> str | None:
    """Lock the run folder on each storage. Returns why one of them could not be locked; the same on every rank."""
    taken = on_keepers(dist, lambda: acquire_run_folder(run_dir) if run_dir else None)
    if dist.storages is None:
        return taken
    return next((why for why in gather(taken, dist.control_group) if why), None)


def _tell_start(dist: Dist) -> None:
    ranks = (
        f"{dist.world_size} rank(s)" if dist.nodes is None else f"{dist.world_size} ranks of {_nodes_text(dist.nodes)}"
    )
    write_line(sys.stdout, f"{ranks} on {dist.device.type}: reading data, building the model")
    if dist.nodes is not None:
        write_line(sys.stdout, render_storage(dist))


def _nodes_text(nodes: Nodes) -> str:
    """`2 nodes (node 0 (a): ranks 0-3, node 1 (b): ranks 4-7)`."""
    places = [(name, nodes.ranks(node)) for node, name in enumerate(nodes.names)]
    shown = [f"{name}: rank{'s' * (len(ranks) > 1)} {_span(ranks)}" for name, ranks in places]
    return f"{len(places)} nodes ({first_few(shown, 8)})"


def _span(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _new_run_dir(config: Config) -> Path:
    run_dir = launch.new_run_dir(config, time.localtime())
    write_line(sys.stdout, f"run folder: {run_dir}")
    return run_dir


def _open_run_dir(config: Config, run_dir: Path | None) -> Path:
    """Create the run folder if needed, write the resolved config into it, and delete an earlier start's outcome and
    failure files."""
    if run_dir is None:  # started with torchrun by hand
        run_dir = _new_run_dir(config)
    launch.write_config(config, run_dir)
    for stale in (OUTCOME_FILE, diagnose.FAILURE_FILE):
        (run_dir / stale).unlink(missing_ok=True)
    return run_dir


def tell_failure(error: BaseException, run_dir: Path | None, *, debug: bool) -> int:
    """Report the reason unless another rank of this start has reported one, and return the exit code."""
    number = os.environ.get("RANK", "0")
    rank = int(number) if number.isdigit() else 0
    code = exit_code(error)
    message = diagnose.describe(error)
    if run_dir is not None and run_dir.is_dir():
        if not diagnose.claim_failure(run_dir, rank, message):
            return code
        if not diagnose.is_ours(error) and not isinstance(error, KeyboardInterrupt):
            kept = diagnose.write_traceback(run_dir, rank, error)
            message += f"\n  stack trace: {kept or 'not kept, the run folder takes no file; --debug shows it'}"
    elif rank != 0 and diagnose.is_ours(error):
        launch.let_rank_0_tell()  # no run folder yet: usually all ranks have found the same error
    if debug:
        write_error("".join(traceback.format_exception(error)).rstrip("\n"))
    tag = f"[rank {rank}] " if "RANK" in os.environ else ""
    write_error(f"{tag}{message}")
    return code


def exit_code(error: BaseException) -> int:
    """2 for a user's error in config, data or model; 130 for Ctrl-C; 1 for all other errors. A call of exit inside a
    run keeps its code if that is a non-zero integer; else it is 1, because the run is not finished."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, UserError) else 1
