"""Plans: the torchrun command and its environment, decided before anything is done."""

import json
import shlex
import sys
from datetime import datetime, timezone

import pytest

from deployer.agent.host.typed import to_json
from deployer.agent.job.plan import Devices, Plan, fill, groups_of, parse_plan
from deployer.errors import UsageError
from deployer.plan.launch_plan import TRAINER_REQUIRES, Command, build_plan, new_job_id, render_command, shell_slots
from deployer.plan.options import Options, read_config
from tests.support.ferry import REPO
from trainer.schema import Config, TargetConfig

SLOTS = {"python": "/py", "root": "/r", "job": "/r/jobs/j1", "agent": "/r/agent/h/agent"}


def plan_of(target: TargetConfig | None = None, command: Command | None = None, **options) -> Plan:
    config = Config(target=target or TargetConfig())
    options.setdefault("own_trainer", True)
    return build_plan(config, job_id="j1", created="2026-01-01T00:00:00Z", tree="aa", command=command, **options)


def slots_of(plan: Plan, root: str = "/r") -> dict[str, str]:
    (group,) = groups_of(plan)
    return shell_slots(group, job_id=plan.job_id, root=root, agent="abc")


def command_of(plan: Plan, slots: dict[str, str] = SLOTS) -> str:
    return render_command(plan, plan.roles[0], slots)


def argv_of(plan: Plan) -> list[str]:
    return [fill(text, SLOTS) for text in plan.roles[0].argv]


def test_four_gpus_torchrun_with_four_processes_and_the_devices_in_the_given_order():
    plan = plan_of(TargetConfig(gpu_ranks=[3, 1, 0, 2], train_backend="fsdp"))
    assert argv_of(plan) == [
        *("/py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=0"),
        *("/r/agent/h/agent/rank.py", "train.py", "/r/jobs/j1/config.yaml"),
    ]
    assert plan.roles[0].nodes == (Devices("cuda", ("3", "1", "0", "2")),)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=3,1,0,2 " in command_of(plan, slots_of(plan))


def test_number_of_gpus_to_choose_is_a_slot_that_the_host_fills():
    plan = plan_of(TargetConfig(gpu_ranks=["auto:2"]))
    assert argv_of(plan)[4] == "--nproc-per-node=2"
    assert fill(plan.roles[0].env["CUDA_VISIBLE_DEVICES"], {"gpus": "1,3"}) == "1,3"
    shown = slots_of(plan)
    assert "CUDA_VISIBLE_DEVICES=$GPUS " in command_of(plan, shown)
    assert "CUDA_VISIBLE_DEVICES=1,3 " in command_of(plan, {**shown, "gpus": "1,3"})


def test_one_gpu_without_torchrun():
    plan = plan_of(TargetConfig(gpu_ranks=[1]))
    assert argv_of(plan) == ["/py", "-u", "train.py", "/r/jobs/j1/config.yaml"]
    assert (plan.roles[0].nproc, plan.roles[0].torchrun, slots_of(plan)["gpus"]) == (1, False, "1")


def test_trainers_of_one_host_share_what_they_compile_and_programs_are_left_alone():
    assert fill(plan_of().roles[0].env["TORCHFERRY_CACHE"], SLOTS) == "/r/cache"
    assert "TORCHFERRY_CACHE" not in plan_of(command=Command(("python", "x.py"), torchrun=False)).roles[0].env


def test_cpu_as_many_processes_and_no_visible_gpu():
    plan = plan_of(TargetConfig(gpu_ranks=[0, 1], device="cpu"))
    (role,) = plan.roles
    assert (role.nproc, role.nodes, role.env["CUDA_VISIBLE_DEVICES"]) == (2, (Devices("cpu"),), "")


@pytest.mark.parametrize(
    ("words", "torchrun", "keys", "told"),
    [
        (["true"], False, {"target.gpu_ranks": [0, 1]}, ["naming GPUs changes nothing: on the CPU a program without"]),
        (["true"], False, {}, []),
        (["t.py"], True, {"target.gpu_ranks": [0, 1]}, []),
        (["true", "x", "--gpus=3", "--detach"], False, {}, ["--gpus=3 stands after --, so the program gets it"]),
        (["torchrun", "--device", "cpu", "--name", "x"], False, {}, []),
    ],
)
def test_options_that_change_nothing_for_a_program_are_said(words, torchrun, keys, told):
    notes: list[str] = []
    options = Options(command=tuple(words), torchrun=torchrun, keys={"target.device": "cpu"} | keys)
    read_config(options, tell=notes.append)
    assert [note.startswith(begin) for note, begin in zip(notes, told, strict=True)] == [True] * len(told)


def test_project_without_a_trainer_runs_the_clients_own():
    plan = plan_of(TargetConfig(gpu_ranks=[0]), own_trainer=False)
    assert argv_of(plan)[2] == "/r/jobs/j1/lib/train.py"


def test_program_keeps_every_argument_and_gets_the_hosts_python():
    command = Command(("python", "-c", "print('a  b', \"{python}\")", "--x=$HOME"), torchrun=False)
    assert argv_of(plan_of(command=command)) == ["/py", "-c", "print('a  b', \"{python}\")", "--x=$HOME"]


def test_program_under_torchrun_with_or_without_the_word_python():
    target = TargetConfig(gpu_ranks=[0, 1])
    for words in (("python", "-u", "t.py", "--a"), ("t.py", "--a")):
        assert argv_of(plan_of(target, Command(words, torchrun=True)))[-3:] == [
            f"{SLOTS['agent']}/rank.py",
            "t.py",
            "--a",
        ]


