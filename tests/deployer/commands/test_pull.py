"""Results brought home by the real agent: resumed, verified, whole or absent, topped up, over lines that break."""

import json
import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from deployer.connection.host import Host, ReconnectBackoff
from deployer.errors import ConnectError, FerryError, LostConnection, UsageError
from deployer.pull.choice import BEYOND_LIMIT, PullRequest, choose
from deployer.pull.pieces import PIECE_BYTES, RemoteFile
from deployer.pull.rounds import pull
from deployer.pull.target import CannotWrite, PullTarget
from deployer.terminal import size
from deployer.transport.local import LocalTransport
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.lying import lying_host
from tests.support.sshd import ALIAS, SshServer, start_sshd


@pytest.fixture
def job(tmp_path):
    """A job's folder on this machine as host, with the files that every job has."""
    folder = tmp_path / "root" / "jobs" / "j1"
    put(folder / "logs" / "attempt_1" / "rank_0.log", b"first line\n")
    put(folder / "metrics.jsonl", b'{"step": 1}\n')
    put(folder / "status.json", b"{}")
    return folder


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def put_checkpoint(job: Path, step: int, *, complete: bool = True, size: int = 3000) -> Path:
    folder = job / "checkpoints" / f"step_{step:06d}"
    put(folder / "__0_0.distcp", noise(size, step))
    put(folder / ".metadata", b"m")
    if complete:
        put(folder / "COMPLETE", b"")
    return folder


def host_of(job: Path) -> Host:
    return Host(None, str(job.parent.parent))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class CutHost(Host):
    """A host whose connections break after so many bytes each; the first beyond these holds."""

    def __init__(self, job: Path, cuts: list[int]) -> None:
        super().__init__(None, str(job.parent.parent))
        self.cuts = cuts

    def _make_transport(self):
        transport, cuts = LocalTransport(), self.cuts
        start = transport.open

        def open_cut(command):
            stream = start(command)
            read, left = stream.read, [cuts.pop(0) if cuts else 1 << 60]

            def read_some(size):
                data = read(size)
                left[0] -= len(data)
                if left[0] <= 0:
                    stream.close()
                    raise LostConnection("the line was cut")
                return data

            stream.read = read_some
            return stream

        transport.open = open_cut
        return transport


def stop_after(limit: int):
    """A progress callback that ends the pull, as a full disk would, once so many bytes have come."""

    def progress(done, total):
        if done > limit:
            raise FerryError("stopped")

    return progress


