"""Cases: names, and what they are refused for."""

from __future__ import annotations

from typing import Any

from tests.world.same.cases import case, open_at, put, tree, tried


def _opened(m: Any, path: str, *flags: str) -> Any:
    """Whether it can be opened so, and what is there then."""
    answer = tried(open_at, m, path, *flags)
    if not isinstance(answer, int):
        return answer
    kind = m.os.fstat(answer).st_mode >> 12
    m.os.close(answer)
    return kind


@case
def open_flags(m: Any) -> Any:
    m.os.mkdir("folder")
    put(m, "file", b"content")
    m.os.symlink("file", "to-file")
    m.os.symlink("folder", "to-folder")
    m.os.symlink("missing", "dangling")
    m.os.symlink("loop", "loop")
    sets: list[tuple[str, ...]] = [
        ("RDONLY",),
        ("RDWR",),
        ("RDONLY", "NOFOLLOW"),
        ("RDONLY", "DIRECTORY"),
        ("RDONLY", "DIRECTORY", "NOFOLLOW"),
        ("RDONLY", "CREAT"),
        ("WRONLY", "CREAT", "EXCL"),
        ("WRONLY", "CREAT", "NOFOLLOW"),
    ]
    paths = ["folder", "file", "to-file", "to-folder", "loop", "file/", "folder/", "file/below", "missing/below", ""]
    answers = [_opened(m, path, *flags) for flags in sets for path in paths]
    answers += [_opened(m, "dangling", *flags) for flags in sets[:5]]
    answers += [_opened(m, "dangling", "WRONLY", "CREAT", "EXCL"), _opened(m, "dangling", "WRONLY", "CREAT"), tree(m)]
    return answers


@case
def open_with_a_slash_behind(m: Any) -> Any:
    m.os.mkdir("folder")
    return [_opened(m, "new/", "WRONLY", "CREAT"), _opened(m, "folder/new/", "WRONLY", "CREAT"), tree(m)]


@case
def rename_onto(m: Any) -> Any:
    def fresh() -> None:
        for name in m.os.listdir("."):
            (m.shutil.rmtree if m.os.path.isdir(name) and not m.os.path.islink(name) else m.os.unlink)(name)
        for folder in ("empty", "other", "full", "full/sub"):
            m.os.mkdir(folder)
        put(m, "file", b"file")
        put(m, "second", b"second")
        put(m, "full/inner")
        m.os.link("file", "same")
        m.os.symlink("second", "to-second")
        m.os.symlink("empty", "to-empty")

    answers = []
    names = ["empty", "full", "full/sub", "file", "same", "to-second", "to-empty", "missing"]
    names += ["full/", "file/", "new/", ".", "full/..", "full/sub/new", "file/new", ""]
    for old in names:
        for new in names:
            fresh()
            before = tree(m)
            answer = tried(m.os.rename, old, new)
            after = tree(m)
            answers.append((old, new, answer, after if after != before else "unchanged"))
    return answers


@case
def unlink_rmdir_mkdir(m: Any) -> Any:
    m.os.mkdir("folder")
    m.os.mkdir("full")
    put(m, "full/file")
    put(m, "file")
    m.os.symlink("folder", "link")
    names = ["full", "file", "link", "missing", "link/", "file/", "missing/", ".", "..", "folder/.", "folder/..", "/"]
    names += ["file/below", "missing/below", "", "x" * 256, "folder/", "link/sub"]
    answers = [(call.__name__, name, tried(call, name)) for name in names for call in (m.os.mkdir,)]
    answers += [(name, tried(m.os.rmdir, name)) for name in [*names[:-2], "link/sub"]]
    answers += [(name, tried(m.os.unlink, name)) for name in names]
    return [*answers, tree(m)]


@case
def links_with_names(m: Any) -> Any:
    put(m, "file", b"file")
    m.os.mkdir("folder")
    m.os.symlink("file", "link")
    m.os.symlink("gone", "dangling")
    answers = [
        tried(m.os.link, "file", "second"),
        tried(m.os.link, "file", "second"),
        tried(m.os.link, "missing", "new"),
        tried(m.os.link, "missing", "second"),
        tried(m.os.link, "folder", "new"),
        tried(m.os.link, "file", "missing/new"),
        tried(m.os.link, "file", "file/new"),
        tried(m.os.link, "file", "folder"),
        tried(m.os.link, "file", "dangling"),
        tried(m.os.link, "link", "as-link", follow_symlinks=False),
        tried(m.os.link, "dangling", "of-dangling", follow_symlinks=False),
        m.os.stat("file").st_nlink,
        m.os.lstat("link").st_nlink,
    ]
    return [*answers, tree(m)]


