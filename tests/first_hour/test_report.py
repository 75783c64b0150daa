"""`report`: one file that tells of a run, whatever its files hold, and loads nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deployer.agent.job.status import Status
from deployer.commands.look import report as command
from deployer.commands.look.again import lines_again
from deployer.commands.look.run_files import Run
from deployer.connection.host import Host
from deployer.errors import UnknownJob
from deployer.jobs.registry import JobRecord, write_record
from deployer.report.facts import MAX_FILE, MAX_LEAVES, Facts, Git, read_facts, setting
from deployer.report.run_page import Told, run_page
from tests.support.ferry import Ferry
from tests.support.jobs import make_plan
from tests.support.limits import HANG_S

FAILS = """
import json, os
run = os.environ["TORCHFERRY_RUN_DIR"]
with open(run + "/metrics.jsonl", "w") as file:
    for step in range(1, 31):
        print(json.dumps({"step": step, "loss": 3 / step, "lr": 1e-3}), file=file)
with open(run + "/samples.jsonl", "w") as file:
    print(json.dumps({"step": 30, "prompt": "What is <b>?", "text": "It is <script>alert(1)</script>"}), file=file)
raise ValueError("no <img src=http://evil.test/x> such luck")
"""


class Reader(HTMLParser):
    """The text, the tags and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [name for name, _ in attrs if name in ("src", "href", "xlink:href", "data", "action", "srcset")]

    def handle_data(self, data: str) -> None:
        self.words += data


def reader_of(path: Path) -> Reader:
    found = Reader(path.read_text("utf-8"))
    assert found.loaded == []
    assert not {"script", "img", "link", "iframe", "object", "b"} & found.tags
    assert not re.search(r"url\(|@import", path.read_text("utf-8"))
    return found


def test_failed_job_is_told_with_its_words_and_without_its_secrets(ferry: Ferry):
    ferry.write("fails.py", FAILS)
    options = ["--device", "cpu", "--env", "TOKEN=hush-hush", "--name", "luckless", "--out", "made", *ferry.where()]
    assert ferry.run("run", *options, "--", "python", "fails.py", "a b").returncode == 1
    (job_id,) = ferry.job_ids()
    done = ferry.run("report", job_id[:5], "-o", "told.html", "--json")
    assert done.returncode == 0, done.stderr
    file = ferry.project / "told.html"
    assert json.loads(done.stdout) == {"id": job_id, "path": str(file), "bytes": file.stat().st_size}
    words = reader_of(file).words
    for told in (
        "failed (exit code 1)",
        "ValueError: no <img src=http://evil.test/x> such luck",
        "It is <script>alert(1)</script>",
        "Lowest loss",
        "0.1 at step 30",
        "TOKEN",
        "Interpreter",
        "run --remote-root",
        "--name luckless --device cpu --out made --env TOKEN=VALUE -- python fails.py 'a b'",
    ):
        assert told in words, told
    assert "hush" not in file.read_text()
    shutil.rmtree(ferry.root)  # what is home tells it too
    assert ferry.run("report", job_id, "-o", "home.html").returncode == 0
    assert "ValueError: no <img" in reader_of(ferry.project / "home.html").words


def test_job_of_a_host_that_is_gone_is_told_as_it_is_home(ferry: Ferry, tmp_path: Path):
    home = tmp_path / "results" / "far-1"
    home.mkdir(parents=True)
    (home / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5}\n')
    write_record(JobRecord("far-1", "far", "nobody@127.0.0.1:1", "~/.torchferry", str(home), "2026-01-01T00:00:00Z"))
    done = ferry.run("report", "far-1")
    assert (done.returncode, b"does not tell of it" in done.stderr) == (0, True)
    words = reader_of(ferry.project / "report-far-1.html").words
    assert "nobody@127.0.0.1:1 does not tell of it (127.0.0.1:1 refuses connections)" in words and "as of " in words


