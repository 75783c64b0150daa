"""Outputs by pattern: what a job wrote comes home by itself, also while it runs."""

from tests.support.jobs import wait_for
from tests.support.limits import PATIENCE

WRITES = """
import os, pathlib
for name in ("plots/a.png", "plots/b.txt", "deep/er/w.pt", "w.pt", ".cache/w.pt"):
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
os.symlink("/etc/hostname", "plots/link.png")
"""


def brought(ferry):
    (results,) = (ferry.project / "results").iterdir()
    code = results / "code"
    return {path.relative_to(code).as_posix(): path.read_text() for path in code.rglob("*") if path.is_file()}


def test_patterns_bring_outputs_home_and_no_link_is_followed(ferry):
    ferry.write("writes.py", WRITES)
    words = ("--out", "plots/*.png", "--out", "**/w.pt")
    done = ferry.run("run", *ferry.where(), *words, "--", "python", "writes.py")
    assert brought(ferry) == {name: name for name in ("plots/a.png", "deep/er/w.pt", "w.pt")}
    assert done.returncode == 74 and b"plots/link.png: a link" in done.stderr, done.stderr.decode()
    pulled = ferry.run("pull", *ferry.where(), ferry.job_ids()[0], "plots/*.t?t")
    assert pulled.returncode == 0 and "plots/b.txt" in brought(ferry)


def test_pattern_without_a_file_is_not_home(ferry):
    done = ferry.run("run", *ferry.where(), "--out", "none/*.bin", "--", "true")
    assert done.returncode == 74 and b"none/*.bin" in done.stderr and b"the job has no such file" in done.stderr


def test_watching_pull_brings_outputs_while_the_job_runs(ferry):
    ferry.write("slow.py", WRITES + "import time\nwhile not pathlib.Path('end').exists(): time.sleep(0.05)\n")
    detached = ferry.run("run", *ferry.where(), "--detach", "--out", "w.pt", "--", "python", "slow.py")
    assert detached.returncode == 0, detached.stderr.decode()
    watching = ferry.start("pull", *ferry.where(), ferry.job_ids()[0], "--watch", "--every", "1s")
    try:
        wait_for(lambda: (ferry.project / "results").exists() and brought(ferry) == {"w.pt": "w.pt"})
        (ferry.job() / "code" / "w.pt").write_text("newer")
        (ferry.job() / "code" / "end").touch()
        watching.communicate(timeout=60 * PATIENCE)
        assert (watching.returncode, brought(ferry)) == (0, {"w.pt": "newer"})
    finally:
        watching.kill()
