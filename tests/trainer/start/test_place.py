"""What train.py takes itself for, given an environment: alone, one node of several, or a rank of a launcher."""

from __future__ import annotations

import pytest

from tests.support.configs import config_of
from tests.support.ferry import REPO
from trainer.config.load import ConfigError
from trainer.dist import device_index
from trainer.errors import UserError
from trainer.start.launch import check_ranks
from trainer.start.place import (
    Alone,
    Node,
    Rank,
    changes,
    is_other_rank,
    note_on_processes,
    read_place,
    render_place,
    without_torchruns,
)
from trainer.start.slurm import first_host


def variables(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split())


TORCHRUN = variables(
    "TORCHELASTIC_RUN_ID=none RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=gpu-a "
    "MASTER_PORT=29500"
)
ACCELERATE = {name: value for name, value in TORCHRUN.items() if name not in ("TORCHELASTIC_RUN_ID", "GROUP_RANK")}
PROVIDER = variables("MASTER_ADDR=10.0.0.1 MASTER_PORT=23456 WORLD_SIZE=2 RANK=1")
BY_HAND = variables("MASTER_ADDR=10.0.0.1 MASTER_PORT=29501 NNODES=2 NODE_RANK=1")
KUBEFLOW = variables(
    "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=job-master-0 MASTER_ADDR=job-master-0 "
    "MASTER_PORT=23456 WORLD_SIZE=16 RANK=1"
)
SRUN = variables(  # `srun --nodes 2 --ntasks-per-node 2 python train.py CONFIG`, the last task
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4 "
    "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=gpu[07-08]"
)
ONE_EACH = SRUN | variables(  # `srun --nodes 2 --ntasks-per-node 1 python train.py CONFIG`
    "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
BATCH = variables("SLURM_JOB_ID=4711 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=8")
"""In a batch script: Slurm describes its first task there, though no srun has started anything."""


def of_srun(rank: int, local_rank: int) -> Rank:
    numbers = {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    group = {"GROUP_RANK": f"{rank // 2}", "GROUP_WORLD_SIZE": "2"}
    return Rank("srun", rank, {**numbers, **group, "MASTER_ADDR": "gpu07", "MASTER_PORT": "19711"})


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Alone()),
        ({"RANK": "", "NODE_RANK": " "}, Alone()),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, Alone()),
        ({"NODE_RANK": "0", "NNODES": "1"}, Alone()),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0"}, Alone()),
        ({"WORLD_SIZE": "1"}, Alone()),
        (BATCH, Alone()),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, Alone()),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Alone()),  # srun --pty bash
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, Alone()),  # the shell of salloc, in newer versions
        (TORCHRUN, Rank("torchrun", 3)),
        ({**TORCHRUN, **SRUN}, Rank("torchrun", 3)),  # srun torchrun
        ({**TORCHRUN, "NODE_RANK": "7", "NNODES": "x"}, Rank("torchrun", 3)),
        (ACCELERATE, Rank("another launcher", 3)),
        (SRUN, of_srun(3, 1)),
        ({**SRUN, **of_srun(3, 1).env}, of_srun(3, 1)),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, of_srun(0, 0)),
        (ONE_EACH, Node(1, 2, "gpu07", 19711, "SLURM_PROCID=1 and SLURM_STEP_NUM_NODES=2")),
        (
            {**ONE_EACH, "LOCAL_RANK": "0", "MASTER_PORT": "9"},
            Node(1, 2, "gpu07", 9, "SLURM_PROCID=1 and SLURM_STEP_NUM_NODES=2"),
        ),
        (BY_HAND, Node(1, 2, "10.0.0.1", 29501, "NODE_RANK=1 and NNODES=2")),
        ({**BY_HAND, "MASTER_PORT": ""}, Node(1, 2, "10.0.0.1", 29500, "NODE_RANK=1 and NNODES=2")),
        ({**BY_HAND, "MASTER_ADDR": "[fd00::1]"}, Node(1, 2, "fd00::1", 29501, "NODE_RANK=1 and NNODES=2")),
        ({**BY_HAND, "WORLD_SIZE": "16", "RANK": "1"}, Node(1, 2, "10.0.0.1", 29501, "NODE_RANK=1 and NNODES=2")),
        ({**BATCH, **BY_HAND}, Node(1, 2, "10.0.0.1", 29501, "NODE_RANK=1 and NNODES=2")),
        (KUBEFLOW, Node(1, 2, "job-master-0", 23456, "PET_NODE_RANK=1 and PET_NNODES=2")),
        (
            PROVIDER,
            Node(
                1, 2, "10.0.0.1", 23456, "RANK=1 and WORLD_SIZE=2 count nodes here, as no launcher started this process"
            ),
        ),
        (
            {**PROVIDER, "NODE_RANK": "1"},
            Node(
                1,
                2,
                "10.0.0.1",
                23456,
                "WORLD_SIZE=2 counts nodes here, as no launcher started this process; NODE_RANK=1",
            ),
        ),
    ],
)
def test_place_is_read_from_the_environment(environ, place):
    assert read_place(environ) == place


