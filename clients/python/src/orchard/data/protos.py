"""Protobuf messages as plain JSON values and back: protobuf's JSON mapping with the fields' own names, but faster.

Whole numbers are numbers, also those of 64 bits; numbers that JSON lacks are the texts NaN, Infinity and -Infinity.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from orchard.data.nodes import Node
from orchard.trajectory.v1 import trajectory_pb2 as pb

M = TypeVar("M", bound=Message)

_FLOATS: Final = frozenset({FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT})
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STATES: Final = tuple(name for name, number in pb.RewardState.items() if number)
_SCALAR: Final = 0
_FLOAT: Final = 1
_ENUM: Final = 2
_MESSAGE: Final = 3
_MAP: Final = 4


@cache
def _fields(descriptor: Descriptor) -> dict[str, tuple[FieldDescriptor, int, bool]]:
    """Each field of a message with its kind, and whether it is repeated."""
    return {field.name: (field, _kind(field), bool(field.is_repeated)) for field in descriptor.fields}


def _kind(field: FieldDescriptor) -> int:
    if field.message_type is not None:
        return _MAP if field.message_type.GetOptions().map_entry else _MESSAGE
    if field.enum_type is not None:
        return _ENUM
    return _FLOAT if field.cpp_type in _FLOATS else _SCALAR


def _enum(field: FieldDescriptor) -> EnumDescriptor:
    assert field.enum_type is not None  # noqa: S101 (asked of fields of this kind alone)
    return field.enum_type


def to_plain(message: Message) -> dict[str, Any]:
    """The fields of a message that are set."""
    made: dict[str, Any] = {}
    known = _fields(message.DESCRIPTOR)
    for field, value in message.ListFields():
        _, kind, repeated = known[field.name]
        if kind == _SCALAR:
            made[field.name] = list(value) if repeated else value
        elif kind == _MESSAGE:
            made[field.name] = [_message(one) for one in value] if repeated else _message(value)
        elif kind == _FLOAT:
            made[field.name] = [_number(one) for one in value] if repeated else _number(value)
        elif kind == _ENUM:
            made[field.name] = _enum(field).values_by_number[value].name
        else:
            made[field.name] = dict(sorted(value.items()))
    return made


def _message(value: Any) -> Any:
    return value.ToJsonString() if isinstance(value, Timestamp) else to_plain(value)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_plain(node: Node, message: M) -> M:
    """Fill a message from JSON values.

    Raises:
        DataError: a field is not known, or its value does not fit; the error names it.
    """
    known = _fields(message.DESCRIPTOR)
    for key, value in node.object().items():
        if value is None:
            continue
        if key not in known:
            Node(value, node.where.at(key)).fail("is not known")
        try:
            _set(message, known[key], value, node)
        except (TypeError, ValueError, KeyError, AttributeError):
            Node(value, node.where.at(key)).fail("does not fit: it is of another type, or out of range")
    return message


def trajectory_of(node: Node) -> pb.Trajectory:
    """The description of a trajectory.

    Raises:
        DataError: as `from_plain`, or a reward does not say whether it is a number.
    """
    made = from_plain(node, pb.Trajectory())
    places = [(node.where.at("rewards").at(index), reward) for index, reward in enumerate(made.rewards)]
    if made.HasField("outcome"):
        places.append((node.where.at("outcome"), made.outcome))
    for where, reward in places:
        if reward.state == pb.REWARD_STATE_UNSPECIFIED:
            Node(None, where.at("state")).fail("is missing", f"use one of {', '.join(_STATES)}")
    return made


def _set(message: Message, known: tuple[FieldDescriptor, int, bool], value: Any, node: Node) -> None:
    field, kind, repeated = known
    name = field.name
    if kind == _MAP:
        getattr(message, name).update(value)
    elif repeated:
        if not isinstance(value, list):
            raise TypeError
        if kind == _MESSAGE:
            target = getattr(message, name)
            for index, one in enumerate(value):
                from_plain(Node(one, node.where.at(name).at(index)), target.add())
        else:
            getattr(message, name).extend(map(_float, value) if kind == _FLOAT else value)
    elif kind == _MESSAGE:
        target = getattr(message, name)
        if isinstance(target, Timestamp):
            target.FromJsonString(value)
        else:
            target.SetInParent()
            from_plain(Node(value, node.where.at(name)), target)
    elif kind == _ENUM:
        setattr(message, name, _enum(field).values_by_name[value].number)
    else:
        setattr(message, name, _float(value) if kind == _FLOAT else value)


def _float(value: Any) -> Any:
    return _NOT_FINITE[value] if isinstance(value, str) else value
