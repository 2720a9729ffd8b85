"""Blocking work beside the event loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work`, begun at once in a daemon thread of its own.

    So one that hangs holds up neither others nor the end of the process. Cancelling does not stop it. A failure that
    nobody waits for is not reported.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=run, name="in_thread", daemon=True).start()
    future = asyncio.wrap_future(outcome)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
