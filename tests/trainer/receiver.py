"""A process that receives weights as the engine host does: a line in on stdin, a line out on stdout."""

import hashlib
import sys

import torch

from llm_proxy.engine.groups import Group
from llm_proxy.engine.layout import Layout, check_sums, table_for
from rollfarm.errors import FarmError
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

SECONDS = 20.0


def receive(group: Group, request: llm_proxy_pb2.BeginWeightUpdateRequest) -> dict[str, str]:
    """The hash of each tensor."""
    layout = Layout(request.tensors, request.bucket_size_bytes)
    memory = torch.empty(layout.size_bytes, dtype=torch.uint8)
    buffers = layout.buffers(memory)
    table = table_for(buffers)
    check_sums(group.receive([*buffers, table]), table)
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in layout.tensors(memory)}


def main() -> None:
    group: Group | None = None
    held: dict[str, str] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, payload = line.strip().partition(" ")
        answer = "ok"
        try:
            if verb == "join":
                meeting = engine_pb2.WeightGroup.FromString(bytes.fromhex(payload))
                group = Group(meeting, seconds=SECONDS)
            elif verb == "stage" and group is not None:
                held = receive(group, llm_proxy_pb2.BeginWeightUpdateRequest.FromString(bytes.fromhex(payload)))
            elif verb == "held":
                answer = f"ok {held}"
        except FarmError as error:
            answer = str(error).splitlines()[0]
        print(answer, flush=True)


if __name__ == "__main__":
    main()