def test_pull_brings_every_file_with_its_bytes_and_time(job, tmp_path):
    put(job / "export" / "model.safetensors", noise(3 * PIECE_BYTES + 17))
    put(job / "export" / "empty", b"")
    os.utime(job / "export" / "empty", ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    assert files_below(tmp_path / "home") == files_below(job)
    assert (pulled.files, pulled.fetched_files, pulled.left_out) == (5, 5, ())
    assert (tmp_path / "home" / "export" / "empty").stat().st_mtime_ns == 1_700_000_000_123_456_789


def test_pull_again_fetches_nothing_and_leaves_no_trace(job, tmp_path):
    pull(host_of(job), "j1", target=tmp_path / "home")
    again = pull(host_of(job), "j1", target=tmp_path / "home")
    assert (again.files, again.fetched_files, again.fetched_bytes) == (3, 0, 0)
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == ["logs", "metrics.jsonl", "status.json"]


def test_pull_of_a_thousand_small_files_takes_few_requests(job, tmp_path):
    for number in range(1000):
        put(job / "export" / f"shard{number}", b"%d" % number)
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    assert pulled.files == 1003 and files_below(tmp_path / "home") == files_below(job)


def test_connection_cut_again_and_again_brings_the_same_bytes(job, tmp_path):
    put(job / "export" / "model.safetensors", noise(12 << 20))
    told = []
    pulled = pull(CutHost(job, [3 << 20, 2 << 20, 4 << 20]), "j1", target=tmp_path / "home", tell=told.append)
    assert files_below(tmp_path / "home") == files_below(job)
    assert pulled.fetched_bytes < 22 << 20 and [words.endswith("; trying again") for words in told] == [True] * 3


def test_patience_ends_and_says_what_happened_last():
    told = []
    patience = ReconnectBackoff(told.append, give_up_after_s=-1)
    with pytest.raises(LostConnection, match="no route"):
        patience.wait(ConnectError("no route"))
    assert told == []


def test_broken_off_pull_goes_on_where_it_stopped(job, tmp_path):
    put(job / "export" / "model.safetensors", noise(12 << 20))

    with pytest.raises(FerryError, match="stopped"):
        pull(host_of(job), "j1", target=tmp_path / "home", progress=stop_after(7 << 20))
    assert not (tmp_path / "home" / "export").exists()
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    assert files_below(tmp_path / "home") == files_below(job)
    assert pulled.fetched_bytes < 9 << 20


def test_kept_bytes_that_rotted_are_fetched_anew(job, tmp_path):
    put(job / "export" / "model.safetensors", noise(6 << 20))

    with pytest.raises(FerryError, match="stopped"):
        pull(host_of(job), "j1", target=tmp_path / "home", progress=stop_after(4 << 20))
    for part in (tmp_path / "home" / ".pulling").glob("*.part"):
        with part.open("r+b") as file:
            file.write(b"rotten")
    pull(host_of(job), "j1", target=tmp_path / "home")
    assert files_below(tmp_path / "home") == files_below(job)


def test_file_replaced_on_the_host_between_two_pulls_is_not_mixed_with_what_was_kept(job, tmp_path):
    model = put(job / "export" / "model.safetensors", noise(6 << 20))

    with pytest.raises(FerryError, match="stopped"):
        pull(host_of(job), "j1", target=tmp_path / "home", progress=stop_after(4 << 20))
    model.write_bytes(noise(6 << 20, seed=1))
    pull(host_of(job), "j1", target=tmp_path / "home")
    assert files_below(tmp_path / "home") == files_below(job)


def test_log_that_has_grown_is_topped_up(job, tmp_path):
    log = put(job / "logs" / "attempt_1" / "rank_0.log", noise(3 << 20))
    pull(host_of(job), "j1", target=tmp_path / "home")
    with log.open("ab") as file:
        file.write(b"more\n")
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    assert pulled.fetched_bytes == 5
    assert files_below(tmp_path / "home") == files_below(job)


@pytest.mark.parametrize("text", [b"short\n", b"another log, and a longer one than it was\n"], ids=["shorter", "other"])
def test_log_that_is_another_one_by_now_is_fetched_anew(job, tmp_path, text):
    pull(host_of(job), "j1", target=tmp_path / "home")
    put(job / "logs" / "attempt_1" / "rank_0.log", text)
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    assert files_below(tmp_path / "home") == files_below(job) and pulled.left_out == ()


def test_log_whose_oldest_part_was_dropped_keeps_its_hole(job, tmp_path):
    log = job / "logs" / "attempt_1" / "rank_0.log"
    with log.open("r+b") as file:
        file.seek(1 << 34)
        file.write(b"the newest part\n")
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    came = tmp_path / "home" / "logs" / "attempt_1" / "rank_0.log"
    assert came.stat().st_size == (1 << 34) + 16 and came.stat().st_blocks < 10_000
    assert pulled.fetched_bytes < 3 << 20


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_come_whole_and_only_complete_ones(job, tmp_path):
    for step in (10, 20):
        put_checkpoint(job, step)
    put_checkpoint(job, 30, complete=False)
    put(job / "checkpoints" / ".tmp_step_000040" / "COMPLETE", b"")
    pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints="all"))
    assert {p.name for p in (tmp_path / "home" / "checkpoints").iterdir()} == {"step_000010", "step_000020"}
    assert files_below(tmp_path / "home" / "checkpoints" / "step_000020") == files_below(
        job / "checkpoints" / "step_000020"
    )


