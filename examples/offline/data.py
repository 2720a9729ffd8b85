"""Writes tiny records for the examples of `rollfarm train`: `python examples/offline/data.py` makes data/offline.

Every sum of two digits: demonstrations.jsonl has its answer, preferences.jsonl the same and a wrong one.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path


def write(folder: Path, *, seed: int) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    demonstrations: list[Mapping[str, object]] = []
    preferences: list[Mapping[str, object]] = []
    for left in range(10):
        for right in range(10):
            asked, answer = {"role": "user", "content": f"what is {left} plus {right}"}, str(left + right)
            wrong = str(chance.choice([number for number in range(19) if number != left + right]))
            demonstrations.append({"messages": [asked, {"role": "assistant", "content": answer}]})
            preferences.append({"prompt": [asked], "chosen": answer, "rejected": wrong})
    _write(folder / "demonstrations.jsonl", demonstrations)
    _write(folder / "preferences.jsonl", preferences)


def _write(file: Path, records: Iterable[Mapping[str, object]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/offline"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the wrong answers (default: %(default)s)")
    chosen = parser.parse_args()
    write(chosen.out, seed=chosen.seed)
    print(f"{chosen.out}: {', '.join(sorted(path.name for path in chosen.out.glob('*.jsonl')))}")
