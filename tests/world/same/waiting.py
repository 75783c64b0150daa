"""Cases: signals and threads."""

from __future__ import annotations

from typing import Any

from tests.world.same.cases import case, read_all, tried, until
from tests.world.same.processes import ends, start, stat_of


def _state(m: Any, pid: int) -> str:
    return (stat_of(m, pid) or "?")[0]


@case
def handlers(m: Any) -> Any:
    heard: list[int] = []
    term, usr1 = m.signal.SIGTERM, m.signal.SIGUSR1
    answers = [
        int(m.signal.getsignal(term)),
        int(m.signal.signal(term, lambda number, frame: heard.append(int(number)))),
    ]
    m.os.kill(m.os.getpid(), term)
    answers += [list(heard), callable(m.signal.getsignal(term)), int(m.signal.signal(usr1, m.signal.SIG_IGN))]
    m.os.kill(m.os.getpid(), usr1)
    m.signal.pthread_sigmask(m.signal.SIG_BLOCK, [term])
    m.os.kill(m.os.getpid(), term)
    m.os.kill(m.os.getpid(), term)  # one of a kind waits
    answers += [list(heard), sorted(map(int, m.signal.pthread_sigmask(m.signal.SIG_UNBLOCK, [term]))), list(heard)]
    m.signal.signal(term, m.signal.SIG_DFL)
    answers += [tried(m.signal.signal, m.signal.SIGKILL, m.signal.SIG_IGN), tried(m.os.kill, m.os.getpid(), 0)]
    answers += [
        m.signal.getsignal(m.signal.SIGINT) is m.signal.default_int_handler,
        tried(m.os.kill, m.os.getpid(), 99),
    ]
    answers.append(int(m.signal.getsignal(m.signal.SIGPIPE)))

    def broken(number: int, frame: Any) -> None:
        raise ValueError("from the handler")

    m.signal.signal(usr1, broken)
    answers.append(tried(m.os.kill, m.os.getpid(), usr1))
    m.signal.pthread_sigmask(m.signal.SIG_BLOCK, [m.signal.SIGUSR2])
    m.os.kill(m.os.getpid(), m.signal.SIGUSR2)
    m.signal.signal(m.signal.SIGUSR2, m.signal.SIG_IGN)  # what waits is dropped when it is ignored
    m.signal.signal(m.signal.SIGUSR2, m.signal.SIG_DFL)
    m.signal.pthread_sigmask(m.signal.SIG_UNBLOCK, [m.signal.SIGUSR2])
    return answers


@case
def waiting_for_signals(m: Any) -> Any:
    usr1, usr2, chld = m.signal.SIGUSR1, m.signal.SIGUSR2, m.signal.SIGCHLD
    m.signal.pthread_sigmask(m.signal.SIG_BLOCK, [usr1, usr2, chld])
    me = m.os.getpid()
    begins = m.time.monotonic()
    answers = [m.signal.sigtimedwait([usr1], 0.05), m.time.monotonic() - begins >= 0.05]
    m.os.kill(me, usr2)
    m.os.kill(me, usr1)
    answers += [m.signal.sigtimedwait([usr1], 0) is not None, int(m.signal.sigwait([usr1, usr2]))]
    answers.append(m.signal.sigtimedwait([usr1, usr2], 0))

    def tell() -> None:
        m.time.sleep(0.03)
        m.os.kill(me, usr1)

    pid = m.fork(tell)
    info = m.signal.sigtimedwait([usr1], 10)
    answers.append(int(info.si_signo))
    answers += [int(m.signal.sigtimedwait([chld], 10).si_signo), ends(m, pid), m.signal.sigtimedwait([chld], 0)]
    pid = m.fork(tell)
    answers += [int(m.signal.sigwait({usr1})), ends(m, pid), int(m.signal.sigwait([chld]))]
    # a child inherits what is blocked, and not what waits
    m.os.kill(me, usr1)

    def child() -> None:
        blocked = m.signal.pthread_sigmask(m.signal.SIG_BLOCK, [])
        found = m.signal.sigtimedwait([usr1], 0)
        raise SystemExit(len(blocked) * 10 + (found is not None))

    return [*answers, ends(m, m.fork(child)) >> 8, int(m.signal.sigwait([usr1]))]


