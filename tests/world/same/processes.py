"""Cases: processes, their ends and what /proc tells of them."""

from __future__ import annotations

from typing import Any

from tests.world.same.cases import case, put, read, read_all, tried, until


def stat_of(m: Any, pid: int) -> list[str] | None:
    try:
        with m.open(f"/proc/{pid}/stat", "rb") as file:
            text: str = file.read().decode()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def ends(m: Any, pid: int) -> int:
    """Of a child."""
    status: int = m.os.waitpid(pid, 0)[1]
    return status


def start(m: Any, *words: str, **more: Any) -> Any:
    """A child that has said its first line."""
    child = m.subprocess.Popen(m.child(*words), stdout=m.subprocess.PIPE, **more)
    child.first = child.stdout.readline()
    return child


@case
def waiting_for_children(m: Any) -> Any:
    answers = [tried(m.os.waitpid, -1, 0), tried(m.os.waitpid, -1, m.os.WNOHANG), tried(m.os.waitpid, m.os.getpid(), 0)]
    go, tell = m.os.pipe()

    def child(code: int) -> None:
        m.os.close(tell)
        m.os.read(go, 1)
        raise SystemExit(code)

    pids = [m.fork(lambda code=code: child(code)) for code in (0, 3, 300)]
    answers += [m.os.waitpid(-1, m.os.WNOHANG), m.os.waitpid(pids[0], m.os.WNOHANG)]
    answers.append(m.os.waitid(m.os.P_ALL, 0, m.os.WEXITED | m.os.WNOWAIT | m.os.WNOHANG) is None)
    m.os.close(tell)
    answers += [ends(m, pids[1]), tried(ends, m, pids[1])]
    found = {m.os.waitpid(-1, 0) for _ in range(2)}
    answers += [sorted((pids.index(pid), status) for pid, status in found), tried(m.os.waitpid, -1, 0)]
    answers.append(tried(m.os.waitid, m.os.P_ALL, 0, m.os.WEXITED | m.os.WNOWAIT | m.os.WNOHANG))
    pid = m.fork(lambda: m.os._exit(7))
    seen = until(m, lambda: m.os.waitid(m.os.P_ALL, 0, m.os.WEXITED | m.os.WNOWAIT | m.os.WNOHANG))
    answers.append(seen.si_pid == pid)  # and it is still there
    status = ends(m, pid)
    answers += [status, m.os.WIFEXITED(status), m.os.WEXITSTATUS(status), m.os.waitstatus_to_exitcode(status)]
    pid = m.fork(lambda: m.time.sleep(30))
    m.os.kill(pid, m.signal.SIGKILL)
    status = ends(m, pid)
    return [*answers, status, m.os.WIFSIGNALED(status), m.os.WTERMSIG(status), m.os.waitstatus_to_exitcode(status)]


@case
def zombies(m: Any) -> Any:
    pid = m.fork(lambda: m.os._exit(3))
    until(m, lambda: (stat_of(m, pid) or "R")[0] == "Z")
    stat = stat_of(m, pid)
    assert stat is not None
    answers: list[Any] = [stat[0], int(stat[1]) == m.os.getpid(), int(stat[2]) == m.os.getpgrp()]
    answers += [read(m, f"/proc/{pid}/cmdline"), tried(m.os.kill, pid, 0), tried(m.os.kill, pid, m.signal.SIGKILL)]
    answers += [m.os.getpgid(pid) == m.os.getpgrp(), str(pid) in m.os.listdir("/proc")]
    answers += [ends(m, pid), tried(m.os.kill, pid, 0), stat_of(m, pid), str(pid) in m.os.listdir("/proc")]
    told = [tried(m.os.kill, pid, 9), tried(m.os.getpgid, pid), tried(m.os.stat, f"/proc/{pid}")]
    told += [tried(m.open, f"/proc/{pid}/stat"), tried(m.os.readlink, f"/proc/{pid}/cwd")]
    return [*answers, *[str(answer).replace(str(pid), "PID") for answer in told]]


