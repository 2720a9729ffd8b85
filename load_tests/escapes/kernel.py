"""Programs that ask the kernel for more than they need."""

from load_tests.escapes.escape import Escape


def _calls(what: str, act: str, *, control: bool = False) -> Escape:
    return Escape(what, f"with attempt():\n    {act}", control=control)


ESCAPES = [
    _calls("mount", "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))"),
    _calls(
        "watching the files of others",
        "check(libc.inotify_add_watch(libc.inotify_init1(0), b'/tmp', 0xfff))",
        control=True,
    ),
    _calls("a new mount interface", "syscall(430, 430, b'tmpfs', 0)"),
    _calls("unmounting", "check(libc.umount2(b'/proc', 2))"),
    _calls("a user namespace", "check(libc.unshare(0x10000000))", control=True),
    _calls("a network namespace", "check(libc.unshare(0x40000000))"),
    _calls("a user namespace by clone", "syscall(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)"),
    _calls("another's namespace", "check(libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0))"),
    _calls("chroot", "os.chroot('.')"),
    _calls("becoming root", "os.setuid(0)"),
    _calls("becoming root by all ids", "os.setresuid(0, 0, 0)"),
    _calls("joining groups", "os.setgroups([0])"),
    _calls("privileges by exec", "expect(libc.prctl(39, 0, 0, 0, 0) == 0)", control=True),
    _calls("a setuid program", "subprocess.run(['mount', '-t', 'tmpfs', 'none', '/tmp'], check=True)"),
    Escape(
        "a library before all others",
        """
        os.environ["LD_PRELOAD"] = facts["file"]
        with attempt():
            said = subprocess.run(["su", "-c", "id -u"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            expect(said.stdout.strip() == "0")
        """,
    ),
    _calls("tracing its parent", "check(libc.ptrace(16, os.getppid(), 0, 0))"),
    _calls("being traced", "check(libc.ptrace(0, 0, 0, 0))", control=True),
    _calls(
        "reading another process's memory",
        "place = ctypes.create_string_buffer(64); vector = struct.pack('QQ', ctypes.addressof(place), 8); "
        "check(libc.process_vm_readv(os.getppid(), vector, 1, vector, 1, 0))",
    ),
    _calls("writing its parent's memory", "open(f'/proc/{os.getppid()}/mem', 'r+b')"),
    _calls("another process's descriptors", "syscall(438, 438, os.pidfd_open(os.getppid()), 0, 0)"),
    _calls("kernel keys", "syscall(248, 217, b'user', b'name', b'PROOF', 5, -3)", control=True),
    _calls("a session keyring", "syscall(250, 219, 1, 0)"),
    _calls("io_uring", "syscall(425, 425, 8, ctypes.create_string_buffer(256))", control=True),
    _calls("bpf", "syscall(321, 280, 0, struct.pack('IIII', 1, 4, 4, 1) + bytes(112), 128)"),
    _calls(
        "perf events",
        "syscall(298, 241, struct.pack('IIQQQQQ', 1, 128, 0, 0, 0, 0, 0b1100000) + bytes(80), 0, -1, -1, 0)",
        control=True,
    ),
    _calls("userfaultfd", "syscall(323, 282, 1)", control=True),
    _calls("loading a module", "syscall(175, 105, b'', 0, b'')"),
    _calls("another kernel", "syscall(246, 104, 0, 0, 0, 0)"),
    _calls("the host's name", "check(libc.sethostname(b'escaped', 7))"),
    _calls("the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time())"),
    _calls("kernel messages by syscall", "check(libc.klogctl(3, ctypes.create_string_buffer(100), 100))"),
    _calls("another personality", "check(libc.personality(0x0040000))", control=True),
    _calls("executable memory behind a descriptor", "syscall(447, 447, 0)"),
    _calls("files by handle", "check(libc.open_by_handle_at(-100, bytes(128), 0))"),
    _calls("watching the file system", "check(libc.fanotify_init(0, 0))"),
    _calls("message queues", "syscall(240, 180, b'escaped', 0o100, 0o600, 0)", control=True),
    _calls("System V semaphores", "syscall(64, 190, 0, 1, 0o1600)"),
    _calls("pinning memory", "check(libc.mlockall(3))"),
    _calls("real-time priority", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    _calls("a better priority", "os.nice(-5)"),
    _calls("more processes", "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))"),
    _calls(
        "the limits of its parent",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))",
    ),
    _calls("the processors of its parent", "os.sched_setaffinity(os.getppid(), {0})"),
    _calls("typing into a terminal", "import fcntl; fcntl.ioctl(0, 0x5412, b'x')"),
    Escape(
        "a call of another architecture",
        "with attempt():\n    syscall(0x40000000 | 41, -1, 2, 1, 0)",
        ("killed", "exited"),
        says="",
    ),
]
