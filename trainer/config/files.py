"""Reads a config file: `.py` by running it, YAML by its nodes, with the places of all values. Writes and edits YAML."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, get_origin

from trainer.config.fields import NULL_WORDS, Word
from trainer.config.keys import Places, field_kinds, known_keys, section_of_class, unknown_key
from trainer.errors import COMMAND_LINE, ConfigError, together
from trainer.schema import Config

if TYPE_CHECKING:
    import yaml

YAML_SUFFIXES = (".yaml", ".yml")
MODULE_NAME = "torchferry_config"
MAX_DEPTH = 8  # a config has three levels; an alias that contains itself has no end
MAX_VALUES = 100_000
OPEN_HINT = "check this line and the one above: an open bracket or quote, a missing space after a colon, the indent"
MAX_BYTES = 4 << 20
MAX_PYTHON_BYTES = 256 << 10
LARGE = 8 << 10  # bytes of YAML; up to this the Python loader is quick enough, above it libyaml is faster
MAPPING = "tag:yaml.org,2002:map"
TOO_DEEP = "not a config: nested too deeply"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
OWN_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)
UNKNOWN_KEYWORD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
RAISED_HINTS = {
    "FrozenInstanceError": "configs do not change; give the value to Config(...) or use dataclasses.replace",
    "ModuleNotFoundError": "a config is read on this machine, so what it imports must be installed here",
}


def read_source(path: Path, suffixes: Sequence[str] = (".py", *YAML_SUFFIXES)) -> bytes:
    """The bytes of a config file. Raises ConfigError if it cannot be read."""
    if not path.exists():
        raise ConfigError(f"config {path} does not exist", hint=_nearest_file(path))
    if not path.is_file():  # reading a pipe would block
        what = "a folder" if path.is_dir() else "no regular file"
        raise ConfigError(f"config {path} is {what}", hint=f"name a .py or .yaml file, such as {path / 'NAME.py'}")
    if path.suffix not in suffixes:
        ending = f"ends in {path.suffix}" if path.suffix else "has no suffix"
        raise ConfigError(f"config {path} {ending}", hint="a config is a .py, .yaml or .yml file")
    try:
        with path.open("rb") as f:
            source = f.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from None
    if len(source) > (most := MAX_BYTES if path.suffix in YAML_SUFFIXES else MAX_PYTHON_BYTES):
        raise ConfigError(f"not a config: more than {most >> 10:,} KiB", where=str(path))
    if not source.strip():
        raise ConfigError(f"config {path} is empty")
    return source


def _nearest_file(path: Path) -> str:
    from difflib import get_close_matches

    with contextlib.suppress(OSError):
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".py", *YAML_SUFFIXES)]
        near = get_close_matches(path.name, names, n=1)
        if near:
            return f"did you mean {path.parent / near[0]}?"
    return "check the name" if path.is_absolute() else f"check the name and the folder you are in: {Path.cwd()}"


# --- Python -----------------------------------------------------------------------------------------------------------


def read_python(path: Path) -> tuple[Config, Places]:
    """Run a `.py` config and return its `config`, not yet checked, with the line of every keyword in it.

    A file that cannot define `config` is not run: it may be a user's program, given by mistake. While it runs, its
    folder is importable, and its output goes to stderr, because stdout is for data.
    """
    source = read_source(path)
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise _syntax_error(error, path) from None
    except (RecursionError, MemoryError):
        raise ConfigError(TOO_DEEP, where=str(path)) from None
    if "config" not in (names := bound_names(tree)) and "*" not in names:
        raise _no_config(path, tree)
    places = Places(str(path), {key: f"{path}:{line}" for key, line in keyword_lines(tree).items()})
    module = ModuleType(MODULE_NAME)
    module.__file__ = str(path)
    try:
        with _importable(path.parent.resolve(), module), contextlib.redirect_stdout(sys.stderr):
            exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        raise _raised(error, path, places, tree) from None
    return _defined_config(vars(module), path, tree), places


def _defined_config(names: dict[str, object], path: Path, tree: ast.Module) -> Config:
    if "config" not in names:
        raise _no_config(path, tree)
    config = names["config"]
    if not isinstance(config, Config):
        message = f"config is a {type(config).__name__}, expected a Config"
        raise ConfigError(message, where=str(path), hint="from trainer.schema import Config; config = Config(...)")
    return config


def _no_config(path: Path, tree: ast.Module) -> ConfigError:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    other = [ast.unparse(node.targets[0]) for node in assigned if _called_name(node.value) == "Config"]
    hint = "it must end with: config = Config(...); for a program of your own: deploy.py run -- python FILE"
    if other:
        hint = f"rename {other[0]} to config"
    return ConfigError(f"{path} does not define config", where=str(path), hint=hint)


def bound_names(tree: ast.Module) -> set[str]:
    """The names that running the module may define at its top level; "*" for a star import."""
    names = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if not isinstance(node, OWN_SCOPES):
            nodes += ast.iter_child_nodes(node)
    return names


@contextlib.contextmanager
def _importable(folder: Path, module: ModuleType) -> Iterator[None]:
    """Puts the folder first in sys.path; afterwards restores it and removes the folder's modules from sys.modules."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.modules[MODULE_NAME] = module
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name == MODULE_NAME or (file and Path(file).parent == folder):
                del sys.modules[name]


