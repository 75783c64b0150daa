"""Makes a plan and its shipment from a config and the command line: reads the project and decides; starts nothing."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from deployer.agent.job.plan import Include, Plan
from deployer.agent.python.spec import PythonSpec
from deployer.agent.store.tree import EXECUTABLE, FILE, Entry, root_hash
from deployer.errors import UsageError
from deployer.paths import CLIENT_ROOT, expanded, state_dir
from deployer.plan.env_file import EnvFile, env_file_of
from deployer.plan.first_rows import check_first_rows
from deployer.plan.first_word import check_first_word
from deployer.plan.launch_plan import (
    NOT_REQUESTED,
    TRAINER_REQUIRES,
    Command,
    ConfigText,
    build_plan,
    new_job_id,
    script_of,
    supervised_keys,
    torchrun_hint,
)
from deployer.plan.named_paths import (
    check_named,
    check_stays,
    inside_of,
    is_below,
    keep_of,
    left_out,
    to_include,
    travels,
)
from deployer.plan.options import LaunchSpec, Options
from deployer.plan.setup import make_setup
from deployer.project import manifest
from deployer.project.manifest import Scan, Shipment, hash_file
from deployer.project.walk import Keep
from trainer.schema import Config, as_sources

ASK_TREE_BYTES = 500 * 10**6
ASK_FILE_BYTES = 100 * 10**6
PACKAGES = (b".whl", b".tar.gz")
"""File endings that an installer reads from a folder of wheels."""


@dataclass(frozen=True)
class Prepared:
    """Everything that a launch needs."""

    plan: Plan
    shipment: Shipment
    code: Scan
    payload: dict[str, Any]
    """Values of the job's environment and secrets; they are sent beside the plan and show in no process list."""
    env_file: EnvFile | None = None
    named: tuple[tuple[str, int], ...] = ()
    """Paths that git ignores but that are sent because the config names them, with their bytes."""
    wheels: tuple[str, int] | None = None
    """The folder of --wheels, and its number of packages."""


def prepare(spec: LaunchSpec, *, options: Options, project: Path) -> Prepared:
    """Reads the project and decides the plan. Raises UsageError if it would not send a file that the job needs."""
    config, command = spec.config, spec.command
    paths = _include_paths((*config.files, *options.include))
    # an included folder is sent whole, an included link as its target: neither is also part of the code
    env_file = env_file_of(config.target.env_file, project)
    hidden = _paths_of(env_file, project, paths)
    code = manifest.scan(project, hash_cache=_hash_cache(), included=[*paths, *hidden])
    own_trainer = (project / "train.py").is_file() and (project / "trainer" / "__init__.py").is_file()
    warnings, named = [], dict[str, bool]()
    if command is None:
        warnings = check_named(config, project)
        named = to_include(config, project, code=code, includes=paths, hidden=hidden)
    asked_for = paths
    if named:
        paths = _include_paths((*paths, *named))
        if any(is_below(entry.path.removeprefix("code/"), named) for entry in code.entries):
            code = manifest.scan(project, hash_cache=_hash_cache(), included=[*paths, *hidden])
    how: dict[str, Any] = {"project": project, "code": code, "asked": asked_for, "hidden": hidden}
    keeps = {path: keep_of(path, whole=whole, **how) for path, whole in named.items()}
    includes = {path: _scan_include(project, path, keeps.get(path), options.include) for path in paths}
    # a link on the path of an included file becomes the folder that contains it
    entries = [e for e in code.entries if not any(is_below(path, [e.path.removeprefix("code/")]) for path in includes)]
    lib_entries, lib_sources = _client_trainer() if command is None and not own_trainer else ([], {})
    entries += lib_entries
    sources = code.sources | lib_sources
    if command is not None:
        warnings = _check_program(command, project, code=code, includes=list(includes))
    elif options.text is not None:
        check_first_rows(config, project)
    wheels = _scan_wheels(options.wheels, project) if options.wheels else None
    warnings += [f"--include {path}: {warning}" for path, scan in includes.items() for warning in scan.warnings]
    warnings += [f"--wheels {options.wheels}: {warning}" for warning in (wheels.warnings if wheels else ())]
    code = replace(code, warnings=(*code.warnings, *warnings))
    files = _hashes(project, entries, includes)
    python = python_spec(config, command, project=project, files=files, named=options.requirements)
    apart = [*includes.values(), *([wheels] if wheels else [])]
    shipment = _shipment(entries, sources, apart)
    payload = payload_of(config, env_file)
    setup, timeout_s = config.target.setup, config.target.setup_timeout_s
    plan = build_plan(
        config,
        job_id=new_job_id(config.run.name),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tree=root_hash(entries),
        own_trainer=own_trainer,
        command=command,
        python=python._replace(explicit=config.target.python, wheels=root_hash(wheels.entries) if wheels else None),
        includes=[
            Include(path, root_hash(scan.entries), (project / path).is_file()) for path, scan in includes.items()
        ],
        allow_busy=options.allow_busy,
        restrict_gpus=command is None or "target.gpu_ranks" in options.keys or options.config is not None,
        text=None if command else _text_of(spec, to_another=own_trainer and project.resolve() != CLIENT_ROOT),
        setup=make_setup(setup, timeout_s, files) if setup else None,
    )
    plan = plan._replace(secret_names=tuple(sorted(payload.get("secrets", ()))))
    sizes = tuple((path, includes[path].total_bytes) for path in named if path in includes)
    packages = (str(options.wheels), len(wheels.entries)) if wheels else None
    return Prepared(plan, shipment, code, payload, env_file, sizes, packages)


