"""The program inside every box: takes requests on stdin, answers on stdout, one at a time.

It is one self-contained, standard-library-only source (Python >= 3.8), because it travels as an argument
(`python3 -I -S -B -c SOURCE OPTIONS`): a box with a read-only root has nowhere to put a file. In a Docker box it is
PID 1, so `kill(-1)` reaches every other process whatever it did, and nothing in the box can kill or stop it. On the
host (local sandbox) it makes itself the reaper of its descendants and finds them through /proc.

    frame   = MAGIC, header length (u32), body length (u64), header (JSON), body (bytes)
    request = {"id", "op": ping | exec | read | write | reset, ...} + body (stdin of exec, data of write)
    answer  = {"id", ...} or {"id", "error": {...}} + body (output of exec, data of read)

Invariants: output is bounded while it is read; a child that keeps stdout open does not delay the answer; what has run
past its deadline is dead, with everything else in the box, before the answer leaves; no process of the box can write
to the answer stream (PR_SET_DUMPABLE 0 shuts /proc/1/fd and /proc/1/mem). It limits nothing else: the engine does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import stat
import struct
import subprocess
import sys
import time

FRAME = struct.Struct(">4sIQ")
MAGIC = b"\x00Qn1"
MAX_HEADER_BYTES = 2**23
MAX_BODY_BYTES = 2**26
FILE_CHUNK_BYTES = 2**20
PIPE_CHUNK_BYTES = 2**16
KILL_WAIT_S = 5.0
MAX_LEFT_OPEN = 32
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class Kept:
    """Head and tail of a stream of any length, in bounded memory."""

    def __init__(self, limit):
        self.head_limit, self.tail_limit = limit // 2, limit - limit // 2
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data):
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.tail_limit + 4 * PIPE_CHUNK_BYTES:
            del self.tail[: -self.tail_limit]

    def parts(self):
        return bytes(self.head), bytes(self.tail[-self.tail_limit :])


class Processes:
    """Every process of the box but this one: reaping them, finding them, killing them all."""

    def __init__(self, private):
        self.private = private and os.getpid() == 1
        self.awaited, self.status = None, None

    def reap(self):
        """Collect every child that has ended; True where no child is left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.awaited:
                self.status = status

    def others(self):
        """Pids of the box but our own: the whole pid namespace, or our descendants on a host."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.private:
            return [pid for pid in pids if pid != 1]
        parent_of = {}
        for pid in pids:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                parent_of[pid] = int(file.read().rsplit(b")", 1)[1].split()[1])
        found, frontier = [], {os.getpid()}
        while frontier:
            frontier = {pid for pid, parent in parent_of.items() if parent in frontier}
            found.extend(frontier)
        return found

    def kill_all(self):
        """SIGKILL everything until nothing is left; the pids that could not be ended in time."""
        deadline = time.monotonic() + KILL_WAIT_S
        while True:
            # On a host "no child" means "no descendant", since orphans are handed to us: no need to walk /proc.
            left = [] if self.reap() and not self.private else self.others()
            if not left or time.monotonic() > deadline:
                return left
            if self.private:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)


class Box:
    """The state of the box, and one method an operation."""

    def __init__(self, options):
        self.work = options["work"]
        self.folders = list(options["folders"])
        self.env = dict(os.environ, **options["env"])
        self.processes = Processes(options["private"])
        if self.processes.private:
            self.folders += [path for path in writable_mounts() if path not in self.folders]
        self.selector = selectors.DefaultSelector()
        self.left_open = []
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, self.discard)
        self.condition = own_condition()

    def discard(self, source):
        """Drop wake-up bytes, and the output of what an ended command left running (else SIGPIPE would kill it)."""
        fd = source if isinstance(source, int) else source.fileno()
        try:
            if os.read(fd, PIPE_CHUNK_BYTES):
                return
        except BlockingIOError:
            return
        self.selector.unregister(source)
        source.close()
        self.left_open.remove(source)

    def pump(self, timeout_s):
        for key, _ in self.selector.select(timeout_s):
            if key.data is not None:
                key.data(key.fileobj)

    def op_ping(self, request, body):
        return {"python": sys.version.split()[0], "pid": os.getpid()}, b""

    def op_exec(self, request, body):
        started = time.monotonic()
        command = request["command"]
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        cwd = os.path.join(self.work, request["cwd"] or "")
        outputs = [Kept(request["max_output_bytes"]), Kept(request["max_output_bytes"])]
        timed_out = False
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if body else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=cwd,
                env=dict(self.env, **request["env"]),
                start_new_session=True,
                close_fds=False,  # ours are all close-on-exec, and /proc/self/fd is shut to a non-dumpable process
            )
        except (OSError, ValueError, IndexError) as error:
            missing = isinstance(error, FileNotFoundError) and error.filename != cwd
            outputs[1].add(f"cannot run {argv[:1]}: {error}\n".encode("utf-8", "replace"))
            exit_code = 127 if missing else 126
        else:
            exit_code, timed_out = self.follow(child, body, outputs, started + request["timeout_s"])
        parts = [part for output in outputs for part in output.parts()]
        answer = {
            "exit_code": exit_code,
            "timed_out": timed_out,
            "duration_s": time.monotonic() - started,
            "totals": [output.total for output in outputs],
            "lengths": [len(part) for part in parts],
        }
        return answer, b"".join(parts)

    def follow(self, child, stdin, outputs, deadline):
        """Feed and drain one child until it has ended or the deadline kills everything."""
        self.processes.awaited, self.processes.status = child.pid, None
        streams = [child.stdout, child.stderr]
        for stream, output in zip(streams, outputs):  # noqa: B905 strict= came with Python 3.10
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, lambda source, kept=output: self.take(source, kept))
        if stdin:
            self.feed(child.stdin, memoryview(stdin))
        timed_out = False
        while self.processes.status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                timed_out = True
                self.processes.kill_all()
                break
            self.pump(left_s)
            self.processes.reap()
        for stream, output in zip(streams, outputs):  # noqa: B905 strict= came with Python 3.10
            # What the child wrote before it ended is in the pipe already; the bound stops a child that still floods it.
            bound = output.total + 2**20
            while not stream.closed and output.total < bound and self.take(stream, output):
                pass
            if not stream.closed:
                self.selector.modify(stream, selectors.EVENT_READ, self.discard)
                self.left_open.append(stream)
        if child.stdin is not None and not child.stdin.closed:
            self.close(child.stdin)
        while len(self.left_open) > MAX_LEFT_OPEN:
            self.close(self.left_open.pop(0))
        status, self.processes.awaited = self.processes.status, None
        if status is None:
            code = -signal.SIGKILL
        else:
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        child.returncode = code
        return (128 - code if code < 0 else code), timed_out

    def take(self, stream, output):
        """Move what is there from a pipe to its keeper; False where nothing is there now or ever will be."""
        try:
            data = os.read(stream.fileno(), PIPE_CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close(stream)
            return False
        output.add(data)
        return True

    def feed(self, pipe, rest):
        """Write stdin as fast as the child reads it."""
        os.set_blocking(pipe.fileno(), False)

        def more(_):
            nonlocal rest
            try:
                rest = rest[os.write(pipe.fileno(), rest[:PIPE_CHUNK_BYTES]) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                rest = rest[:0]
            if not rest:
                self.close(pipe)

        self.selector.register(pipe, selectors.EVENT_WRITE, more)

    def close(self, stream):
        with contextlib.suppress(KeyError):
            self.selector.unregister(stream)
        stream.close()

    def op_read(self, request, body):
        """One chunk of a regular file; a FIFO or device is refused, since it could block the agent for ever."""
        fd = open_regular(os.path.join(self.work, request["path"]), os.O_RDONLY)
        try:
            data = os.pread(fd, min(request["length"], FILE_CHUNK_BYTES), request["offset"])
            return {"size": os.fstat(fd).st_size}, data
        finally:
            os.close(fd)

    def op_write(self, request, body):
        """One chunk of a file; the first one makes the parents, sets the mode and cuts what was there."""
        path = os.path.join(self.work, request["path"])
        first = request["offset"] == 0
        if first:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = open_regular(path, os.O_WRONLY | (os.O_CREAT if first else 0), request["mode"])
        try:
            if first:
                os.ftruncate(fd, 0)
                os.fchmod(fd, request["mode"])
            rest, offset = memoryview(body), request["offset"]
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
        finally:
            os.close(fd)
        return {}, b""

    def op_reset(self, request, body):
        """Everything a trajectory can leave is removed; what could not be is named in `problems`."""
        problems = [f"process {pid} does not end" for pid in self.processes.kill_all()]
        while self.left_open:
            self.close(self.left_open.pop())
        for folder in self.folders:
            try:
                empty_folder(folder)
            except OSError as error:
                problems.append(f"{folder}: {error}")
        if self.processes.private:
            problems += remove_ipc()
        if own_condition() != self.condition:  # a same-uid process may change limits and priority of PID 1
            problems.append("limits or priority of the agent were changed")
        return {"problems": problems}, b""


def open_regular(path, flags, mode=0o600):
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", path)


def empty_folder(top):
    """Delete all that is in `top`, of any depth: sub-folders move up to `top` first, so no path ever gets long."""
    os.chmod(top, os.stat(top).st_mode | 0o700) if os.stat(top).st_uid == os.getuid() else None
    number = 0
    while True:
        names = os.listdir(top)
        if not names:
            break
        for name in names:
            path = os.path.join(top, name)
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for child in os.listdir(path):
                inner = os.path.join(path, child)
                if stat.S_ISDIR(os.lstat(inner).st_mode):
                    os.chmod(inner, 0o700)  # a folder that is not writable cannot be moved
                    number += 1
                    os.rename(inner, os.path.join(top, f".{number}.{os.getpid()}.emptying"))
                else:
                    os.unlink(inner)
            os.rmdir(path)
    with contextlib.suppress(OSError):
        for name in os.listxattr(top):
            os.removexattr(top, name)


def remove_ipc():
    """Message queues and System V objects outlive the processes that made them."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/mqueue"):
            os.unlink(os.path.join("/dev/mqueue", name))
    problems = []
    libc = ctypes.CDLL(None, use_errno=True)
    removers = {
        "shm": lambda i: libc.shmctl(i, 0, None),
        "sem": lambda i: libc.semctl(i, 0, 0),
        "msg": lambda i: libc.msgctl(i, 0, None),
    }
    for kind, remove in removers.items():
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as file:
            for line in file.readlines()[1:]:
                if remove(int(line.split()[1])) != 0:
                    problems.append(f"System V {kind} {line.split()[1]} cannot be removed")
    return problems


