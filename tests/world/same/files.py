"""Cases: files, open files and what Python makes of them."""

from __future__ import annotations

from typing import Any

from tests.world.same.cases import case, open_at, put, read, tree, tried


@case
def truncating_and_appending(m: Any) -> Any:
    put(m, "file", b"0123456789")
    append = open_at(m, "file", "WRONLY", "APPEND")
    answers = [m.os.lseek(append, 2, m.os.SEEK_SET), m.os.write(append, b"more"), m.os.lseek(append, 0, m.os.SEEK_CUR)]
    answers.append(m.os.pwrite(append, b"!", 0))  # Linux appends even that
    answers.append(read(m, "file"))
    m.os.close(open_at(m, "file", "RDWR", "TRUNC"))
    answers += [read(m, "file"), m.os.write(append, b"after")]
    return [*answers, read(m, "file")]


@case
def descriptors_that_may_not(m: Any) -> Any:
    put(m, "file", b"content")
    reading, writing, folder = open_at(m, "file", "RDONLY"), open_at(m, "file", "WRONLY"), open_at(m, ".", "RDONLY")
    gone = m.os.dup(reading)
    m.os.close(gone)
    return [
        tried(m.os.write, reading, b"x"),
        tried(m.os.pwrite, reading, b"x", 0),
        tried(m.os.ftruncate, reading, 0),
        tried(m.os.read, writing, 1),
        tried(m.os.pread, writing, 1, 0),
        tried(m.os.read, folder, 1),
        tried(m.os.pread, folder, 1, 0),
        tried(m.os.ftruncate, folder, 0),
        tried(m.os.truncate, ".", 0),
        [tried(call, gone) for call in (m.os.close, m.os.fstat, m.os.dup, m.os.fsync, m.os.listdir)],
        [tried(m.os.read, gone, 1), tried(m.os.write, gone, b""), tried(m.os.lseek, gone, 0, 0)],
        tried(m.os.pread, reading, 1, -1),
        tried(m.os.lseek, reading, -1, m.os.SEEK_SET),
        tried(m.os.ftruncate, writing, -1),
        tried(m.os.stat, "file", dir_fd=gone),
        tried(m.os.stat, "file", dir_fd=reading),
        tried(m.fcntl.flock, gone, m.fcntl.LOCK_EX),
        m.os.fsync(folder),
    ]


@case
def walk_and_scandir(m: Any) -> Any:
    m.os.makedirs("top/one/two")
    m.os.makedirs("elsewhere/deep")
    put(m, "top/file", b"12345")
    put(m, "top/one/inner")
    m.os.symlink("../elsewhere", "top/to-folder")
    m.os.symlink("file", "top/to-file")
    m.os.symlink("gone", "top/dangling")

    def walked(**words: Any) -> list[Any]:
        return sorted((p, sorted(d), sorted(f)) for p, d, f in m.os.walk("top", **words))

    def about(entry: Any) -> list[Any]:
        answers: list[Any] = [entry.name, entry.path, m.os.fspath(entry), entry.is_symlink()]
        for follow in (True, False):
            answers += [entry.is_dir(follow_symlinks=follow), entry.is_file(follow_symlinks=follow)]
            answers.append(tried(lambda f=follow: entry.stat(follow_symlinks=f).st_mode))
        return [*answers, entry.inode() == m.os.lstat(entry.path).st_ino]

    with m.os.scandir("top") as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    answers = [about(entry) for entry in entries]
    m.os.unlink("top/file")
    answers += [e.stat(follow_symlinks=False).st_size for e in entries if e.name == "file"]  # kept from before
    errors: list[Any] = []
    for _ in m.os.walk("missing", onerror=lambda error: errors.append(str(error))):
        pass
    top = open_at(m, "top", "RDONLY")
    with m.os.scandir(top) as scan:
        answers += sorted((entry.name, entry.path) for entry in scan)
    with m.os.scandir(".") as scan:
        answers += sorted(entry.path for entry in scan)
    with m.os.scandir() as scan:
        answers += sorted(entry.path for entry in scan)
    refusals = [tried(m.os.scandir, path) for path in ("missing", "top/one/inner", "")]
    refusals += [tried(m.os.listdir, path) for path in ("missing", "top/one/inner", "")]
    return [answers, walked(), walked(topdown=False), walked(followlinks=True), errors, refusals]


