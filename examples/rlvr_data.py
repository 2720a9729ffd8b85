"""Writes tiny data sets for examples/rlvr.toml: `python examples/rlvr_data.py` makes data/rlvr.

Three domains of one-turn tasks with verifiable answers, and demonstrations of them, a quarter of which are wrong: the
warm start teaches the form, and reinforcement learning has something left to teach.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DIRECTIONS = ("left", "right", "up", "down")
KEYS = ("a", "b")

Task = Mapping[str, Any]


def maths() -> Iterator[tuple[Task, str]]:
    """Every sum of two digits, and its answer."""
    for left in range(10):
        for right in range(10):
            yield {"prompt": f"what is {left} plus {right}", "answer": str(left + right)}, str(left + right)


def following() -> Iterator[tuple[Task, str]]:
    """Instructions as IFEval has them: a word, and how many."""
    for word in DIRECTIONS:
        for other in DIRECTIONS:
            for count in range(2, 5):
                kwargs = [{"keywords": [word, other]}, {"relation": "less than", "num_words": count + 1}]
                names = ["keywords:existence", "length_constraints:number_words"]
                prompt = f"say {word} and {other} in {count} words"
                yield {"prompt": prompt, "instruction_id_list": names, "kwargs": kwargs}, f"{word} {other}"


def objects() -> Iterator[tuple[Task, str]]:
    """JSON with one key, equal to the reference."""
    for key in KEYS:
        for number in range(19):
            answer = json.dumps({key: number})
            yield {"prompt": f"json {key} {number}", "answer": answer}, f'{{ "{key}" : {number} }}'


DOMAINS: dict[str, Callable[[], Iterator[tuple[Task, str]]]] = {
    "maths": maths,
    "following": following,
    "objects": objects,
}


def write(folder: Path, *, demonstrations: int, noise: float, seed: int) -> None:
    """Each domain's tasks in a file of its own, and all demonstrations in one."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {name: list(make()) for name, make in DOMAINS.items()}
    for name, pairs in tasks.items():
        _write(folder / f"{name}.jsonl", [task for task, _ in pairs])
    chance = random.Random(seed)
    shown: list[Task] = []
    for _ in range(demonstrations):
        pairs = tasks[chance.choice(list(tasks))]
        task, answer = chance.choice(pairs)
        if chance.random() < noise:
            answer = chance.choice(pairs)[1]
        said = [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": answer}]
        shown.append({"messages": said})
    _write(folder / "demonstrations.jsonl", shown)


def _write(file: Path, lines: Sequence[Task]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/rlvr"), help="folder (default: %(default)s)")
    parser.add_argument("--demonstrations", type=int, default=3000, help="how many (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.25, help="share that is wrong (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    chosen = parser.parse_args()
    write(chosen.out, demonstrations=chosen.demonstrations, noise=chosen.noise, seed=chosen.seed)
    print(f"{chosen.out}: {', '.join(sorted(path.name for path in chosen.out.glob('*.jsonl')))}")
