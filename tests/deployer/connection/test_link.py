"""The conversation with the real agent over pipes, and the frames that it is made of."""

import ast
import base64
import io
import marshal
import os
import random
import shutil
import subprocess
import sys
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agent.loader import install, is_intact, name_of
from deployer.agent.serve import HANDLERS, load_handler
from deployer.agent.wire import frames
from deployer.agent.wire.conversation import Call, Sender
from deployer.agent.wire.frames import MAX_FRAME, ProtocolError, Window, encode, read_frame
from deployer.connection.command import agent_hash, agent_sources, build_command, build_word
from deployer.connection.link import Link
from deployer.errors import HostError, LostConnection, UnknownJob, UsageError
from deployer.launch.follow import Watcher
from deployer.launch.start import launch_and_follow
from deployer.plan.options import Options, read_config
from deployer.plan.prepare import prepare
from deployer.transport.local import LocalTransport
from tests.support.accounts import MALLORY, ROOT_ONLY
from tests.support.ferry import REPO
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.lying import Lying

HEADS = st.dictionaries(st.text(max_size=20), st.none() | st.integers() | st.text(max_size=200), max_size=5)


@given(HEADS, st.binary(max_size=2000))
def test_frame_any_head_and_body_round_trips(head, body):
    stream = io.BytesIO(encode(head, body) + encode({}, b"next"))
    assert read_frame(stream)[:2] == (head, body)
    assert read_frame(stream)[:2] == ({}, b"next")
    assert read_frame(stream) is None


def test_frame_cut_anywhere_is_an_error_and_never_a_frame():
    data = encode({"a": 1}, b"body")
    for size in range(1, len(data)):
        with pytest.raises(ProtocolError, match="inside a frame"):
            read_frame(io.BytesIO(data[:size]))


def test_frame_that_announces_too_much_refused_before_it_is_read():
    with pytest.raises(ProtocolError, match="at most"):
        read_frame(io.BytesIO(b"\xff" * 8))
    with pytest.raises(ValueError, match="exceeds"):
        encode({}, b"x" * MAX_FRAME)


def test_window_waits_for_a_grant_and_gives_up_in_time():
    window = Window(10)
    window.take(10, timeout_s=HANG_S)
    threading.Timer(0.05, window.grant, [4]).start()
    window.take(4, timeout_s=HANG_S)
    with pytest.raises(ProtocolError, match="took no data"):
        window.take(1, timeout_s=0.05)


def test_command_is_one_line_that_no_shell_changes():
    command = build_command(build_word({"root": "it's $HOME `x` !\n"}))
    assert not set("\n\\!") & set(command)
    assert command.count("'") == 2
    assert set(command.rsplit("' ", 1)[1]) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")


def test_first_contact_brings_the_agent_and_the_second_finds_it(tmp_path):
    root = tmp_path / "a root's"
    for _ in range(2):
        with Link.open(LocalTransport(), root=str(root), request={"op": "ps"}) as link:
            assert link.first.result("jobs") == []
            assert link.hello["root"] == str(root)
    (agent,) = (root / "agent").iterdir()
    assert agent.name == agent_hash()