@pytest.mark.parametrize(("wanted", "steps"), [("latest", [20]), ("10", [10]), ("step_000010", [10])])
def test_one_checkpoint_by_its_step(job, tmp_path, wanted, steps):
    for step in (10, 20):
        put_checkpoint(job, step)
    pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints=wanted))
    assert [p.name for p in (tmp_path / "home" / "checkpoints").iterdir()] == [f"step_{s:06d}" for s in steps]


def test_checkpoint_that_is_not_there_is_named_with_those_that_are(job, tmp_path):
    put_checkpoint(job, 10)
    with pytest.raises(UsageError, match="no complete checkpoint '7'") as raised:
        pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints="7"))
    assert raised.value.hint == "there are: step_000010"


@pytest.mark.parametrize("wanted", ["latest", "all"])
def test_results_come_without_a_complete_checkpoint_and_a_word_says_so(job, tmp_path, wanted):
    put_checkpoint(job, 3, complete=False)
    (left,) = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints=wanted)).left_out
    assert (left.name, left.reason) == ("checkpoints", "none is complete yet")
    assert (tmp_path / "home" / "metrics.jsonl").exists()


def test_index_of_times_stays_on_the_host(job, tmp_path):
    put(job / "logs" / "attempt_1" / "times.jsonl", b"[1, 1, {}]\n")
    assert pull(host_of(job), "j1", target=tmp_path / "home").left_out == ()
    assert [p.name for p in (tmp_path / "home" / "logs" / "attempt_1").iterdir()] == ["rank_0.log"]


def test_broken_off_checkpoint_is_absent_and_comes_whole_the_next_time(job, tmp_path):
    folder = put_checkpoint(job, 10, size=6 << 20)

    with pytest.raises(FerryError, match="stopped"):
        pull(
            host_of(job),
            "j1",
            target=tmp_path / "home",
            request=PullRequest(checkpoints="all"),
            progress=stop_after(4 << 20),
        )
    assert not (tmp_path / "home" / "checkpoints").exists()
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints="all"))
    assert files_below(tmp_path / "home" / "checkpoints" / "step_000010") == files_below(folder)
    assert pulled.fetched_bytes < 6 << 20


def test_checkpoint_pruned_meanwhile_is_left_out_with_a_word(job, tmp_path):
    put_checkpoint(job, 20)
    doomed = put_checkpoint(job, 10, size=40 << 20)  # the newest comes first
    put(doomed / "small", b"")

    def prune(done, total):
        shutil.rmtree(doomed, ignore_errors=True)

    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints="all"), progress=prune)
    assert [p.name for p in (tmp_path / "home" / "checkpoints").iterdir()] == ["step_000020"]
    ((name, reason),) = [(left.name, left.reason) for left in pulled.left_out]
    assert name == "checkpoints/step_000010" and "removed" in reason


def test_checkpoint_saved_again_under_its_name_replaces_the_older_one(job, tmp_path):
    folder = put_checkpoint(job, 10)
    pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints="all"))
    put(folder / "__0_0.distcp", noise(4000, 99))
    (folder / ".metadata").unlink()
    pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(checkpoints="all"))
    assert files_below(tmp_path / "home" / "checkpoints") == files_below(job / "checkpoints")


def test_limit_keeps_what_fits_whole_and_names_the_rest():
    def file(path, size):
        return RemoteFile(path, size, 0, "1", size)

    files = [file("metrics.jsonl", 10), file("export/a", 40)]
    files += [file(f"checkpoints/step_{s}/{name}", 15) for s in (1, 2, 3) for name in ("COMPLETE", "w")]
    kept, left_out = choose(files, PullRequest(checkpoints="all", max_bytes=85))
    assert {f.unit for f in kept} == {"", "export", "checkpoints/step_3"}
    assert [(left.name, left.files, left.size_bytes, left.reason) for left in left_out] == [
        ("checkpoints/step_2", 2, 30, BEYOND_LIMIT),
        ("checkpoints/step_1", 2, 30, BEYOND_LIMIT),
    ]