@case
def files_without_names(m: Any) -> Any:
    put(m, "file", b"file")
    fd = open_at(m, "file", "RDWR")
    where, here = f"/proc/self/fd/{fd}", open_at(m, ".", "RDONLY")
    answers = [
        tried(m.os.link, where, "second"),
        m.os.readlink(where).replace(m.here, "HERE"),
        m.os.stat(where).st_ino == m.os.fstat(fd).st_ino,
    ]
    answers += [tried(m.os.link, where, "second", dst_dir_fd=here), m.os.fstat(fd).st_nlink]
    m.os.rename("file", "third")
    answers.append(m.os.readlink(where).replace(m.here, "HERE"))
    m.os.unlink("third")
    m.os.unlink("second")
    put(m, "second", b"another")
    answers += [m.os.fstat(fd).st_nlink, m.os.write(fd, b"FI"), m.os.pread(fd, 9, 0)]
    # which of its former names Linux tells is of which path it was opened by
    answers += [m.os.readlink(where).endswith(" (deleted)"), m.os.stat(where).st_nlink]
    again = m.os.open(where, m.os.O_RDONLY)
    answers += [m.os.read(again, 9), m.os.fstat(again).st_nlink]
    answers.append(str(tried(m.os.link, where, "new", dst_dir_fd=here)).split(":")[0])
    answers += [tried(m.os.readlink, "/proc/self/fd/999"), tried(m.os.stat, "/proc/self/fd/999")]
    answers.append(tried(m.os.open, "/proc/self/fd/999", m.os.O_RDONLY))
    return [*answers, tree(m)]


@case
def folders_without_names(m: Any) -> Any:
    m.os.mkdir("folder")
    fd = open_at(m, "folder", "RDONLY", "DIRECTORY")
    put(m, "file")
    m.os.rmdir("folder")
    return [
        m.os.fstat(fd).st_nlink,
        m.os.readlink(f"/proc/self/fd/{fd}").replace(m.here, "HERE"),
        m.os.listdir(fd),
        tried(m.os.open, "new", m.os.O_CREAT | m.os.O_WRONLY, dir_fd=fd),
        tried(m.os.mkdir, "new", dir_fd=fd),
        tried(m.os.symlink, "x", "new", dir_fd=fd),
        tried(m.os.rename, "file", "new", dst_dir_fd=fd),
        tried(m.os.link, "file", "new", dst_dir_fd=fd),
        tried(m.os.stat, "new", dir_fd=fd),
        tried(m.os.unlink, "new", dir_fd=fd),
        tree(m),
    ]


@case
def makedirs_and_removedirs(m: Any) -> Any:
    put(m, "file")
    m.os.symlink("missing", "dangling")
    makedirs = m.os.makedirs
    return [
        tried(makedirs, "one/two/three"),
        tried(makedirs, "one/two/three"),
        tried(makedirs, "one/two/three", exist_ok=True),
        tried(makedirs, "file", exist_ok=True),
        tried(makedirs, "file/below"),
        tried(makedirs, "one/../new/x/", mode=0o700),
        tried(makedirs, "dangling", exist_ok=True),
        tried(makedirs, "dangling/below", exist_ok=True),
        tried(makedirs, "one/./x"),
        tried(makedirs, ""),
        oct(m.os.stat("one/two").st_mode),
        oct(m.os.stat("new/x").st_mode),
        tree(m),
        tried(m.os.removedirs, "one/two/three"),
        tree(m),
    ]


@case
def rmtree(m: Any) -> Any:
    m.os.makedirs("top/one/two")
    put(m, "top/one/file")
    put(m, "kept")
    m.os.symlink("../kept", "top/link")
    m.os.symlink("..", "top/one/up")
    m.os.symlink("top", "to-top")
    errors: list[Any] = []
    rmtree = m.shutil.rmtree
    answers = [tried(rmtree, "to-top"), tried(rmtree, "kept"), tried(rmtree, "missing"), rmtree("missing", True)]
    rmtree("missing", onerror=lambda call, path, info: errors.append((call.__name__, path, str(info[1]))))
    return [*answers, errors, tried(rmtree, "top"), tree(m)]


@case
def symlinks(m: Any) -> Any:
    m.os.mkdir("folder")
    put(m, "folder/file", b"inner")
    m.os.symlink("loop-b", "loop-a")
    m.os.symlink("loop-a", "loop-b")
    m.os.symlink("folder", "link")
    m.os.symlink("link/file", "chained")
    m.os.symlink("link/../outer", "outward")
    m.os.symlink(m.here + "/folder", "absolute")
    m.os.symlink("folder/file/", "slashed")
    before = "folder/file"
    for number in range(41):
        m.os.symlink(before, before := f"long-{number}")
    paths = ["loop-a", "loop-a/x", "link", "link/", "link/file", "chained", "outward", "absolute/file", "slashed"]
    paths += ["long-38", "long-39", "long-40", "link/..", "link/../link/file", "folder/file/..", "folder/./file", "//"]
    answers = []
    for path in paths:
        told = tried(lambda p=path: m.os.stat(p).st_mode)
        linked = tried(lambda p=path: m.os.lstat(p).st_mode >> 12)
        target = str(tried(m.os.readlink, path)).replace(m.here, "HERE")
        is_there = m.os.path.exists(path), m.os.path.lexists(path), m.os.path.isdir(path), m.os.path.isfile(path)
        answers.append((path, told, linked, target, is_there, m.os.path.islink(path)))
    answers += [m.os.path.realpath(path).replace(m.here, "HERE") for path in paths]
    answers += [str(tried(m.os.path.realpath, p, strict=True)).replace(m.here, "HERE") for p in paths]
    refused = [tried(m.os.symlink, "x", path) for path in ("link", "folder", "missing/x", "folder/file/x", "new/", "")]
    return [answers, refused, tried(m.os.symlink, "", "empty"), put(m, "outward"), m.os.path.exists("outer")]
