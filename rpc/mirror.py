"""Copies between a dataclass and the message whose flat fields bear the same names."""

import dataclasses
from typing import Any, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)
PlainT = TypeVar("PlainT")


def to_message(message_class: type[MessageT], plain: Any) -> MessageT:
    """Build the message from a dataclass of scalars."""
    names = (field.name for field in dataclasses.fields(plain))
    return message_class(**{name: getattr(plain, name) for name in names})


def from_message(plain_class: type[PlainT], message: Message) -> PlainT:
    """Build the dataclass from a message of scalars."""
    names = (field.name for field in dataclasses.fields(plain_class))  # type: ignore[arg-type]
    return plain_class(**{name: getattr(message, name) for name in names})
