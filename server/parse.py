"""Bytes to request messages, with every fault named.

gRPC's own deserializer turns invalid UTF-8 into INTERNAL "Exception deserializing request!", and protobuf keeps
fields that it doesn't know in silence; a request that asks for something must not be answered as if it hadn't.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from specserve.proto import specserve_pb2 as pb
from specserve.server.errors import InvalidRequestError, UnsupportedError

M = TypeVar("M", bound=Message)


def parse_request(message_class: type[M], data: bytes) -> M:
    """The message in `data`.

    Raises InvalidRequestError for bytes that are no such message, naming the field if a string isn't UTF-8, and
    UnsupportedError for a field that this server doesn't know.
    """
    message = message_class()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequestError(_decode_fault(message.DESCRIPTOR.full_name, data)) from None
    for path, part in _parts(message, ""):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            where = path.removesuffix(".") or part.DESCRIPTOR.name
            raise UnsupportedError(
                f"{where} has a field number {unknown[0].field_number} that this server doesn't know (or knows with "
                "another type); leave it out, or call a newer server"
            )
    return message


def _parts(message: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The message and all messages in it, each with the path that its fields' names follow."""
    yield path, message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for name, part in _items(field, value, path):
                yield from _parts(part, f"{name}.")


def _items(field: Any, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values of a field, each with its path."""
    if field.is_repeated:
        yield from ((f"{path}{field.name}[{index}]", item) for index, item in enumerate(value))
    else:
        yield f"{path}{field.name}", value


def _decode_fault(full_name: str, data: bytes) -> str:
    """What is wrong with bytes that protobuf refused."""
    shadow = message_factory.GetMessageClass(_shadow_pool().FindMessageTypeByName(full_name))()
    try:
        shadow.ParseFromString(data)
    except DecodeError:
        return f"the request ({len(data)} bytes) is no {full_name} message"
    originals = pb.DESCRIPTOR.pool
    for path, part in _parts(shadow, ""):
        fields = originals.FindMessageTypeByName(part.DESCRIPTOR.full_name).fields_by_name
        for field, value in part.ListFields():
            if fields[field.name].type == FieldDescriptor.TYPE_STRING:
                for name, text in _items(field, value, path):
                    try:
                        text.decode()
                    except UnicodeDecodeError as error:
                        return f"{name} is not valid UTF-8: {error.reason} at byte {error.start}"
    return f"the request ({len(data)} bytes) is no {full_name} message"


@lru_cache(maxsize=1)
def _shadow_pool() -> descriptor_pool.DescriptorPool:
    """The protocol with bytes in the place of strings, so that it parses whatever stands there."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        for field in message.field:
            if field.type == FieldDescriptor.TYPE_STRING:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