@case
def what_proc_tells(m: Any) -> Any:
    child = start(m, "wait", env={"ONE": "1", "TWO": "zwei ä"}, start_new_session=True)
    pid = child.pid
    until(m, lambda: (stat_of(m, pid) or "R")[0] == "S")
    stat = stat_of(m, pid)
    assert stat is not None
    words = read(m, f"/proc/{pid}/cmdline").split(b"\0")
    answers = [int(stat[1]) == m.os.getpid(), int(stat[2]) == pid, int(stat[3]) == pid, len(stat) > 21, words[-2:]]
    answers.append(words[:-1] == [m.os.fsencode(word) for word in m.child("wait")])
    environ = read(m, f"/proc/{pid}/environ").split(b"\0")
    answers += [[name for name in environ if name[:3] in (b"ONE", b"TWO")], m.os.listdir(f"/proc/{pid}/fd") != []]
    answers += [m.os.readlink(f"/proc/{pid}/cwd") == m.here, m.os.stat(f"/proc/{pid}").st_uid == m.os.getuid()]
    answers += [m.os.readlink(f"/proc/{pid}/fd/1").startswith("pipe:"), m.os.path.isdir(f"/proc/{pid}")]
    answers.append(m.os.stat(f"/proc/{pid}/fd/1").st_ino == m.os.fstat(child.stdout.fileno()).st_ino)
    me = m.os.getpid()
    answers.append(read(m, f"/proc/{me}/task/{me}/children").split() == [str(pid).encode()])
    me_stat = stat_of(m, me)
    assert me_stat is not None
    answers += [me_stat[0], int(me_stat[19]) <= int(stat[19]), stat[0], m.os.getpgid(pid) == pid]
    before = read(m, "/proc/sys/kernel/random/boot_id")
    answers += [before == read(m, "/proc/sys/kernel/random/boot_id"), before.endswith(b"\n")]
    m.os.environ["LATER"] = "x"  # what a process was started with stays so
    answers.append(b"LATER" in read(m, "/proc/self/environ"))
    later = m.subprocess.run(m.child("tell"), stdout=m.subprocess.PIPE, env={**m.os.environ, "GIVEN": "7"})
    child.kill()
    return [*answers, later.stdout, child.wait(), tried(m.os.readlink, "/proc/0/cwd"), m.os.path.isdir("/proc/self/fd")]


@case
def sessions_and_groups(m: Any) -> Any:
    me, group = m.os.getpid(), m.os.getpgrp()
    plain, own = start(m, "wait"), start(m, "wait", start_new_session=True)
    answers = [
        me == group,
        m.os.getpgid(0) == group,
        m.os.getpgid(plain.pid) == group,
        m.os.getpgid(own.pid) == own.pid,
    ]
    answers.append([int((stat_of(m, child.pid) or [])[3]) == own.pid for child in (plain, own)])
    forked = m.fork(lambda: m.time.sleep(30))
    m.os.setpgid(forked, 0)
    answers += [m.os.getpgid(forked) == forked, int((stat_of(m, forked) or [])[3]) == me]
    answers += [tried(m.os.setpgid, own.pid, 0), tried(m.os.killpg, 4_000_000, 0)]
    other = m.fork(lambda: m.time.sleep(30))
    m.os.setpgid(other, forked)
    m.os.killpg(forked, m.signal.SIGTERM)
    answers += [ends(m, forked), ends(m, other), tried(m.os.killpg, forked, 0)]
    m.os.killpg(own.pid, m.signal.SIGKILL)
    answers += [own.wait(), plain.poll(), plain.kill(), plain.wait()]
    return answers


@case
def killed_group_without_its_leader(m: Any) -> Any:
    reading, writing = m.os.pipe()

    def lead() -> None:
        m.os.setpgid(0, 0)
        m.fork(lambda: m.time.sleep(30))

    pid = m.fork(lead)
    status = ends(m, pid)
    m.os.close(writing)
    return [status, m.os.killpg(pid, m.signal.SIGTERM), read_all(m, reading)]


def subreaper(m: Any) -> None:
    m.ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


@case
def orphans_go_to_the_subreaper(m: Any) -> Any:
    subreaper(m)
    child = start(m, "orphans")
    pid, orphan = map(int, child.first.split())
    answers = [pid == child.pid, child.wait(), int(child.stdout.readline()) == m.os.getpid()]
    answers += [m.os.waitpid(-1, 0) == (orphan, 0), tried(m.os.waitpid, -1, 0)]
    second = m.subprocess.Popen(m.child("orphans"), stdout=m.subprocess.PIPE)
    child = start(m, "becomes", *m.child("orphans"))  # who has become another program has the same children
    pid, orphan = map(int, child.first.split())
    answers += [child.wait(), ends(m, orphan), second.wait()]
    return [*answers, m.os.waitpid(-1, 0)[1], tried(m.os.waitpid, -1, 0)]