@case
def signals_to_others(m: Any) -> Any:
    answers = []
    for number in (1, 2, 10, 12, 15, 14, 24):
        child = start(m, "wait", stderr=m.subprocess.DEVNULL)
        child.send_signal(number)
        answers.append((number, child.wait()))
    for number in (17, 18, 28, 23, 13):
        child = start(m, "wait")
        child.send_signal(number)
        answers.append((number, str(tried(child.wait, 0.02)).split("'")[0], child.kill(), child.wait()))
    child = start(m, "ignores", "15")
    child.terminate()
    answers += [tried(child.wait, 0.02).split("'")[0], child.kill(), child.wait()]
    child = start(m, "handles", "15", "10", "2")
    for number in (15, 10, 2):
        child.send_signal(number)
        answers.append(child.stdout.readline())
    return [*answers, child.wait(), child.stdout.read()]


@case
def stopped_and_continued(m: Any) -> Any:
    child = start(m, "handles", "15", "10", "18")
    child.send_signal(m.signal.SIGSTOP)
    answers = [until(m, lambda: _state(m, child.pid) == "T"), child.poll(), tried(child.wait, 0.02).split("'")[0]]
    child.send_signal(15)
    m.time.sleep(0.03)
    answers += [_state(m, child.pid), m.select.select([child.stdout], [], [], 0)[0] == []]
    child.send_signal(m.signal.SIGCONT)
    answers += [sorted(child.stdout.readline() for _ in range(2)), _state(m, child.pid) != "T"]
    child.send_signal(10)
    answers += [child.stdout.readline(), child.wait()]
    for number in (9, 15):
        child = start(m, "wait")
        child.send_signal(m.signal.SIGSTOP)
        until(m, lambda child=child: _state(m, child.pid) == "T")  # type: ignore[misc]
        child.send_signal(number)  # who is stopped can be killed, and all else waits
        answers += [tried(child.wait, 0.3 if number == 15 else 10), _state(m, child.pid)]
        child.send_signal(m.signal.SIGCONT)
        answers.append(child.wait())
    child = start(m, "wait")
    child.send_signal(m.signal.SIGTSTP)  # not in a group that no shell looks after
    m.time.sleep(0.02)
    answers += [_state(m, child.pid) == "T", child.kill(), child.wait()]
    return [answer if not isinstance(answer, str) else answer.split("'")[0] for answer in answers]


@case
def child_ends_are_told(m: Any) -> Any:
    heard: list[int] = []
    m.signal.signal(m.signal.SIGCHLD, lambda number, frame: heard.append(int(number)))
    pid = m.fork(lambda: None)
    until(m, lambda: heard)
    answers = [list(heard), ends(m, pid)]
    m.signal.signal(m.signal.SIGCHLD, m.signal.SIG_IGN)  # nobody is left to collect then
    reading, writing = m.os.pipe()
    pid = m.fork(lambda: None)
    m.os.close(writing)
    read_all(m, reading)
    return [*answers, tried(m.os.waitpid, pid, 0)]


@case
def interrupted_waits_go_on(m: Any) -> Any:
    heard: list[int] = []
    m.signal.signal(m.signal.SIGUSR1, lambda number, frame: heard.append(int(number)))
    me = m.os.getpid()
    reading, writing = m.os.pipe()

    def poke() -> None:
        m.os.close(reading)
        for _ in range(3):
            m.time.sleep(0.02)
            m.os.kill(me, m.signal.SIGUSR1)
        m.time.sleep(0.05)
        m.os.write(writing, b"x")

    pid = m.fork(poke)
    answers = [m.os.read(reading, 9), len(heard), ends(m, pid)]
    begins = m.time.monotonic()
    pid = m.fork(lambda: m.os.kill(me, m.signal.SIGUSR1))
    m.time.sleep(0.2)
    answers += [m.time.monotonic() - begins >= 0.2, ends(m, pid), len(heard)]

    def broken(number: int, frame: Any) -> None:
        raise ValueError("enough")

    m.signal.signal(m.signal.SIGUSR1, broken)
    pid = m.fork(lambda: m.time.sleep(0.02) or m.os.kill(me, m.signal.SIGUSR1))
    return [*answers, tried(m.time.sleep, 10), ends(m, pid)]


# --- threads ----------------------------------------------------------------------------------------------------------