def _scan_wheels(folder: str, project: Path | None = None) -> Scan:
    """The packages in a folder, as pip and uv look for them there, and no other files. A relative path is below the
    project, else below the current folder. In the project, no link may lead out."""
    path = (project or Path()) / folder
    if not path.is_dir():
        raise UsageError(f"--wheels {folder} is no folder of this machine")
    real, top = path.resolve(), (project or Path()).resolve()

    def keep(inner: bytes, target: bytes, is_dir: bool) -> bool:
        if is_dir or not inner.endswith(PACKAGES):
            return False
        if real.is_relative_to(top) and inside_of(Path(os.fsdecode(target)), top) is None:
            raise UsageError(f"--wheels {folder} has a link out of the project: {os.fsdecode(inner)}")
        return True

    return manifest.scan_include(path, hash_cache=_hash_cache(), keep=keep)


def _shipment(entries: Sequence[Entry], sources: Mapping[str, str], apart: Sequence[Scan]) -> Shipment:
    trees, found = {root_hash(entries): tuple(sorted(entries))}, dict(sources)
    for scan in apart:
        trees[root_hash(scan.entries)] = scan.entries
        found |= scan.sources
    return Shipment(trees, found)


def _hashes(project: Path, entries: Sequence[Entry], includes: Mapping[str, Scan]) -> dict[str, str]:
    """Path in the project -> hash, of every file that is sent."""
    files = {entry.path.removeprefix("code/"): entry.hash for entry in entries}
    for path, scan in includes.items():
        alone = (project / path).is_file()
        files |= {path if alone else f"{path}/{entry.path}": entry.hash for entry in scan.entries}
    return files


def _paths_of(env_file: EnvFile | None, project: Path, includes: Sequence[str]) -> list[str]:
    """The env file's own paths in the project. Raises UsageError if an included folder would send it."""
    paths = env_file.paths_below(project) if env_file is not None else []
    for path in paths:
        if include := next((one for one in includes if is_below(path, [one])), None):
            raise UsageError(f"--include {include} would send the env file {path}", hint="keep it outside that folder")
    return paths


DECIDED = ("target.gpu_ranks", "target.train_backend", "target.device")
"""Keys that decide a job's command: its trainer must have the same values."""


