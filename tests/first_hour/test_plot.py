"""`plot`: where the numbers come from, and what is said of runs that cannot be drawn."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deployer.commands.look import plot as command
from deployer.connection.host import Host
from deployer.curves.along import points_along
from deployer.curves.metrics import read_metrics
from deployer.curves.png import png_of
from deployer.errors import UnknownJob, UsageError
from deployer.jobs.registry import JobRecord, write_record
from tests.support.ferry import Ferry
from tests.support.jobs import wait_for

WRITES = """
import json, os, sys, time
with open(os.environ["TORCHFERRY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    for step in range(1, 41):
        print(json.dumps({"step": step, "loss": 4 - step / 20, "tokens": 10, "step_s": 0.5}), file=file)
    print(json.dumps({"step": 40, "eval_loss": 2.5}), file=file)
time.sleep(float(sys.argv[1]))
"""


def lines_of(steps: int, **more: float) -> bytes:
    return b"".join(json.dumps({"step": n, "loss": 3 / n, **more}).encode() + b"\n" for n in range(1, steps + 1))


def put_run(folder: Path, data: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(data)
    return folder


def test_running_job_is_read_at_its_host_and_ended_one_where_it_is_home(ferry: Ferry):
    ferry.write("writes.py", WRITES)
    started = ferry.run("run", "--device", "cpu", "--detach", *ferry.where(), "--", "python", "writes.py", "600")
    assert started.returncode == 0, started.stderr
    (job_id,) = ferry.job_ids()
    wait_for(
        lambda: (ferry.job() / "metrics.jsonl").exists() and b"eval" in (ferry.job() / "metrics.jsonl").read_bytes()
    )
    seen = ferry.run("plot", job_id[:4])
    assert (seen.returncode, seen.stderr) == (0, b"")
    assert b"loss by step\n" in seen.stdout and b"2 at step 40" in seen.stdout
    told = json.loads(ferry.run("plot", job_id, "--json", "--x", "tokens").stdout)["runs"][0]
    assert (told["id"], told["from"], told["series"]["loss"][-1]) == (job_id, "host", [400, 2.0])
    assert ferry.run("stop", job_id, "--grace", "0").returncode == 0
    assert ferry.run("pull", job_id).returncode == 0
    shutil.rmtree(ferry.root)  # nobody is asked
    told = json.loads(ferry.run("plot", job_id, "--json").stdout)["runs"][0]
    assert (told["from"], told["trouble"], len(told["series"]["loss"])) == ("here", None, 40)


@pytest.fixture
def gone(tmp_path: Path) -> JobRecord:
    """A job of a host that is no more, of which some has been pulled while it ran."""
    home = put_run(tmp_path / "results" / "far-1", lines_of(30))
    record = JobRecord("far-1", "far", "nobody@127.0.0.1:1", "~/.torchferry", str(home), "2026-01-01T00:00:00Z")
    write_record(record)
    return record


def test_unreachable_job_is_drawn_as_it_is_home_and_the_rest_beside_it(ferry: Ferry, gone: JobRecord, tmp_path: Path):
    run = put_run(tmp_path / "mine", lines_of(20, extra=1))
    shown = ferry.run("plot", "far-1", str(run), "--key", "loss", "--key", "extra")
    assert shown.returncode == 0
    said = shown.stderr.decode()
    assert "does not tell of it" in said and "far-1 is shown as it was pulled" in said and "far-1 has no extra" in said
    assert shown.stdout.decode().count("far-1") >= 2 and "30" in shown.stdout.decode()


def test_run_that_cannot_be_drawn_is_a_line_and_a_code(ferry: Ferry, gone: JobRecord, tmp_path: Path):
    shutil.rmtree(gone.results)
    run = put_run(tmp_path / "mine", lines_of(20))
    shown = ferry.run("plot", "far-1", str(run / "metrics.jsonl"), "--json")
    assert shown.returncode == 125
    assert b"far-1 is not shown: " in shown.stderr
    assert [one["id"] for one in json.loads(shown.stdout)["runs"]] == [str(run / "metrics.jsonl")]


def plot_here(*words: object, **wanted: object) -> int:
    def no_job(job_id: str) -> tuple[Host, JobRecord | None]:
        raise UnknownJob(f"no job {job_id}")

    return command.plot([str(word) for word in words], no_job, command.PlotRequest(**wanted))  # type: ignore[arg-type]


def test_mistakes_are_told_with_what_there_is(tmp_path: Path):
    run = put_run(tmp_path / "run", lines_of(5, lr=1e-3))
    empty = put_run(tmp_path / "empty", b"")
    with pytest.raises(UsageError, match="no run has a key 'nope'") as error:
        plot_here(run, keys=("nope",))
    assert error.value.hint == "keys: loss, lr"
    with pytest.raises(UsageError, match="do not tell of time"):
        plot_here(run, along="time")
    with pytest.raises(UnknownJob, match="has written no metrics yet, and its"):
        plot_here(empty)
    with pytest.raises(UnknownJob, match=r"there is no .*missing here"):
        plot_here(tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot be written"):
        plot_here(run, html="/dev/null/x.html")


def test_two_runs_share_a_chart_and_two_losses_of_one_run_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "250")  # the paths of the tests are long, and a legend is cut
    first = put_run(tmp_path / "first", lines_of(5, eval_loss=1))
    second = put_run(tmp_path / "second", lines_of(9))
    assert plot_here(first) == 0
    assert "* loss  + eval_loss" in capsys.readouterr().out
    assert plot_here(first, second, first) == 0
    shown = capsys.readouterr()
    assert shown.out.count(" by step") == 2
    assert f"* {first}" in shown.out and f"+ {second}" in shown.out
    assert shown.err == f"{second} has no eval_loss\n"


class Links(HTMLParser):
    """Collects what an HTML file would load, and its tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "data", "action")]


def test_html_file_has_all_that_it_needs(tmp_path: Path):
    run = put_run(tmp_path / "<b>run", lines_of(500))
    assert plot_here(run, html=str(tmp_path / "x.html")) == 0
    text = (tmp_path / "x.html").read_text()
    links = Links()
    links.feed(text)
    assert not links.loaded and not {"script", "link", "b"} & links.tags
    assert "://" not in text and "svg" in links.tags and "&lt;b&gt;run" in text


def test_picture_is_a_png_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch):
    charts = {"loss": {"a_$x$": [(1.0, 2.0), (2.0, 1.0)], "_b": [(1.0, float("nan"))]}}
    assert png_of(charts, x_name="step").startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="--png needs matplotlib") as error:
        png_of(charts, x_name="step")
    assert "torchferry[plot]" in error.value.hint


def test_time_is_what_the_program_tells_or_the_seconds_a_step_added_up():
    ours = read_metrics(b'{"step": 10, "loss": 3, "step_s": 2}\n{"step": 15, "loss": 2, "step_s": 4}\n')
    assert points_along(ours, "loss", "time") == [(20.0, 3.0), (40.0, 2.0)]
    clock = read_metrics(b'{"step": 1, "loss": 3, "timestamp": 1e9}\n{"step": 2, "loss": 2, "timestamp": 1000000060}\n')
    assert points_along(clock, "loss", "time") == [(0.0, 3.0), (60.0, 2.0)]
    assert points_along(ours, "loss", "tokens") is None
