"""From a config and the command line to a plan and its shipment: reads the project, decides, starts nothing."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deployer.agent.job.plan import Include, Plan
from deployer.agent.python.spec import PythonSpec
from deployer.agent.store.tree import EXECUTABLE, FILE, Entry, root_hash
from deployer.errors import UsageError
from deployer.paths import CLIENT_ROOT, state_dir
from deployer.plan.launch_plan import (
    NOT_REQUESTED,
    TRAINER_REQUIRES,
    Command,
    ConfigText,
    build_plan,
    new_job_id,
    script_of,
    supervised_keys,
)
from deployer.plan.options import Asked, Options
from deployer.project import manifest
from deployer.project.manifest import Scan, Shipment, hash_file
from trainer.schema import Config, as_sources

ASK_TREE_BYTES = 500 * 10**6
ASK_FILE_BYTES = 100 * 10**6


@dataclass(frozen=True)
class Prepared:
    """All that a launch needs, decided."""

    plan: Plan
    shipment: Shipment
    code: Scan
    payload: dict[str, Any]
    """Values of the job's environment and secrets; they travel beside the plan and show in no process list."""


def prepare(asked: Asked, *, options: Options, project: Path) -> Prepared:
    """Reads the project's tree and decides the plan. UsageError when something that the job needs would not travel."""
    config, command = asked.config, asked.command
    code = manifest.scan(project, hash_cache=_hash_cache())
    own_trainer = (project / "train.py").is_file() and (project / "trainer" / "__init__.py").is_file()
    includes = {path: _scan_include(project, path) for path in _include_paths((*config.files, *options.include))}
    # an included folder comes whole, and an included link as its target: neither is also part of the code
    entries = [entry for entry in code.entries if not _is_below(entry.path.removeprefix("code/"), includes)]
    sources = dict(code.sources)
    if command is None and not own_trainer:
        lib_entries, lib_sources = _client_trainer()
        entries += lib_entries
        sources |= lib_sources
    if command is None:
        remote = config.target.ssh is not None
        _check_data_paths(config, project, code=code, includes=list(includes), remote=remote)
        code = replace(code, warnings=(*code.warnings, *(_not_shipped(config, project) if remote else [])))
    else:
        _check_program(command, code=code, includes=list(includes))
    if options.wheels and not Path(options.wheels).is_dir():
        raise UsageError(f"--wheels {options.wheels} is no folder of this machine")
    wheels = manifest.scan_include(Path(options.wheels), hash_cache=_hash_cache()) if options.wheels else None
    trees = {root_hash(entries): tuple(sorted(entries))}
    for scan in (*includes.values(), *([wheels] if wheels else [])):
        trees[root_hash(scan.entries)] = scan.entries
        sources |= scan.sources
    payload = payload_of(config)
    plan = build_plan(
        config,
        job_id=new_job_id(config.run.name),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tree=root_hash(entries),
        own_trainer=own_trainer,
        command=command,
        python=PythonSpec(
            explicit=config.target.python,
            requires=requirements(config, command, project=project),
            lock="requirements.txt" if (project / "requirements.txt").is_file() else None,
            wheels=root_hash(wheels.entries) if wheels else None,
        ),
        includes=[
            Include(path, root_hash(scan.entries), (project / path).is_file()) for path, scan in includes.items()
        ],
        allow_busy=options.allow_busy,
        restrict_gpus=command is None or "target.gpu_ranks" in options.keys or options.config is not None,
        text=None if command else _text_of(asked, to_another=own_trainer and project.resolve() != CLIENT_ROOT),
    )
    return Prepared(plan, Shipment(trees, sources), code, payload)


DECIDED = ("target.gpu_ranks", "target.train_backend", "target.device")
"""What a job's command follows from: its trainer has to see it in the same way."""


