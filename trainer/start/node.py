"""One node's torchrun: meets the other nodes, runs, and ends so that every node knows how the training ended.

Part of trainer/start/torchrun.py, for a training that was started by hand on several nodes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import torch

from trainer.config.load import ANY_WORLD, load_config, num_processes
from trainer.console import write_error, write_line
from trainer.errors import UserError
from trainer.schema import OUTCOME_FILE, RUN_DIR_ENV
from trainer.start.by_hand import PROGRAM_ENV, adopt_run_dir, forget_config, meet_timeout_s
from trainer.start.cards import Card, MeetingError, shared_values
from trainer.start.meeting import Meeting, open_meeting
from trainer.start.place import PROGRAM, Node
from trainer.start.torchrun import read_state, run


def run_node(args: Namespace) -> int:
    """Meet the other nodes, then run this node's torchrun; returns the exit code of either.

    `args`: torchrun's, which get the ID of this start and the path of the config.
    """
    node = Node(args.node_rank, int(args.nnodes), args.master_addr.strip("[]"), args.master_port)
    program = os.environ.pop(PROGRAM_ENV, "")
    try:
        meeting, run_dir = _meet(args, node)
    except UserError as error:
        write_error(error.render().replace(PROGRAM, program) if program.endswith(" train") else error.render())
        return error.exit_code
    except KeyboardInterrupt:
        write_error("interrupted while waiting for the other nodes; nothing was trained")
        return 128 + signal.SIGINT

    def state() -> str | None:  # after a signal
        _let_signals_end_this()
        meeting.join_last_barrier()
        return read_state(run_dir) if node.rank == 0 else meeting.outcome()

    try:
        return run(args, run_dir, state, meeting.tell_failure)
    except RuntimeError as error:  # of the store
        told = f"torchrun could not start on all nodes: {str(error).splitlines()[0]}"
        write_error(MeetingError(told, hint="the output of the other nodes may have the reason").render())
        return MeetingError.exit_code
    finally:
        _let_signals_end_this()
        meeting.end(read_state(run_dir) if node.rank == 0 else None)


def _let_signals_end_this() -> None:
    """Remove torchrun's signal handlers: its ranks have ended, and this process only waits for other nodes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _meet(args: Namespace, node: Node) -> tuple[Meeting, Path]:
    """The meeting after all nodes are ready, and the run folder. Raises UserError and KeyboardInterrupt."""
    config_path = Path(args.training_script_args[0])
    config = load_config(config_path, world=ANY_WORLD)
    run_dir = os.environ.get(RUN_DIR_ENV, "")
    if node.rank == 0:
        with suppress(OSError):
            (Path(run_dir) / OUTCOME_FILE).unlink()  # of an earlier start
    card = Card(
        node=node.rank,
        nodes=node.nodes,
        ranks=num_processes(config),
        host=socket.gethostname(),
        pid=os.getpid(),
        torch=torch.__version__,
        config=shared_values(config),
        run_dir=run_dir if node.rank == 0 else "",
        run_id=uuid.uuid4().hex,
    )
    adopted = [Path(run_dir)]

    def prepare(first: Card) -> None:
        try:
            adopted[0], args.training_script_args[0] = adopt_run_dir(config_path, node, first.run_dir)
        except OSError as error:
            told = f"{card.name} cannot make the run folder {run_dir or first.run_dir}: {error.strerror}"
            hint = "name a folder with --run-dir that every node can write, or mount node 0's there"
            raise MeetingError(told, hint=hint) from error
        write_line(sys.stdout, f"run folder: {adopted[0]}")

    def tell(text: str) -> None:
        write_line(sys.stdout, text)

    timeout_s = meet_timeout_s(os.environ)
    try:
        meeting = open_meeting(node, timeout_s=timeout_s, tell=tell)
        meeting.introduce(card, prepare, timeout_s=timeout_s, tell=tell)
    finally:
        forget_config(config_path)
    args.rdzv_id = meeting.run_id
    return meeting, adopted[0]