def _text_of(spec: LaunchSpec, *, to_another: bool) -> ConfigText:
    """The config.yaml for the trainer: the whole config for this client's trainer. The project's own trainer may not
    have some of these keys, or have other defaults. It gets only the keys that were given, without those that the host
    carries out."""
    from trainer.config.load import config_to_yaml, known_keys

    keys = frozenset(known_keys())
    if to_another:
        keys = frozenset((*DECIDED, *spec.given)) - {*supervised_keys(), *NOT_REQUESTED}
    # values of --env are not in it: the plan has their names, and the job's environment the values
    config = replace(spec.config, target=replace(spec.config.target, env={}, env_file=None, ssh=None, after=[]))
    return ConfigText(config_to_yaml(config, keys), keys, given_alone=to_another)


class Question(NamedTuple):
    """A question to the user before anything is sent."""

    text: str
    hint: str


def unusual_project(project: Path) -> Question | None:
    """The question before reading a folder that users rarely want to send; None for any other folder."""
    if project.resolve() in (expanded("~").resolve(), Path("/")):
        what = f"the project is the folder you are in, {project}: everything in it would be sent"
        return Question(what, "run it in the project's own folder, or pass --yes")
    return None


def large_files(code: Scan) -> Question | None:
    """The question before sending a very large tree; None for any other tree."""
    named = [(path, f"{path} ({size / 1e6:,.0f} MB)", size) for path, size in code.largest]
    if big := [entry for entry in named if entry[2] > ASK_FILE_BYTES]:
        text = f"the project has files over {ASK_FILE_BYTES // 10**6} MB: "
    elif code.total_bytes > ASK_TREE_BYTES:
        big, text = named[:3], f"the project is {code.total_bytes / 1e6:,.0f} MB; its largest files: "
    else:
        return None
    options = " ".join(f"--include {shlex.quote(path)}" for path, _, _ in big)
    hint = f"{options} sends them once for all jobs; lines in .deployignore leave them out; --yes sends all as it is"
    return Question(text + ", ".join(line for _, line, _ in big), hint)


def python_spec(
    config: Config, command: Command | None, *, project: Path, files: Mapping[str, str], named: str | None = None
) -> PythonSpec:
    """The packages of the job's interpreter: the trainer's, or those that the project's files require.

    `files`: those that are sent, with their hashes. `named`: the file that --requirements names. A trainer's
    environment also gets the packages of the project's requirements.txt. An existing interpreter does not have to have
    them, unless the file is named.
    """
    spec = PythonSpec()
    if named or any(
        (project / name).is_file() for name in ("requirements.txt", "pyproject.toml")[: 2 if command else 1]
    ):
        from deployer.environment.choose import read_needs  # a launch without requirements does not wait for it
        from deployer.environment.needs import Tree

        spec = read_needs(Tree(project.resolve(), files), named).spec()
    if command is None:
        spec = spec if named else PythonSpec(lock=spec.lock, key=spec.key, variables=spec.variables)
        return spec._replace(requires=(*spec.requires, *_of_trainer(config)))
    listed = any(re.match(r"(?i)torch\s*([^\w\s.-]|$)", text) for text in (*spec.requires, *spec.locked))
    return spec._replace(requires=(*(["torch>=2.0"] if command.torchrun and not listed else []), *spec.requires))


def _of_trainer(config: Config) -> tuple[str, ...]:
    from trainer.config.data import ROW_SUFFIXES

    data = [source.path for source in as_sources([*config.data.train, *config.data.eval])]
    hub = [d for d in data if not d.startswith("builtin:") and not d.endswith((*ROW_SUFFIXES, ".parquet"))]
    arrow = any(d.endswith((".parquet", ".zst")) for d in data)
    torchao = config.optim.optimizer == "adamw8bit" or config.train.float8 != "off"
    extra = {"datasets>=3.0": hub, "pyarrow": arrow, "torchao>=0.14": torchao}
    extra |= dict.fromkeys(config.run.trackers, True)
    return (*TRAINER_REQUIRES, *(name for name, needed in extra.items() if needed))


