"""Programs that use up the machine."""

from load_tests.escapes.escape import BRIEF, SMALL, Escape

ENOUGH = ("memory", "exited")
"""How a program ends that forks to use up memory: of runs that share a user's processes, some may not fork at all."""

ESCAPES = [
    Escape(
        "fork bomb",
        """
        while True:
            with contextlib.suppress(OSError):
                os.fork()
        """,
        ("timeout",),
        says="",
        limits=BRIEF,
        alone=True,
    ),
    Escape(
        "fork bomb whose parents exit",
        """
        while True:
            with contextlib.suppress(OSError):
                if os.fork() == 0:
                    os.setsid()
                elif os.getpid() != os.getsid(0):
                    os._exit(0)
        """,
        ("timeout", "exited", "killed"),
        says="",
        limits=BRIEF,
        alone=True,
    ),
    Escape(
        "a thousand threads",
        """
        try:
            for _ in range(1000):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            print("PROOF")
        except RuntimeError as refused:
            print("DENIED", refused)
        """,
        control=True,
        alone=True,
    ),
    Escape(
        "more processes than allowed", "with attempt():\n    for _ in range(200):\n        os.fork() or time.sleep(60)"
    ),
    Escape("memory bomb", "with attempt():\n    blob = bytearray(10**10)", limits=SMALL),
    Escape(
        "memory bomb in small pieces",
        "with attempt():\n    pieces = []\n    while True:\n        pieces.append(bytearray(2**20))",
        limits=SMALL,
    ),
    Escape(
        "memory bomb of many processes",
        """
        for _ in range(8):
            if os.fork() == 0:
                blob = bytearray(b"x" * (60 * 2**20))
                time.sleep(60)
        time.sleep(60)
        """,
        ENOUGH,
        says="",
        limits=SMALL,
    ),
    Escape(
        "memory bomb of shared mappings",
        """
        for _ in range(8):
            if os.fork() == 0:
                shared = mmap.mmap(-1, 60 * 2**20)
                for _ in range(60):
                    shared.write(b"x" * 2**20)
                time.sleep(60)
        time.sleep(60)
        """,
        ENOUGH,
        says="",
        limits=SMALL,
    ),
    Escape("mapping a terabyte", "with attempt():\n    mmap.mmap(-1, 2**40)", limits=SMALL),
    Escape("System V shared memory", "with attempt():\n    syscall(29, 194, 0, 2**20, 0o1600)"),
    Escape("memory behind a file descriptor", "with attempt():\n    os.memfd_create('blob')", control=True),
    Escape(
        "filling the disk with files",
        """
        with attempt():
            for number in range(64):
                with open(f"file-{number}", "wb") as file:
                    file.write(b"x" * 2**20)
            time.sleep(60)
        """,
        ("exited", "output"),
        says="",
        limits=SMALL,
    ),
    Escape(
        "filling the disk with one file",
        """
        with attempt():
            with open("file", "wb") as file:
                for _ in range(64):
                    file.write(bytes(2**20))
        """,
        ("exited", "output"),
        says="",
        limits=SMALL,
        control=True,
    ),
    Escape(
        "using up inodes",
        """
        with attempt():
            for number in range(50_000):
                open(f"empty-{number}", "w").close()
        """,
        ("exited", "output"),
        says="",
        limits=SMALL,
    ),
    Escape(
        "a huge file without contents",
        "with attempt():\n    with open('file', 'wb') as file:\n        file.truncate(2**40)",
        limits=SMALL,
        control=True,
    ),
    Escape("infinite loop", "while True:\n    pass", ("timeout",), says="", limits=BRIEF),
    Escape(
        "CPU time beyond its limit",
        "while True:\n    pass",
        ("timeout",),
        says="",
        limits=SMALL.model_copy(update={"cpu_seconds": 1}),
    ),
    Escape("sleeping forever", "time.sleep(10**6)", ("timeout",), says="", limits=BRIEF),
    Escape("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",), says="", limits=BRIEF),
    Escape(
        "waiting at a pipe that nobody opens", "os.mkfifo('pipe')\nopen('pipe')", ("timeout",), says="", limits=BRIEF
    ),
    Escape("flood on stdout", "while True:\n    print('x' * 1000)", ("output",), says="", limits=SMALL),
    Escape("flood on stderr", "while True:\n    os.write(2, bytes(1000))", ("output",), says="", limits=SMALL),
    Escape(
        "deep recursion",
        "sys.setrecursionlimit(10**9)\ndef down():\n    down()\ndown()",
        ("exited", "killed", "memory"),
        says="",
        limits=SMALL,
    ),
    Escape(
        "deep recursion in C",
        "sys.setrecursionlimit(10**9)\nnested = []\nfor _ in range(10**6):\n    nested = [nested]\nrepr(nested)",
        ("exited", "killed", "memory"),
        says="",
        limits=SMALL,
    ),
    Escape(
        "zip bomb",
        """
        packer = zlib.compressobj(1)
        bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(100)) + packer.flush()
        with attempt():
            zlib.decompress(bomb)
        """,
        limits=SMALL.model_copy(update={"memory_bytes": 96 * 2**20}),
        control=True,
    ),
]
