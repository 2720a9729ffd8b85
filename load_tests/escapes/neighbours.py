"""Programs that bother other processes, or want to stay."""

from load_tests.escapes.escape import BRIEF, Escape

ESCAPES = [
    Escape("a signal to the service", "with attempt():\n    os.kill(facts['service'], 0)", control=True),
    Escape("killing a process of the service", "with attempt():\n    os.kill(facts['victim'], signal.SIGKILL)"),
    # Linux answers that all is well where the caller may signal nobody: what became of the others tells.
    Escape("killing everybody", "with contextlib.suppress(OSError):\n    os.kill(-1, signal.SIGKILL)\nprint('DENIED')"),
    Escape(
        "stopping everybody", "with contextlib.suppress(OSError):\n    os.kill(-1, signal.SIGSTOP)\nprint('DENIED')"
    ),
    Escape(
        "killing its parent",
        """
        parent = os.getppid()
        with attempt():
            os.kill(parent, signal.SIGKILL)
            time.sleep(0.2)
            expect(os.getppid() != parent)
        """,
    ),
    Escape(
        "killing its process group",
        "os.kill(0, signal.SIGKILL)",
        ("killed",),
        says="",
    ),
    Escape(
        "a signal by descriptor",
        "with attempt():\n    signal.pidfd_send_signal(os.pidfd_open(facts['victim']), signal.SIGKILL)",
    ),
    Escape(
        "ignoring every signal",
        """
        for number in range(1, 65):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
        """,
        ("timeout",),
        says="",
        limits=BRIEF,
    ),
    Escape(
        "a daemon that outlives the run",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for descriptor in range(3):
                    os.close(descriptor)
                time.sleep(600)
            os._exit(0)
        print("DENIED")
        """,
    ),
    Escape(
        "a daemon that holds the output",
        """
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        print("DENIED")
        """,
    ),
    Escape(
        "a time bomb of many",
        """
        def tick():
            time.sleep(1.5)
            with contextlib.suppress(OSError):
                open(facts["folder"] + "/exploded", "w")
        for _ in range(10):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    tick()
                os._exit(0)
        print("DENIED")
        """,
    ),
    Escape(
        "deleting itself",
        """
        shutil.rmtree(os.getcwd(), ignore_errors=True)
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        print("DENIED")
        """,
    ),
    Escape(
        "locking its own folders",
        """
        for _ in range(300):
            os.mkdir("deep")
            os.chdir("deep")
        with contextlib.suppress(OSError):
            os.chmod(".", 0)
            os.chmod(os.environ["HOME"], 0)
        print("DENIED", flush=True)
        """,
        ("exited", "output"),
    ),
    Escape("closing every descriptor", "print('DENIED', flush=True)\nos.closerange(0, 4096)"),
    Escape(
        "a crash",
        "print('DENIED', flush=True)\nctypes.string_at(0)",
        ("killed",),
    ),
    Escape(
        "replacing itself",
        "print('DENIED', flush=True)\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    ),
    Escape(
        "a copy of its Python without the walls",
        """
        print("DENIED", flush=True)
        read = "try:\\n    print('PROOF', open(%r).read())\\nexcept OSError:\\n    pass" % facts["file"]
        subprocess.run([sys.executable, "-c", read])
        """,
    ),
]
