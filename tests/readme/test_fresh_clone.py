"""The README as a new user follows it: a clean clone, a fresh venv, a host behind a real sshd, and the page's own
lines, one after the other. Each must succeed at the first try; only what cannot be here is another word (see HERE)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
import torch
import transformers

from tests.first_hour.models import write_model
from tests.first_hour.test_trials import ROWS, SKY, TRAIN
from tests.support.ferry import REPO
from tests.support.limits import FOREVER_S
from tests.support.sshd import ALIAS, start_sshd

pytestmark = [pytest.mark.soak, pytest.mark.timeout(FOREVER_S)]

HERE = {"Qwen/Qwen2.5-0.5B-Instruct": "models/mine", "HOST": "gpu"}
"""A word of the pages, and what stands for it: no hub is reached from here, and a host's name is the user's own."""
CONFIG = """\
[hosts.gpu]
device = "cpu"
python = {python}
"""
"""All that this host needs said: it has no GPU, and its torch is in a venv."""


def lines_of(page: str, heading: str) -> list[str]:
    """The commands of the console blocks below a heading, without their remarks."""
    section = (REPO / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+# .*", "", line) for line in lines]


@dataclass
class NewUser:
    """Somebody with a clone, a venv and a project, who types what stands on a page."""

    clone: Path
    project: Path
    env: dict[str, str]

    def types(self, line: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        for word, other in HERE.items():
            line = re.sub(rf"(?<![\w/-]){re.escape(word)}(?![\w/-])", other, line)
        if "results/ID/" in line:
            line = line.replace("results/ID/", f"results/{self.newest().name}/")
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder or self.project,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FOREVER_S,
        )
        print(f"{time.monotonic() - began:6.1f} s  $ {line}")
        assert done.returncode == 0, (line, done.stdout[-3000:], done.stderr[-3000:])
        return done

    def newest(self) -> Path:
        """What came home last."""
        return max((self.project / "results").iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, with what the README's first line installs, in a venv of its own."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run(["git", "clone", "-q", str(REPO), str(folder / "clone")], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    return folder / "clone"


@pytest.fixture(scope="module")
def user(clone: Path) -> Iterator[NewUser]:
    folder = clone.parent
    venv = folder / "venv"
    with start_sshd(folder) as server:
        config = server.client_config_path.read_text().replace(f"Host {ALIAS}", "Host gpu")
        (folder / "ssh_config").write_text(config)
        (folder / "config").mkdir()
        (folder / "config" / "config.toml").write_text(CONFIG.format(python=json.dumps(str(venv))))
        project = folder / "my_project"
        write_model(project / "models" / "mine")
        (project / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        places = {
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            "TORCHFERRY_SSH_CONFIG": str(folder / "ssh_config"),
            "TORCHFERRY_CONFIG_DIR": str(folder / "config"),
            "TORCHFERRY_STATE_DIR": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        newcomer = NewUser(clone, project, {**kept, **places})
        for line in lines_of("README.md", "Install"):
            newcomer.types(line, clone)
        yield newcomer


def test_first_fine_tune_line_by_line(user: NewUser) -> None:
    """`sft --lora` at the first command: its adapter is home, `generate` speaks with it. Then the same by a file."""
    enter, *lines = lines_of("README.md", "A first fine-tune")
    assert enter.startswith("cd "), enter
    first, generates, *rest = lines
    assert re.search(r"step 1/\d+ +loss", user.types(first).stdout)
    results = user.newest()
    base = transformers.AutoModelForCausalLM.from_pretrained(user.project / "models" / "mine")
    opened = peft.PeftModel.from_pretrained(base, results / "export" / "adapter")
    learned = [tensor for name, tensor in opened.named_parameters() if "lora_B" in name]
    assert learned and all(torch.count_nonzero(tensor) for tensor in learned)
    assert user.types(generates).stdout.strip()
    assert [line.split()[1] for line in rest] == ["init", "inspect", "lora.yaml", "train"]
    for line in rest:
        user.types(line)
    assert user.newest() != results


def test_own_program_line_by_line(user: NewUser) -> None:
    """A script of one's own under `run`, alone and with a process a GPU; what it wrote is home by itself."""
    alone, spread = lines_of("README.md", "Your own program")
    (user.project / "my_train.py").write_text("import torch\n\ntorch.save({'w': torch.ones(2)}, 'weights.pt')\n")
    user.types(alone)
    assert torch.load(user.newest() / "code" / "weights.pt", weights_only=True)["w"].shape == (2,)
    (user.project / "my_train.py").write_text(TRAIN.replace("sys.argv[1]", "'fsdp.yaml'"))
    (user.project / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    assert user.types(spread).stdout.count("step 2 loss") == 2


def test_task_of_skypilot_line_by_line(user: NewUser) -> None:
    """`convert`, then `run`, as docs/tasks.md has it."""
    (user.project / "sky.yaml").write_text(SKY)
    lines = lines_of("docs/tasks.md", "From SkyPilot or dstack")
    shown, _, runs = lines  # between them the same for dstack
    assert "convert sky.yaml" in shown and runs.startswith("torchferry run torchferry.yaml")
    user.types(f"{shown} -o torchferry.yaml")
    assert user.types(runs).stdout.endswith("prepared\n")


def test_launch_from_python(user: NewUser) -> None:
    """The README's own expression."""
    (expression,) = re.findall(r"`(torchferry\.launch\([^`]*)`", (REPO / "README.md").read_text())
    code = f"import torchferry\nresult = {expression}\nprint(result.state, result.code)"
    done = user.types(shlex.join(["python", "-c", code]))
    assert done.stdout.splitlines()[-1] == "succeeded 0"


def test_looks_stops_and_fetches_line_by_line(user: NewUser) -> None:
    """Each line below "Look, reach in, stop, pull" but those that a host needs a GPU for, or that never end."""
    user.types("torchferry lora.yaml --ssh gpu train.epochs=1 --detach")
    job_id = json.loads(user.types("torchferry ps --json").stdout)[0]["id"]
    lines = lines_of("README.md", "Look, reach in, stop, pull")
    lines = [line for line in lines if not line.endswith(("nvidia-smi", "tensorboard ID", " top"))]
    assert len(lines) == 9, lines
    (user.project / "prompts.txt").write_text("What does a ferry carry?\n")
    user.types("torchferry logs")
    former = next(
        row["id"] for row in json.loads(user.types("torchferry ps --all --json").stdout) if row["id"] != job_id
    )
    for line in lines:
        line = line.replace("ID1", job_id).replace("ID2", former)
        user.types(re.sub(r"\bID\b", job_id, line) + (" --yes" if "torchferry gc" in line else ""))
    assert (user.project / f"report-{job_id}.html").is_file()