def payload_of(config: Config, env_file: EnvFile | None = None) -> dict[str, Any]:
    """Values of the job's environment and secrets; a value that is given wins over the env file. Raises UsageError if
    this shell does not have a secret."""
    missing = [name for name in config.target.secrets if name not in os.environ]
    if missing:
        what = f"the secret {missing[0]} is" if len(missing) == 1 else f"the secrets {', '.join(missing)} are"
        values = "its value goes" if len(missing) == 1 else "their values go"
        raise UsageError(
            f"{what} not set in this shell", hint=f"export {missing[0]}=… first; {values} to the job's environment only"
        )
    secrets = {name: os.environ[name] for name in config.target.secrets}
    if env_file is not None:
        secrets = {**env_file.without(config.target.env).variables, **secrets}
    return {"env": dict(config.target.env), "secrets": secrets} if config.target.env or secrets else {}


# --- what is sent -----------------------------------------------------------------------------------------------------


def _hash_cache() -> Path:
    return state_dir() / "hashes"


def _client_trainer() -> tuple[list[Entry], dict[str, str]]:
    """This client's own trainer, below `lib/`."""
    scan = manifest.scan(CLIENT_ROOT / "trainer", prefix="lib/trainer/", hash_cache=None)
    train = CLIENT_ROOT / "train.py"
    digest, size = hash_file(os.fsencode(train))
    mode = EXECUTABLE if os.access(train, os.X_OK) else FILE
    entry = Entry("lib/train.py", mode, size, digest)
    return [*scan.entries, entry], {**scan.sources, digest: str(train)}


def _include_paths(paths: Sequence[str]) -> list[str]:
    """The plain form of each path, once, without paths below another one."""
    plain = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    return [path for path in plain if not is_below(path, [other for other in plain if other != path])]


def _scan_include(project: Path, path: str, keep: Keep | None, by_user: Sequence[str]) -> Scan:
    if path == ".":
        raise UsageError("--include . is the project, which travels anyway", hint="leave --include . out")
    if os.path.isabs(path) or path == ".." or path.startswith("../"):  # noqa: PTH117
        name = shlex.quote((project / path).resolve().name or "root")
        raise UsageError(
            f"--include {path} is not below the project {project}",
            hint=f"ln -s {shlex.quote(path)} {name}, then --include {name}: its target travels",
        )
    if not is_below(path, map(os.path.normpath, by_user)):
        check_stays(path, project)
    return manifest.scan_include(project / path, hash_cache=_hash_cache(), keep=keep)


def _check_program(command: Command, project: Path, *, code: Scan, includes: Sequence[str]) -> list[str]:
    """Raises UsageError for a program that cannot start on the host: the user should see that here, not there minutes
    later. Returns warnings for what will hardly run."""
    if command.torchrun and command.argv[0] in ("torchrun", "accelerate"):
        what = f"--torchrun starts torchrun itself, so {command.argv[0]} cannot be the program"
        raise UsageError(what, hint=torchrun_hint(command.argv))
    script = script_of(command)
    if script is None and not command.torchrun:
        modes = {entry.path.removeprefix("code/"): entry.mode for entry in code.entries}
        return check_first_word(command.argv, modes=modes, project=project)
    if script is None or os.path.isabs(script):  # noqa: PTH117
        return []
    clean = os.path.normpath(script)
    if clean == "." or travels(clean, code, includes):
        return []
    if code.why_ignored(clean):
        raise left_out(script, code)
    names = [entry.path.removeprefix("code/") for entry in code.entries if entry.path.endswith(".py")]
    near = difflib.get_close_matches(clean, names, n=1)
    raise UsageError(
        f"{script} is not among the files that are sent: Torchferry sends the folder you are in",
        hint=f"did you mean {near[0]}?" if near else "run this command in the project's folder",
    )
