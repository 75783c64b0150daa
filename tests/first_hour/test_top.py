"""`top`: what a host answers in few bytes, what stands on a screen of any size, and keys on a real terminal."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from deployer.agent.gpus.load import read_load
from deployer.agent.gpus.view import GpuLoad
from deployer.agent.host.typed import to_json
from deployer.agent.job.status import FAILED, PREPARING, RUNNING
from deployer.agent.job.views import Row
from deployer.commands.top import glancing
from deployer.commands.top.glancing import Glancer
from deployer.commands.top.layout import View, lines_of
from deployer.connection.host import Host
from deployer.curves.metrics import Metrics
from deployer.errors import UnknownJob
from deployer.fullscreen import DOWN, UP, next_key
from tests.support.ferry import Ferry
from tests.support.jobs import end_of, make_job, make_plan, python, start, wait_for
from tests.support.smi import fake_smi
from tests.support.terminals import EVIL

ROW = Row("job-1", RUNNING, name="job", step=120, steps=2000, step_s=0.5, loss=1.25, ran_s=61.0, gpus=("1",))
GPUS = tuple(GpuLoad(str(n), "NVIDIA H100", 90.0 + n, 40960, 81559, 650, 700, 64) for n in range(8))


def metrics(steps: int) -> Metrics:
    found = Metrics()
    for step in range(1, steps + 1):
        found.add({"step": step, "loss": 4 / step, "tokens_per_s_per_gpu": 1000.0 + step})
    return found


def text_of(view: View, width: int, height: int) -> list[str]:
    lines = ["".join(part.text for part in line) for line in lines_of(view, width, height)]
    assert len(lines) == height
    return lines


# --- the screen -------------------------------------------------------------------------------------------------------


def test_screen_tells_the_job_its_gpus_first_both_curves_and_the_log() -> None:
    log = "\n".join(f"step {n}" for n in range(200))
    lines = text_of(View("job-1", "gpu7", ROW, GPUS[:2], "", metrics(120), log, number=2, jobs=3), 100, 30)
    assert lines[0] == "job-1  running  gpu7"
    assert lines[1] == "step 120/2000  loss 1.25  ran 1m01s  15m40s left  job"
    assert lines[2].startswith("GPU 1* ") and "91 %  40.0/80 GiB  650/700 W  64 °C  NVIDIA H100" in lines[2]
    assert lines[3].startswith("GPU 0  ")
    assert lines[4].startswith("loss 0.0333") and "tokens/s 1120" in lines[4], "beside each other"
    assert lines[-2] == "step 199" and "log" in lines
    assert lines[-1].endswith("job 2/3  s stop  f pull")


@pytest.mark.parametrize("width", [10, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 9, 24, 70])
def test_screen_has_a_place_for_the_keys_whatever_its_size(width: int, height: int) -> None:
    for row in (None, ROW, ROW._replace(state=FAILED, code=7, gpus=())):
        for gpus in ((), GPUS):
            for found in (metrics(0), metrics(1), metrics(300)):
                view = View("job-1", "gpu7", row, gpus, "" if gpus else "none", found, "a\n" * 99)
                assert text_of(view, width, height)[-1].startswith("q quit")


@pytest.mark.parametrize(("told", "line"), [(-1e10, "░" * 10 + "   0 %"), (1e300, "█" * 10 + " 100 %")])
def test_load_that_cannot_be_is_drawn_as_the_nearest_that_can(told: float, line: str) -> None:
    lines = text_of(View("job-1", "gpu7", ROW, (GpuLoad("0", "NVIDIA", told),)), 80, 24)
    assert lines[2].replace("#", "█").replace(".", "░") == f"GPU 0  {line}  NVIDIA"


def test_screen_without_metrics_gpus_or_log_says_so() -> None:
    lines = text_of(View("job-1", "gpu7", ROW._replace(state=PREPARING), no_gpus="this host has none"), 80, 24)
    assert {"GPUs: this host has none", "no metrics yet", "no log yet"} <= set(lines)
    assert "asking its host" in text_of(View("job-1", "gpu7"), 80, 24)[0]


def test_host_that_is_gone_is_told_with_the_age_of_what_is_shown() -> None:
    view = View("job-1", "gpu7", ROW, trouble="no route to gpu7", silent_s=125.0)
    assert text_of(view, 80, 24)[2] == "as 2m ago; no route to gpu7; trying again"
    assert text_of(view._replace(trouble=""), 80, 24)[2] == "as 2m ago; its host is silent; trying again"
    assert "trying again" not in "".join(text_of(view._replace(trouble="", silent_s=2.0), 80, 24))


def test_question_fits_on_a_narrow_terminal() -> None:
    view = View("job-1", "gpu7", ROW, word=f"stop {'j' * 60}? y/n", is_question=True)
    assert text_of(view, 80, 24)[-1] == view.word and text_of(view, 40, 24)[-1] == "stop it? y/n"


def test_nothing_that_a_host_says_drives_the_terminal() -> None:
    row = ROW._replace(name=EVIL, command=EVIL, reason=EVIL, damaged=EVIL)
    view = View("job-1", EVIL, row, (GpuLoad(EVIL, EVIL, 5.0),), EVIL, Metrics(), EVIL, EVIL)
    assert all(text.isprintable() for text in text_of(view, 200, 40))


def test_keys_are_told_apart_however_they_come() -> None:
    pressed, keys = b"sy\x1b[A\x1bOB\x1b[1;5C\x1bq\x00j", []
    while pressed:
        key, pressed = next_key(pressed)
        keys.append(key)
    assert keys == ["s", "y", UP, DOWN, "", "", "q", "", "j"]


# --- what the host answers --------------------------------------------------------------------------------------------


def test_second_look_brings_what_is_new_alone(tmp_path: Path) -> None:
    job = make_job(tmp_path, "here", make_plan(python("print('hello')")))
    end_of(start(job, make_plan(python("print('hello')"))))
    records = [{"step": n, "loss": 1.0 / n, "step_s": 0.1, "note": "x" * 300} for n in range(1, 20001)]
    Path(job.metrics).write_text("".join(json.dumps(record) + "\n" for record in records))
    glancer, answers = Glancer(Host(None, str(tmp_path)), "he"), []
    take = glancer._take

    def count(found: glancing.Glance) -> None:
        answers.append(len(json.dumps(to_json(found, sparse=True))))
        take(found)

    glancer._take = count  # type: ignore[method-assign]
    glancer.look()
    assert (glancer.job_id, glancer.log) == ("here", "hello")
    loss = glancer.metrics.get("loss")
    assert 100 <= len(loss) <= 120 and loss.steps[-1] == 20000 and loss.steps[0] < 200, "thinned over the whole run"
    with Path(job.metrics).open("a") as file:
        file.write('{"step": 20001, "loss": 0.5}\n{"step": 20002')
    glancer.look()
    glancer.look()
    assert glancer.metrics.get("loss").steps[-2:].tolist() == [20000, 20001] and len(glancer.metrics.get("loss")) > 100
    assert answers[0] < 16_000 and answers[2] < answers[1] < 2500, "5 kB/s, every 2 s"
    (tmp_path / "anew").write_text('{"step": 1, "loss": 3.0}\n')
    (tmp_path / "anew").replace(job.metrics)
    glancer.look()
    assert list(glancer.metrics.get("loss")) == [(1.0, 3.0)], "it began again"
    glancer.close()


def test_host_without_that_job_is_heard_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    glancer = Glancer(Host(None, str(tmp_path)), "none")
    with pytest.raises(UnknownJob):
        glancer.look()
    monkeypatch.setattr(glancing, "EVERY_S", 0.05)

    def has_asked_twice() -> bool:
        glancer.keep_looking()
        return glancer.news >= 2

    wait_for(has_asked_twice)
    assert "no job none" in glancer.trouble
    glancer.close()


def test_load_of_gpus_as_nvidia_smi_tells_it(tmp_path: Path) -> None:
    rows = [
        "0, NVIDIA H100, SXM, 97, 70000, 81559, 650.31, 700.00, 64",
        "1, A2, [N/A], 5, 15356, [N/A], 60.00, 40",
        "odd",
    ]
    assert read_load(fake_smi(tmp_path, use="\n".join(rows))) == (
        GpuLoad("0", "NVIDIA H100,SXM", 97.0, 70000.0, 81559.0, 650.31, 700.0, 64.0),
        GpuLoad("1", "A2", None, 5.0, 15356.0, None, 60.0, 40.0),
    )
    assert read_load({"PATH": "/none"}) == ()


# --- the command ------------------------------------------------------------------------------------------------------

STEPS = """
import json, os, time
with open(os.environ["TORCHFERRY_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    for step in range(1, 9):
        print(json.dumps({"step": step, "steps": 8, "loss": 1 / step}), file=file)
print("eight steps are done", flush=True)
time.sleep(1000)
"""


def test_top_on_a_terminal_goes_through_the_jobs_stops_one_and_gives_the_terminal_back(
    ferry: Ferry, tmp_path: Path
) -> None:
    ferry.write("steps.py", STEPS)
    for name in ("first", "second"):
        done = ferry.run("run", *ferry.where(), "--detach", "--name", name, "--", "python", "steps.py")
        assert done.returncode == 0, done.stderr.decode()
    refused = ferry.run("top")
    assert refused.returncode == 2 and b"ps --json" in refused.stderr
    found = json.loads(ferry.run("top", "--json", "second").stdout)
    assert found["job"]["state"] in ("preparing", "running") and (found["gpus"] or found["no_gpus"])

    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in ferry.environment().items() if name.isupper())
    script = tmp_path / "top.sh"
    script.write_text(f"export {words}\n{shlex.join(ferry.argv('top'))}\necho ended with $?\nstty -a\nexec cat\n")
    tmux = ["tmux", "-S", str(tmp_path / "tmux")]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", f"sh {script}"], check=True)

    def screen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True).stdout

    def press(*keys: str) -> None:
        subprocess.run([*tmux, "send-keys", *keys], check=True)

    try:
        wait_for(lambda: "second-" in screen() and "step 8/8" in screen() and "eight steps are done" in screen())
        assert "running" in screen() and "job 1/2" in screen()
        press("s")
        wait_for(lambda: "? y/n" in screen())
        press("n", "Down")
        wait_for(lambda: screen().startswith("first-") and "step 8/8" in screen())
        press("s", "y")
        wait_for(lambda: "stopped" in screen().splitlines()[0])
        press("q")
        wait_for(lambda: "ended with 0" in screen())
        assert " icanon" in screen() and " echo " in screen(), screen()
    finally:
        subprocess.run([*tmux, "kill-server"], capture_output=True)
    states = {row["name"]: row["state"] for row in json.loads(ferry.run("ps", "--json", *ferry.where()).stdout)}
    assert states == {"first": "stopped", "second": "running"}
    ferry.run("stop", "second", "--force")