@case
def events(m: Any) -> Any:
    event = m.threading.Event()
    begins = m.time.monotonic()
    answers = [event.is_set(), event.wait(0.02), m.time.monotonic() - begins >= 0.02, event.wait(0)]
    heard: list[Any] = []
    threads = [m.threading.Thread(target=lambda: heard.append(event.wait(10)), daemon=True) for _ in range(3)]
    answers.append([thread.is_alive() for thread in threads])
    for thread in threads:
        thread.start()
    answers += [[thread.is_alive() for thread in threads], list(heard), event.set()]
    for thread in threads:
        thread.join()
    answers += [heard, [thread.is_alive() for thread in threads], event.wait(), event.clear(), event.is_set()]
    answers += [tried(threads[0].start), tried(m.threading.Thread(target=print).join)]
    return answers


@case
def locks(m: Any) -> Any:
    lock = m.threading.Lock()
    answers = [lock.acquire(), lock.locked(), lock.acquire(blocking=False), lock.acquire(timeout=0.02)]
    thread = m.threading.Thread(target=lock.release)  # anybody may
    thread.start()
    answers += [lock.acquire(timeout=10), lock.release(), lock.locked(), tried(lock.release)]
    answers += [tried(lock.acquire, False, 1), str(tried(lock.acquire, True, -2)).split(":")[0]]
    again = m.threading.RLock()
    answers += [again.acquire(), again.acquire(), again.release()]
    found: list[Any] = []
    other = m.threading.Thread(target=lambda: found.append(again.acquire(blocking=False)))
    other.start()
    other.join()
    answers += [found, again.release(), tried(again.release)]
    other = m.threading.Thread(target=lambda: found.append(tried(again.release)))
    again.acquire()
    other.start()
    other.join()
    with lock:
        answers.append(lock.locked())
    return [*answers, found, lock.locked()]


@case
def conditions(m: Any) -> Any:
    told = m.threading.Condition()
    items: list[int] = []
    took: list[int] = []

    def take() -> None:
        with told:
            while not items:
                told.wait()
            took.append(items.pop())

    threads = [m.threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3):
        with told:
            items.append(number)
            told.notify()
    for thread in threads:
        thread.join(10)
    answers: list[Any] = [sorted(took), tried(told.notify), tried(told.wait)]
    with told:
        answers += [told.wait(0.01), told.wait_for(lambda: items, 0.01), told.wait_for(lambda: 7), told.notify_all()]
    # one notify wakes one
    woken: list[int] = []

    def wait(number: int) -> None:
        with told:
            ready.append(number)
            woken.append(number) if told.wait(0.2) else None

    ready: list[int] = []
    threads = [m.threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    until(m, lambda: len(ready) == 3)
    with told:
        told.notify()
    for thread in threads:
        thread.join()
    return [*answers, len(woken)]


@case
def queues(m: Any) -> Any:
    line = m.queue.Queue(2)
    begins = m.time.monotonic()
    answers = [line.put(1), line.put(2), tried(line.put, 3, timeout=0.02), tried(line.put_nowait, 3), line.full()]
    answers += [m.time.monotonic() - begins > 0.019, line.get(), line.get(), tried(line.get, timeout=0.02)]
    answers += [tried(line.get_nowait), line.empty(), line.qsize()]
    found: list[Any] = []

    def take() -> None:
        while (item := line.get()) is not None:
            found.append(item)

    thread = m.threading.Thread(target=take)
    thread.start()
    for item in (*range(20), None):
        line.put(item)
    thread.join()
    return [*answers, found]


@case
def threads_and_their_process(m: Any) -> Any:
    answers: list[Any] = []
    child = m.fork(lambda: m.threading.Thread(target=lambda: m.os._exit(9)).start() or m.time.sleep(30))
    answers.append(ends(m, child))
    heard: list[Any] = []
    m.signal.signal(
        m.signal.SIGUSR1, lambda *_: heard.append(m.threading.current_thread() is m.threading.main_thread())
    )
    thread = m.threading.Thread(target=lambda: m.os.kill(m.os.getpid(), m.signal.SIGUSR1))
    thread.start()
    thread.join()
    until(m, lambda: heard)
    thread = m.threading.Thread(target=lambda: found.append(tried(m.signal.signal, 15, m.signal.SIG_IGN)), name="named")
    found: list[Any] = []
    thread.start()
    thread.join()
    return [*answers, heard, found, thread.name, m.threading.current_thread().name]