def writable_mounts():
    """Mount points of real file systems that this user may write to."""
    skipped = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")
    found = []
    with open("/proc/self/mounts") as file:
        for line in file:
            _, path, kind, flags = line.split()[:4]
            path = path.encode().decode("unicode_escape")
            if (
                kind not in skipped
                and "rw" in flags.split(",")
                and os.path.isdir(path)
                and os.access(path, os.W_OK | os.X_OK)
            ):
                found.append(path)
    return found


def own_condition():
    limits = [
        resource.getrlimit(number)
        for number in range(resource.RLIM_NLIMITS if hasattr(resource, "RLIM_NLIMITS") else 16)
    ]
    return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)


def become_agent(private):
    """Shut our memory and files to the box, take the orphans, and keep the long argument out of `ps`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/stat", "rb") as file:
        start, end = (int(field) for field in file.read().rsplit(b")", 1)[1].split()[45:47])
        if end - start > 64:
            title = b"quintain-agent\0"
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, title, len(title))
            ctypes.memset(end - 1, 1, 1)  # a last byte other than NUL tells the kernel that the title was rewritten
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    if not private:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # for PID 1 the default is "not delivered"; Python's handler would raise


def read_exactly(fd, count):
    data = bytearray()
    while len(data) < count:
        chunk = os.read(fd, min(count - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def receive(fd):
    """The next request, or None at the end of the stream."""
    frame = read_exactly(fd, FRAME.size)
    if frame is None:
        return None
    magic, header_bytes, body_bytes = FRAME.unpack(frame)
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise SystemExit("quintain agent: the request stream is not ours")
    header, body = read_exactly(fd, header_bytes), read_exactly(fd, body_bytes)
    return None if header is None or body is None else (json.loads(header), body)


def pack(header, body=b""):
    text = json.dumps(header).encode()
    return FRAME.pack(MAGIC, len(text), len(body)) + text + body


def serve(box, fd_in, fd_out):
    box.selector.register(fd_in, selectors.EVENT_READ, None)
    while True:
        keys = box.selector.select()
        for key, _ in keys:
            if key.data is not None:
                key.data(key.fileobj)
        box.processes.reap()
        if not any(key.fd == fd_in for key, _ in keys):
            continue
        request = receive(fd_in)
        if request is None:
            return
        header, body = request
        box.selector.unregister(fd_in)
        try:
            answer, data = getattr(box, "op_" + header["op"])(header, body)
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", None)
            answer, data = {"error": {"errno": code, "message": getattr(error, "strerror", None) or str(error)}}, b""
        box.selector.register(fd_in, selectors.EVENT_READ, None)
        rest = memoryview(pack(dict(answer, id=header["id"]), data))
        while rest:
            rest = rest[os.write(fd_out, rest) :]


def main():
    options = json.loads(sys.argv[1])
    become_agent(options["private"] and os.getpid() == 1)
    fd_in, fd_out = os.dup(0), os.dup(1)  # not inheritable, unlike 0 and 1
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    box = Box(options)
    try:
        serve(box, fd_in, fd_out)
    except BrokenPipeError:
        pass
    finally:
        if not box.processes.private:  # as PID 1 our own end takes the box with it
            box.processes.kill_all()
            for folder in box.folders:
                with contextlib.suppress(OSError):
                    empty_folder(folder)
                    os.rmdir(folder)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(box.work))


if __name__ == "__main__":
    main()