def test_commands_of_the_page_start_the_two_nodes_that_it_shows():
    lines = (REPO / "docs" / "multi-node.md").read_text().splitlines()
    commands = [line.removeprefix("$ ").partition(" torchferry ")[0] for line in lines if line.startswith("$ NNODES=")]
    places = [read_place(variables(command)) for command in commands]
    assert places == [Node(k, 2, "10.0.0.1", 29500, f"NODE_RANK={k} and NNODES=2") for k in (0, 1)]
    assert {render_place(places[1]), render_place(read_place(PROVIDER | {"MASTER_PORT": ""}))} <= {*lines}


STALE = "if they are left over: `unset RANK LOCAL_RANK WORLD_SIZE`, then `python train.py CONFIG`"


@pytest.mark.parametrize(
    ("environ", "message", "hint"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but no launcher started this process", "`unset LOCAL_RANK`"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 are set", "on each of N nodes"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is set", "`unset LOCAL_RANK`, then `python train.py CONFIG`"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK=0 is set, but no launcher", STALE),
        ({**PROVIDER, "LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but no launcher", "unset RANK LOCAL_RANK WORLD_SIZE"),
        (
            {**PROVIDER, "LOCAL_RANK": "0"},
            "LOCAL_RANK=0 is set",
            "if a launcher set them, it must set LOCAL_WORLD_SIZE too",
        ),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set, but no launcher started", "it is left over: `unset WORLD_SIZE`"),
        (
            {"RANK": "1"},
            "RANK=1, read as this node's number as no launcher",
            "`NNODES=N NODE_RANK=1 MASTER_ADDR=ADDRESS",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none"},
            "is set, but not RANK, LOCAL_RANK and WORLD_SIZE",
            "`unset TORCHELASTIC_RUN_ID`",
        ),
        (
            {**TORCHRUN, "RANK": "4"},
            "RANK=4, but possible are 0 to 3 with WORLD_SIZE=4",
            "set RANK or WORLD_SIZE right",
        ),
        (
            {**ACCELERATE, "LOCAL_RANK": "2"},
            "LOCAL_RANK=2, WORLD_SIZE=4 and LOCAL_WORLD_SIZE=2 contradict",
            "unset RANK",
        ),
        (
            {**ACCELERATE, "LOCAL_WORLD_SIZE": "4"},
            "contradict each other",
            "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD",
        ),
        (
            {**ACCELERATE, "MASTER_PORT": ""},
            "are set, but not MASTER_PORT, where the ranks meet",
            "a launcher must set MASTER_PORT too",
        ),
        ({**ACCELERATE, "RANK": "x"}, "RANK=x is not a whole number", "set it right, or unset it"),
        ({**SRUN, "RANK": "0"}, "RANK=0 is set, but for this task of srun it would be 3", "`unset RANK` before srun"),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "3"}, "Slurm's variables do not fit together", "start train.py with srun"),
        ({**SRUN, "SLURM_PROCID": "four"}, "Slurm's variables do not fit together: SLURM_PROCID=four", "srun"),
        ({**ONE_EACH, "NODE_RANK": "0"}, "NODE_RANK=0 and SLURM_PROCID=1 contradict each other", "unset what is left"),
        ({**BY_HAND, "NODE_RANK": "2"}, "NODE_RANK=2, but possible are 0 to 1 with NNODES=2", "NODE_RANK or NNODES"),
        ({**BY_HAND, "NODE_RANK": "-1"}, "NODE_RANK=-1 is not a whole number of 0 or more", "set it right"),
        ({**BY_HAND, "NNODES": "1:4"}, "NNODES=1:4 is not a whole number of 0 or more", "a range is for torchrun"),
        ({**BY_HAND, "NNODES": "0"}, "NNODES=0: a training has 1 node or more", "`unset NNODES`"),
        (
            {**BY_HAND, "MASTER_ADDR": ""},
            "NODE_RANK=1 and NNODES=2, but MASTER_ADDR does not say",
            "MASTER_ADDR=ADDRESS",
        ),
        ({**BY_HAND, "MASTER_ADDR": "10.0.0.1:29500"}, "MASTER_ADDR=10.0.0.1:29500 is not a host", "MASTER_PORT names"),
        ({**BY_HAND, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port", "the same on all nodes"),
        ({**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT=http is not a whole number", "set it right"),
        ({**BY_HAND, "NNODES": ""}, "NODE_RANK=1: NNODES does not say how many", "NODE_RANK=1 MASTER_ADDR=10.0.0.1"),
        ({**BY_HAND, "NODE_RANK": ""}, "NNODES=2, but NODE_RANK does not say which node this is", "K from 0 to 1"),
        ({**BY_HAND, "PET_NODE_RANK": "0"}, "NODE_RANK=1 and PET_NODE_RANK=0 contradict each other", "unset what"),
        ({**BY_HAND, "RANK": "8"}, "NODE_RANK=1 and RANK=8 contradict each other", "NNODES=N NODE_RANK=K"),
        ({**BY_HAND, "WORLD_SIZE": "3"}, "NNODES=2 and WORLD_SIZE=3 contradict each other", "unset what is left over"),
        ({"NODE_RANK": "1", "NNODES": "1"}, "NODE_RANK=1, but only 0 is possible with NNODES=1", "NODE_RANK or NNODES"),
        (
            {**PROVIDER, "RANK": "2"},
            "RANK=2, but possible are 0 to 1 with WORLD_SIZE=2",
            "set RANK or WORLD_SIZE right",
        ),
    ],
)
def test_environment_that_does_not_fit_is_refused_with_what_to_do(environ, message, hint):
    with pytest.raises(UserError) as caught:
        read_place(environ)
    assert message in caught.value.message and hint in caught.value.hint
    assert caught.value.exit_code == 2 and not is_other_rank(environ)


def test_place_of_a_node_is_one_line_that_says_where_it_is_from():
    assert render_place(read_place(PROVIDER)) == (
        "node 1 of 2, meeting at 10.0.0.1:23456 "
        "(RANK=1 and WORLD_SIZE=2 count nodes here, as no launcher started this process)"
    )
    assert render_place(Node(0, 2, "fd00::1", 29500, "NODE_RANK=0 and NNODES=2")) == (
        "node 0 of 2, meeting at [fd00::1]:29500 (NODE_RANK=0 and NNODES=2)"
    )


def test_ranks_of_srun_are_told_by_the_first_one_alone():
    assert render_place(of_srun(0, 0)) == "4 ranks, one for each task of srun, meeting at gpu07:19711"
    assert [render_place(place) for place in (of_srun(1, 1), Rank("torchrun", 0), Alone())] == [None] * 3


def test_variables_of_a_rank_stay_in_a_rank_alone():
    assert (
        changes(Alone())
        == changes(read_place(BY_HAND))
        == dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    )
    assert changes(read_place(TORCHRUN)) == {} and changes(of_srun(3, 1)) == of_srun(3, 1).env


def test_torchrun_of_ours_takes_no_options_from_the_environment():
    kept = {name: value for name, value in KUBEFLOW.items() if not name.startswith("PET_")}
    assert without_torchruns(KUBEFLOW | {"PET_RDZV_BACKEND": "c10d", "PETS": "2"}) == kept | {"PETS": "2"}


@pytest.mark.parametrize(
    ("environ", "other"), [(TORCHRUN, True), (SRUN, True), ({"RANK": "1"}, False), (PROVIDER, False)]
)
def test_only_a_launchers_rank_is_another_rank(environ, other):
    assert is_other_rank(environ) == other


@pytest.mark.parametrize(
    ("named", "told"),
    [({"PET_NPROC_PER_NODE": "8"}, True), ({"NPROC_PER_NODE": "2"}, False), ({"PET_NPROC_PER_NODE": "auto"}, False)],
)
def test_other_number_of_processes_is_told(named, told):
    note = note_on_processes(named, 2)
    assert (note == "PET_NPROC_PER_NODE=8 has no effect: target.gpu_ranks starts 2 rank(s) on this node") == told
    assert told or note is None


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[07-08],big1", "gpu07"), ("a,b", "a"), ("rack[2,5]-n[1-3]", "rack2-n1"), ("", "")]
)
def test_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_uneven_tasks_of_srun_have_their_nodes_count():
    environ = {**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    place = read_place({**environ, "SLURM_STEP_TASKS_PER_NODE": "2,1"})
    assert isinstance(place, Rank) and place.env["LOCAL_WORLD_SIZE"] == "1" and place.env["WORLD_SIZE"] == "3"


def test_gpu_of_a_rank_is_the_only_one_that_slurm_shows_it():
    assert device_index(1, 1, SRUN) == 0
    assert device_index(1, 2, SRUN) == device_index(1, 1, {**SRUN, **TORCHRUN}) == device_index(1, 1, {}) == 1


def test_more_ranks_than_named_gpus_are_refused():
    config = config_of(target={"gpu_ranks": [0], "device": "cuda"})
    with pytest.raises(ConfigError, match=r"starts 2 ranks on this node, but target.gpu_ranks names 1 GPU"):
        check_ranks(config, {"LOCAL_WORLD_SIZE": "2"})
    check_ranks(config_of(target={"gpu_ranks": [0, 1], "device": "cuda"}), {"LOCAL_WORLD_SIZE": "2"})