def _text_of(asked: Asked, *, to_another: bool) -> ConfigText:
    """The whole config for this client's trainer. Another one, that of the project, may lack some of these keys, or
    have other defaults: it gets what was given, without what the host carries out by itself."""
    from trainer.config.load import config_to_yaml, known_keys

    keys = frozenset(known_keys())
    if to_another:
        keys = frozenset((*DECIDED, *asked.given)) - {*supervised_keys(), *NOT_REQUESTED}
    # values of --env stay out of it: the plan names them, the job's environment holds them
    config = replace(asked.config, target=replace(asked.config.target, env={}, ssh=None))
    return ConfigText(config_to_yaml(config, keys), keys, given_alone=to_another)


def unusual_project(project: Path) -> str | None:
    """What to ask before reading a folder that hardly anybody means to send; None for a usual one."""
    if project.resolve() in (Path.home().resolve(), Path("/")):
        return f"the project is the folder you are in, {project}: everything in it would be sent"
    return None


def large_files(code: Scan) -> str | None:
    """What to ask before sending a tree that is surprisingly large; None for a usual one."""
    big = [f"{path} ({size / 1e6:,.0f} MB)" for path, size in code.largest if size > ASK_FILE_BYTES]
    if big:
        return f"the code tree holds files over {ASK_FILE_BYTES // 10**6} MB: {', '.join(big)}"
    if code.total_bytes > ASK_TREE_BYTES:
        top = ", ".join(f"{path} ({size / 1e6:,.0f} MB)" for path, size in code.largest[:3])
        return f"the code tree is {code.total_bytes / 1e6:,.0f} MB; its largest files: {top}"
    return None


def requirements(config: Config, command: Command | None, *, project: Path) -> tuple[str, ...]:
    """What the job's interpreter must have: the trainer's packages, or those of the project's requirements.txt."""
    if command is None:
        from trainer.config.data import ROW_SUFFIXES

        data = [source.path for source in as_sources([*config.data.train, *config.data.eval])]
        hub = [d for d in data if not d.startswith("builtin:") and not d.endswith((*ROW_SUFFIXES, ".parquet"))]
        arrow = any(d.endswith((".parquet", ".zst")) for d in data)
        torchao = config.optim.optimizer == "adamw8bit" or config.train.float8 != "off"
        extra = {"datasets>=3.0": hub, "pyarrow": arrow, "torchao>=0.14": torchao}
        extra |= dict.fromkeys(config.run.trackers, True)
        return (*TRAINER_REQUIRES, *(name for name, needed in extra.items() if needed))
    listed = _requirement_lines(project / "requirements.txt")
    named = any(re.match(r"(?i)torch\s*([^\w\s.-]|$)", line) for line in listed)
    return (*(["torch>=2.0"] if command.torchrun and not named else []), *listed)


def _requirement_lines(path: Path) -> list[str]:
    """The plain requirements of a file; options and links cannot be checked by name and are left to the installer."""
    if not path.is_file():
        return []
    lines = (line.split(" #")[0].strip() for line in path.read_text(errors="replace").splitlines())
    return [line for line in lines if re.match(r"[A-Za-z0-9]", line) and "://" not in line and " --" not in line]


def payload_of(config: Config) -> dict[str, Any]:
    """Values of the job's environment and secrets. UsageError with every secret that this shell has not."""
    missing = [name for name in config.target.secrets if name not in os.environ]
    if missing:
        what = f"the secret {missing[0]} is" if len(missing) == 1 else f"the secrets {', '.join(missing)} are"
        values = "its value goes" if len(missing) == 1 else "their values go"
        raise UsageError(
            f"{what} not set in this shell", hint=f"export {missing[0]}=… first; {values} to the job's environment only"
        )
    secrets = {name: os.environ[name] for name in config.target.secrets}
    return {"env": dict(config.target.env), "secrets": secrets} if config.target.env or secrets else {}


# --- what travels -----------------------------------------------------------------------------------------------------


def _hash_cache() -> Path:
    return state_dir() / "hashes"


def _client_trainer() -> tuple[list[Entry], dict[str, str]]:
    """The trainer that came with this client, below `lib/`."""
    scan = manifest.scan(CLIENT_ROOT / "trainer", prefix="lib/trainer/", hash_cache=None)
    train = CLIENT_ROOT / "train.py"
    digest, size = hash_file(os.fsencode(train))
    mode = EXECUTABLE if os.access(train, os.X_OK) else FILE
    entry = Entry("lib/train.py", mode, size, digest)
    return [*scan.entries, entry], {**scan.sources, digest: str(train)}