@case
def paths_and_stat(m: Any) -> Any:
    put(m, "file", b"12345")
    m.os.link("file", "second")
    m.os.mkdir("folder")
    path = m.os.path
    return [
        path.getsize("file"),
        path.samefile("file", "second"),
        path.samestat(m.os.stat("file"), m.os.stat("folder")),
        path.ismount("/"),
        path.ismount("folder"),
        path.abspath("x/../y").replace(m.here, "HERE"),
        path.relpath("/", "/a/b"),
        path.expanduser("a/~"),
        m.os.getcwd() == m.here,
        [m.os.access(name, mode) for name in ("file", "folder", "missing", "file/x") for mode in (0, 1, 2, 4)],
        str(tried(lambda: m.os.stat("file\0x"))).split(":")[0],  # the words are Python's, and of its version
        str(tried(m.os.open, "file\0x", 0)).split(":")[0],
        tried(lambda: m.os.stat("x" * 256)),
        tried(lambda: m.os.stat("x" * 5000)),
        tried(lambda: m.os.stat(b"file").st_size),
        sorted(m.os.listdir(b".")) == [b"file", b"folder", b"second"],
        m.os.readlink(b"/proc/self/cwd") == m.os.fsencode(m.here),
    ]


@case
def by_descriptor_of_a_folder(m: Any) -> Any:
    m.os.makedirs("top/sub")
    top, sub = open_at(m, "top", "RDONLY", "DIRECTORY"), open_at(m, "top/sub", "RDONLY", "DIRECTORY")
    put(m, "top/file", b"inner")
    m.os.rename("top", "moved")
    answers = [
        m.os.stat("file", dir_fd=top).st_size,
        tried(lambda: m.os.stat("missing", dir_fd=top)),
        m.os.open("file", m.os.O_RDONLY, dir_fd=top) > 2,
        m.os.mkdir("made", dir_fd=top),
        m.os.symlink("file", "link", dir_fd=top),
        m.os.readlink("link", dir_fd=top),
        m.os.lstat("link", dir_fd=top).st_mode >> 12,
        m.os.stat("link", dir_fd=top, follow_symlinks=False).st_mode >> 12,
        m.os.rename("file", "renamed", src_dir_fd=top, dst_dir_fd=sub),
        m.os.stat("../sub/renamed", dir_fd=sub).st_size,
        m.os.link("renamed", "again", src_dir_fd=sub, dst_dir_fd=top),
        m.os.unlink("renamed", dir_fd=sub),
        tried(m.os.unlink, "sub", dir_fd=top),
        tried(m.os.rmdir, "again", dir_fd=top),
        m.os.rmdir("made", dir_fd=top),
        m.os.stat(m.here, dir_fd=999).st_mode >> 12,
    ]
    return [*answers, tree(m)]


@case
def lengths_and_holes(m: Any) -> Any:
    fd = open_at(m, "file", "RDWR", "CREAT")
    answers = [
        m.os.pwrite(fd, b"end", 10),
        m.os.read(fd, 99),
        m.os.lseek(fd, 0, m.os.SEEK_CUR),
        m.os.lseek(fd, 20, m.os.SEEK_SET),
        m.os.read(fd, 1),
        m.os.write(fd, b"far"),
        m.os.fstat(fd).st_size,
        m.os.ftruncate(fd, 12),
        m.os.pread(fd, 99, 8),
        m.os.lseek(fd, 0, m.os.SEEK_CUR),
        m.os.write(fd, b""),
        m.os.fstat(fd).st_size,
        m.os.truncate("file", 30),
        m.os.lseek(fd, -2, m.os.SEEK_END),
        m.os.read(fd, 9),
        tried(m.os.lseek, fd, -31, m.os.SEEK_END),
        tried(m.os.lseek, fd, 30, m.os.SEEK_DATA),
        tried(m.os.truncate, "missing", 1),
        tried(m.os.truncate, "file", -1),
        tried(m.os.read, fd, 0),
        tried(m.os.pread, fd, 4, 99),
    ]
    return [*answers, read(m, "file")]


@case
def copies_of_descriptors(m: Any) -> Any:
    put(m, "file", b"0123456789")
    fd = open_at(m, "file", "RDONLY")
    copy, other = m.os.dup(fd), open_at(m, "file", "RDONLY")
    answers = [m.os.read(fd, 3), m.os.read(copy, 3), m.os.read(other, 3)]
    m.os.close(fd)
    again = open_at(m, "file", "RDONLY")  # the lowest free number
    answers += [again == fd, m.os.read(copy, 3), m.os.dup2(copy, again), m.os.read(again, 3)]
    answers += [
        m.os.dup2(copy, copy) == copy,
        m.os.read(copy, 1),
        tried(m.os.dup2, 999, copy),
        m.os.fstat(copy).st_size,
    ]
    return answers


