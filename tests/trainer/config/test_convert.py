"""Tasks of SkyPilot and dstack as ours: what they come to, and that nothing of them goes in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trainer.commands.convert import convert, read_foreign
from trainer.config.kinds.convert import render
from trainer.config.kinds.recognise import TASK, read_kind
from trainer.config.kinds.task import read_task
from trainer.errors import ConfigError

SKY = """\
name: my task
num_nodes: 2
workdir: .
resources:
  infra: aws/us-east-1
  accelerators: {A100: 2}
  use_spot: true
  cpus: 8+
  ports: 8081
  image_id: docker:a
  disk_size: 256
  autostop: {idle_minutes: 10}
  job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 3}
envs:
  MODEL: gpt2
  TOKEN:
  RANK: 0
secrets:
  KEY: abc
file_mounts:
  /data: ./data
  /home: ~/else
  /bucket: s3://b
  /mounted: {source: gs://b, mode: MOUNT}
service: {replicas: 2}
strange: [1]
setup: |
  pip install a
run: |
  cd ~/sky_workdir
  torchrun --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE --nnodes=${SKYPILOT_NUM_NODES} a.py $SKYPILOT_TASK_ID $MODEL
"""
DSTACK = """\
type: task
name: train
nodes: 2
python: 3.12
image: some/image
shell: bash
env:
  - TOKEN
  - MODEL=a=b
commands:
  - pip install a
  - |
    python a.py \\
      --gpus $DSTACK_GPUS_NUM
resources:
  gpu: A100:80GB:2..4
  memory: 200GB..
files: [".:examples", /etc/hosts]
max_duration: 2h
spot_policy: auto
working_dir: a
retry: true
odd: 1
"""


def converted(folder: Path, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    path = folder / "foreign.yaml"
    path.write_text(text)
    task, _ = read_foreign(str(path))
    return task.values, dict(task.notes)


def test_skypilot_task_becomes_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    values, notes = converted(tmp_path, SKY)
    run = values.pop("run")
    assert run.startswith("#!/bin/bash\ncd ~/sky_workdir\ntorchrun ") and run.endswith("$MODEL")
    assert values == {
        "name": "my-task",
        "gpus": "auto:2",
        "max_restarts": 3,
        "env": {"MODEL": "gpt2", "SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_NUM_NODES": "1"},
        "secrets": ["TOKEN", "KEY"],
        "include": ["data"],
        "setup": "pip install a",
    }
    resources = ("infra", "accelerators", "use_spot", "cpus", "ports", "image_id", "disk_size", "autostop")
    mounts = ("/data", "/home", "/bucket", "/mounted")
    variables = ("$SKYPILOT_NUM_GPUS_PER_NODE", "$SKYPILOT_NUM_NODES", "$SKYPILOT_TASK_ID")
    assert notes.keys() == {
        *("name", "num_nodes", "envs.RANK", "secrets.KEY", "service", "strange", "sky_workdir"),
        *(f"resources.{name}" for name in resources),
        *(f"file_mounts.{path}" for path in mounts),
        *variables,
    }
    assert "abc" not in str(notes) + str(values)
    assert "TORCHFERRY_JOB_ID" in notes["$SKYPILOT_TASK_ID"] and "WORLD_SIZE" in notes["$SKYPILOT_NUM_NODES"]


def test_dstack_task_becomes_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values, notes = converted(tmp_path, DSTACK)
    assert values == {
        "name": "train",
        "gpus": "auto:2",
        "env": {"MODEL": "a=b", "DSTACK_GPUS_NUM": "2"},
        "secrets": ["TOKEN"],
        "max_runtime": "2h",
        "run": "#!/bin/bash\nset -e\npip install a\npython a.py \\\n  --gpus $DSTACK_GPUS_NUM",
    }
    assert notes.keys() == {
        *("nodes", "python", "image", "files .", "files /etc/hosts", "resources.gpu", "resources.memory"),
        *("spot_policy", "working_dir", "retry", "odd", "$DSTACK_GPUS_NUM"),
    }


@pytest.mark.parametrize("text", [SKY, DSTACK, "run: 'a: # é \\t b'\nenvs: {A: 'yes', B: '1e3', C: 'null'}\n"])
def test_what_is_written_is_read_back_as_it_was_meant(tmp_path: Path, text: str) -> None:
    (tmp_path / "foreign.yaml").write_text(text)
    task, _ = read_foreign(str(tmp_path / "foreign.yaml"))
    (tmp_path / "task.yaml").write_text(render(task, "head\n: run: b"))
    found = read_kind(tmp_path / "task.yaml")
    said = read_task(found.tree, found.places)
    assert found.kind == TASK and said.words.keys() == task.values.keys() - {"run"}
    assert said.words["env"] == [f"{name}={value}" for name, value in task.values["env"].items()]
    assert task.values["run"].endswith(said.program.text or "\0")
    comments = (tmp_path / "task.yaml").read_text()
    assert all(f"#   {key}: " in comments for key, _ in task.notes)


@pytest.mark.parametrize(
    ("accelerators", "gpus"),
    [
        ("A100:8", "auto:8"),
        ("H100", "auto:1"),
        ("{V100: }", "auto:1"),
        ("[A100:4, H100:2]", "auto:4"),
        ("L4:0.5", "auto:1"),
        ("null", None),
    ],
)
def test_accelerators_are_a_number_of_gpus(tmp_path: Path, accelerators: str, gpus: str | None) -> None:
    values, _ = converted(tmp_path, f"run: a\nworkdir: .\nresources: {{accelerators: {accelerators}}}")
    assert values.get("gpus") == gpus


@pytest.mark.parametrize(
    ("gpu", "gpus"),
    [
        ("2", "auto:2"),
        ("24GB", "auto:1"),
        ("A100", "auto:1"),
        ("A10G,A100", "auto:1"),
        ("40GB..80GB:4", "auto:4"),
        ("24GB:2..", "auto:2"),
        ("{name: A100, count: 2}", "auto:2"),
        ("{count: {min: 3, max: 4}}", "auto:3"),
        ("0", None),
    ],
)
def test_gpu_of_dstack_is_a_number_of_gpus(tmp_path: Path, gpu: str, gpus: str | None) -> None:
    values, _ = converted(
        tmp_path, f"type: task\ncommands: [a]\nresources: {{gpu: '{gpu}'}}".replace("'{", "{").replace("}'", "}")
    )
    assert values.get("gpus") == gpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("type: service\ncommands: [a]", "type is service: only a task is a job\n  in FILE:1"),
        ("type: task", "it has no commands"),
        ("type: task\ncommands: {a: b}", "commands is a mapping, expected a list\n  in FILE:2"),
        ("setup: a\nenvs: {A: 1}", "it has no run"),
        ("run: a\nresources: [a]", "resources is ['a'], expected a mapping\n  in FILE:2"),
        ("run: [a]\nenvs: {A: 1}", "run is a list, expected text\n  in FILE:1"),
        ("run: a\nworkdir: .\nresources: {accelerators: tpu-v4-8}", "there is no TPU backend"),
        ("run: a\nresources: {accelerators: A100:many}", "expected NAME:COUNT"),
        ("run: a\nresources: {accelerators: A100:100}", "asks for 100 GPUs"),
        ("run: a", "FILE is a task file, which runs a program"),
        ("recipe: sft", "FILE is a config of the trainer"),
        ("base_model: a", "FILE is an axolotl config"),
    ],
)
def test_what_cannot_be_converted_is_an_error_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(tmp_path, text)
    assert said in str(caught.value).replace(str(tmp_path / "foreign.yaml"), "FILE")


def test_file_that_is_there_is_left_alone_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sky.yaml").write_text("run: a\nworkdir: .\nresources: {use_spot: true}\n")
    shown = CliRunner().invoke(convert, ["sky.yaml"])
    assert shown.exit_code == 0 and shown.stdout.splitlines()[1] == "run: a"
    assert "note: resources.use_spot: " in shown.stderr and "#   resources.use_spot: " in shown.stdout
    written = CliRunner().invoke(convert, ["sky.yaml", "-o", "t.yaml"])
    assert written.exit_code == 0 and not written.stdout
    assert written.stderr.endswith("t.yaml is written. Next: python deploy.py run t.yaml --ssh HOST\n")
    Path("t.yaml").write_text("mine")
    again = CliRunner().invoke(convert, ["sky.yaml", "-o", "t.yaml"])
    assert str(again.exception).startswith("t.yaml is there already") and Path("t.yaml").read_text() == "mine"
    assert CliRunner().invoke(convert, ["sky.yaml", "-o", "t.yaml", "--force"]).exit_code == 0
    assert Path("t.yaml").read_text().startswith("# From sky.yaml, of SkyPilot. ")
