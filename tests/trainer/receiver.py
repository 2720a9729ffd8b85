"""A process that receives weights as engines do: a line in on stdin, a line out on stdout."""

import hashlib
import sys
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from rollfarm import buckets
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

TIMEOUT = timedelta(seconds=20)


def join(meeting: engine_pb2.WeightGroup) -> ProcessGroupGloo:
    host, _, port = meeting.store_address.rpartition(":")
    store = PrefixStore(meeting.group_name, TCPStore(host, int(port), is_master=False, timeout=TIMEOUT))
    return ProcessGroupGloo(store, meeting.rank, meeting.world_size, TIMEOUT)


def receive(group: ProcessGroupGloo, request: llm_proxy_pb2.BeginWeightUpdateRequest) -> dict[str, str]:
    """The hash of each tensor."""
    found: dict[str, str] = {}
    for bucket in buckets.plan(request.tensors, request.bucket_size_bytes):
        flat = torch.empty(bucket.numel, dtype=getattr(torch, bucket.dtype))
        group.broadcast([flat.view(torch.uint8)]).wait()  # pyright: ignore
        for slot in bucket.slots:
            part = flat[slot.offset : slot.offset + slot.numel]
            found[slot.name] = hashlib.sha256(part.numpy().tobytes()).hexdigest()
    return found


def main() -> None:
    group: ProcessGroupGloo | None = None
    held: dict[str, str] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, payload = line.strip().partition(" ")
        answer = "ok"
        try:
            if verb == "join":
                group = join(engine_pb2.WeightGroup.FromString(bytes.fromhex(payload)))
            elif verb == "stage" and group is not None:
                held = receive(group, llm_proxy_pb2.BeginWeightUpdateRequest.FromString(bytes.fromhex(payload)))
            elif verb == "held":
                answer = f"ok {held}"
        except RuntimeError as error:
            answer = str(error).splitlines()[0]
        print(answer, flush=True)


if __name__ == "__main__":
    main()
