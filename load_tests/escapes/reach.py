"""Programs that reach for files and networks."""

from load_tests.escapes.escape import Escape


def _reads(what: str, path: str, *, control: bool = True) -> Escape:
    return Escape(f"reading {what}", f"with attempt():\n    expect(open({path}, 'rb').read(1000))", control=control)


ESCAPES = [
    Escape(
        "TCP to the host",
        "with attempt():\n    socket.create_connection(('127.0.0.1', facts['tcp_port']), 5).sendall(b'PROOF')",
        control=True,
    ),
    Escape("TCP to the internet", "with attempt():\n    socket.create_connection(('1.1.1.1', 53), 5)"),
    Escape(
        "UDP to the host",
        "with attempt():\n    socket.socket(type=socket.SOCK_DGRAM).sendto(b'PROOF', ('127.0.0.1', facts['udp_port']))",
        control=True,
    ),
    Escape("DNS", "with attempt():\n    socket.getaddrinfo('example.com', 80)"),
    Escape(
        "a unix socket of the host",
        "with attempt():\n    socket.socket(socket.AF_UNIX).connect(facts['unix_socket'])",
        control=True,
    ),
    Escape(
        "an abstract unix socket of the host",
        "with attempt():\n    socket.socket(socket.AF_UNIX).connect('\\0' + facts['abstract_socket'])",
        control=True,
    ),
    Escape(
        "a datagram to the host from a socket of a pair",
        "with attempt():\n    socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'PROOF', facts['datagram_socket'])",
    ),
    Escape(
        "netlink",
        "with attempt():\n    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))",
        control=True,
    ),
    Escape("raw packets", "with attempt():\n    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    Escape("raw IP", "with attempt():\n    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    Escape("the kernel's crypto sockets", "with attempt():\n    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)"),
    Escape("virtual machine sockets", "with attempt():\n    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
    Escape(
        "reading /etc/passwd",
        "with attempt():\n    expect(open('/etc/passwd').read() == facts['users'])",
        control=True,
    ),
    _reads("/etc/shadow", "'/etc/shadow'", control=False),
    _reads("the environment of the first process", "'/proc/1/environ'", control=False),
    _reads("the environment of the service", "f\"/proc/{facts['service']}/environ\""),
    _reads("the memory map of its parent", "f'/proc/{os.getppid()}/maps'", control=False),
    _reads("the service's source", "facts['source']"),
    _reads("a file that everybody may read", "facts['file']"),
    _reads("the host's file through its root", "'/proc/self/root' + facts['file']"),
    _reads("the host's file through the first process's root", "'/proc/1/root' + facts['file']", control=False),
    _reads("the host's file upwards", "'../' * 20 + facts['file']"),
    _reads("kernel messages", "'/dev/kmsg'", control=False),
    _reads("the host's disk", "'/dev/vda'", control=False),
    _reads("memory of the machine", "'/dev/mem'", control=False),
    Escape(
        "the service's environment",
        "with attempt():\n    expect(facts['secret'] in ' '.join(os.environ.values()))",
        control=True,
    ),
    Escape("the home folder", "with attempt():\n    expect(os.listdir(facts['home']))", control=True),
    Escape(
        "writing outside", "with attempt():\n    open(facts['folder'] + '/written', 'w').write('PROOF')", control=True
    ),
    Escape(
        "a symlink out",
        "os.symlink(facts['file'], 'link')\nwith attempt():\n    expect(open('link').read())",
        control=True,
    ),
    Escape(
        "a symlink to the root",
        "os.symlink('/', 'link')\nwith attempt():\n    expect(open('link' + facts['file']).read())",
        control=True,
    ),
    Escape("a hard link out", "with attempt():\n    os.link(facts['file'], 'hard')"),
    Escape("moving a file in", "with attempt():\n    os.rename(facts['file'], 'moved')"),
    Escape("changing a file's permissions", "with attempt():\n    os.chmod(facts['file'], 0o777)"),
    Escape("truncating a file", "with attempt():\n    os.truncate(facts['writable'], 0)"),
    Escape("deleting a file", "with attempt():\n    os.unlink(facts['writable'])"),
    Escape("changing the system", "with attempt():\n    open('/usr/bin/escaped', 'w')"),
    Escape("changing its Python", "with attempt():\n    open(os.__file__, 'a')"),
    # A container has one of its own: the host looks whether anything came there.
    Escape(
        "shared memory of the host",
        "with contextlib.suppress(OSError):\n    open('/dev/shm/' + facts['shared'], 'w')\nprint('DENIED')",
    ),
    Escape("changing the kernel's settings", "with attempt():\n    open('/proc/sys/kernel/core_pattern', 'w')"),
    Escape("magic keys", "with attempt():\n    open('/proc/sysrq-trigger', 'w')"),
    Escape("leaving its control group", "with attempt():\n    open('/sys/fs/cgroup/cgroup.procs', 'w')"),
    Escape("making a device", "with attempt():\n    os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))"),
    Escape(
        "an inherited descriptor",
        """
        with attempt():
            found = []
            for descriptor in range(3, 4096):
                with contextlib.suppress(OSError):
                    os.fstat(descriptor)
                    found.append(descriptor)
            expect(found)
        """,
    ),
    Escape(
        "writing to every descriptor",
        """
        with attempt():
            written = 0
            for descriptor in range(3, 4096):
                with contextlib.suppress(OSError):
                    written += os.write(descriptor, b"PROOF")
            expect(written)
        """,
    ),
]
