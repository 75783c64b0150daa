"""Cases: pipes, locks and what waits for them."""

from __future__ import annotations

from typing import Any

from tests.world.same.cases import case, put, read_all, tried


@case
def pipe_ends(m: Any) -> Any:
    reading, writing = m.os.pipe()
    answers = [
        m.os.write(writing, b"hello"),
        m.os.read(reading, 2),
        m.os.read(reading, 99),
        tried(m.os.write, reading, b"x"),
        tried(m.os.read, writing, 1),
        tried(m.os.lseek, reading, 0, m.os.SEEK_SET),
        tried(m.os.pread, reading, 1, 0),
        tried(m.os.pwrite, writing, b"x", 0),
        tried(m.os.ftruncate, writing, 0),
        tried(m.os.fsync, writing),
        m.os.fstat(reading).st_mode >> 12,
        m.os.fstat(writing).st_nlink,
        m.os.readlink(f"/proc/self/fd/{reading}").startswith("pipe:["),
        m.os.readlink(f"/proc/self/fd/{reading}") == m.os.readlink(f"/proc/self/fd/{writing}"),
        m.os.write(writing, b""),
        m.os.write(writing, b"last"),
        m.os.close(writing),
    ]
    return [*answers, m.os.read(reading, 99), m.os.read(reading, 99), m.os.read(reading, 99)]


@case
def pipe_without_a_reader(m: Any) -> Any:
    before = m.signal.signal(m.signal.SIGPIPE, m.signal.SIG_IGN)
    reading, writing = m.os.pipe()
    m.os.close(reading)
    answers = [int(before), tried(m.os.write, writing, b"x")]
    child = m.subprocess.Popen(m.child("puts", "1"), stdout=m.subprocess.PIPE, stderr=m.subprocess.PIPE)
    child.stdout.close()
    return [*answers, child.stderr.read(), child.wait()]


@case
def pipe_that_is_full(m: Any) -> Any:
    reading, writing = m.os.pipe()
    m.os.set_blocking(writing, False)
    m.os.set_blocking(reading, False)
    answers: list[Any] = [tried(m.os.read, reading, 1), m.os.write(writing, b"x" * 70_000)]
    answers += [tried(m.os.write, writing, b"x"), tried(m.os.write, writing, b"")]
    answers += [len(m.os.read(reading, 4096)), m.os.write(writing, b"y" * 4096), tried(m.os.write, writing, b"x")]
    answers.append([list(map(len, m.select.select([reading], [writing], [], 0)))])
    answers += [len(m.os.read(reading, 100_000)), tried(m.os.read, reading, 1)]
    m.os.write(writing, b"z" * 65_000)
    answers += [tried(m.os.write, writing, b"w" * 1000)]  # no part of what is small enough to go as one
    return answers


@case
def writer_waits_for_room(m: Any) -> Any:
    reading, writing = m.os.pipe()

    def write() -> None:
        m.os.close(reading)
        m.os.write(1, str(m.os.write(writing, b"a" * 200_000)).encode())

    told, tell = m.os.pipe()

    def write_and_tell() -> None:
        m.os.dup2(tell, 1)
        write()

    pid = m.fork(write_and_tell)
    m.os.close(writing)
    m.os.close(tell)
    return [len(read_all(m, reading)), m.os.read(told, 99), m.os.waitpid(pid, 0)[1]]


@case
def reader_waits_for_all_writers(m: Any) -> Any:
    reading, writing = m.os.pipe()

    def write(text: bytes) -> None:
        m.time.sleep(0.05)
        m.os.write(writing, text)

    pids = [m.fork(lambda text=text: write(text)) for text in (b"a", b"b", b"c")]
    m.os.close(writing)
    found = sorted(read_all(m, reading))
    return [found, [m.os.waitpid(pid, 0)[1] for pid in pids], tried(m.os.waitpid, pids[0], 0)]