def keyword_lines(tree: ast.Module) -> dict[str, int]:
    """The line of every keyword in a call of a schema class, by dotted key; keys that are given twice are left out."""
    prefixes = section_of_class()
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        name = _called_name(node)
        if isinstance(node, ast.Call) and name in prefixes:
            found += [(f"{prefixes[name]}{k.arg}", k.value.lineno) for k in node.keywords if k.arg]
    times = Counter(key for key, _ in found)
    return {key: line for key, line in found if times[key] == 1}


def _called_name(node: ast.AST) -> str:
    """The last name in the callee of a call; empty for any other node."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _syntax_error(error: SyntaxError | ValueError, path: Path) -> ConfigError:
    if isinstance(error, SyntaxError):
        where = f"{error.filename or path}:{error.lineno}" if error.lineno else str(path)
        return ConfigError(f"syntax error: {error.msg}", where=where, hint=(error.text or "").strip())
    return ConfigError(f"{path} is not Python: {error}", where=str(path))


def _raised(error: BaseException, path: Path, places: Places, tree: ast.Module) -> ConfigError:
    """The error for an exception that the config's code raised."""
    if isinstance(error, SyntaxError):  # in a module that the config imports
        return _syntax_error(error, path)
    line = _line_in(error.__traceback__, str(path))
    where = f"{path}:{line}" if line else str(path)
    unknown = UNKNOWN_KEYWORD.match(str(error)) if isinstance(error, TypeError) else None
    if unknown and unknown[1] in section_of_class():
        key = f"{section_of_class()[unknown[1]]}{unknown[2]}"
        first = unknown_key(key, Places(where, places.by_key))
        lines = sorted((line, other) for other, line in keyword_lines(tree).items() if other != key)
        known = {*known_keys(), *field_kinds(Config)}
        others = [unknown_key(other, Places(f"{path}:{line}")) for line, other in lines if other not in known]
        return together([first, *others]) or first
    kind = type(error).__name__
    text = str(error) or "without a message"
    return ConfigError(f"the config raised {kind}: {text}", where=where, hint=RAISED_HINTS.get(kind, ""))


def _line_in(trace: TracebackType | None, filename: str) -> int | None:
    lines = [line for frame, line in traceback.walk_tb(trace) if frame.f_code.co_filename == filename]
    return lines[-1] if lines else None


# --- YAML -------------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> tuple[dict[str, object], Places]:
    """The nested values of a YAML config, unquoted scalars as `Word`, and the line of every key and list element."""
    return parse_yaml(read_source(path), str(path))


def read_json(path: Path) -> tuple[dict[str, object], Places]:
    """The same for a JSON file of another tool: YAML accepts JSON, except tabs between values."""
    return parse_yaml(read_source(path, (".json",)).replace(b"\t", b" "), str(path))


def parse_yaml(source: bytes, file: str) -> tuple[dict[str, object], Places]:
    """The same for a YAML config's bytes; `file` names them in errors."""
    node = _compose(source, file)
    if node is None:
        raise ConfigError(f"config {file} is empty", where=file)
    lines: dict[str, str] = {}
    tree = node_value(node, "", file, lines)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is not a mapping of sections", where=f"{file}:{node.start_mark.line + 1}")
    return tree, Places(file, lines)


def _read_piece(text: str, key: str) -> object:
    """The value of a piece of YAML on the command line, unquoted scalars as `Word`."""
    node = _compose(text, COMMAND_LINE)
    return Word("") if node is None else node_value(node, key, "", {})


def read_override(text: str, kind: Any, key: str) -> object:
    """The value in the text, before the type is applied: a Word, a quoted text, a list (also `0,1`), or a mapping."""
    if get_origin(kind) is list:
        if text.startswith(("[", '"', "'")):
            value = _read_piece(text, key)
            return [value] if isinstance(value, str) else value
        return [] if text in NULL_WORDS else [Word(part.strip()) for part in text.split(",")]
    if get_origin(kind) is dict:
        return _read_piece(text, key)
    if text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1:
        return _read_piece(text, key)
    if kind is str and not text:
        return ""
    return Word(text)