@case
def modes(m: Any) -> Any:
    before = m.os.umask(0o027)
    m.os.mkdir("folder", 0o777)
    m.os.close(m.os.open("file", m.os.O_CREAT | m.os.O_WRONLY, 0o666))
    answers = [oct(before), oct(m.os.umask(0o022)), oct(m.os.stat("folder").st_mode), oct(m.os.stat("file").st_mode)]
    m.os.chmod("file", 0o4751)
    fd = open_at(m, "file", "RDONLY")
    answers.append(oct(m.os.stat("file").st_mode))
    m.os.fchmod(fd, 0o600)
    answers += [oct(m.os.fstat(fd).st_mode), m.os.access("file", m.os.X_OK), tried(m.os.chmod, "missing", 0o600)]
    m.os.utime("file", (1000, 2000.5))
    answers += [m.os.stat("file").st_mtime, m.os.stat("file").st_mtime_ns]
    m.os.utime("file", ns=(5, 7_000_000_003))
    answers += [
        m.os.path.getmtime("file"),
        m.os.stat("file").st_mtime_ns,
        str(tried(m.os.utime, "missing")).split(": 'missing'")[0],
    ]
    return answers


@case
def times_of_changes(m: Any) -> Any:
    """What moves a folder's and a file's time."""
    m.os.mkdir("folder")
    put(m, "folder/file", b"1")

    def moves(call: Any, *words: Any) -> tuple[bool, bool]:
        names = ["folder/" + name for name in ("file", "other")]
        for path in ["folder", *filter(m.os.path.exists, names)]:
            m.os.utime(path, (1000, 1000))
        call(*words)
        return m.os.stat(next(filter(m.os.path.exists, names))).st_mtime != 1000, m.os.stat("folder").st_mtime != 1000

    return [
        moves(put, m, "folder/file", b"2"),
        moves(put, m, "folder/second", b"2"),
        moves(m.os.truncate, "folder/file", 5),
        moves(m.os.truncate, "folder/file", 5),
        moves(read, m, "folder/file"),
        moves(m.os.chmod, "folder/file", 0o600),
        moves(m.os.rename, "folder/second", "folder/third"),
        moves(m.os.unlink, "folder/third"),
        moves(m.os.rename, "folder/file", "folder/other"),
        moves(open_at, m, "folder/other", "WRONLY", "TRUNC"),
    ]


@case
def python_files(m: Any) -> Any:
    answers: list[Any] = []
    with m.open("file", "w", encoding="utf-8") as file:
        answers += [file.write("ä\nb\n"), file.tell()]
    with m.open("file", "r+b") as file:
        answers += [file.readline(), file.seek(0), file.write(b"xy"), file.seek(0, 2), file.tell(), file.truncate(4)]
    with m.open("file", "ab") as file:
        answers += [file.tell(), file.write(b"more")]
    with m.open("file", encoding="utf-8") as file:
        answers += [list(file), file.name, file.mode]
    with m.open("file", "rb", buffering=0) as file:
        answers += [file.read(2), file.readall(), file.read(2), file.name]
    answers += [
        tried(m.open, "file", "x"),
        tried(m.open, ".", "rb"),
        tried(m.open, ".", "wb"),
        tried(m.open, "no/file"),
    ]
    answers += [tried(m.open, "file/x", "w"), tried(m.open("file", "rb").write, b"x"), tried(m.open("file", "wb").read)]
    with m.os.fdopen(m.os.open("file", m.os.O_RDWR), "wb") as file:
        file.write(b"fd")
    with m.os.fdopen(m.os.open("file", m.os.O_RDONLY)) as file:
        answers.append(file.read())
        file.close()
        answers.append(tried(file.read))
    return [*answers, read(m, "file"), str(tried(m.open, 999, "rb"))]


@case
def globbing_and_which(m: Any) -> Any:
    m.os.makedirs("one/two")
    for name in ("one/a.txt", "one/b.txt", "one/two/c.txt", "one/.hidden.txt", "one/[x].txt"):
        put(m, name)
    m.os.symlink("gone", "one/d.txt")
    m.os.mkdir("programs")
    put(m, "programs/runs")
    m.os.chmod("programs/runs", 0o755)
    put(m, "programs/reads")
    patterns = ["one/*.txt", "one/**", "one/*/", "*/two", "one/[ab].txt", "missing/*", "one/d.txt", "one/a.tx?"]
    answers = [sorted(m.glob.glob(pattern)) for pattern in [*patterns, "one/" + m.glob.escape("[x].txt")]]
    answers.append(sorted(m.glob.glob("one/**/*.txt", recursive=True)))
    answers += [m.shutil.which(name, path="missing:programs") for name in ("runs", "reads", "programs/runs", "none")]
    return answers


@case
def copies_and_moves(m: Any) -> Any:
    put(m, "file", b"data" * 1000)
    m.os.mkdir("folder")
    with m.open("file", "rb") as source, m.open("copied", "wb") as target:
        m.shutil.copyfileobj(source, target)
    m.os.replace("copied", "folder/copied")
    return [tried(m.os.replace, "file", "folder"), tree(m), m.os.statvfs(".").f_bavail > 0]
