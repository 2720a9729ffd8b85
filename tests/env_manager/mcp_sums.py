"""An MCP server for tests: `python mcp_sums.py` speaks on stdin and stdout, and with a port it serves a URL."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("sums", log_level="CRITICAL")


@server.tool()
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("it broke")


@server.tool()
def variable(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "")


@server.tool()
def wait(seconds: float) -> str:
    """Takes a while."""
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