def test_what_a_run_tells_of_itself_comes_home_and_its_token_files_do_not(job, tmp_path):
    here = {f"{name}/a": noise(50, seed) for seed, name in enumerate(("hang", "tensorboard", "profile"))}
    for name, data in {**here, "tokens/rows.tokens": noise(50), "control/trainer.lock": b"1"}.items():
        put(job / name, data)
    pull(host_of(job), "j1", target=tmp_path / "home")
    found = files_below(tmp_path / "home")
    assert here.items() <= found.items() and not [name for name in found if name.startswith(("tokens", "control"))]


def test_names_that_are_one_on_this_disk_do_not_overwrite_each_other():
    files = [RemoteFile("logs/A", 1, 0, "1", 1), RemoteFile("logs/a", 2, 0, "2", 1)]
    kept, left_out = choose(files, PullRequest(), folds_case=True)
    assert [f.path for f in kept] == ["logs/A"] and [left.name for left in left_out] == ["logs/a"]


# --- this machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["logs", "logs/attempt_1"])
def test_planted_link_in_the_target_is_not_followed(job, tmp_path, link):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = tmp_path / "home" / link
    planted.parent.mkdir(parents=True)
    planted.symlink_to(elsewhere)
    (left,) = pull(host_of(job), "j1", target=tmp_path / "home").not_home
    assert left.name == "logs/attempt_1/rank_0.log" and "links are not followed" in left.reason
    assert list(elsewhere.iterdir()) == [] and (tmp_path / "home" / "metrics.jsonl").exists()


def test_planted_link_where_files_gather_is_not_followed(job, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".pulling").symlink_to(tmp_path)
    with pytest.raises(CannotWrite, match="links are not followed"):
        pull(host_of(job), "j1", target=tmp_path / "home")


def test_planted_link_under_a_files_own_name_is_replaced(job, tmp_path):
    secret = put(tmp_path / "secret", b"mine")
    put(tmp_path / "home" / "x", b"")
    (tmp_path / "home" / "metrics.jsonl").symlink_to(secret)
    pull(host_of(job), "j1", target=tmp_path / "home")
    assert secret.read_bytes() == b"mine" and not (tmp_path / "home" / "metrics.jsonl").is_symlink()


