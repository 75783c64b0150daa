"""The first hour of somebody with a project of their own, over a real sshd: nothing has to be tried twice. Two more
trials are `test_notebook.py` (from a notebook) and `test_automation.py` (by a script, with --json alone)."""

import json
import sys

import peft
import pytest
import torch
import transformers

from tests.first_hour.models import write_model

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(40)
]


@pytest.fixture
def typed(remote):
    """Types a command, which must succeed, on a host without a GPU."""
    remote.env["OMP_NUM_THREADS"] = "1"

    def run(*words):
        done = remote.run(*words)
        assert done.returncode == 0, (words, done.stdout.decode()[-2000:], done.stderr.decode()[-4000:])
        return done

    return run


def only_results(ferry):
    (results,) = (ferry.project / "results").iterdir()
    return results


def test_own_rows_and_model_with_lora(remote, typed):
    """A config, a look at it, the run: the first loss at the third command, and the adapter is home."""
    write_model(remote.project / "models" / "mine")
    remote.write("my.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    typed("init", "lora", "--model", "models/mine", "--data", "my.jsonl")
    typed("inspect", "lora.yaml")
    keys = ("target.device=cpu", "train.steps=4", "train.epochs=null", "data.seq_len=128", "lora.rank=4")
    done = typed("lora.yaml", *remote.where(), "--python", sys.executable, *keys)
    assert b"loss" in done.stdout
    adapter = only_results(remote) / "export" / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(remote.project / "models" / "mine")
    opened = peft.PeftModel.from_pretrained(base, adapter)
    learned = [tensor for name, tensor in opened.named_parameters() if "lora_B" in name]
    assert learned and all(torch.count_nonzero(tensor) for tensor in learned)


TRAIN = """
import sys
import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

options = yaml.safe_load(open(sys.argv[1]))
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(8, 4) * (dist.get_rank() + 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f} {options['distributed_type']}", flush=True)
if dist.get_rank() == 0:
    import os

    os.makedirs("out", exist_ok=True)
    torch.save(model.module.state_dict(), "out/weights.pt")
dist.destroy_process_group()
"""


def test_own_ddp_script_with_its_yaml_and_requirements(remote, typed):
    """The second command runs it in two processes, and what it wrote is home by itself."""
    remote.write("my_train.py", TRAIN)
    remote.write("fsdp.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    remote.write("requirements.txt", "torch\npyyaml\n")
    words = ("--gpus", "0,1", "--device", "cpu", "--torchrun", "--python", sys.executable, "--out", "out/*.pt")
    program = ("--", "my_train.py", "fsdp.yaml")
    typed("run", *remote.where(), *words, "--dry-run", *program)
    done = typed("run", *remote.where(), *words, *program)
    assert done.stdout.count(b"step 2 loss") == 2 and b"FSDP" in done.stdout
    weights = torch.load(only_results(remote) / "code" / "out" / "weights.pt", weights_only=True)
    assert weights["weight"].shape == (1, 4)


SKY = """
name: mine
resources:
  accelerators: A100:1
  cloud: gcp
  use_spot: true
num_nodes: 1
workdir: .
envs:
  WORD: ferry
setup: |
  echo prepared > ready.txt
run: |
  cat ready.txt
  python -c "import os; open('said.txt', 'w').write(os.environ['WORD'])"
"""


def test_task_of_skypilot_is_converted_and_runs(remote, typed):
    remote.write("task.yaml", SKY)
    converted = typed("convert", "task.yaml", "-o", "torchferry.yaml")
    assert b"use_spot" in converted.stderr
    done = typed(
        "run", *remote.where(), "--device", "cpu", "--gpus", "0", "--python", sys.executable, "--out", "said.txt"
    )
    assert done.stdout.endswith(b"prepared\n")
    assert (only_results(remote) / "code" / "said.txt").read_text() == "ferry"
