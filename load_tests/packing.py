"""What rows end to end gain over padded ones, and what logits in chunks save; in about three minutes.

    .venv/bin/python load_tests/packing.py
    .venv/bin/python load_tests/packing.py --rounds 1 --rows 16

The last line on stdout is one JSON object; the progress goes to stderr. One thread, and CPU time throughout: other
processes on the machine change it little.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.backends import logprobs
from trainer.backends.logprobs import token_logprobs
from trainer.backends.packed_attention import pack
from trainer.backends.scoring import TokenLogprobs
from trainer.micro_batches import MicroBatch, micro_batch, plan
from trainer.rows import Row

CPU = torch.device("cpu")
VOCABULARY = 2048
HEAD_HIDDEN, HEAD_VOCABULARY, HEAD_TOKENS = 64, 65_536, 2048

Pass = Callable[[], None]


def main() -> None:
    options = read_options(sys.argv[1:])
    torch.set_num_threads(1)
    rows = length_mix(options.rows)
    lengths = [len(row) for row in rows]
    measured = speeds(rows, options)
    memory = memories(options.rounds)
    print(
        json.dumps(
            {
                "benchmark": "packing",
                "cores": os.cpu_count(),
                "load_average": round(os.getloadavg()[0], 2),
                "rows": len(rows),
                "tokens": sum(lengths),
                "lengths": [min(lengths), int(statistics.median(lengths)), max(lengths)],
                **{f"{name}_tokens_per_s": round(speed) for name, speed in measured.items()},
                **{
                    f"packed_vs_{name}": round(measured["packed"] / measured[name], 2)
                    for name in measured
                    if name != "packed"
                },
                **memory,
            }
        )
    )


def read_options(argv: list[str]) -> argparse.Namespace:
    """Flags, with their defaults."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/packing.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of which medians are told (%(default)s)")
    add("--rows", type=int, default=32, help="in each pass (%(default)s)")
    add("--budget", type=int, default=4096, help="tokens of a micro-batch (%(default)s)")
    return parser.parse_args(argv)


