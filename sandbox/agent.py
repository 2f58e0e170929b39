"""The program inside every box: takes requests on stdin, answers on stdout, one at a time.

It and its parts (`agent_frames`, `agent_processes`, `agent_cleaning`) use the standard library of Python >= 3.8 only,
and travel as an argument (`python3 -I -S -B -c SOURCE OPTIONS`): a box with a read-only root has nowhere to put a file.

    request = {"id", "op": ping | exec | read | write | reset, ...} + body (stdin of exec, data of write)
    answer  = {"id", ...} or {"id", "error": {...}} + body (output of exec, data of read)

Invariants: output is bounded while it is read; a child that keeps stdout open does not delay the answer; what has run
past its deadline is dead, with everything else in the box, before the answer leaves; no process of the box can write
to the answer stream (PR_SET_DUMPABLE 0 shuts /proc/1/fd and /proc/1/mem); when the owner's end closes, all ends. It
limits nothing else: the engine does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import stat
import subprocess
import sys
import time

from quintain.sandbox.agent_canary import Canary
from quintain.sandbox.agent_cleaning import empty_folder, remove_ipc, writable_mounts
from quintain.sandbox.agent_frames import FILE_CHUNK_BYTES, receive, send
from quintain.sandbox.agent_lease import Lease
from quintain.sandbox.agent_processes import OOM_NORMAL, OOM_PREFERRED, Processes, become_agent

PIPE_CHUNK_BYTES = 2**16
MAX_LEFT_OPEN = 32


class HungUp(Exception):
    """Whoever owns the box is gone."""


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


class Box:
    """The state of the box, and one method an operation."""

    def __init__(self, options, oom_file=None):
        self.oom_file = oom_file
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
        self.selector.register(wake_read, selectors.EVENT_READ, drain)
        self.canary = Canary(self.processes, self.folders)

    def discard(self, source):
        """Drop the output of what an ended command left running, which SIGPIPE would kill else."""
        with contextlib.suppress(BlockingIOError):
            if not os.read(source.fileno(), PIPE_CHUNK_BYTES):
                self.close(source)
                self.left_open.remove(source)

    def pump(self, timeout_s):
        """Handle what is ready. Nobody sends a request while one is answered: if its stream stirs, it has ended."""
        for key, _ in self.selector.select(timeout_s):
            if key.data is None:
                raise HungUp
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
        self.set_oom_score(OOM_PREFERRED)  # inherited: where memory runs out, the child goes before the agent
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
            self.set_oom_score(OOM_NORMAL)
        else:
            self.set_oom_score(OOM_NORMAL)
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

    def set_oom_score(self, score):
        if self.oom_file is not None:
            os.pwrite(self.oom_file, score, 0)

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
            with contextlib.suppress(FileExistsError):  # a file in the way: opening says so
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
        return {"problems": problems + self.canary.problems()}, b""


def drain(fd):
    with contextlib.suppress(BlockingIOError):
        os.read(fd, PIPE_CHUNK_BYTES)


def open_regular(path, flags, mode=0o600):
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", path)


def serve(box, fd_in, fd_out, lease):
    box.selector.register(fd_in, selectors.EVENT_READ, None)
    while True:
        keys = [key for key, _ in box.selector.select()]
        for key in keys:
            if key.data is not None:
                key.data(key.fileobj)
        box.processes.reap()
        if all(key.data is not None for key in keys):
            continue
        request = receive(fd_in)
        if request is None:
            return
        header, body = request
        lease.renew(header.get("timeout_s", 0.0))
        try:
            answer, data = getattr(box, "op_" + header["op"])(header, body)
        except (OSError, ValueError) as error:
            message = getattr(error, "strerror", None) or str(error)
            answer, data = {"error": {"errno": getattr(error, "errno", None), "message": message}}, b""
        send(fd_out, dict(answer, id=header["id"]), data)
        lease.renew()


def main():
    options = json.loads(sys.argv[1])
    private = options["private"] and os.getpid() == 1
    oom_file = become_agent(private)
    fd_in, fd_out = os.dup(0), os.dup(1)  # not inheritable, unlike 0 and 1
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    box = Box(dict(options, private=private), oom_file)

    def expire():
        if private:
            os._exit(0)  # takes the box with it
        raise HungUp

    try:
        serve(box, fd_in, fd_out, Lease(options.get("lease_s"), expire))
    except (BrokenPipeError, HungUp):
        pass
    finally:
        if not private:  # as PID 1 our own end takes the box with it
            box.processes.kill_all()
            for folder in box.folders:
                with contextlib.suppress(OSError):
                    empty_folder(folder)
                    os.rmdir(folder)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(box.work))
