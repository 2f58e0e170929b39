"""Running one command in the box: start it, feed it, drain it, and end everything where its time is up.

Standard library only, Python >= 3.8: a part of the agent (see `agent`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time

from quintain.sandbox.agent_output import PIPE_CHUNK_BYTES, Kept, SpillFolder
from quintain.sandbox.agent_processes import OOM_NORMAL, OOM_PREFERRED, OomKills

MAX_LEFT_OPEN = 32
MAX_ARGUMENT_BYTES = 2**17 - 1
"""The kernel's limit on one argument (MAX_ARG_STRLEN, with its NUL)."""
LONGEST_WAIT_S = 3600.0
"""One wait for news; a longer one the kernel might refuse."""
KILL_IN_TIME_S = 0.8
"""A deadline's sweep may take this long; what is left then makes the box unusable."""


class Commands:
    """Runs commands one at a time; `pump` handles events while one runs."""

    def __init__(self, processes, selector, pump, *, work, env, spill, oom_file):
        self.processes, self.selector, self.pump = processes, selector, pump
        self.work, self.env, self.oom_file = work, env, oom_file
        self.spill = SpillFolder(spill)
        self.oom_kills = OomKills(processes.private)
        self.left_open = []

    def run(self, request, body):
        """One command; the answer's header and its output."""
        started, killed_before = time.monotonic(), self.oom_kills.count()
        limit = request["max_output_bytes"]
        self.spill.begin()
        spills = self.spill.next_pair(request.get("max_spill_bytes", 0))
        outputs = [Kept(limit, spill) for spill in spills]
        timed_out, left = False, []
        try:
            child = self.start(request, body)
        except (OSError, ValueError, IndexError, TypeError) as error:
            cwd = os.path.join(self.work, str(request["cwd"] or ""))
            missing = isinstance(error, FileNotFoundError) and error.filename != cwd
            name = request["command"] if isinstance(request["command"], str) else request["command"][:1]
            outputs[1].add(f"cannot run {str(name)[:200]}: {error}\n".encode("utf-8", "replace"))
            exit_code = 127 if missing else 126
        else:
            exit_code, timed_out, left = self.follow(child, body, outputs, started + request["timeout_s"])
        answer = {
            "exit_code": exit_code,
            "timed_out": timed_out,
            "oom_killed": self.oom_kills.count() > killed_before,
            "left": left,
            "duration_s": time.monotonic() - started,
            "totals": [output.total for output in outputs],
            "heads": [output.head_bytes for output in outputs],
            "lengths": [len(output.data) for output in outputs],
            "spilled": [spill and spill.close() for spill in spills],
        }
        return answer, b"".join(output.whole() for output in outputs)

    def start(self, request, body):
        """The child process. Raises OSError, ValueError, IndexError, TypeError where there can be none."""
        command, script = request["command"], None
        if isinstance(command, str):
            argv = ["/bin/sh", "-c", command]
            source = os.fsencode(command)
            if len(source) > MAX_ARGUMENT_BYTES and b"\0" not in source:
                script = memory_file(source)
                argv[2] = f". /proc/self/fd/{script}"
        else:
            argv = command
        self.set_oom_score(OOM_PREFERRED)  # inherited: where memory runs out, the child goes before the agent
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if body.left else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=os.path.join(self.work, request["cwd"] or ""),
                env=dict(self.env, **request["env"]),
                start_new_session=True,
                close_fds=False,  # ours are all close-on-exec, and /proc/self/fd is shut to a non-dumpable process
            )
        finally:
            self.set_oom_score(OOM_NORMAL)
            if script is not None:
                os.close(script)

    def set_oom_score(self, score):
        if self.oom_file is not None:
            os.pwrite(self.oom_file, score, 0)

    def follow(self, child, body, outputs, deadline):
        """Feed and drain one child until it has ended or the deadline kills everything."""
        self.processes.awaited, self.processes.status = child.pid, None
        streams = [child.stdout, child.stderr]
        for stream, output in zip(streams, outputs):  # noqa: B905 strict= came with Python 3.10
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, lambda source, kept=output: self.take(source, kept))
        feeder = Feeder(self.selector, body, child.stdin) if child.stdin is not None else None
        timed_out, left = False, []
        while self.processes.status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                timed_out = True
                left = self.processes.kill_all(KILL_IN_TIME_S)
                break
            self.pump(min(LONGEST_WAIT_S, left_s))
            self.processes.reap()
        for stream, output in zip(streams, outputs):  # noqa: B905 strict= came with Python 3.10
            # What the child wrote before it ended is in the pipe already; the bound stops a child that still floods it.
            bound = output.total + 2**20
            while not stream.closed and output.total < bound and self.take(stream, output):
                pass
            if not stream.closed:
                self.selector.modify(stream, selectors.EVENT_READ, self.discard)
                self.left_open.append(stream)
        if feeder is not None:
            feeder.finish()
        while len(self.left_open) > MAX_LEFT_OPEN:
            self.close(self.left_open.pop(0))
        status, self.processes.awaited = self.processes.status, None
        if status is None:
            code = -signal.SIGKILL
        else:
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        child.returncode = code
        return (128 - code if code < 0 else code), timed_out, left

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

    def discard(self, source):
        """Drop the output of what an ended command left running, which SIGPIPE would kill else."""
        with contextlib.suppress(BlockingIOError):
            if not os.read(source.fileno(), PIPE_CHUNK_BYTES):
                self.close(source)
                self.left_open.remove(source)

    def close(self, stream):
        with contextlib.suppress(KeyError):
            self.selector.unregister(stream)
        stream.close()

    def reset(self):
        """Let go of every stream of the past."""
        while self.left_open:
            self.close(self.left_open.pop())
        self.spill.forget()


class Feeder:
    """Moves a request's body to a child's stdin a piece at a time, so that a large one never is in memory whole.

    While the body is on its way the request stream belongs to the feeder; afterwards what stirs on it is news again.
    """

    def __init__(self, selector, body, pipe):
        self.selector, self.body, self.pipe = selector, body, pipe
        self.piece = memoryview(b"")
        os.set_blocking(pipe.fileno(), False)
        self.watched = selector.get_key(body.fd)
        selector.modify(body.fd, selectors.EVENT_READ, self.fill)

    def fill(self, _):
        self.piece = memoryview(self.body.read(PIPE_CHUNK_BYTES))
        self.selector.unregister(self.body.fd)
        self.selector.register(self.pipe, selectors.EVENT_WRITE, self.empty)

    def empty(self, _):
        try:
            self.piece = self.piece[os.write(self.pipe.fileno(), self.piece) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.finish()
            return
        if self.piece:
            return
        self.selector.unregister(self.pipe)
        self.selector.register(self.body.fd, selectors.EVENT_READ, self.fill)
        if not self.body.left:
            self.finish()

    def finish(self):
        """Close the child's stdin, read past what is left of the body. Idempotent."""
        if self.pipe.closed:
            return
        with contextlib.suppress(KeyError):
            self.selector.unregister(self.pipe)
        self.pipe.close()
        self.body.drop()
        with contextlib.suppress(KeyError):
            self.selector.unregister(self.body.fd)
        self.selector.register(self.body.fd, selectors.EVENT_READ, self.watched.data)


def memory_file(data):
    """A file descriptor, inherited by children, of a file that is in no folder and holds `data`."""
    fd = os.memfd_create("command", 0)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
