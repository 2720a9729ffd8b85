"""A trainer that publishes once: `python -m tests.trainer.publish WEIGHTS_HOST [PREFIX...]`, where PREFIX starts the
receiver elsewhere."""

import asyncio
import sys

from tests.trainer.stand_ins import Receiver, serving_proxy
from tests.trainer.test_publisher import expected, hashes, publisher_to, snapshot


async def main(weights_host: str, *prefix: str) -> None:
    async def announce() -> None: ...

    async with serving_proxy() as proxy, publisher_to(proxy, weights_host) as publisher:
        proxy.attach("far", await Receiver.start(*prefix))
        await publisher.publish(snapshot(1), announce)
        assert proxy.versions == {"far": 1}
        assert await hashes(proxy.receivers["far"]) == expected(1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
