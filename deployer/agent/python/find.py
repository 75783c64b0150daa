"""Finds the Python that runs the job: one of the host's that meets the job's requirements, else an environment built
once.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..host.errors import AgentError
from ..host.files import blake2b, write_whole
from ..host.layout import AGENT_DIR, Root
from ..host.typed import InvalidData, parse, read_typed, to_json
from .build import MISSING_HINT, Building, Interpreter, note
from .spec import PythonSpec

CHECK_TIMEOUT_S = 60
_CHECK = os.path.join(AGENT_DIR, "checkpy.py")
_USUAL = (
    "/opt/conda/bin/python",
    "/opt/venv/bin/python",
    "/venv/main/bin/python",
    "/usr/local/bin/python3",
    "/usr/bin/python3",
)
_KEPT_ANSWERS = 64
_KEPT_FAILURES, _LINE = 3, 200
_NO_CAUSE = ("Current thread", "<no Python frame>")
"""Last lines of a fatal Python error that are not its cause."""


def resolve_python(spec: PythonSpec, code_dir: str, root: Root, env: Dict[str, str], log: BinaryIO) -> str:
    """The absolute path of the job's interpreter.

    `spec`: as in the plan, but its `wheels` is a folder of this host. An explicit interpreter must meet everything that
    can be checked. Otherwise the first interpreter of the host that meets everything is used. Otherwise an environment
    is built from the lock (a file of code_dir) and `requires`; its output goes to `log`. Raises AgentError with what is
    missing.
    """
    if spec.explicit:
        if spec.unchecked:
            note(log, "--python is taken at its word for " + ", ".join(spec.unchecked))
        return find_python(spec, env=env, root=root)
    unchecked = spec.unchecked
    if spec.lock and not spec.key and not spec.requires:  # of an older client, that sent what it could not read as this
        unchecked = (spec.lock,)
    with _Answers(root) as answers:
        found = [_lacking(i, unchecked) for i in _inspect_all(spec, env, answers, stop=not unchecked)]
        why = answers.why_none()
    fitting = [i.path for i in found if not i.unmet]
    if fitting:
        return fitting[0]
    if not found:
        raise AgentError(
            "host", "no Python 3.8 or newer runs on this host" + why, "install one, or name it with --python P"
        )
    return Building(spec, code_dir, root, env, log).environment(found)


def find_python(spec: PythonSpec, *, env: Dict[str, str], root: Root) -> str:
    """As resolve_python, but only among existing interpreters. Raises AgentError with what each of them lacks."""
    with _Answers(root) as answers:
        if spec.explicit:
            return _explicit(spec.explicit, spec, env, answers)
        found = []
        for interpreter in _inspect_all(spec, env, answers, stop=not spec.unchecked):
            interpreter = _lacking(interpreter, spec.unchecked)
            if not interpreter.unmet:
                return interpreter.path
            found.append(interpreter)
        lacking = "; ".join(map(str, found[:3])) or "no Python 3.8 or newer runs here" + answers.why_none()
    raise AgentError("host", "no interpreter of this host has what the job needs: " + lacking, MISSING_HINT)


def _lacking(interpreter: Interpreter, unchecked: Sequence[str]) -> Interpreter:
    unmet = [*interpreter.unmet, *("%s (cannot be checked)" % what for what in unchecked)]
    return interpreter._replace(unmet=unmet)


def _explicit(path: str, spec: PythonSpec, env: Dict[str, str], answers: "_Answers") -> str:
    wanted = os.path.expanduser(path)
    if os.path.isdir(wanted):
        wanted = os.path.join(wanted, "bin", "python")
    import shutil  # a supervisor starts without it

    located = shutil.which(wanted, path=env.get("PATH", os.defpath))
    if located is None:
        raise AgentError("host", "%s does not exist on this host (--python)" % path, "name an interpreter of the host")
    interpreter = answers.inspect(os.path.abspath(located), spec, env)
    if interpreter is None:
        text = "--python %s does not run as Python 3.8 or newer" % path
        raise AgentError("host", text + answers.why_none(), "name another interpreter, or mend this one")
    if interpreter.unmet:
        raise AgentError("host", "--python " + str(interpreter), "install that there, or leave --python out")
    return interpreter.path


def list_pythons(names: Sequence[str], *, env: Dict[str, str], root: Root) -> List[Tuple[str, str, Dict[str, str]]]:
    """(path, Python's version, {distribution: version}) for each of the host's interpreters, all asked at the same
    time."""
    from concurrent.futures import ThreadPoolExecutor

    with _Answers(root) as answers, ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda path: answers.ask(path, PythonSpec(requires=tuple(names)), env), candidates(env))
        found = [answer for answer in asked if answer]
    return [(answer.executable, answer.version, answer.found) for answer in found]


def candidates(env: Dict[str, str]) -> List[str]:
    """Paths of the host's interpreters, the session's own environment first, each interpreter once."""
    search = env.get("PATH", os.defpath)
    own = [os.path.join(env[name], "bin", "python") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    on_path = [os.path.join(folder, name) for folder in search.split(os.pathsep) for name in ("python3", "python")]
    paths, seen = [], set()
    for path in own + on_path + list(_USUAL) + [sys.executable]:
        # a venv's python is a link to its base, so the folder distinguishes them
        identity = (os.path.realpath(os.path.dirname(path)), os.path.realpath(path))
        if os.path.isabs(path) and os.access(path, os.X_OK) and identity not in seen:
            seen.add(identity)
            paths.append(os.path.abspath(path))
    return paths


def _inspect_all(
    spec: PythonSpec, env: Dict[str, str], answers: "_Answers", *, stop: bool = True
) -> Iterator[Interpreter]:
    """The host's interpreters with what they lack. `stop`: end at the first that lacks nothing."""
    for path in candidates(env):
        interpreter = answers.inspect(path, spec, env)
        if interpreter is not None:
            yield interpreter
            if stop and not interpreter.unmet:
                return


class _Answer(NamedTuple):
    """The output of `checkpy.py`."""

    executable: str
    version: str
    python_fits: bool
    unmet: List[str]
    folders: List[str]
    found: Dict[str, str]


class _Known(NamedTuple):
    """A stored answer, and the modification times on which it depends."""

    times: Dict[str, int]
    answer: _Answer


class _Answers:
    """The interpreters' answers, stored in `envs/resolved.json` as long as neither the interpreters nor their package
    folders change: starting interpreters takes most of a launch's time here."""

    def __init__(self, root: Root) -> None:
        self._file = os.path.join(root.envs, "resolved.json")
        self._known: Dict[str, _Known] = {}
        self._changed = False
        self._failures = []  # type: List[str]  # of interpreters that do not run, with what they said last

    def why_none(self) -> str:
        """The errors of interpreters that do not work; "" if there was none."""
        return "".join([": ", "; ".join(self._failures[:_KEPT_FAILURES])] if self._failures else [])

    def __enter__(self) -> "_Answers":
        with suppress(OSError, InvalidData):
            self._known = read_typed(self._file, Dict[str, _Known])
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._changed:
            return
        kept = dict(list(self._known.items())[-_KEPT_ANSWERS:])
        try:
            os.makedirs(os.path.dirname(self._file), mode=0o700, exist_ok=True)
            write_whole(self._file, json.dumps(to_json(kept)).encode("ascii"))
        except OSError:
            pass  # without it the next launch asks again

    def inspect(self, path: str, spec: PythonSpec, env: Dict[str, str]) -> Optional[Interpreter]:
        """The interpreter at `path`; None if it does not work, or is older than Python 3.8."""
        answer = self.ask(path, spec, env)
        return Interpreter(answer.executable, answer.version, answer.unmet, answer.python_fits) if answer else None

    def ask(self, path: str, spec: PythonSpec, env: Dict[str, str]) -> "Optional[_Answer]":
        """The answer of `checkpy.py` there; None as above."""
        wanted = {"requires": spec.requires + spec.locked, "constraints": spec.constraints, "python": spec.python}
        question = json.dumps(wanted)
        asked = [path, question, env.get("PYTHONPATH"), env.get("PYTHONNOUSERSITE"), env.get("HOME")]
        key = blake2b(json.dumps(asked).encode("ascii"), digest_size=12).hexdigest()
        known = self._known.get(key)
        if known is not None and known.times == _times(known.answer, path):
            return known.answer
        answer, why = _ask(path, question, env)
        if answer is None:
            self._failures.append("%s: %s" % (path, why))
        else:
            self._known.pop(key, None)
            self._known[key] = _Known(_times(answer, path), answer)
            self._changed = True
        return answer


def _times(answer: "_Answer", path: str) -> Dict[str, int]:
    """Modification times of the interpreter and its package folders; 0 for a missing one."""
    return {name: _mtime_ns(name) for name in [path, *answer.folders]}


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _ask(path: str, question: str, env: Dict[str, str]) -> "Tuple[Optional[_Answer], str]":
    """The answer of `checkpy.py` there; or None and the reason, the interpreter's last line."""
    options: Dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": CHECK_TIMEOUT_S}
    try:
        done = subprocess.run([path, _CHECK], input=question.encode("ascii"), env=env, cwd="/", **options)
        return parse(done.stdout.splitlines()[-1], _Answer), ""
    except OSError as e:
        return None, e.strerror or str(e)
    except subprocess.TimeoutExpired:
        return None, "no answer within %d s" % CHECK_TIMEOUT_S
    except (ValueError, LookupError, InvalidData):
        said = done.stderr[-4096:].decode("utf-8", "replace").split("\n")
        words = [line.strip() for line in said if line.strip() and not line.strip().startswith(_NO_CAUSE)]
        return None, words[-1][:_LINE] if words else "exit status %d, without a word" % done.returncode