def test_eight_first_contacts_at_once_all_answer(tmp_path):
    answers = []

    def ask():
        with Link.open(LocalTransport(), root=str(tmp_path), request={"op": "ps"}) as link:
            answers.append(link.first.result("jobs"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[]] * 8
    assert [p.name for p in (tmp_path / "agent").iterdir()] == [agent_hash()]


def test_payload_reaches_an_agent_that_was_not_there_yet(tmp_path):
    word = {"op": "status", "job": "x"}
    with Link.open(LocalTransport(), root=str(tmp_path), request=word, payload={"a": "b" * 300_000}) as link:
        with pytest.raises(UnknownJob, match="no job x"):
            link.first.result()


def test_many_calls_on_one_link_answered_each(tmp_path):
    with Link.open(LocalTransport(), root=str(tmp_path)) as link:
        calls = [link.call("status", job=f"job{i}") for i in range(20)]
        for i, call in enumerate(calls):
            with pytest.raises(UnknownJob, match=f"job{i} "):
                call.result()


def test_large_output_and_input_at_the_same_time_neither_blocks(tmp_path):
    size = 24 << 20
    program = "import sys\nn = 0\nwhile True:\n d = sys.stdin.buffer.read(1 << 16)\n n += len(d)\n"
    program += " sys.stdout.buffer.write(d)\n if not d: break\nsys.stderr.write(str(n))"
    with Link.open(LocalTransport(), root=str(tmp_path)) as link:
        call = link.call("exec", argv=["python3", "-c", program], job=None)
        feeder = threading.Thread(target=lambda: (call.send_data(bytes(size)), call.end_data()))
        feeder.start()
        received, said, code = 0, b"", None
        for name, value, data in call.events():
            if name == "ok":
                code = value["exit"]
            elif value["stream"] == "stdout":
                received += len(data)
            else:
                said += data
        feeder.join()
    assert (received, said, code) == (size, str(size).encode(), 0)


def test_host_that_ends_before_its_answer_says_so(tmp_path):
    class NoPython(LocalTransport):
        def open(self, command):
            return super().open("echo 'go away' >&2; exit 1")

    with Link.open(NoPython(), root=str(tmp_path), request={"op": "ps"}) as link:
        with pytest.raises(HostError, match="exit status 1") as raised:
            link.first.result()
    assert raised.value.where == ("host: go away",)


def test_answer_of_a_host_that_has_gone_since_is_read_to_its_end(tmp_path):
    code = "for n in range(9): frame({'id': 0, 'data': True, 'n': n}, b'x' * 1000)\nframe({'id': 0, 'ok': 'done'})"
    with Link.open(Lying(code), root=str(tmp_path), request={"op": "ps"}) as link:
        wait_for(lambda: link.lost)
        events = list(link.first.events())
    assert [value["n"] for name, value, _ in events[:-1]] == list(range(9))
    assert events[-1] == ("ok", "done", b"")


def test_log_that_breaks_off_ends_with_the_lost_connection(tmp_path):
    code = "frame({'id': 0, 'data': True}, b'x' * 1000)"
    with Link.open(Lying(code), root=str(tmp_path), request={"op": "ps"}) as link:
        wait_for(lambda: link.lost)
        events = link.first.events()
        assert next(events)[0] == "data"
        with pytest.raises(LostConnection, match="closed the connection"):
            next(events)


@pytest.mark.parametrize("number", [0, 2])
def test_answer_to_what_was_not_asked_ends_the_wait(tmp_path, number):
    code = f"frame({{'hello': {{}}}})\nhear('exec')\nframe({{'id': {number}, 'ok': {{}}}})\nforever()"
    with Link.open(Lying(code), root=str(tmp_path)) as link:
        with pytest.raises(HostError, match="an answer to what was not asked"):
            link.call("exec", argv=["true"], job=None).result()


def test_request_that_fits_no_frame_is_refused_here(tmp_path):
    with Link.open(LocalTransport(), root=str(tmp_path)) as link, pytest.raises(UsageError, match="exec request"):
        link.call("exec", argv=["echo", "x" * MAX_FRAME], job=None)


def test_root_that_cannot_be_made_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    with Link.open(LocalTransport(), root=str(tmp_path / "file" / "root"), request={"op": "ps"}) as link:
        with pytest.raises(HostError, match="remote root"):
            link.first.result()


def test_refusal_is_read_though_the_host_takes_no_more_of_what_is_sent(tmp_path):
    tmp_path.chmod(0o777)
    for size in (0, 1000, 1 << 16, 1 << 20):
        for _ in range(3):
            ahead = [({}, b"x" * (1 << 15))] * (size >> 15 or 1)
            with Link.open(
                LocalTransport(), root=f"{tmp_path}/root", request={"op": "ps"}, ahead=ahead, agent_too=True
            ) as link:
                with pytest.raises(HostError, match="other users can write into it"):
                    link.first.result()
                with pytest.raises(HostError, match="other users can write into it"):
                    link.send({"more": 1}, b"x" * 1000)


def test_agent_arrives_with_every_module_in_its_folder(tmp_path):
    with Link.open(LocalTransport(), root=str(tmp_path), request={"op": "ps"}) as link:
        link.first.result()
    folder = tmp_path / "agent" / agent_hash() / "agent"
    arrived = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
    assert arrived == agent_sources()


def test_loader_writes_modules_into_subfolders(tmp_path):
    files = {"serve.py": "1", "store/__init__.py": "", "store/packs.py": "2", "a/b/c_1.py": "3"}
    install(str(tmp_path / "home"), files)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "home" / "agent")): path.read_text() for path in written} == files