@case
def orphans_of_orphans(m: Any) -> Any:
    """A zombie whose parent dies is the subreaper's to collect."""
    subreaper(m)
    reading, writing = m.os.pipe()

    def parent() -> None:
        inner = m.fork(lambda: m.os._exit(5))
        until(m, lambda: (stat_of(m, inner) or "R")[0] == "Z")
        m.os.write(writing, str(inner).encode())

    pid = m.fork(parent)
    inner = int(m.os.read(reading, 99))
    return [ends(m, pid), m.os.waitpid(-1, 0) == (inner, 5 << 8), tried(m.os.waitpid, -1, 0)]


@case
def who_dies_with_its_parent(m: Any) -> Any:
    subreaper(m)
    child = start(m, "mourns", str(int(m.signal.SIGKILL)))
    child.kill()
    answers = [child.wait(), m.os.waitpid(-1, 0)[1]]
    child = start(m, "mourns", str(int(m.signal.SIGTERM)))
    child.kill()
    return [*answers, child.wait(), m.os.waitpid(-1, 0)[1], child.stdout.read(), tried(m.os.waitpid, -1, 0)]


# --- subprocess -------------------------------------------------------------------------------------------------------


def shown(done: Any) -> tuple[Any, ...]:
    return done.returncode, done.stdout, done.stderr


@case
def run(m: Any) -> Any:
    pipe, null, both = m.subprocess.PIPE, m.subprocess.DEVNULL, m.subprocess.STDOUT
    run = m.subprocess.run
    echo = m.child("echo", "words", "ä b")
    answers = [
        shown(run(echo, input=b"in", capture_output=True)),
        shown(run(echo, input="Ünd\n", capture_output=True, text=True, encoding="utf-8")),
        shown(run(echo, stdin=null, stdout=pipe, stderr=both)),
        shown(run(echo, input=b"in", stdout=null, stderr=pipe)),
        shown(run(echo, input=b"x" * 300_000, capture_output=True)) == (0, b"x" * 300_000, "words ä b".encode()),
        [run(m.child("leave", code), stderr=pipe).returncode for code in ("0", "7", "256", "text")],
        run(m.child("leave", "text"), stderr=pipe).stderr,
        [run(m.child("fail", str(number))).returncode for number in (9, 15, 13)],
        str(tried(run, m.child("leave", "3"), check=True)).split(" returned ")[1],
        [tried(run, [name], stdin=null) for name in ("no-such-program", "./no-such-program", "/no/such")],
        tried(run, m.child("leave", "0"), cwd="missing"),
        tried(run, ["no-such-program"], input=b"x", capture_output=True),
    ]
    put(m, "file", b"from a file")
    with m.open("file", "rb") as file, m.open("out", "wb") as out:
        file.read(5)
        answers.append(shown(run(echo, stdin=m.os.open("file", m.os.O_RDONLY), stdout=out, stderr=both)))
    return [*answers, read(m, "out"), sorted(m.os.listdir("/proc/self/fd"))[:2]]


@case
def run_with_a_timeout(m: Any) -> Any:
    begins = m.time.monotonic()
    try:
        m.subprocess.run(m.child("wait"), stdout=m.subprocess.PIPE, timeout=0.7)
    except m.subprocess.TimeoutExpired as late:
        answers = [late.timeout, late.output, m.time.monotonic() - begins >= 0.7]
    child = start(m, "wait")
    answers += [str(tried(child.wait, timeout=0.01)).split(":")[0], child.poll(), child.terminate(), child.wait(5)]
    answers += [child.poll(), child.returncode, child.send_signal(m.signal.SIGKILL), child.wait(), child.kill()]
    return [*answers, m.subprocess.run(m.child("leave", "2"), timeout=30).returncode, tried(m.os.waitpid, -1, 0)]


