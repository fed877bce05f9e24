"""Random protobuf messages of any type, from values that break programs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INTEGERS: Final = (0, 1, -1, 2, 100, 1000, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 10**9)
_REALS: Final = (0.0, -0.0, 0.5, 1.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 5e-324)
_TEXTS: Final = (
    *("", "a", "x" * 64, "x" * 65, "-", "..", "../../etc/passwd", "/", "/tmp/fuzz", "a b", "\0", "ä\u202e\ufeff"),
    *("'; DROP TABLE trajectories; --", "%s%n", "{}", "null", "1e999", "\n", "Z" * 5000, "default", "outcome"),
)
_DEEPEST: Final = 5
_CHANGED: Final = 0.06
_UNSIGNED: Final = frozenset({FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64})
_PYTHON_TYPES: Final = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}
_WIDTH: Final = {
    FieldDescriptor.CPPTYPE_INT32: 32,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 64,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}

Known = Mapping[str, Sequence[Any]]
"""Values by the name of a field, all of one type: that of the field."""


class RandomMessages:
    """Makes messages; `known` are values that fit a field of this name, taken nine times of ten.

    Known bytes are taken as they are, or a little broken. `examples` are good messages by the full name of their type:
    most of that type are one of them with a field or two changed.
    """

    def __init__(
        self, rng: random.Random, known: Known, examples: Mapping[str, Sequence[Message]] = MappingProxyType({})
    ) -> None:
        self._rng = rng
        self._known = known
        self._examples = examples

    def make(self, descriptor: Descriptor, depth: int = 0, *, member: str = "") -> Message:
        """One message; where `member` names a field of a oneof, that is the one which is set."""
        message = GetMessageClass(descriptor)()
        examples = self._examples.get(descriptor.full_name)
        if examples and self._rng.random() < 0.8:
            message.CopyFrom(self._rng.choice(examples))
            for field in descriptor.fields:
                if self._rng.random() < _CHANGED:
                    message.ClearField(field.name)
                    self._fill(message, field, depth)
            return message
        chosen = descriptor.fields_by_name[member].containing_oneof if member else None
        for field in descriptor.fields:
            share = self._share(field)
            if chosen is not None and field.containing_oneof is chosen:
                share = float(field.name == member)
            if self._rng.random() < share and (field.message_type is None or depth < _DEEPEST):
                self._fill(message, field, depth)
        return message

    def _share(self, field: FieldDescriptor) -> float:
        """How often a field is set."""
        one_of = field.containing_oneof
        if one_of is not None:
            return 1 / len(one_of.fields)
        # Without what a request is about most would end there.
        return 0.95 if field.name in self._known else 0.6

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            for _ in range(self._rng.randrange(3)):
                key = self._scalar(entry["key"])
                if entry["value"].message_type is None:
                    getattr(message, field.name)[key] = self._scalar(entry["value"])
        elif field.is_repeated:
            for _ in range(self._rng.randrange(4)):
                made = self._value(field, depth)
                getattr(message, field.name).append(made)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(message, field.name, self._value(field, depth))

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        return self._scalar(field) if field.message_type is None else self.make(field.message_type, depth + 1)

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng, kind = self._rng, field.cpp_type
        known = self._known.get(field.name, ())
        if known and type(known[0]) is _python_type(field) and rng.random() < 0.9:
            value = rng.choice(known)
            return damaged(rng, value) if isinstance(value, bytes) and rng.random() < 0.3 else value
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 10, 1000)))
            return rng.choice(_TEXTS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([*(value.number for value in field.enum_type.values), 99, -1])
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice(_REALS)
        width = _WIDTH[kind]
        lowest, highest = (0, 2**width - 1) if kind in _UNSIGNED else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
        return rng.choice([number for number in _INTEGERS if lowest <= number <= highest])


def _python_type(field: FieldDescriptor) -> type:
    return bytes if field.type == FieldDescriptor.TYPE_BYTES else _PYTHON_TYPES.get(field.cpp_type, int)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A serialized message, a little broken."""
    changed = bytearray(data or b"\x0a\x01a")
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(changed) + 1)
        action = rng.randrange(3)
        if action == 0:
            changed[place:place] = rng.randbytes(rng.randrange(1, 5))
        elif action == 1:
            del changed[place : place + rng.randrange(1, 5)]
        elif place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)