def test_links_and_pipes_of_the_job_stay_on_the_host(job, tmp_path):
    (job / "export").symlink_to("/etc")
    (job / "logs" / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(job / "logs" / "pipe")
    pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    assert set(files_below(tmp_path / "home")) == {"logs/attempt_1/rank_0.log", "metrics.jsonl", "status.json"}
    assert [(left.name, left.reason) for left in pulled.left_out] == [
        ("logs/passwd", "a link; links are not followed"),
        ("export", "a link; links are not followed"),
    ]


def test_two_pulls_into_one_folder_do_not_meet(job, tmp_path):
    met = []

    def second(done, total):
        try:
            pull(host_of(job), "j1", target=tmp_path / "home")
        except FerryError as error:
            met.append(error.message)

    pull(host_of(job), "j1", target=tmp_path / "home", progress=second)
    assert met and "another pull" in met[0]
    assert files_below(tmp_path / "home") == files_below(job)


def test_disk_that_has_no_room_is_said_before_anything_is_fetched(job, tmp_path):
    with PullTarget(tmp_path / "home") as pull_target:
        room = pull_target.free_bytes()
    code = f"files(['export/huge', {room}, 1, 1, {room}]); forever()"
    pulled = pull(lying_host(code, tmp_path), "j1", target=tmp_path / "home")
    assert [left.name for left in pulled.not_home] == ["export/huge"] and pulled.fetched_bytes == 0
    assert pulled.not_home[0].reason.startswith(f"no room here: {size(room)} are due, ")


# --- several connections ----------------------------------------------------------------------------------------------


def connections(server: SshServer) -> int:
    return server.log_path.read_text().count("Accepted publickey")


@pytest.mark.parametrize(("streams", "least", "most"), [(None, 2, 4), (1, 1, 1)], ids=["as many as pay", "one"])
def test_much_data_comes_over_several_connections(job, tmp_path, monkeypatch, streams, least, most):
    put(job / "export" / "model.safetensors", noise(64 << 20))
    with start_sshd(tmp_path, extra_config="LogLevel VERBOSE") as server:
        monkeypatch.setenv("TORCHFERRY_SSH_CONFIG", str(server.client_config_path))
        host = Host(ALIAS, str(job.parent.parent))
        pull(host, "j1", target=tmp_path / "home", request=PullRequest(streams=streams))
        host.close()
        assert least <= connections(server) <= most
    assert files_below(tmp_path / "home") == files_below(job)


def test_host_that_lets_no_second_connection_in_serves_all_over_the_first(job, tmp_path, monkeypatch):
    put(job / "export" / "model.safetensors", noise(40 << 20))
    with start_sshd(tmp_path) as server:
        monkeypatch.setenv("TORCHFERRY_SSH_CONFIG", str(server.client_config_path))
        host = Host(ALIAS, str(job.parent.parent))
        host.connect().close()
        (server.home.parent / "authorized_keys").write_text("")
        pull(host, "j1", target=tmp_path / "home")
        host.close()
    assert files_below(tmp_path / "home") == files_below(job)


@pytest.mark.soak
def test_pull_whose_connections_are_killed_at_random_brings_every_byte(job, tmp_path, monkeypatch):
    for number in range(4):
        put(job / "export" / f"model-{number}.safetensors", noise(128 << 20, number))
    chance, kills, next_at = random.Random(0), [], [5 << 20]

    def kill_sessions(done: int, total: int) -> None:
        if done < next_at[0]:
            return
        next_at[0] = done + chance.randrange(5 << 20, 60 << 20)
        sessions = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        for pid in sessions if chance.random() < 0.5 else sessions[:1]:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
                kills.append(pid)

    with start_sshd(tmp_path) as server:
        monkeypatch.setenv("TORCHFERRY_SSH_CONFIG", str(server.client_config_path))
        host = Host(ALIAS, str(job.parent.parent))
        pulled = pull(host, "j1", target=tmp_path / "home", progress=kill_sessions)
        host.close()
    assert len(kills) > 3 and pulled.left_out == ()
    assert files_below(tmp_path / "home") == files_below(job)


# --- the command ------------------------------------------------------------------------------------------------------


def test_watch_keeps_results_coming_and_ends_with_the_job(ferry):
    code = (
        "import os, time, pathlib\nprint('up', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\n"
    )
    (ferry.project / "job.py").write_text(code + "print('the end', flush=True)\n")
    assert ferry.run("run", *ferry.where(), "--detach", "--", "python", "job.py").returncode == 0
    (job_id,) = ferry.job_ids()
    watcher = ferry.start("pull", job_id, "--watch", "--every", "0.2s", "--json")
    log = ferry.project / "results" / job_id / "logs" / "attempt_1" / "rank_0.log"
    wait_for(lambda: log.exists() and log.read_bytes() == b"up\n")
    (ferry.job() / "code" / "go").touch()
    out, err = watcher.communicate(timeout=HANG_S)
    assert watcher.returncode == 0, err
    assert log.read_bytes() == b"up\nthe end\n"
    assert json.loads((log.parents[2] / "status.json").read_text())["state"] == "succeeded"
    assert json.loads(out)["files"] > 2


def test_watch_interrupted_says_how_to_go_on(ferry):
    (ferry.project / "job.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    assert ferry.run("run", *ferry.where(), "--detach", "--", "python", "job.py").returncode == 0
    (job_id,) = ferry.job_ids()
    watcher = ferry.start("pull", job_id, "--watch", "--every", "0.2s")
    wait_for(lambda: (ferry.project / "results" / job_id / "status.json").exists())
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=HANG_S)
    assert watcher.returncode == 130, err.decode()
    assert f"pull {job_id}".encode() in err and b"Traceback" not in err
    assert ferry.run("stop", job_id, "--grace", "0").returncode == 0