@pytest.mark.parametrize(
    "words", [["t.py", "--a"], ["-m", "pkg.train", "-m", "x"], ["--module", "pkg"], ["--no-python", "bash", "-c", "x"]]
)
def test_ranks_start_what_torchrun_itself_would_start(words):
    from torch.distributed.run import config_from_args, parse_args

    _, program, args = config_from_args(parse_args(["--standalone", *words]))
    plan = plan_of(TargetConfig(gpu_ranks=[0]), Command(tuple(words), torchrun=True))
    wrapped = argv_of(plan)[argv_of(plan).index(f"{SLOTS['agent']}/rank.py") + 1 :]
    ranks = wrapped[1:] if wrapped[0] == "--exec" else [sys.executable, "-u", *wrapped]
    assert ranks == [program, *args]


def test_program_of_no_python_has_the_job_s_interpreter():
    plan = plan_of(TargetConfig(gpu_ranks=[0]), Command(("--no-python", "python", "x.py"), torchrun=True))
    assert argv_of(plan)[-3:] == ["--exec", "/py", "x.py"]


@pytest.mark.parametrize(
    ("words", "follow"),
    [
        (("python", "-c", "1"), "-- train.py ARGS"),
        (("--nproc-per-node", "2", "t.py", "-x"), "-- t.py -x, one"),
        (("--nproc-per-node=2", "-m", "pkg.train", "-x"), "-- -m pkg.train -x, one"),
        (("-m",), "-- train.py ARGS"),
        (("python",), "-- train.py ARGS"),
    ],
)
def test_torchrun_of_something_else_refused_with_words_that_do(words, follow):
    with pytest.raises(UsageError, match="torchrun starts a Python file, -m MODULE or --no-python") as caught:
        plan_of(TargetConfig(gpu_ranks=[0]), Command(words, torchrun=True))
    assert follow in caught.value.hint
    again = shlex.split(caught.value.hint.split(" -- ")[1].split(", one process")[0])
    plan_of(TargetConfig(gpu_ranks=[0]), Command(tuple(again), torchrun=True))


def test_program_that_names_no_gpu_sees_them_all():
    plan = plan_of(command=Command(("true",), torchrun=False), restrict_gpus=False)
    assert plan.roles[0].nodes == (Devices("any"),)
    assert "CUDA_VISIBLE_DEVICES" not in plan.roles[0].env


def test_plan_holds_names_of_secrets_and_never_their_values():
    plan = plan_of(TargetConfig(secrets=["HF_TOKEN"], env={"A": "canary-value"}))
    text = json.dumps(to_json(plan)) + command_of(plan, slots_of(plan)) + repr(plan)
    assert "HF_TOKEN" in text and "canary-value" not in text


def test_rendered_command_read_by_a_shell_gives_the_same_argv():
    command = Command(("python", "x.py", "it's", "a b", "$(touch pwned)", "", "ü\n"), torchrun=False)
    plan = plan_of(command=command)
    words = shlex.split(command_of(plan, {**SLOTS, "gpus": "0"}))
    assert words[len(plan.roles[0].env) :] == argv_of(plan)


def test_shell_slots_leave_the_home_to_the_hosts_shell():
    plan = plan_of(TargetConfig(gpu_ranks=[0, 1]))
    text = command_of(plan, slots_of(plan, root="~/my root"))
    assert "$PYTHON -m torch.distributed.run" in text
    assert "~/'my root/agent/abc/agent'/rank.py" in text


def test_plan_read_by_the_host_is_the_very_plan_and_holds_what_was_asked_for():
    target = TargetConfig(gpu_ranks=["auto:2"], max_restarts=3, env={"A": "canary"}, ssh="box", log_max_gb=0.5)
    plan = plan_of(target, Command(("python", "x.py", "a b"), torchrun=True))
    assert parse_plan(json.loads(json.dumps(to_json(plan)))) == plan
    assert plan.request.command == ("python", "x.py", "a b") and plan.request.torchrun
    assert plan.request.overrides == (
        'target.gpu_ranks=["auto:2"]',
        "target.max_restarts=3",
        "target.log_max_gb=0.5",
    )
    assert plan_of(own_trainer=True).request.own_trainer and not plan_of(own_trainer=True).request.command


def test_job_ids_carry_name_and_time_and_differ():
    now = datetime(2026, 3, 4, 5, 6, tzinfo=timezone.utc)
    first, second = (new_job_id("My Run/ü", now=now) for _ in range(2))
    assert first.startswith("my-run-0304-0506-") and first != second


def test_what_a_trainer_job_requires_is_what_the_project_declares():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert set(TRAINER_REQUIRES) <= {*project["dependencies"], *project["optional-dependencies"]["train"]}


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("sft of Ann.yaml", "target: {device: cpu}", "sft-of-Ann"),
        ("sft.yaml", "run: {name: mine}", "mine"),
        ("sft.yaml", "run: {name: run}", "run"),
        ("a.py", "from trainer.schema import Config\nconfig = Config()", "a"),
        ("ü.yaml", "target: {device: cpu}", "run"),
    ],
)
def test_run_without_a_name_is_named_after_its_config(tmp_path, file, text, name):
    (tmp_path / file).write_text(text)
    assert read_config(Options(config=str(tmp_path / file))).config.run.name == name
    assert read_config(Options(config=str(tmp_path / file), overrides=("run.name=given",))).config.run.name == "given"
