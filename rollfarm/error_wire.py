"""The catalogue's errors over the wire: as the status of a call, and as one item of a batched answer."""

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from rollfarm.errors import CATALOGUE, DeadlineExceeded, FarmError, Unavailable
from rollfarm.v1 import trajectory_pb2

DOMAIN = "rollfarm"


def to_status(error: FarmError) -> grpc.Status:
    """The error as a server sends it."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.facts)
    detail = any_pb2.Any()
    detail.Pack(info)
    return rpc_status.to_status(status_pb2.Status(code=error.code, message=str(error), details=[detail]))


def from_rpc(call: aio.AioRpcError) -> FarmError:
    """The error that the server raised, as its own class; an unknown reason gives a plain FarmError.

    Facts of the transport alone (refused, too late) become Unavailable and DeadlineExceeded.
    """
    for name, value in call.trailing_metadata() or ():
        if name == "grpc-status-details-bin" and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return _rebuild(status.code, info.reason, status.message, info.metadata)
    if call.code() is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"No answer: {call.details()}.")
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("No answer in time.")
    return _rebuild(call.code().value[0], call.code().name, f"{call.code().name}: {call.details()}", {})


def to_failure(error: FarmError) -> trajectory_pb2.Failure:
    """The error as one item of a batched answer."""
    return trajectory_pb2.Failure(code=error.code, reason=error.reason, message=str(error), metadata=error.facts)


def from_failure(failure: trajectory_pb2.Failure) -> FarmError:
    """The error that one item of a batched answer carries."""
    return _rebuild(failure.code, failure.reason, failure.message, failure.metadata)


def _rebuild(code: int, reason: str, message: str, facts: Mapping[str, str]) -> FarmError:
    known = CATALOGUE.get(reason)
    if known is not None:
        return known(message.removesuffix(known.remedy).strip(), **facts)
    unknown = type("UnknownFarmError", (FarmError,), {"code": code, "reason": reason})
    return unknown(message, **facts)
