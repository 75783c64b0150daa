"""The meeting of nodes that were started by hand: who waits for whom, and which nodes may train together."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.configs import config_of
from tests.support.limits import HANG_S
from tests.support.sshd import free_port
from trainer.start.by_hand import build_node_argv, interface_of, meet_timeout_s, own_address
from trainer.start.cards import Card, MeetingError, judge_cards, render_cards, shared_values
from trainer.start.meeting import Meeting, open_meeting
from trainer.start.place import Node


def card(node: int, **changes) -> Card:
    values = {"node": node, "nodes": 2, "ranks": 1, "host": f"gpu-{'abc'[node]}", "pid": 7, "torch": "2.13.0"}
    return Card(**(values | {"config": {"train.seed": 0, "train.steps": 6}} | changes))


FIRST = card(0, run_dir="/runs/one", run_id="5f2a")


def meet(
    port: int, own: Card, *, timeout_s: float = 20, prepare: Callable[[Card], None] = lambda first: None
) -> tuple[Meeting | MeetingError, list[str]]:
    """One node's meeting, or why it failed, and what it told."""
    told: list[str] = []
    try:
        meeting = open_meeting(Node(own.node, own.nodes, "127.0.0.1", port), timeout_s=timeout_s, tell=told.append)
        meeting.introduce(own, prepare, timeout_s=timeout_s, tell=told.append)
    except MeetingError as error:
        return error, told
    return meeting, told


def meet_both(first: Card, second: Card, **options) -> tuple[Meeting | MeetingError, Meeting | MeetingError]:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(meet, port, one, **options) for one in (second, first)]
        (other, _), (own, _) = (one.result(HANG_S) for one in found)
    return own, other


def test_nodes_that_fit_learn_of_node_0s_run_folder_and_know_each_others_end():
    prepared: list[str] = []
    own, other = meet_both(FIRST, card(1, ranks=2), prepare=lambda first: prepared.append(first.run_dir))
    assert isinstance(own, Meeting) and isinstance(other, Meeting)
    assert (own.run_id, other.run_id, prepared) == ("5f2a", "5f2a", ["/runs/one"])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(own.end, "stopped")
        assert other.outcome() == "stopped"
        assert not ended.done()  # its store stays until the other node has ended
        other.end(None)
        ended.result(HANG_S)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"torch": "2.12.0"}, "node 0 (gpu-a) has torch 2.13.0, and node 1 (gpu-b) has 2.12.0"),
        (
            {"config": {"train.seed": 1, "train.steps": 5}},
            "train.seed is 0 on node 0 (gpu-a), and 1 on node 1 (gpu-b); train.steps too",
        ),
        ({"nodes": 3}, "node 1 (gpu-b) counts 3 nodes, and node 0 (gpu-a) counts 2"),
    ],
)
def test_nodes_that_do_not_fit_all_tell_the_same_reason(other, message):
    errors = meet_both(FIRST, card(1, **other))
    assert [str(error.message) for error in errors if isinstance(error, MeetingError)] == [message] * 2


def test_node_that_cannot_get_ready_ends_the_others_too():
    def refuse(first: Card) -> None:
        raise MeetingError(f"node 1 (gpu-b) cannot make the run folder {first.run_dir}: Read-only file system")

    errors = meet_both(FIRST, card(1), prepare=refuse)
    assert all(
        isinstance(error, MeetingError) and "cannot make the run folder /runs/one" in str(error) for error in errors
    )


def test_node_that_does_not_come_is_named_with_the_command_that_starts_it():
    port = free_port()
    error, told = meet(port, FIRST, timeout_s=2)
    assert isinstance(error, MeetingError) and error.exit_code == 1
    assert error.render() == (
        f"Error: node 1 of 2 did not come to 127.0.0.1:{port} within 2 s\n"
        f"hint: start `NNODES=2 NODE_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} python train.py CONFIG` there; "
        f"it must reach port {port} of node 0"
    )
    assert told == [f"waiting for node 1 of 2 at 127.0.0.1:{port}, up to 1 s"]