def length_mix(count: int) -> list[Row]:
    """Many short rows and a few long ones, as episodes are; the policy wrote the second half of each."""
    dice = np.random.default_rng(0)
    rows: list[Row] = []
    for length in np.clip(dice.lognormal(np.log(250), 0.9, count), 16, 2048).astype(int).tolist():
        mask = np.arange(length) >= max(1, length // 2)
        rows.append(Row(dice.integers(0, VOCABULARY, length).astype(np.int32), mask))
    return rows


def speeds(rows: list[Row], options: argparse.Namespace) -> dict[str, float]:
    """Tokens of the rows a CPU second, forward and backward, by how rows go through the model: medians."""
    passes = {
        "packed": by_micro_batch(rows, options.budget, packed=True),
        "padded": by_micro_batch(rows, options.budget, packed=False),
        "one_by_one": one_by_one(rows),
        "masked": masked(rows, options.budget),
    }
    tokens, measured = sum(len(row) for row in rows), {name: list[float]() for name in passes}
    for number in range(options.rounds):
        for name, forward_and_backward in passes.items():
            begun = time.process_time()
            forward_and_backward()
            measured[name].append(tokens / (time.process_time() - begun))
            say(f"round {number + 1}, {name}: {measured[name][-1]:.0f} tokens/s")
    return {name: statistics.median(found) for name, found in measured.items()}


def by_micro_batch(rows: list[Row], budget: int, *, packed: bool) -> Pass:
    """As the trainer does, end to end or padded; the padded ones are sorted by length, which pads little."""
    model = a_model()
    if packed:
        assert pack(model)
    tokens = TokenLogprobs(model)

    def forward_and_backward() -> None:
        for places in plan(rows, 1, budget, padded=tokens.padded)[0]:
            logp_P, _ = tokens(micro_batch(rows, places, CPU), 1.0)
            logp_P.sum().backward()
        model.zero_grad()

    return forward_and_backward


def one_by_one(rows: list[Row]) -> Pass:
    """A plain Hugging Face model and log_softmax, one row after the other."""
    model = a_model()

    def forward_and_backward() -> None:
        for row in rows:
            ids_T = torch.from_numpy(row.ids_T).long()
            logp_TV = model(ids_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            logp_T = logp_TV.gather(-1, ids_T[1:, None])[:, 0]
            logp_T[torch.from_numpy(row.mask_T[1:])].sum().backward()
        model.zero_grad()

    return forward_and_backward


def masked(rows: list[Row], budget: int) -> Pass:
    """transformers' own packing: positions that begin anew, and one mask over all rows of a micro-batch."""
    model = a_model()

    def logp_of(batch: MicroBatch) -> Tensor:
        hidden_TH = model.base_model(
            input_ids=batch.ids_T[None], position_ids=batch.position_T[None], use_cache=False
        ).last_hidden_state[0]
        ids_P = batch.ids_T[batch.at_P]
        logp_P, _ = token_logprobs(
            model.lm_head, hidden_TH[batch.at_P - 1], ids_P, temperature=1.0, vocabulary=VOCABULARY
        )
        return logp_P

    def forward_and_backward() -> None:
        for places in plan(rows, 1, budget)[0]:
            logp_of(micro_batch(rows, places, CPU)).sum().backward()
        model.zero_grad()

    return forward_and_backward


def a_model() -> Qwen3ForCausalLM:
    """Of 3.7 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.eval()


def memories(rounds: int) -> Mapping[str, float]:
    """What log-probabilities take beside the hidden states and the head, and how long: each in a fresh process."""
    names = ("plain", "checkpointed", "chunked")
    spawn = multiprocessing.get_context("spawn")
    megabytes, seconds = ({name: list[float]() for name in names} for _ in range(2))
    for _ in range(rounds):
        for name in names:
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                peak, took = process.submit(of_logprobs, name).result(timeout=300)
            megabytes[name].append(peak)
            seconds[name].append(took)
            say(f"log-probabilities, {name}: {peak:.0f} MB, {took:.2f} s")
    mb, s = ({name: statistics.median(found[name]) for name in names} for found in (megabytes, seconds))
    return {
        "logprob_memory_ratio": round(mb["chunked"] / mb["plain"], 3),
        "logprob_time_ratio": round(s["chunked"] / s["plain"], 2),
        "logprob_time_vs_checkpointed": round(s["chunked"] / s["checkpointed"], 2),
        **{f"logprob_{name}_mb": round(mb[name]) for name in names},
        **{f"logprob_{name}_s": round(s[name], 2) for name in names},
    }


def of_logprobs(name: str) -> tuple[float, float]:
    """(MB at the peak, CPU seconds) of forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = nn.Linear(HEAD_HIDDEN, HEAD_VOCABULARY, bias=False)
    hidden_PH = torch.randn(HEAD_TOKENS, HEAD_HIDDEN, requires_grad=True)
    ids_P = torch.randint(0, HEAD_VOCABULARY, (HEAD_TOKENS,))
    head.weight.grad, hidden_PH.grad = torch.zeros_like(head.weight), torch.zeros_like(hidden_PH)
    # Once, small, so that nothing is loaded or made for the first time below.
    logp_of(name, head, hidden_PH[:8], ids_P[:8]).backward()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = resident_peak(), time.process_time()
    logp_of(name, head, hidden_PH, ids_P).backward()
    return resident_peak() - before, time.process_time() - begun


def logp_of(name: str, head: nn.Linear, hidden_PH: Tensor, ids_P: Tensor) -> Tensor:
    if name == "chunked":
        logp_P, entropy_P = token_logprobs(head, hidden_PH, ids_P, temperature=0.9, vocabulary=HEAD_VOCABULARY)
        return logp_P.sum() + entropy_P.detach().sum()
    size = HEAD_TOKENS if name == "plain" else logprobs.CHUNK_ELEMENTS // HEAD_VOCABULARY
    chunks = zip(hidden_PH.split(size), ids_P.split(size), strict=True)
    if name == "plain":
        return torch.cat([autograd(head, *chunk) for chunk in chunks]).sum()
    return torch.cat([checkpoint(autograd, head, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def autograd(head: nn.Module, hidden_PH: Tensor, ids_P: Tensor) -> Tensor:
    """By torch's own functions, the entropy without gradient."""
    logits_PV = head(hidden_PH).float() / 0.9
    normalizer_P = torch.logsumexp(logits_PV, dim=-1)
    logp_P = logits_PV.gather(-1, ids_P[:, None]).squeeze(-1) - normalizer_P
    with torch.no_grad():
        entropy_P = normalizer_P - (torch.softmax(logits_PV, dim=-1) * logits_PV).sum(-1)
    return logp_P + entropy_P


def resident_peak() -> float:
    """MB that this process had at most since its count was reset."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1024


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
