"""The shipped code, loaded from its sources so that it sees the simulated standard library."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from tests.world.linux.modules import MODULES
from tests.world.linux.streams import open_
from tests.world.planted import planted

PREFIX = "simulated."
sys.modules.setdefault("simulated", types.ModuleType("simulated"))  # pickle looks for what is above a module


class Package:
    """The modules of one checkout, each loaded once for all processes of all worlds."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        place: str,
        instead: dict[str, dict[str, Any]],
        modules: dict[str, types.ModuleType] = MODULES,
    ) -> None:
        """folder: the package's sources; `place`: where they lie in the world. `instead`: module -> name -> what stands
        in its place, for the few functions that no single thread can do (a copy of a process) or need not (the sources
        that a command carries). `modules`: what it imports that is not its own."""
        self.folder = folder
        self.name = name
        self.place = place
        self.instead = instead
        self.modules: dict[str, types.ModuleType] = {}
        self._builtins = {**vars(builtins), "open": open_, "__import__": self._import}
        importlib_ = types.ModuleType("importlib")
        importlib_.import_module = self._import_module  # type: ignore[attr-defined]
        self._fakes = {**modules, "importlib": importlib_}

    def load_all(self) -> None:
        for path in sorted(self.folder.rglob("*.py")):
            inner = path.relative_to(self.folder).with_suffix("")
            name = ".".join((self.name, *inner.parts))
            self.load(name.removesuffix(".__init__"))

    def load(self, name: str) -> types.ModuleType:
        """One by its dotted name."""
        name = name.removeprefix(PREFIX)
        if name in self.modules:
            return self.modules[name]
        above, _, last = name.rpartition(".")
        package = self.load(above) if above else None
        inner = self.folder.joinpath(*name.split(".")[1:])
        is_package = inner.is_dir()
        source = inner / "__init__.py" if is_package else inner.with_suffix(".py")
        module = types.ModuleType(f"{PREFIX}{name}")
        sys.modules[module.__name__] = module  # dataclasses and typing look there
        module.__dict__.update(
            __file__="/".join([self.place, *name.split(".")[1:]]) + ("/__init__.py" if is_package else ".py"),
            __package__=name if is_package else above,  # without the prefix: relative imports come out as absolute ones
            __builtins__=self._builtins,
        )
        self.modules[name] = module
        if source.exists():
            exec(compile(planted(name, source.read_text()), str(source), "exec"), module.__dict__)
            module.__dict__.update(self.instead.get(name, {}))
        if package is not None:
            setattr(package, last, module)
        return module

    def _has(self, name: str) -> bool:
        inner = self.folder.joinpath(*name.split(".")[1:])
        return inner.is_dir() or inner.with_suffix(".py").is_file()

    def _import_module(self, name: str, package: str | None = None) -> Any:
        absolute = importlib.util.resolve_name(name, package)
        return (
            self.load(absolute)
            if absolute.split(".")[0] == self.name
            else self._fakes.get(absolute) or __import__(absolute)
        )

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0) -> Any:
        if level:
            absolute = importlib.util.resolve_name("." * level + name, globals_["__package__"])
            module = self.load(absolute)
            for one in names or ():
                if not hasattr(module, one) and self._has(f"{absolute}.{one}"):
                    self.load(f"{absolute}.{one}")
            return module
        if name.split(".")[0] == self.name:
            module = self.load(name)
            for one in names or ():
                if not hasattr(module, one) and self._has(f"{name}.{one}"):
                    self.load(f"{name}.{one}")
            return module if names else self.modules[self.name]
        if name in self._fakes:
            top = name.partition(".")[0]
            return self._fakes[name if names else top]
        return __import__(name, globals_, locals_, names, level)