@case
def select_on_pipes(m: Any) -> Any:
    a, to_a = m.os.pipe()
    b, to_b = m.os.pipe()

    def names(answer: Any) -> Any:
        known = {a: "a", b: "b", to_a: "to_a", to_b: "to_b"}
        return [[known[fd] for fd in fds] for fds in answer]

    answers = [names(m.select.select([a, b], [], [], 0)), names(m.select.select([a, b], [to_a], [], 5))]
    begins = m.time.monotonic()
    answers += [names(m.select.select([a], [], [], 0.05)), m.time.monotonic() - begins >= 0.05]
    m.os.write(to_b, b"x")
    answers += [names(m.select.select([a, b], [], [])), m.os.read(b, 1)]
    m.os.close(to_a)
    answers += [names(m.select.select([a, b], [to_b], [], 0)), m.os.read(a, 1)]
    m.os.close(b)
    answers += [names(m.select.select([], [to_b], [], 0)), names(m.select.select([a, a], [], []))]
    answers.append(tried(m.select.select, [b], [], [], 0))
    reading = m.os.open(put(m, "file"), m.os.O_RDONLY)
    answers.append([len(found) for found in m.select.select([reading], [], [], 0)])
    poll = m.select.poll()
    poll.register(a, m.select.POLLIN)
    poll.register(to_b, m.select.POLLOUT)
    return [*answers, sorted((names([[fd]]), event) for fd, event in poll.poll(0))]


@case
def null_and_full(m: Any) -> Any:
    null, full = m.os.open("/dev/null", m.os.O_RDWR), m.os.open("/dev/full", m.os.O_RDWR)
    answers = [m.os.write(null, b"gone"), m.os.read(null, 9), tried(m.os.write, full, b"x"), m.os.fstat(null).st_size]
    answers += [m.os.readlink(f"/proc/self/fd/{null}"), m.os.devnull, m.os.fstat(null).st_mode >> 12]
    with m.open("/dev/null", "wb") as file:
        answers.append(file.write(b"x"))
    return answers


# --- locks ------------------------------------------------------------------------------------------------------------


def _lock(m: Any, fd: int, *words: str) -> Any:
    how = m.fcntl.LOCK_NB
    for word in words:
        how |= getattr(m.fcntl, f"LOCK_{word}")
    return tried(m.fcntl.flock, fd, how)


@case
def flock_of_one_process(m: Any) -> Any:
    a, b, c = (m.os.open("file", m.os.O_RDWR | m.os.O_CREAT) for _ in range(3))
    answers = [_lock(m, a, "EX"), _lock(m, b, "EX"), _lock(m, b, "SH"), _lock(m, a, "EX"), _lock(m, a, "SH")]
    answers += [_lock(m, b, "SH"), _lock(m, a, "EX"), _lock(m, c, "EX"), _lock(m, c, "SH")]  # no way up for two
    # Linux drops the shared lock of who asked in vain for more
    answers += [_lock(m, b, "UN"), _lock(m, c, "UN"), _lock(m, b, "EX"), _lock(m, a, "SH"), _lock(m, b, "UN")]
    copy = m.os.dup(a)
    answers += [_lock(m, a, "EX"), _lock(m, copy, "EX"), m.os.close(a), _lock(m, b, "SH"), m.os.close(copy)]
    answers += [_lock(m, b, "EX"), _lock(m, b, "UN"), _lock(m, b, "UN"), _lock(m, c, "SH")]
    m.os.unlink("file")
    other = m.os.open("file", m.os.O_RDWR | m.os.O_CREAT)
    answers += [_lock(m, other, "EX"), _lock(m, b, "SH"), _lock(m, other, "UN"), _lock(m, b, "EX")]
    with m.open("file", "rb") as file:
        answers.append(tried(m.fcntl.flock, file, m.fcntl.LOCK_SH | m.fcntl.LOCK_NB))
    folder = m.os.open(".", m.os.O_RDONLY)
    return [*answers, _lock(m, folder, "EX"), _lock(m, m.os.pipe()[0], "EX")]


