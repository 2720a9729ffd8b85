import asyncio
import gc
import subprocess
import sys
import threading

import pytest

from rollfarm.threads import in_thread


async def test_work_that_blocks_gives_its_result_or_its_error_and_the_loop_goes_on_meanwhile():
    released = threading.Event()

    waiting = in_thread(lambda: released.wait(10))
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
    released.set()

    assert await waiting is True


async def test_work_that_nobody_waits_for_any_more_ends_in_silence():
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    released, ended = threading.Event(), asyncio.Event()
    cancelled = in_thread(lambda: released.wait(10))
    failed = in_thread(lambda: 1 / 0)
    failed.add_done_callback(lambda _: ended.set())

    cancelled.cancel()
    released.set()
    await ended.wait()
    del failed
    gc.collect()

    assert complaints == []


def test_work_that_hangs_does_not_hold_up_the_end_of_the_process():
    hang = "import asyncio, threading; from rollfarm.threads import in_thread\n"
    hang += "async def main(): in_thread(threading.Event().wait)\n"
    hang += "asyncio.run(main())"

    assert subprocess.run([sys.executable, "-c", hang], timeout=20, check=False).returncode == 0
