"""What a job was asked for: it survives a resume, and another trainer than the client's hears nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from deployer.plan.options import Options, read_config
from deployer.plan.prepare import prepare
from tests.agent.gpus.test_gpus import fake_smi
from tests.support.ferry import REPO, Ferry
from trainer.config.load import config_to_yaml
from trainer.schema import Config, TargetConfig


def plan_of(ferry: Ferry) -> dict[str, Any]:
    return dict(json.loads((ferry.job() / "job.json").read_text())["plan"])


def test_every_option_of_a_program_survives_a_resume(ferry: Ferry, tmp_path: Path) -> None:
    gpus = "0, GPU-0, Fake H100, 81559, 4\n1, GPU-1, Fake H100, 81559, 4\n"
    ferry.env |= {**fake_smi(tmp_path, gpus=gpus), "S": "hush"}
    ferry.write(".gitignore", "data\n")
    ferry.write("data", "1")
    (ferry.project / "wheels").mkdir()
    options = (
        *("--gpus", "1,0", "--device", "cuda", "--name", "mine", "--env", "A=1", "--secret", "S", "--queue"),
        *("--python", sys.executable, "--max-restarts", "1", "--max-runtime", "1h", "--stall-timeout", "30m"),
        *("--log-max", "5MB", "--include", "data", "--wheels", "wheels", "--allow-busy"),
    )
    program = ("sh", "-c", "echo $TORCHFERRY_ATTEMPT $CUDA_VISIBLE_DEVICES $A $S $(cat data); exit 3")
    assert ferry.run("run", *ferry.where(), *options, "--no-pull", "--", *program).returncode == 3
    (job_id,) = ferry.job_ids()
    before = plan_of(ferry)
    done = ferry.run("resume", job_id, "--no-pull")
    assert (done.returncode, done.stdout) == (3, b"3 1,0 1 hush 1\n4 1,0 1 hush 1\n"), done.stderr.decode()
    assert plan_of(ferry) == before

    changes = ("--gpus", "0", "--env", "A=2", "--max-restarts", "0", "--stall-timeout", "10m")
    assert ferry.run("resume", job_id, *changes, "--no-pull").stdout == b"5 0 2 hush 1\n"
    changed = plan_of(ferry)
    settings = dict(setting.split("=", 1) for setting in changed["request"]["overrides"])
    assert {key: json.loads(value) for key, value in settings.items()} == {
        "run.name": "mine",
        "target.device": "cuda",
        "target.python": sys.executable,
        "target.secrets": ["S"],
        "target.queue": True,
        "target.max_runtime_s": 3600.0,
        "target.stall_timeout_s": 600.0,
        "target.log_max_gb": 0.005,
    }  # GPU 0 and no restart are the defaults; values of --env are not the request's
    assert ferry.run("resume", job_id, "--no-pull").stdout == b"6 0 2 hush 1\n"
    assert plan_of(ferry) == changed


OWN_TRAINER = """
import os, sys
print(open(sys.argv[1]).read(), end='')
sys.exit(3)
"""
CONFIG = """
from trainer.schema import Config, RunConfig, TrainConfig
train = {'seed': 5}
config = Config(train=TrainConfig(steps=200, **train))
"""


def test_trainer_of_the_project_is_sent_what_was_given(ferry: Ferry) -> None:
    (ferry.project / "trainer").mkdir()
    for name, text in {"train.py": OWN_TRAINER, "trainer/__init__.py": "", "a.py": CONFIG}.items():
        ferry.write(name, text)
    options = ("--device", "cpu", "--max-runtime", "1h", "--env", "A=canary", *ferry.where(), "--no-pull")
    done = ferry.run("a.py", "run.export=false", *options)
    assert done.returncode == 3, done.stderr.decode()
    decided = {"gpu_ranks": [0], "train_backend": "auto", "device": "cpu"}
    given = {"target": decided, "train": {"steps": 200, "seed": 5}, "run": {"name": "a", "export": False}}
    assert yaml.safe_load(done.stdout) == given
    request = {"command": [], "torchrun": False, "own_trainer": True, "given_alone": True}
    assert plan_of(ferry)["request"] == {**request, "overrides": ["target.max_runtime_s=3600.0"]}
    (job_id,) = ferry.job_ids()
    done = ferry.run("resume", job_id, "train.keep_every=7", "--max-restarts", "0", "--no-pull")
    assert yaml.safe_load(done.stdout) == {**given, "train": {**given["train"], "keep_every": 7}}
    assert plan_of(ferry)["request"]["overrides"] == ["target.max_runtime_s=3600.0"]


def test_trainer_of_this_client_is_sent_the_whole_config(ferry: Ferry) -> None:
    options = Options(config=str(REPO / "configs" / "01_debug_sft.py"), overrides=("target.device=cpu",))
    asked = read_config(options)
    whole = config_to_yaml(asked.config)
    plan = prepare(asked, options=options, project=REPO).plan
    assert (plan.config_yaml, plan.request.own_trainer, plan.request.given_alone) == (whole, True, False)
    plan = prepare(asked, options=options, project=ferry.project).plan
    assert (plan.config_yaml, plan.request.own_trainer, plan.request.given_alone) == (whole, False, False)
    assert asked.config != Config(target=TargetConfig(device="cpu"))
