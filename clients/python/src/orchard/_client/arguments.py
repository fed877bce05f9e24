"""What is wrong with an argument of a public method, told by its name.

Nothing is checked while all is well, so that no call pays for it: where one ends in an error of Python itself from deep
inside, such as "bad argument type for built-in operation", its arguments are held against the method's annotations, and
the first that does not fit is named.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import enum
import functools
import inspect
import os
import sys
import types
import typing
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from orchard._client.errors import InvalidArgument, OrchardError

T = TypeVar("T")

_BARE: Final = (TypeError, ValueError, AttributeError, KeyError)
_NAMESPACES: Final = ("orchard._client.options", "orchard._client.trajectories.options", "orchard")
"""Where names in annotations are found that their module imports for types alone."""
_MARK: Final = "argument"
_MOST_ITEMS: Final = 10_000
_WORDS: Final[Mapping[Any, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    bytes: "bytes",
    dt.datetime: "a datetime",
    dt.timedelta: "a timedelta",
    type(None): "None",
    os.PathLike: "a path",
    collections.abc.Callable: "a function",
}
_NUMBERS: Final[Mapping[Any, tuple[str, ...]]] = {
    float: ("__float__", "__index__"),
    int: ("__index__",),
}
"""What stands for a number: also those of NumPy."""


class Misfit(NamedTuple):
    """A value that is not what its annotation says."""

    path: str
    wanted: Any
    value: Any


def explained(cls: type[T]) -> type[T]:
    """Have the public methods of a class name the argument that is wrong."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    for name, method in members.items():
        if isinstance(method, types.FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _explaining(method))
    return cls