PROFILE = {
    "step": 12,
    "rank": 0,
    "span_ms": 20.0,
    "shares": [{"name": "products", "ms": 15.0, "hidden_ms": 0.0, "calls": 9, "percent": 75.0}],
    "on_device": True,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder as train.py leaves one."""
    folder = tmp_path / "run"
    (folder / "profile").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "recipe: sft\ntarget:\n  env: {TOKEN: hush-hush}\noptim:\n  learning_rate: 0.002\n"
        "train:\n  steps: 40\n  profile_steps: [12]\nrun:\n  name: <i>x\n"
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5, "grad_norm": 1}\n{"step": 40, "loss": 1.5}\n')
    (folder / "outcome.json").write_text('{"state": "succeeded", "reason": null, "export": "export", "steps": 40}')
    (folder / "profile" / "step_000012_rank_0.json").write_text(json.dumps(PROFILE))
    (folder / "samples.jsonl").write_text(
        "".join(json.dumps({"step": step, "prompt": "Hi", "text": f"said at {step}"}) + "\n" for step in (20, 40))
    )
    return folder


def report_here(path: Path, output: Path) -> Reader:
    def no_job(job_id: str | None) -> tuple[Host, JobRecord | None]:
        raise UnknownJob(f"no job {job_id}")

    command.report(str(path), no_job, output=str(output), as_json=False)
    return reader_of(output)


def test_folder_of_a_local_run_is_told(run_dir: Path, tmp_path: Path):
    words = report_here(run_dir, tmp_path / "x.html").words
    for told in ("succeeded", "loss 3.5 → 1.5", "products", "75.0 %", "said at 40", "learning_rate", "TOKEN", "<i>x"):
        assert told in words, told
    assert words.index("said at 40") < words.index("said at 20")
    assert "hush" not in words
    assert "--run-dir NEW_FOLDER" in words


@pytest.mark.parametrize("name", ["config.yaml", "outcome.json", "job.json", "status.json", "metrics.jsonl"])
@pytest.mark.parametrize("data", [b"\xff\x00{[<script>", b"[1, 2]", b"a: &a [*a]\n", b"{}", b"null"])
def test_damaged_file_costs_itself_alone(run_dir: Path, tmp_path: Path, name: str, data: bytes):
    (run_dir / name).write_bytes(data)
    words = report_here(run_dir, tmp_path / "x.html").words
    assert "said at 40" in words


def test_empty_folder_makes_a_page(tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    assert "nothing" in report_here(tmp_path / "nothing", tmp_path / "x.html").words


def test_what_a_job_writes_is_bounded():
    files = {
        "samples.jsonl": b'{"text": "' + b"x" * 900_000 + b'", "step": 1}\n' * 3,
        "config.yaml": b"strange:\n" + b"".join(b"  k%d: 1\n" % n for n in range(3000)),
    }
    facts = read_facts("x", lambda path, most: files.get(path, b"")[:most] or None, None, None)
    assert facts.config is not None and len(facts.config.values) <= MAX_LEAVES
    assert len(run_page(facts, Told("now"))) < 400_000


@pytest.mark.parametrize(
    "value", ["2001-13-40", '!!int "x"', "9" * 5000, "[{2001-01-01: 1}]", "!!timestamp x", '"\\UFFFFFFFF"']
)
def test_value_that_no_config_has_is_told_as_it_is_written(run_dir: Path, tmp_path: Path, value: str):
    (run_dir / "config.yaml").write_text(f"recipe: sft\na: {value}\n")
    words = report_here(run_dir, tmp_path / "x.html").words
    assert "said at 40" in words
    assert value[:10] in words or value.split()[-1].strip('"') in words or "is not understood" in words


def test_values_of_a_config_are_those_that_the_trainer_reads():
    text = b"recipe: sft\na: [1, 2.5, 2e-5, yes, null, x]\ntrain: {steps: 1_000}\n"
    facts = read_facts("x", lambda path, most: text if path == "config.yaml" else None, None, None)
    assert facts.config is not None and not facts.damages
    assert facts.config.values == {"recipe": "sft", "a": [1, 2.5, 2e-5, True, None, "x"], "train.steps": 1000}


def test_time_without_a_zone_is_one_of_utc():
    status = Status("running", started_at="2026-01-01T00:00:00", attempt=2)
    told = Told("now", now=datetime(2026, 1, 1, 0, 1, tzinfo=timezone.utc))
    assert "1 m 00 s so far" in run_page(Facts("x", status=status), told)
    ended = status._replace(state="failed", ended_at="2026-01-01T01:00:00Z")
    assert "1 h 00 m" in run_page(Facts("x", status=ended), told)


def test_last_samples_are_told_of_a_file_that_is_too_long(run_dir: Path, tmp_path: Path):
    line = json.dumps({"step": 1, "text": "x" * 1000}).encode() + b"\n"
    with (run_dir / "samples.jsonl").open("wb") as file:
        file.write(line * (MAX_FILE // len(line) + 500))
        file.write(b'{"step": 40, "text": "said at the end"}\n')
    assert "said at the end" in report_here(run_dir, tmp_path / "x.html").words


@pytest.mark.parametrize(("commit", "told"), [("--upload-pack=x", False), ("a1b2c3d", True), ("A; rm", False)])
def test_commit_to_check_out_is_one(commit: str, told: bool):
    plan = make_plan(["true"])
    facts = Facts("x", plan=plan, git=Git(commit))
    assert (f"git checkout {commit}" in lines_again(facts, Run("x", Path("x")))) == told
    assert ("git checkout" in lines_again(facts, Run("x", Path("x")))) == told


def test_setting_tells_names_of_the_environment_alone():
    assert setting('target.env={"A": "secret"}') == ("target.env", "A")
    assert setting("target.env.B=secret") == ("target.env.B", "…")
    assert setting("target.gpu_ranks=[0]") == ("target.gpu_ranks", "[0]")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_browser_shows_it_without_a_network(run_dir: Path, tmp_path: Path):
    (run_dir / "samples.jsonl").write_text('{"text": "said at 40 <img src=http://evil.test/x>", "step": 40}')
    report_here(run_dir, tmp_path / "x.html")
    log = tmp_path / "net.json"
    options = ("disable-gpu", "disable-quic", "disable-background-networking", "disable-component-update")
    options += ("disable-sync", "no-first-run", "no-sandbox", "host-resolver-rules=MAP * ~NOTFOUND")
    options += (f"user-data-dir={tmp_path / 'profile'}", f"log-net-log={log}", "dump-dom")
    done = subprocess.run(
        ["chromium", "--headless", *(f"--{option}" for option in options), f"file://{tmp_path / 'x.html'}"],
        capture_output=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=HANG_S,
    )
    assert done.returncode == 0 and b"said at 40" in done.stdout and b"</svg>" in done.stdout
    # the browser asks for updates of its own all the same
    asked = set(re.findall(r'"url":"(https?://[^/"]*)', log.read_text(errors="replace")))
    assert [url for url in asked if "google" not in url] == []
