"""gc says what nobody has brought home of the jobs that go."""

import json

WRITES = """
import os, pathlib
pathlib.Path("w.pt").write_bytes(bytes(5_000_000))
run = pathlib.Path(os.environ["TORCHFERRY_RUN_DIR"])
for name in ("export/model.bin", "checkpoints/step_1/weights", "checkpoints/step_1/COMPLETE", "metrics.jsonl"):
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"step": 1, "loss": 2.5}\\n' if name == "metrics.jsonl" else "")
"""


def unfetched(ferry):
    shown = ferry.run("gc", *ferry.where(), "--older-than", "0s", "--dry-run", "--json")
    (job,) = json.loads(shown.stdout)["jobs"]
    return set(job["unfetched"]["names"])


def test_what_nobody_fetched_is_named_until_it_is_home(ferry):
    ferry.write("writes.py", WRITES)
    assert ferry.run("run", *ferry.where(), "--no-pull", "--", "python", "writes.py").returncode == 0
    (job_id,) = ferry.job_ids()
    assert unfetched(ferry) == {"checkpoints", "export", "metrics.jsonl", "w.pt"}
    for look in (("plot", "--json"), ("report", "-o", "told.html")):
        assert ferry.run(*look, job_id).returncode == 0
    assert "metrics.jsonl" in unfetched(ferry), "they read it and keep nothing"
    shown = ferry.run("gc", *ferry.where(), "--older-than", "0s", "--dry-run").stderr.decode()
    assert f"never pulled of {job_id}: 5 files, 5.0 MB: w.pt" in shown and f"pull {job_id} " in shown
    assert ferry.run("pull", *ferry.where(), job_id).returncode == 0
    assert unfetched(ferry) == {"checkpoints", "w.pt"}
    assert ferry.run("pull", *ferry.where(), job_id, "w.pt", "checkpoints/step_1").returncode == 0
    assert unfetched(ferry) == set()
    ferry.write("mine.txt", "mine")
    assert ferry.run("push", *ferry.where(), job_id, "mine.txt").returncode == 0
    assert unfetched(ferry) == set()  # who pushed it has it
    gone = ferry.run("gc", *ferry.where(), "--older-than", "0s", "--yes")
    assert gone.returncode == 0 and b"never pulled" not in gone.stderr and not ferry.job_ids()
