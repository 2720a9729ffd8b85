import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.sample_buffer.support import Valkey


@pytest.fixture
async def valkey() -> AsyncIterator[Valkey]:
    """A real Valkey; its socket's path is short enough for every platform."""
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        server = Valkey(Path(folder))
        await server.start()
        yield server
        server.kill()
