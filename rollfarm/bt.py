import os,time,threading
_fd=os.open("/tmp/B_trace.txt" if os.environ.get("B_TRACE") else "/dev/null",os.O_WRONLY|os.O_APPEND|os.O_CREAT)
_l=threading.local()
def mark(name):
    if not os.environ.get("B_TRACE"): return
    if not hasattr(_l,'f'): _l.f=os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat",os.O_RDONLY)
    cpu,delay,_=os.pread(_l.f,100,0).split()
    os.write(_fd,f"{time.monotonic_ns()/1e6:.3f} {os.getpid()}/{threading.get_native_id()} {int(cpu)/1e6:.3f} {int(delay)/1e6:.3f} {name}\n".encode())