def _include_paths(paths: Sequence[str]) -> list[str]:
    """The paths in their plain form, each once, without those below another one."""
    plain = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    return [path for path in plain if not _is_below(path, [other for other in plain if other != path])]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _scan_include(project: Path, path: str) -> Scan:
    if os.path.isabs(path) or path.startswith("..") or path == ".":  # noqa: PTH117
        raise UsageError(
            f"--include {path} is not below the project {project}",
            hint="link it into the project (ln -s) and include the link: its target travels",
        )
    return manifest.scan_include(project / path, hash_cache=_hash_cache())


def _not_shipped(config: Config, project: Path) -> Iterator[str]:
    """A line for each path of the config that the host itself must have."""
    from trainer.config.load import local_data_paths

    for path in local_data_paths(config, root=project):
        if _is_hosts_own(path):
            yield f"{path} is not part of the project and does not travel: the host must have it"


def _is_hosts_own(path: str) -> bool:
    return os.path.isabs(path) or path.startswith("~")  # noqa: PTH117


def _check_data_paths(config: Config, project: Path, *, code: Scan, includes: Sequence[str], remote: bool) -> None:
    from trainer.config.load import local_data_paths

    for path in local_data_paths(config, root=project):
        if _is_hosts_own(path):
            if not remote and not Path(path).expanduser().exists():
                raise UsageError(f"{path}: no such file or folder")
            continue
        clean = os.path.normpath(path)
        if not (project / clean).exists():
            raise UsageError(f"{path}: no such file or folder in {project}")
        if not _travels(clean, code, includes):
            raise _left_out(path, code, hint=f" (or files=[{path!r}] in the config)")


def _travels(clean: str, code: Scan, includes: Sequence[str]) -> bool:
    """Whether a file or folder of the project (its plain relative path) is part of what is sent."""
    return _is_below(clean, includes) or any(_is_below(e.path.removeprefix("code/"), [clean]) for e in code.entries)


def _left_out(path: str, code: Scan, *, hint: str = "") -> UsageError:
    reason = code.why_ignored(os.path.normpath(path))
    why = f" ({reason.pattern} in {reason.source})" if reason else ""
    return UsageError(
        f"{path} is left out of the code tree{why}", hint=f"ship it once, by hash, with --include {path}{hint}"
    )


def _check_program(command: Command, *, code: Scan, includes: Sequence[str]) -> None:
    """UsageError for a program that cannot start on the host: that must show here, not there, minutes later."""
    _check_first_word(command)
    script = script_of(command)
    if script is None or os.path.isabs(script):  # noqa: PTH117
        return
    clean = os.path.normpath(script)
    if clean == "." or _travels(clean, code, includes):
        return
    if code.why_ignored(clean):
        raise _left_out(script, code)
    names = [entry.path.removeprefix("code/") for entry in code.entries if entry.path.endswith(".py")]
    near = difflib.get_close_matches(clean, names, n=1)
    raise UsageError(
        f"{script} is not in the code tree, which is the folder you are in",
        hint=f"did you mean {near[0]}?" if near else "run this in the project's folder",
    )


def _check_first_word(command: Command) -> None:
    first = command.argv[0]
    if command.torchrun and first in ("torchrun", "accelerate"):
        own = next((n for n, word in enumerate(command.argv) if word.endswith(".py")), None)
        program = shlex.join(command.argv[own:]) if own else "train.py ARGS"
        raise UsageError(
            f"--torchrun starts torchrun itself, so {first} cannot be the program",
            hint=f"--torchrun --gpus 0,1 -- {program}, one process for each GPU",
        )
    if not command.torchrun and first.endswith(".py") and "/" not in first:
        words = shlex.join(command.argv)
        raise UsageError(f"{first} is no program", hint=f"-- python {words}, or --torchrun --gpus 0,1 -- {words}")
