"""What a start keeps for the starts after it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from trainer.commands.cli import compile_cache
from trainer.config.load import config_from_dict
from trainer.models.attention import KERNEL_ORDER
from trainer.schema import CACHE_ENV
from trainer.start import caches
from trainer.start.caches import CacheError, compile_tag, cpu_sign, machine_tag, make_private, open_compile_cache


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_compile_tag_tells_torch_triton_attention_and_machine_apart():
    assert compile_tag("2.11.0+cu130", "3.6.0", "py3.12") == "torch-2.11.0+cu130_triton-3.6.0_cudnn_py3.12"
    assert compile_tag("2.13.0", None, "x86_64") == "torch-2.13.0_cudnn_x86_64"
    assert compile_tag("../2", None, "a b") == "torch-.._2_cudnn_a_b"


def test_machine_is_named_by_what_a_library_built_here_needs():
    named = machine_tag(for_cpu=False)
    assert named.split("_")[0] == f"py{sys.version_info.major}.{sys.version_info.minor}"
    assert platform.machine() in named
    assert machine_tag(for_cpu=True) == (f"{named}_{cpu_sign()}" if cpu_sign() else named)


def test_cpus_are_told_apart_by_what_they_can_do(tmp_path):
    """Where several hosts share a home: the compiler's own keys say `-march=native` of any of them."""
    old, new, arm = (tmp_path / name for name in ("old", "new", "arm"))
    old.write_text("processor : 0\ncpu MHz : 1\nflags : fpu avx2\nprocessor : 1\nflags : fpu avx2\n")
    new.write_text("processor : 0\ncpu MHz : 2\nflags : fpu avx2 avx512f\n")
    arm.write_text("processor : 0\nFeatures : fp asimd sve\n")
    again = tmp_path / "again"
    again.write_text(old.read_text().replace("MHz : 1", "MHz : 3"))
    assert len({cpu_sign(path) for path in (old, new, arm)}) == 3
    assert cpu_sign(again) == cpu_sign(old)
    assert cpu_sign(tmp_path / "none") == ""


def test_compile_tag_names_the_kernel_that_attention_takes_first():
    assert KERNEL_ORDER[0].name.lower().startswith(caches.ATTENTION)


def test_cache_is_private_and_named_to_inductor_and_triton(tmp_path):
    cache = open_compile_cache({CACHE_ENV: str(tmp_path / "root" / "cache")})
    folder = Path(cache.env["TORCHINDUCTOR_CACHE_DIR"])
    assert cache.note is None
    assert (folder.parent, mode_of(folder), mode_of(folder.parent)) == (tmp_path / "root/cache/compile", 0o700, 0o700)
    assert cache.env["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_torch_puts_its_caches_there(tmp_path):
    """torch's own word for where they are."""
    env = {**os.environ, **open_compile_cache({CACHE_ENV: str(tmp_path)}).env}
    code = (
        "from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir as t; print(cache_dir(), t(0))"
    )
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"]]


def test_what_the_environment_names_stays(tmp_path):
    named = {"TORCHINDUCTOR_CACHE_DIR": "/a", CACHE_ENV: str(tmp_path)}
    assert list(open_compile_cache(named).env) == ["TRITON_CACHE_DIR"]
    assert open_compile_cache({**named, "TRITON_CACHE_DIR": "/b"}).env == {}


def test_a_variable_that_is_set_to_nothing_names_no_folder(tmp_path):
    empty = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "", CACHE_ENV: str(tmp_path)}
    assert set(open_compile_cache(empty).env) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/torchferry"),
        ({"XDG_CACHE_HOME": ""}, "~/.cache/torchferry"),
        ({"XDG_CACHE_HOME": "x"}, "~/.cache/torchferry"),
    ],
)
@pytest.mark.skipif(sys.platform == "darwin", reason="caches lie elsewhere")
def test_without_a_deployer_it_lies_among_the_users_caches(environ, place):
    assert caches.cache_root(environ) == Path(place).expanduser()


def test_cache_that_cannot_be_made_costs_a_note_only(tmp_path):
    (tmp_path / "file").touch()
    cache = open_compile_cache({CACHE_ENV: str(tmp_path / "file")})
    assert cache.note is not None
    instead = Path(cache.env["TORCHINDUCTOR_CACHE_DIR"])  # not the compiler's own, which anybody could have made
    assert instead.stat().st_mode & 0o777 == 0o700 and Path(cache.env["TRITON_CACHE_DIR"]).parent == instead
    assert str(tmp_path / "file") in cache.note


def test_full_disk_is_no_cache(tmp_path):
    with pytest.raises(CacheError, match="MiB are free for"):
        make_private(tmp_path / "a", room_bytes=1 << 62)


def test_folder_that_others_can_write_into_is_not_used(tmp_path):
    tmp_path.chmod(0o777)  # who writes there could have it executed
    with pytest.raises(CacheError, match="others can write"):
        make_private(tmp_path)


