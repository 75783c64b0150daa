"""`repeat`: a job again, from the files that its host has or from this folder as it is now; `history`."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from deployer.jobs.words import hidden_names, kept_words, without_env, without_option
from tests.support.ferry import REPO, Ferry

SHOW = "import os, sys; print(open('data.txt').read(), os.environ['VALUE'], os.environ['TF_TOKEN'], sys.argv[1:])"


@pytest.fixture
def launched(remote: Ferry) -> Ferry:
    """A job that has ended, whose folder has changed since."""
    remote.write("show.py", SHOW)
    remote.write("data.txt", "first")
    remote.env["TF_TOKEN"] = "tok-1"
    words = ("--env", "VALUE=val-1", "--secret", "TF_TOKEN", "--name", "again", "--", "python3", "show.py", "a b")
    done = remote.run("run", *remote.where(), *words)
    assert done.stdout == b"first val-1 tok-1 ['a b']\n", done.stderr.decode()
    remote.write("data.txt", "second")
    remote.env["TF_TOKEN"] = "tok-2"
    return remote


def history(ferry: Ferry) -> list[dict]:
    return json.loads(ferry.run("history", "--json").stdout)


def test_job_again_with_the_files_it_had_or_those_of_now(launched):
    (first,) = launched.job_ids()
    same = launched.run("repeat", "again")
    assert same.stdout == b"first val-1 tok-2 ['a b']\n" and b"sent:" not in same.stderr, same.stderr.decode()
    changed = launched.run("repeat", first, "--with-changes", "--name", "newer")
    assert changed.stdout == b"second val-1 tok-2 ['a b']\n", changed.stderr.decode()
    newest = launched.run("repeat", "newer", "--env", "VALUE=val-2", "--no-pull")
    assert newest.stdout == b"second val-2 tok-2 ['a b']\n", newest.stderr.decode()

    told = history(launched)
    assert [row["last_state"] for row in told] == ["succeeded"] * 4 and told[3]["id"] == first
    assert told[3]["command"].endswith("--env 'VALUE=…' --secret TF_TOKEN --name again -- python3 show.py 'a b'")
    assert told[0]["words"] == [*told[1]["words"][:-4], "--env", "VALUE=…", "--no-pull", *told[1]["words"][-4:]]
    assert {row["folder"] for row in told} == {str(launched.project)}
    kept = [path.read_bytes() for path in launched.state.rglob("*") if path.is_file()]
    assert not [data for data in kept if b"val-1" in data or b"val-2" in data or b"tok-" in data]
    table = launched.run("history", "--last", "1")
    assert told[0]["id"].encode() in table.stdout and first.encode() not in table.stdout
    assert b"3 older ones" in table.stderr
    assert (launched.project / "results" / told[2]["id"] / "logs").is_dir()


def test_damaged_record_is_told_and_the_others_are_listed(launched):
    (launched.state / "jobs" / "broken-1.json").write_text("{")
    done = launched.run("history")
    assert done.returncode == 0 and launched.job_ids()[0].encode() in done.stdout
    assert b"broken-1" in done.stderr and b"damaged" in done.stderr


def test_repeat_of_what_is_gone_offers_the_folder_of_now(launched):
    (first,) = launched.job_ids()
    for tree in (launched.root / "store" / "trees").iterdir():
        tree.unlink()
    no_tree = launched.run("repeat", first)
    assert (
        no_tree.returncode == 2 and b"are not on box any more" in no_tree.stderr and b"--with-changes" in no_tree.stderr
    )
    shutil.rmtree(launched.job(first))
    no_job = launched.run("repeat", first)
    assert no_job.returncode == 2 and b"--with-changes" in no_job.stderr, no_job.stderr.decode()
    no_value = launched.run("repeat", first, "--with-changes", "--no-pull")
    assert no_value.returncode == 2 and b"give them again: --env" in no_value.stderr, no_value.stderr.decode()
    done = launched.run("repeat", first, "--with-changes", "--env", "VALUE=val-3", "--no-pull")
    assert done.stdout == b"second val-3 tok-2 ['a b']\n", done.stderr.decode()


def test_what_repeat_refuses(launched, tmp_path):
    (first,) = launched.job_ids()
    elsewhere = launched.run("repeat", first, "--ssh", "other")
    assert elsewhere.returncode == 2 and b"are on box alone" in elsewhere.stderr
    anew = launched.run("repeat", first, "--ssh", "other", "--with-changes")
    assert anew.returncode == 2 and b"only box has it" in anew.stderr, anew.stderr.decode()
    there = subprocess.run(
        launched.argv("repeat", first, "--with-changes"), cwd=tmp_path, env=launched.environment(), capture_output=True
    )
    assert there.returncode == 2 and f"was launched from {launched.project}".encode() in there.stderr
    del launched.env["TF_TOKEN"]
    secret = launched.run("repeat", first)
    assert secret.returncode == 2 and b"the secret TF_TOKEN is not set in this shell" in secret.stderr
    assert len(launched.job_ids()) == 1


def test_dry_run_of_a_trainer_s_job_with_another_setting(ferry):
    config = str(REPO / "configs" / "01_debug_sft.py")
    words = ("target.device=cpu", "--python", "/usr/bin/env", "--name", "tuned", "--no-pull", "--env", "VALUE=1")
    ferry.run(config, *ferry.where(), *words)  # whose preparation fails: nothing of it matters here
    (first,) = ferry.job_ids()
    shown = ferry.run("repeat", "tuned", "optim.learning_rate=0.125", "--dry-run", "--json")
    plan = json.loads(shown.stdout)["plan"]
    before = json.loads((ferry.job() / "job.json").read_text())["plan"]
    assert "learning_rate: 0.125" in plan["config_yaml"] and "learning_rate: 0.125" not in before["config_yaml"]
    assert (plan["tree"], plan["name"], plan["env_names"]) == (before["tree"], "tuned", ["VALUE"])
    assert plan["job_id"] != first and plan["roles"][0]["env"]["TORCHFERRY_JOB_ID"] == plan["job_id"]
    text = ferry.run("repeat", "tuned", "--dry-run").stdout.decode()
    assert f"# files    those of {first}, which are there" in text
    assert ferry.job_ids() == [first]


def test_words_are_kept_without_values():
    words = ("c.py", "target.env.A=1", "--env", "B=2", "--env=C=3", "x=4", "--", "p", "--env", "D=5", "target.env.E=6")
    kept = kept_words(words)
    assert kept == ("c.py", "target.env.A=…", "--env", "B=…", "--env=C=…", "x=4", *words[6:])
    assert hidden_names(kept) == ["A", "B", "C"]
    assert without_env(kept) == ["c.py", "x=4", *words[6:]]
    assert kept_words(("x" * 100_000,)) == ()
    whole = kept_words(("c.py", "target.env={A: 1, B: x}", "--notify", "https://x/t", "--notify=https://x/t"))
    assert whole == ("c.py", "target.env.A=…", "target.env.B=…", "--notify", "…", "--notify=…")
    given = ("c.py", "--after", "--after", "--after=b", "target.after=[c]", "x=1", "--", "p", "--after", "d")
    assert without_option(given, "--after", "target.after") == ("c.py", "x=1", "--", "p", "--after", "d")


def test_default_file_is_launched_again_without_what_was_of_that_launch_alone(remote: Ferry) -> None:
    remote.write("torchferry.yaml", "run: echo $OLD $NEW $KEPT\nenv: {OLD: stale}\n")
    first = remote.run("run", *remote.where(), "--env", "KEPT=k", "--name", "first", "--no-pull")
    assert first.stdout == b"stale k\n", first.stderr.decode()
    (job_id,) = remote.job_ids()
    waits = remote.run("repeat", "first", "target.max_runtime_s=600", "--after", job_id, "--name", "plain", "--no-pull")
    assert waits.stdout == b"stale k\n", waits.stderr.decode()
    plan = json.loads((remote.job(history(remote)[0]["id"]) / "job.json").read_text())["plan"]
    assert (plan["policy"]["max_runtime_s"], plan["policy"]["after"]) == (600.0, [job_id])
    again = remote.run("repeat", "plain", "--dry-run", "--json")
    assert b"--after is not repeated" in again.stderr, again.stderr.decode()
    assert not json.loads(again.stdout)["plan"]["policy"].get("after")

    remote.write("torchferry.yaml", "run: echo $OLD $NEW $KEPT\nenv: {NEW: fresh}\n")
    words = ("--with-changes", "--name", "anew", "--no-pull", "--after", job_id)
    anew = remote.run("repeat", "first", *words)
    assert anew.stdout == b"fresh k\n", anew.stderr.decode()
    assert history(remote)[0]["words"][0] == "torchferry.yaml"
    last = remote.run("repeat", "anew", "--with-changes", "--no-pull")
    assert last.stdout == b"fresh k\n" and b"--after is not repeated" in last.stderr, last.stderr.decode()
    assert "--after" not in history(remote)[0]["words"]
    setup = remote.run("repeat", "plain", "--setup", "true")
    assert setup.returncode == 2 and b"target.setup is what" in setup.stderr and b"--with-changes" in setup.stderr
