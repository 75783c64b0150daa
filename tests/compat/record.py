"""Makes the finished jobs in jobs/ anew, by the client of 836d9e4: `python -m tests.compat.record`.

What depends on the machine is written as @ROOT@, @PYTHON@ and so on; `tests/compat/finished.py` puts it in.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.agent.gpus.test_gpus import fake_smi
from tests.compat.finished import JOBS, this_machine
from tests.compat.versions import BLOCKED, Versions, begin, done, ended, extract, kill_supervisor, listed, reached, says

TINY = """\
from trainer.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TargetConfig, TrainConfig

config = Config(
    run=RunConfig(name="sft"),
    target=TargetConfig(gpu_ranks=[0], train_backend="pytorch", device="cpu"),
    model=ModelConfig(family="qwen3", hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1),
    data=DataConfig(train=["rows.jsonl"], seq_len=64),
    optim=OptimConfig(learning_rate=2e-3),
    train=TrainConfig(steps=2, micro_batch_size=2, precision="fp32"),
)
"""
TRAINING_ROWS = "".join(
    json.dumps({"question": f"what is {n}?", "answer": "na " * (1 + n * n % 5) + str(n)}) + "\n" for n in range(20)
)
RANKS = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
FAILS = "import os, sys\nprint('attempt', os.environ['TORCHFERRY_ATTEMPT'], sys.argv[1:])\n"
FAILS += "sys.exit(0 if os.environ['TORCHFERRY_ATTEMPT'] == '3' else int(os.environ['TORCHFERRY_ATTEMPT']) + 2)\n"
WRITES = 'echo \'{"step": 1, "loss": 0.5}\' > $TORCHFERRY_RUN_DIR/metrics.jsonl; echo $A wrote one step'
SAVES = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
LEFT_BEHIND = ("lib", "reserve", "__pycache__", "tokens", "cache")
"""lib/ is the trainer in the archive; the rest is made anew where it is missing."""


def main() -> None:
    shutil.rmtree(JOBS, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="torchferry-") as folder:
        at = Path(folder)
        gpu = fake_smi(at, gpus="0, GPU-0, Fake H100, 81559, 4\n")
        versions = Versions.make(at, extract(at), **gpu)
        run_all(versions)
        for job in sorted((at / "root" / "jobs").iterdir()):
            if not job.name.startswith("holder-"):
                keep(job, at)


def run_all(versions: Versions) -> None:
    old = versions.old
    for name, text in {"ranks.py": RANKS, "fails.py": FAILS, "tiny.py": TINY, "rows.jsonl": TRAINING_ROWS}.items():
        versions.write(name, text)
    jobs = [
        begin(old, "program", "--env", "A=it", program=("sh", "-c", WRITES)),
        begin(old, "gpu", "--gpus", "auto:1", program=("sh", "-c", "echo on $CUDA_VISIBLE_DEVICES")),
        begin(old, "failed", "--max-restarts", "1", program=("python", "fails.py", "a b")),
        begin(old, "ranks", "--torchrun", "--device", "cpu", "--gpus", "0,1", program=("ranks.py",)),
    ]
    stopped = begin(old, "stopped", program=("sh", "-c", SAVES))
    says(stopped, "up")
    reached(stopped, "running")
    done(old.run("stop", stopped.name))
    reached(jobs[1], "succeeded")
    holder = begin(old, "holder", "--gpus", "0", program=("sh", "-c", BLOCKED))
    lost = begin(old, "lost", "--gpus", "0", "--queue", program=("true",))
    reached(lost, "queued")
    kill_supervisor(lost)
    assert listed(old, lost)["state"] == "lost"
    done(old.run("stop", holder.name))
    done(old.run("tiny.py", *old.where(), "--python", sys.executable, "--no-pull"))
    print([ended(job)["state"] for job in jobs])


def keep(job: Path, at: Path) -> None:
    """Copies a job's folder, and writes what depends on this machine as a word."""
    target = JOBS / job.name.split("-")[0]
    shutil.copytree(job, target, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    words = {str(at / "root"): "@ROOT@", str(at): "@HOME@", sys.executable: "@PYTHON@", this_machine(): "@MACHINE@"}
    words |= {os.uname().nodename: "@HOST@"}
    for path in sorted(p for p in target.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for value, word in words.items():
            quoted = f'"{value}"' if word == "@HOST@" else value  # a short name may be part of other words
            data = data.replace(quoted.encode(), f'"{word}"'.encode() if word == "@HOST@" else word.encode())
        path.write_bytes(data)


if __name__ == "__main__":
    main()
