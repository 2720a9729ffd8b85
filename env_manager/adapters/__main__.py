"""Serves adapters over gRPC, for packages that need another environment than env_manager's.

    python -m env_manager.adapters verifiers textworld --port 7730

What follows the names is what `rollfarm.env.serve` takes.
"""

import sys
from itertools import takewhile
from typing import NoReturn

from env_manager.adapters import ADAPTERS
from rollfarm.env import serve
from rollfarm.registry import resolve


def main(argv: list[str]) -> NoReturn:
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    unknown = [name for name in names if name not in ADAPTERS]
    if unknown or not names:
        known = " ".join(ADAPTERS)
        sys.exit(f"usage: python -m env_manager.adapters NAME ... [--host HOST] [--port PORT], with names of: {known}")
    serve(*(resolve({}, ADAPTERS[name], what="environment") for name in names), argv=argv[len(names) :])


if __name__ == "__main__":
    main(sys.argv[1:])