@pytest.mark.parametrize(
    "name",
    [
        *("/tmp/x.py", "../x.py", "store/../../x.py", "./x.py", "store//x.py", "/x.py", "store/", "", ".py", "x"),
        *("x.py/", "x.py\n", "a\\b.py", "a b.py", "a\0.py", ".x.py", "store/.x.py", "\u00fc.py", "a-b/x.py", "x.pyc"),
    ],
)
def test_loader_refuses_a_path_that_is_no_modules_and_writes_nothing(tmp_path, name):
    with pytest.raises(OSError, match="not a module's path"):
        install(str(tmp_path / "home"), {"serve.py": "", name: "bad"})
    assert list(tmp_path.iterdir()) == []


FILES = {"serve.py": "1", "store/__init__.py": "", "store/packs.py": "2"}


def stored_agent(tmp_path):
    home = tmp_path / name_of({path: source.encode() for path, source in FILES.items()})
    install(str(home), FILES)
    assert is_intact(str(home))
    return home


@pytest.mark.parametrize(
    "spoil",
    [
        lambda agent: (agent / "serve.py").unlink(),
        lambda agent: (agent / "serve.py").write_text(""),
        lambda agent: (agent / "store" / "packs.py").write_text("3"),
        lambda agent: (agent / "store" / "more.py").write_text(""),
        lambda agent: (agent / "store" / "packs.py").rename(agent / "packs.py"),
        lambda agent: shutil.rmtree(agent),
        lambda agent: (shutil.rmtree(agent.parent), agent.parent.write_text("")),
        lambda agent: (shutil.rmtree(agent.parent), agent.parent.symlink_to("nowhere")),
        lambda agent: (shutil.rmtree(agent.parent), agent.parent.symlink_to("/usr")),
    ],
)
def test_spoilt_agent_is_replaced_and_leaves_nothing(tmp_path, spoil):
    home = stored_agent(tmp_path)
    spoil(home / "agent")
    assert not is_intact(str(home))
    install(str(home), FILES)
    assert is_intact(str(home)) and list(tmp_path.iterdir()) == [home]


def test_agent_that_another_client_has_just_stored_stays(tmp_path):
    home = stored_agent(tmp_path)
    before = (home / "agent" / "serve.py").stat()
    install(str(home), FILES)
    assert (home / "agent" / "serve.py").stat() == before and list(tmp_path.iterdir()) == [home]


def ask(root):
    with Link.open(LocalTransport(), root=str(root), request={"op": "ps"}) as link:
        link.first.result()


def test_every_file_of_the_stored_agent_can_go_or_be_cut(tmp_path):
    """Its bytecode too: the next command works, and all is whole again."""
    root = tmp_path / "root"
    ask(root)
    home = root / "agent" / agent_hash()
    files = sorted(path for path in home.rglob("*") if path.is_file())
    assert {path.suffix for path in files} == {".py", ".pyc"}
    rng = random.Random(1)
    for number in range(8):
        for path in rng.sample(files, 12):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if number % 2 else 18])
        rng.choice(files).unlink(missing_ok=True)
        ask(root)
        assert is_intact(str(home))
        files = [path for path in files if path.exists()]


def test_bytecode_that_is_not_as_it_was_written_is_made_again(tmp_path):
    """Also where Python could not tell, and would run it, fail or wait for ever."""
    root = tmp_path / "root"
    ask(root)
    (cached,) = root.glob("agent/*/agent/wire/__pycache__/frames.*.pyc")
    whole = cached.read_bytes()
    evil = compile("raise SystemExit('somebody has written this')", "frames.py", "exec")
    for damaged in (whole[:16] + marshal.dumps(evil), whole[:16] + bytes(reversed(whole[16:]))):
        cached.write_bytes(damaged)
        ask(root)
        assert cached.read_bytes() == whole
    cached.unlink()
    os.mkfifo(cached)
    ask(root)
    assert cached.read_bytes() == whole


def test_folder_of_the_stored_agent_that_became_a_link_is_not_followed(tmp_path):
    home = stored_agent(tmp_path)
    for name in ("again", "once_more"):  # each holds the other: a walk through both would not end
        (home / "agent" / name).symlink_to(home / "agent")
    assert is_intact(str(home))