def test_folder_that_others_could_put_another_one_in_the_place_of_is_not_used(tmp_path):
    root = tmp_path / "cache"
    make_private(root / "compile" / "a", below=root)
    root.chmod(0o1777)  # as /tmp
    make_private(root / "compile" / "a", below=root)
    (root / "compile").chmod(0o777)
    with pytest.raises(CacheError, match=rf"{root}/compile is another user's, or others can write"):
        make_private(root / "compile" / "a", below=root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_folder_below_another_users_is_not_used(tmp_path):
    root = tmp_path / "cache"
    make_private(root / "compile" / "a", below=root)
    os.chown(root, 65534, -1)
    with pytest.raises(CacheError, match="is another user's"):
        make_private(root / "compile" / "a", below=root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_own_caches_below_another_users_folder_are_not_used(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, -1)
    cache = open_compile_cache({"XDG_CACHE_HOME": str(tmp_path / "theirs" / "mine")})
    assert cache.note is not None and f"{tmp_path}/theirs is another user's" in cache.note
    assert not Path(cache.env["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_own_caches_below_a_folder_of_another_group_are_not_used(tmp_path):
    (tmp_path / "lab").mkdir()
    os.chown(tmp_path / "lab", 0, 65534)
    (tmp_path / "lab").chmod(0o775)
    cache = open_compile_cache({"XDG_CACHE_HOME": str(tmp_path / "lab" / "mine")})
    assert cache.note is not None and f"{tmp_path}/lab is another user's, or others can write" in cache.note
    os.chown(tmp_path / "lab", 0, 0)
    assert open_compile_cache({"XDG_CACHE_HOME": str(tmp_path / "lab" / "mine")}).note is None


NO_HOME = """
import os, pwd
from trainer.start.caches import open_compile_cache
os.environ.pop("HOME", None)
os.setuid(max(entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid < 60000) + 1)
print(open_compile_cache({}))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes a user that nobody knows")
def test_user_without_a_home_has_no_cache_and_no_folder_called_tilde(tmp_path):
    tmp_path.chmod(0o777)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", NO_HOME], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, "there is no home folder" in done.stdout, list(tmp_path.iterdir())) == (0, True, [])


@pytest.mark.parametrize(
    ("values", "caches_it"),
    [
        ({"target": {"device": "cpu"}}, False),
        ({"target": {"device": "cpu"}, "parallel": {"compile": True}}, True),
        ({"target": {"device": "cuda"}}, True),
        ({"target": {"env": {"TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b"}}}, False),
    ],
)
def test_ranks_that_may_compile_get_the_cache_unless_the_config_names_one(values, caches_it, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    for name in (caches.COMPILER_ENV, caches.TRITON_ENV):
        monkeypatch.delenv(name, raising=False)
    env = compile_cache(config_from_dict(values))
    assert (bool(env), (tmp_path / "cache").exists()) == (caches_it, caches_it)


@pytest.fixture
def bare_package(tmp_path) -> Path:
    """A package as an image installs it: no bytecode, and a Python that is told to write none."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("x = 1\n")
    return tmp_path / "site"


IMPORT = """
import os, sys
from importlib.util import find_spec
from trainer.start.caches import use_bytecode_cache
use_bytecode_cache(find_spec("torch"), os.environ)
import torch
print(torch.__cached__, os.environ.get("PYTHONPYCACHEPREFIX"), os.path.exists(torch.__cached__))
"""


def import_with(site: Path, **env: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {**kept, "PYTHONPATH": f"{site}:{REPO}", **env}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bytecode_that_nobody_would_keep_is_kept_with_the_caches(bare_package, tmp_path):
    cache = tmp_path / "cache"
    for _ in range(2):  # the first start writes it, the second one finds it
        where, prefix, exists = import_with(bare_package, PYTHONDONTWRITEBYTECODE="1", **{CACHE_ENV: str(cache)})
        assert Path(prefix).parent == cache and Path(prefix).name.startswith("bytecode-")
        assert (Path(where).is_relative_to(prefix), exists) == (True, "True")


def test_bytecode_of_other_packages_in_the_same_place_is_not_taken(bare_package, tmp_path):
    """Two images, one home: their files have the same names, sizes and times."""
    source = bare_package / "torch" / "__init__.py"
    for version in ("1", "2"):
        source.write_text(f"import sys; sys.stdout.write('version {version} ')\n")
        os.utime(source, (1, 1))
        (bare_package / f"torch-{version}.dist-info").mkdir()
        said = import_with(bare_package, PYTHONDONTWRITEBYTECODE="1", **{CACHE_ENV: str(tmp_path / "cache")})
        assert said[:2] == ["version", version]


@pytest.mark.parametrize("env", [{}, {"PYTHONPYCACHEPREFIX": "own"}])
def test_bytecode_that_python_keeps_by_itself_stays_where_it_is(bare_package, tmp_path, env):
    env = {name: str(tmp_path / value) for name, value in env.items()}
    where, prefix, _ = import_with(bare_package, **{CACHE_ENV: str(tmp_path / "cache")}, **env)
    assert (prefix, (tmp_path / "cache").exists()) == (env.get("PYTHONPYCACHEPREFIX", "None"), False)
    assert Path(where).is_relative_to(tmp_path / "own" if env else bare_package)


def test_module_without_a_file_changes_nothing(monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", None)
    caches.use_bytecode_cache(ModuleSpec("torch", None, origin=None), {})
    assert sys.pycache_prefix is None