def _compose(source: bytes | str, place: str) -> yaml.Node | None:
    import yaml

    if len(source) > MAX_BYTES:
        raise ConfigError(f"not a config: more than {MAX_BYTES >> 10:,} KiB", where=place)
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader = yaml.SafeLoader if len(source) < LARGE else fast
    try:
        try:
            _check_shape(yaml.parse(source, Loader=fast), place)
        except yaml.YAMLError:  # some versions of libyaml have another limit and other messages
            _check_shape(yaml.parse(source, Loader=loader), place)
        node: yaml.Node | None = yaml.compose(source, Loader=loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter two: "\UFFFFFFFF" is not a character
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and isinstance(source, bytes) else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
        problem = problem.replace("'<stream end>'", "the end of the text")
        raise ConfigError(f"not valid YAML: {problem}", where=place + line, hint=OPEN_HINT if line else "") from None
    return node


def _check_shape(events: Iterator[yaml.Event], place: str) -> None:
    """Raises ConfigError for more than a config holds, before nodes are made: libraries may change Python's own
    limit."""
    depth = values = 0
    for event in events:
        kind = type(event).__name__
        values += kind.startswith(("Scalar", "Alias", "Sequence"))
        depth += kind.startswith(("Sequence", "Mapping")) * (1 if "Start" in kind else -1)
        if depth > MAX_DEPTH + 2:
            raise ConfigError(TOO_DEEP, where=place)
        if values > 2 * MAX_VALUES:  # names and values
            raise ConfigError(f"{place} has more than {MAX_VALUES:,} values", where=place)


def node_value(node: yaml.Node, key: str, file: str, lines: dict[str, str]) -> object:
    """The value of a YAML node. Adds the place of every key below it to `lines`. Refuses tags and repeated keys."""
    import yaml

    place = f"{file}:{node.start_mark.line + 1}"
    if "python/" in node.tag or not node.tag.startswith("tag:yaml.org,2002:"):
        raise ConfigError(f"{key or 'the config'} has the YAML tag {node.tag}, which is not allowed", where=place)
    if key.count(".") + key.count("[") > MAX_DEPTH:
        raise ConfigError(f"{key} is nested too deeply", where=place)
    if len(lines) > MAX_VALUES:  # aliases of aliases turn ten lines into billions of values
        raise ConfigError(f"{file} has more than {MAX_VALUES:,} values", where=place)
    if isinstance(node, yaml.ScalarNode):
        return Word(node.value) if node.style is None else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[f"{key}[{i}]"] = f"{file}:{item.start_mark.line + 1}"
        return [node_value(item, f"{key}[{i}]", file, lines) for i, item in enumerate(node.value)]
    return _mapping_value(node, key, file, lines)


def _mapping_value(node: yaml.Node, key: str, file: str, lines: dict[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name_node, value_node in node.value:
        name = name_node.value if isinstance(name_node.value, str) else "[…]"
        inner = f"{key}.{name}" if key else name
        place = f"{file}:{name_node.start_mark.line + 1}"
        if name in values:
            raise ConfigError(
                f"{inner} is given twice", where=f"{lines[inner]} and line {name_node.start_mark.line + 1}"
            )
        lines[inner] = place
        values[name] = node_value(value_node, inner, file, lines)
    return values


# --- writing YAML -----------------------------------------------------------------------------------------------------

_LAYOUT: dict[str, Any] = {"allow_unicode": True, "width": 120}


def dump_yaml(values: Mapping[str, object]) -> str:
    """Nested plain values as YAML in their order: one line for each key, lists on one line. Loads back equal."""
    import yaml

    text: str = yaml.dump(dict(values), Dumper=_dumper(), sort_keys=False, **_LAYOUT)
    return text


def edit_yaml(text: str, changes: Mapping[str, object]) -> str:
    """A YAML config in which some dotted keys have other plain values, with everything else as written.

    A key keeps its place; a new one comes last in its section. A text written by `dump_yaml` changes only in these
    keys. Another text loses comments and blank lines, and keeps the spelling of every scalar.
    """
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        root = yaml.MappingNode(MAPPING, [], flow_style=False)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        node = _dumper()(io.StringIO(), default_flow_style=False).represent_data(value)
        _replace(_section(root, section) if section else root, name, node)
    edited: str = yaml.serialize(root, Dumper=yaml.SafeDumper, **_LAYOUT)
    return edited


def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def flow_list(dumper: yaml.SafeDumper, values: list[object]) -> yaml.Node:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)

    def text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        # In single quotes, PyYAML writes U+0085 as a line break, which is read back as a blank.
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    Dumper.add_representer(list, flow_list)
    Dumper.add_representer(str, text_node)
    return Dumper


def _section(root: yaml.MappingNode, name: str) -> yaml.MappingNode:
    """The section with this name, made if it is missing, and copied if several names refer to the same one."""
    import yaml

    found = next((value for key, value in root.value if key.value == name), None)
    section = yaml.MappingNode(MAPPING, [], flow_style=False)
    if isinstance(found, yaml.MappingNode):
        section.value, section.flow_style = list(found.value), found.flow_style
    _replace(root, name, section)
    return section


def _replace(mapping: yaml.MappingNode, name: str, value: yaml.Node) -> None:
    """Set the key to another value, in its place; a new key comes last."""
    import yaml

    if not mapping.value:
        mapping.flow_style = False
    for at, (key, _) in enumerate(mapping.value):
        if key.value == name:
            mapping.value[at] = (key, value)
            return
    mapping.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", name), value))