@ROOT_ONLY
def test_module_that_another_account_puts_below_a_running_agent_is_not_loaded(tmp_path):
    files = {"__init__.py": "", "gc/__init__.py": "", "gc/choose.py": "", "bytecode.py": agent_sources()["bytecode.py"]}
    home = tmp_path / "home"
    for path, text in files.items():
        (home / "agent" / path).parent.mkdir(parents=True, exist_ok=True)
        (home / "agent" / path).write_text(text)
    code = "exec(open(sys.argv[2]).read()); enter(sys.argv[1]); sys.stdin.read(); import agent.gc.choose"
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        "import sys; " + code,
        str(home),
        str(home / "agent" / "bytecode.py"),
    ]
    for owner, says in ((0, b"somebody has written this"), (MALLORY, b"not a file of the user's own")):
        module = home / "agent" / "gc" / "choose.py"
        module.write_text("raise SystemExit('somebody has written this')")
        os.chown(module, owner, owner)
        done = subprocess.run(argv, input=b"", capture_output=True)
        assert done.returncode == 1 and says in done.stderr


def test_editors_copies_beside_the_modules_are_not_shipped(tmp_path):
    package = tmp_path / "deployer"
    shutil.copytree(REPO / "deployer", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "agent" / ".#serve.py").symlink_to("nobody@nowhere:1")
    (package / "agent" / ".ipynb_checkpoints").mkdir()
    (package / "agent" / ".ipynb_checkpoints" / "serve-checkpoint.py").write_text("")
    (package / "agent" / "parts").mkdir()
    (package / "agent" / "parts" / "one.py").write_text("")
    code = "from deployer.connection.command import agent_sources; print(*agent_sources())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted([*agent_sources(), "parts/one.py"])


@pytest.mark.parametrize("request_name", HANDLERS)
def test_every_request_has_its_handler(request_name):
    assert callable(load_handler(HANDLERS[request_name]))


def test_agent_package_is_python_3_8_and_imports_the_standard_library_only():
    for name, source in agent_sources().items():
        tree = ast.parse(source, name, feature_version=(3, 8))
        names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
        names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0]
        assert {n.split(".")[0] for n in names} <= sys.stdlib_module_names, name


def test_no_value_secret_or_patch_shows_in_the_command_line(tmp_path, monkeypatch):
    commands = []

    class Recording(LocalTransport):
        def open(self, command):
            commands.append(command)
            return super().open(command)

    monkeypatch.setenv("TOKEN", "canary-secret")
    options = Options(
        command=("true",),
        keys={"target.root": str(tmp_path / "root"), "target.env.A": "canary-value", "target.secrets": ["TOKEN"]},
    )
    prepared = prepare(read_config(options), options=options, project=REPO / "tests")
    launch_and_follow(
        lambda **request: Link.open(Recording(), root=str(tmp_path / "root"), **request),
        prepared.plan,
        shipment=prepared.shipment,
        payload=prepared.payload,
        git={"commit": "abc", "patch": "canary-patch"},
        view=None,
        watcher=Watcher(),
    )
    (word,) = (zlib.decompress(base64.b64decode(command.rsplit(" ", 1)[1])).decode() for command in commands)
    assert "TOKEN" in word and "abc" in word and "canary" not in word
    assert (tmp_path / "root" / "jobs" / prepared.plan.job_id / "git.patch").read_text() == "canary-patch"


def test_large_value_split_into_frames_keeps_its_offsets():
    sent = []

    class Collecting(Sender):
        def __init__(self):
            pass

        def send(self, head, body=b""):
            sent.append((head["offset"], len(body)))

    Call({"id": 1}, Collecting()).send_data(bytes(2 * frames.MAX_BODY + 10), file="rank_0.log", offset=100)
    assert sent == [(100, frames.MAX_BODY), (100 + frames.MAX_BODY, frames.MAX_BODY), (100 + 2 * frames.MAX_BODY, 10)]


@pytest.mark.parametrize("words", [["--help"], ["run", "--dry-run", "--", "true"]], ids=["help", "dry-run"])
def test_command_line_loads_no_heavy_package_where_it_needs_none(tmp_path, words):
    script = str(REPO / "deploy.py")
    done = subprocess.run([sys.executable, "-X", "importtime", script, *words], capture_output=True, cwd=tmp_path)
    modules = {line.rsplit(b"|", 1)[-1].strip() for line in done.stderr.splitlines()}
    loaded = {module.split(b".")[0] for module in modules}
    assert done.returncode == 0 and b"click" in loaded
    assert not loaded & {b"torch", b"fabric", b"paramiko", b"transformers", b"invoke"}
    assert b"deployer.agent.supervisor.start" not in modules  # the host's half