@case
def flock_is_inherited(m: Any) -> Any:
    """It is held until the last copy of the descriptor is closed, or one says so."""
    held, other = (m.os.open("file", m.os.O_RDWR | m.os.O_CREAT) for _ in range(2))
    go, let_go = m.os.pipe()
    answers = [_lock(m, held, "EX")]

    def child(unlocks: bool) -> None:
        m.os.close(let_go)
        m.os.read(go, 1)
        if unlocks:
            m.fcntl.flock(held, m.fcntl.LOCK_UN)
            m.time.sleep(30)

    pid = m.fork(lambda: child(False))
    m.os.close(held)
    answers += [_lock(m, other, "EX"), m.os.write(let_go, b"x"), m.os.waitpid(pid, 0)[1], _lock(m, other, "EX")]
    pid = m.fork(lambda: child(False))
    m.os.close(other)
    other = m.os.open("file", m.os.O_RDWR)
    answers += [_lock(m, other, "SH"), m.os.kill(pid, m.signal.SIGKILL), m.os.waitpid(pid, 0)[1]]
    answers += [_lock(m, other, "SH")]
    held = other
    other = m.os.open("file", m.os.O_RDWR)
    pid = m.fork(lambda: child(True))
    m.os.write(let_go, b"x")
    m.fcntl.flock(other, m.fcntl.LOCK_EX)  # the child has given up the lock of both
    answers += [_lock(m, held, "SH"), m.os.kill(pid, m.signal.SIGKILL), m.os.waitpid(pid, 0)[1]]
    return answers


@case
def flock_over_exec(m: Any) -> Any:
    held, other = (m.os.open("file", m.os.O_RDWR | m.os.O_CREAT) for _ in range(2))
    answers = [_lock(m, held, "EX")]
    child = m.subprocess.Popen(m.child("wait"), stdout=m.subprocess.PIPE)
    answers.append(child.stdout.readline())
    m.os.close(held)
    answers += [_lock(m, other, "EX"), _lock(m, other, "UN")]  # it was closed there
    held = m.os.open("file", m.os.O_RDWR)
    m.fcntl.flock(held, m.fcntl.LOCK_EX)
    second = m.subprocess.Popen(m.child("wait"), stdout=m.subprocess.PIPE, pass_fds=[held])
    answers.append(second.stdout.readline())
    m.os.close(held)
    answers.append(_lock(m, other, "EX"))
    second.kill()
    second.wait()
    answers.append(_lock(m, other, "EX"))
    child.kill()
    return [*answers, child.wait()]


@case
def flock_waits(m: Any) -> Any:
    held = m.os.open("file", m.os.O_RDWR | m.os.O_CREAT)
    m.fcntl.flock(held, m.fcntl.LOCK_EX)
    told, tell = m.os.pipe()

    def wait(word: bytes, how: int) -> None:
        fd = m.os.open("file", m.os.O_RDWR)
        m.os.write(tell, b"waits ")
        m.fcntl.flock(fd, how)
        m.os.write(tell, word)

    pids = [m.fork(lambda: wait(b"shared ", m.fcntl.LOCK_SH)) for _ in range(2)]
    for _ in pids:
        m.os.read(told, 6)
    m.os.write(tell, b"held ")
    m.fcntl.flock(held, m.fcntl.LOCK_UN)
    statuses = [m.os.waitpid(pid, 0)[1] for pid in pids]
    answers = [m.os.read(told, 99), statuses]
    m.fcntl.flock(held, m.fcntl.LOCK_SH)
    pid = m.fork(lambda: wait(b"exclusive ", m.fcntl.LOCK_EX))
    m.os.read(told, 6)
    m.os.kill(pid, m.signal.SIGTERM)  # who waits can be killed
    return [*answers, m.os.waitpid(pid, 0)[1], _lock(m, held, "EX")]


@case
def locks_in_proc(m: Any) -> Any:
    fd = m.os.open("file", m.os.O_RDWR | m.os.O_CREAT)

    def told(path: str) -> Any:
        end = f":{m.os.fstat(fd).st_ino} 0 EOF"
        with m.open(path) as file:
            lines = [line.split() for line in file if line.rstrip().endswith(end)]
        return [[words[at] for at in range(len(words) - 4) if ":" not in words[at]] for words in lines]

    def words() -> list[Any]:
        me = str(m.os.getpid())
        rows = told("/proc/locks") + told(f"/proc/self/fdinfo/{fd}")
        return [["PID" if word == me else word for word in row] for row in rows]

    answers = [words(), m.fcntl.flock(fd, m.fcntl.LOCK_SH), words(), m.fcntl.flock(fd, m.fcntl.LOCK_EX), words()]
    m.os.lseek(fd, 7, m.os.SEEK_SET)
    with m.open(f"/proc/self/fdinfo/{fd}") as file:
        answers.append(file.readline())
    return answers