@case
def popen(m: Any) -> Any:
    pipe = m.subprocess.PIPE
    with m.subprocess.Popen(m.child("echo", "err"), stdin=pipe, stdout=pipe, stderr=pipe) as child:
        child.stdin.write(b"one")
        child.stdin.flush()
        answers = [child.stdout.read(3), child.poll(), child.stdin.close(), child.stdout.read(), child.stderr.read()]
    answers += [child.returncode, child.args == m.child("echo", "err")]
    child = m.subprocess.Popen(m.child("echo"), stdin=pipe, stdout=pipe)
    answers += [child.communicate(b"x" * 200_000) == (b"x" * 200_000, None), child.returncode]
    child = m.subprocess.Popen(m.child("leave", "1"), stdin=pipe, stdout=pipe)
    answers += [child.wait(), child.communicate(b"nobody reads")]
    child = m.subprocess.Popen(m.child("leave", "4"))
    answers += [m.os.waitpid(child.pid, 0)[1], child.wait()]  # whoever is collected elsewhere ended with 0
    child = start(m, "wait")
    child.kill()
    return [*answers, child.first, child.communicate(), child.returncode]


@case
def what_a_child_is_given(m: Any) -> Any:
    m.os.mkdir("folder")
    m.os.environ["GIVEN"] = "from above"
    m.signal.signal(m.signal.SIGHUP, m.signal.SIG_IGN)
    m.signal.signal(m.signal.SIGUSR1, lambda number, frame: None)
    m.signal.pthread_sigmask(m.signal.SIG_BLOCK, [m.signal.SIGUSR2])

    def told(**words: Any) -> Any:
        return m.subprocess.run(m.child("tell", "a", ""), stdout=m.subprocess.PIPE, **words).stdout

    def prepare() -> None:
        m.signal.signal(m.signal.SIGTERM, m.signal.SIG_IGN)
        m.signal.pthread_sigmask(m.signal.SIG_SETMASK, [m.signal.SIGINT])
        m.os.umask(0o077)

    before = m.os.umask(0o022)
    answers = [told(), told(cwd="folder"), told(env={}), told(env={"GIVEN": "x"}), told(start_new_session=True)]
    answers += [told(preexec_fn=prepare), oct(m.os.umask(before)), int(m.signal.getsignal(m.signal.SIGTERM))]
    answers.append(sorted(map(int, m.signal.pthread_sigmask(m.signal.SIG_BLOCK, []))))
    return [*answers, str(tried(told, preexec_fn=lambda: 1 / 0)).split(":")[0]]


@case
def descriptors_of_a_child(m: Any) -> Any:
    a = m.os.open(put(m, "file"), m.os.O_RDONLY)
    b, c = m.os.dup(a), m.os.dup(a)
    m.os.set_inheritable(c, True)
    words = [str(fd) for fd in (0, 1, 2, a, b, c)]

    def told(**more: Any) -> Any:
        return m.subprocess.run(m.child("holds", *words), stdout=m.subprocess.PIPE, **more).stdout.split(b"\n")

    told_over_exec = m.subprocess.run(
        m.child("becomes", *m.child("holds", *words)), stdout=m.subprocess.PIPE, pass_fds=[a]
    )
    answers = [told(), told(pass_fds=[b]), told(close_fds=False), told(pass_fds=(a, c)), told_over_exec.stdout]

    def lists() -> None:
        m.os.write(writing, repr([tried(lambda fd=fd: m.os.fstat(fd).st_nlink) for fd in (a, b, c)]).encode())

    reading, writing = m.os.pipe()
    pid = m.fork(lists)
    m.os.close(writing)
    return [*answers, read_all(m, reading), ends(m, pid)]


@case
def becoming_another_program(m: Any) -> Any:
    pipe = m.subprocess.PIPE
    child = m.subprocess.Popen(m.child("becomes", *m.child("tell", "x")), stdout=pipe, start_new_session=True)
    answers = [child.stdout.read(), child.wait()]
    child = start(m, "becomes", *m.child("wait"))
    words = read(m, f"/proc/{child.pid}/cmdline").split(b"\0")[:-1]
    answers += [words == [m.os.fsencode(word) for word in m.child("wait")], child.kill(), child.wait()]
    return [*answers, tried(m.os.execvp, "no-such-program", ["x"]), tried(m.os.execvp, "/no/such", ["x"])]