def test_node_0_that_does_not_answer_is_named_with_the_reason():
    port = free_port()
    error, told = meet(port, card(1), timeout_s=2)
    assert isinstance(error, MeetingError)
    assert error.message == f"node 0 does not answer at 127.0.0.1:{port}: Connection refused"
    assert re.fullmatch(rf"waiting for node 0 at 127.0.0.1:{port} \(Connection refused\), up to [12] s", told[0])


def test_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        error, _ = meet(server.getsockname()[1], FIRST)
    assert isinstance(error, MeetingError) and "of this node is taken, where the nodes would meet" in error.message


def test_second_process_with_a_nodes_number_is_refused_and_the_first_is_not_disturbed():
    port = free_port()
    seconds = [card(1, nodes=3, pid=pid) for pid in (8, 9)]
    with ThreadPoolExecutor(4) as pool:
        started = [pool.submit(meet, port, one) for one in (replace(FIRST, nodes=3), *seconds)]
        (refused,), _ = wait(started, HANG_S, FIRST_COMPLETED)
        started.append(pool.submit(meet, port, card(2, nodes=3)))
        errors = [one.result(HANG_S)[0] for one in started if not isinstance(one.result(HANG_S)[0], Meeting)]
    assert [refused.result()[0]] == errors and isinstance(errors[0], MeetingError)
    assert re.fullmatch(r"node 1 has started already, on gpu-b \(process [89]\)", errors[0].message)


# --- what is compared -------------------------------------------------------------------------------------------------


def test_machines_own_values_and_paths_are_not_compared(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    values = shared_values(config_of(target={"gpu_ranks": [0, 1]}, data={"train": [str(rows)]}, run={"name": "a"}))
    assert values["target.device"] == "cpu" and values["train.seed"] == 0 and values["optim.optimizer"] == "adamw"
    assert not {"target.gpu_ranks", "run.name", "data.train", "train.resume"} & values.keys()


def test_nodes_with_different_numbers_of_gpus_train_together():
    cards = [FIRST, card(1, ranks=2)]
    assert judge_cards(cards) is None
    assert render_cards(cards) == "2 nodes, 3 ranks: 1 on node 0 (gpu-a), 2 on node 1 (gpu-b)"


def test_command_of_a_node_fixes_its_place():
    node = Node(1, 2, "fd00::1", 29500)
    argv = build_node_argv("/py", "train.py", Path("/r/config.yaml"), node, processes=4, debug=True)
    assert argv[2:] == [
        *["--nnodes=2", "--node-rank=1", "--master-addr=[fd00::1]", "--master-port=29500", "--rdzv-conf=timeout=120"],
        *["--nproc-per-node=4", "--max-restarts=0", "train.py", "/r/config.yaml", "--debug"],
    ]


@pytest.mark.parametrize(
    ("address", "interface"), [("10.0.0.2", "eth1"), ("127.0.0.1", None), ("10.0.0.9", None), ("", None)]
)
def test_interface_of_gloo_is_the_one_towards_node_0(address, interface):
    assert interface_of(address, ["lo 127.0.0.1", "eth0 192.168.0.2", "eth1 10.0.0.2", "ib0"]) == interface


def test_own_address_is_the_one_that_node_0_sees():
    assert own_address(Node(1, 2, "127.0.0.1", 29500)) == "127.0.0.1"
    assert own_address(Node(1, 2, "no-such-host.invalid", 29500)) == ""


def test_time_to_wait_is_settable():
    assert meet_timeout_s({"TORCHFERRY_MEET_TIMEOUT_S": "5"}) == 5
    assert meet_timeout_s({}) == meet_timeout_s({"TORCHFERRY_MEET_TIMEOUT_S": "soon"}) == 600