def _explaining(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def run(*args: Any, **given: Any) -> Any:
            try:
                return await method(*args, **given)
            except _BARE as error:
                _explain(method, args, given, error)
                raise

    else:

        @functools.wraps(method)
        def run(*args: Any, **given: Any) -> Any:
            try:
                made = method(*args, **given)
            except _BARE as error:
                _explain(method, args, given, error)
                raise
            if isinstance(made, AsyncGenerator):
                return _Iterated(made, method, args, given)
            return made

    return run


class _Iterated(AsyncGenerator[Any, None]):
    """A generator whose errors are explained. No generator itself: an event loop that ends closes all that there are at
    once, and of two, one within the other, one would be closed while the other closes it.
    """

    __slots__ = ("_args", "_given", "_made", "_method")

    def __init__(self, made: AsyncGenerator[Any, None], method: Callable[..., Any], args: Any, given: Any) -> None:
        self._made = made
        self._method, self._args, self._given = method, args, given

    async def __anext__(self) -> Any:
        try:
            return await self._made.__anext__()
        except _BARE as error:
            _explain(self._method, self._args, self._given, error)
            raise

    async def asend(self, value: None) -> Any:
        return await self._made.asend(value)

    async def athrow(self, *error: Any) -> Any:
        return await self._made.athrow(*error)

    async def aclose(self) -> None:
        await self._made.aclose()


def _explain(method: Callable[..., Any], args: Any, given: Any, error: Exception) -> None:
    """Raise InvalidArgument in the place of an error, if it is that of an argument."""
    if isinstance(error, OrchardError) and _MARK not in error.metadata:
        return
    signature = inspect.signature(method)
    try:
        bound = signature.bind(*args, **given).arguments
    except TypeError:  # one too many, or too few: Python's own error names it
        return
    values = [
        (name, value, signature.parameters[name])
        for name, value in list(bound.items())[1:]  # all but self
    ]
    for name, value, parameter in values:
        wanted = _evaluated(parameter.annotation, method)
        several = parameter.kind is parameter.VAR_POSITIONAL
        for one, path in [(one, name) for one in value] if several else [(value, name)]:
            if parameter.kind is not parameter.VAR_KEYWORD and (found := misfit(one, wanted, path)) is not None:
                raise _of(found.path, f"must be {_words(found.wanted)}, not {_given(found.value)}") from error
    for name, value, _parameter in values:
        for path, leaf in _leaves(value, name):
            if isinstance(leaf, int) and str(error).endswith(f": {leaf}"):
                raise _of(path, f"{leaf} is out of range") from error
            if isinstance(leaf, str) and isinstance(error, UnicodeError) and not _is_unicode(leaf):
                raise _of(path, "has a lone surrogate, which is no character") from error


def _of(path: str, wrong: str) -> InvalidArgument:
    """Marked, so that a method that calls another public one tells it by its own argument."""
    error = InvalidArgument.of(path, wrong)
    error.metadata = {_MARK: path}
    return error


def misfit(value: Any, wanted: Any, path: str) -> Misfit | None:
    """What does not fit an annotation in a value, as deep inside as can be said; None where all fits, or may."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or isinstance(wanted, (TypeVar, str)) or typing.is_typeddict(origin or wanted):
        return None
    wrong = Misfit(path, wanted, value)
    if origin in {typing.Union, types.UnionType}:
        found = [misfit(value, one, path) for one in inner]
        deeper = next((one for one in found if one is not None and one.path != path), wrong)
        return None if None in found else deeper
    if origin is typing.Annotated:
        return misfit(value, inner[0], path)
    if origin is typing.Literal:
        return None if value in inner else wrong
    if wanted is None:
        return None if value is None else wrong
    kind = origin or wanted
    if kind is collections.abc.Callable:
        return None if callable(value) else wrong
    if not inspect.isclass(kind) or getattr(kind, "_is_protocol", False):
        return None
    if kind in _NUMBERS:
        return None if any(hasattr(type(value), name) for name in _NUMBERS[kind]) else wrong
    if kind is bool:
        return None if type(value).__name__ in {"bool", "bool_"} else wrong
    # A text is a sequence of texts, but none of anything else.
    letters = isinstance(value, str) and inner and inner[0] is not str
    if letters or not isinstance(value, (bytes, bytearray, memoryview) if kind is bytes else kind):
        return wrong
    return _misfit_inside(value, kind, inner, path)


def _misfit_inside(value: Any, kind: type[Any], inner: tuple[Any, ...], path: str) -> Misfit | None:
    """Of what a collection or a dataclass holds. What can be read once alone is left alone."""
    parts: Iterator[tuple[Any, Any, str]] = iter(())
    if dataclasses.is_dataclass(kind):
        fields = [(getattr(value, field.name), field.type, field.name) for field in dataclasses.fields(kind)]
        parts = ((one, _evaluated(written, kind), f"{path}.{name}") for one, written, name in fields)
    elif isinstance(value, Mapping) and len(inner) == 2:
        pairs = list(value.items())[:_MOST_ITEMS]
        parts = (
            (one, part, f"{path}[{key!r}]") for key, held in pairs for one, part in ((key, inner[0]), (held, inner[1]))
        )
    elif isinstance(value, (list, tuple)) and inner:
        each = inner[:1] * len(value) if len(inner) == 1 or inner[-1] is Ellipsis else inner
        parts = (
            (one, part, f"{path}[{place}]")
            for place, (one, part) in enumerate(zip(value[:_MOST_ITEMS], each, strict=False))
        )
    return next((found for one, part, name in parts if (found := misfit(one, part, name)) is not None), None)


class _Names(dict[str, Any]):
    """The names of a module, and those that it knows for types alone."""

    def __missing__(self, name: str) -> Any:
        for namespace in _NAMESPACES:
            try:
                return getattr(sys.modules[namespace], name)
            except (KeyError, AttributeError):
                continue
        raise KeyError(name)


def _evaluated(annotation: Any, owner: Any) -> Any:
    """An annotation that may be written as a string; Any where it cannot be told what it is."""
    if not isinstance(annotation, str):
        return annotation if annotation is not inspect.Parameter.empty else Any
    names = _Names(vars(sys.modules[owner.__module__]))
    try:
        return eval(annotation, {}, names)  # noqa: S307 (our own annotations)
    except Exception:  # noqa: BLE001 (whatever is the matter with it, the error that is explained is another)
        return Any


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All that is no collection in a value, each with its place."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for key, one in list(value.items())[:_MOST_ITEMS]:
            yield f"{path}[{key!r}]", key
            yield from _leaves(one, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value[:_MOST_ITEMS]):
            yield from _leaves(one, f"{path}[{place}]")
    else:
        yield path, value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words(wanted: Any) -> str:
    """What an annotation asks for."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(dict.fromkeys(_words(one) for one in inner))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, inner))}"
    kind = origin or wanted
    if kind is None or kind in _WORDS:
        return _WORDS[type(None) if kind is None else kind]
    if inspect.isclass(kind) and issubclass(kind, enum.StrEnum):
        return f"one of {', '.join(repr(one.value) for one in kind if one.value != 'unknown')}"
    if inspect.isclass(kind) and issubclass(kind, collections.abc.Mapping):
        return "a mapping of strings" if inner == (str, str) else "a mapping"
    if inspect.isclass(kind) and issubclass(kind, collections.abc.Iterable) and inner:
        held = [one for one in inner if one is not Ellipsis]
        return f"a sequence of {_plural(held[0])}" if len(held) == 1 else "a tuple"
    return _with_article(getattr(kind, "__name__", str(kind)))


def _plural(kind: Any) -> str:
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        return " or ".join(dict.fromkeys(_plural(one) for one in typing.get_args(kind)))
    return {str: "strings", int: "whole numbers", float: "numbers"}.get(kind) or _words(kind).removeprefix("a ")


def _given(value: Any) -> str:
    """What there is in its place; a text may be a secret."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return _WORDS.get(type(value)) or _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
