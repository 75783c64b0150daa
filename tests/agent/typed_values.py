"""Random values of the types that cross an edge."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from deployer.agent.host.typed import MAX_INT

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=12),
    bool: st.booleans(),
    int: st.integers(0, MAX_INT),
    float: st.floats(-1e12, 1e12),
    type(None): st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a NamedTuple or of what its fields may be."""
    if hasattr(kind, "_field_defaults"):
        hints = get_type_hints(kind)
        return st.builds(kind, **{name: values_of(hints[name]) for name in kind._fields})
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), values_of(args[1]), max_size=3)
    return _PLAIN[kind]
