"""The program inside every box: takes requests on stdin, answers on stdout, one at a time.

It and its parts (`agent_*`) use the standard library of Python >= 3.8 only, and travel as an argument
(`python3 -I -S -B -c SOURCE OPTIONS`): a box with a read-only root has nowhere to put a file.

    request = {"id", "op": ping | exec | read | write | list | sweep | reset, ...} + body (stdin of exec, data of write)
    answer  = {"id", ...} or {"id", "error": {...}} + body (output of exec, data of read)
    again   = {"id", "op": "again", "mark"}: whoever lost the stream asks for the answer to request `id` once more.
              Answered by the mark's bytes (so that the start of the answer is found in what is left of an older one),
              then the answer, or {"id", "missing": true} where that request never came.

Invariants: output is bounded while it is read; a child that keeps stdout open does not delay the answer; what has run
past its deadline is dead, with everything else in the box, before the answer leaves, or is named in it as `left`; no
process of the box can write to the answer stream (PR_SET_DUMPABLE 0 shuts /proc/1/fd and /proc/1/mem); when the owner's
end closes, all ends. It limits nothing else: the engine does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys

from quintain.sandbox import agent_files
from quintain.sandbox.agent_canary import Canary
from quintain.sandbox.agent_cleaning import Folder, remove_ipc, writable_mounts
from quintain.sandbox.agent_exec import Commands
from quintain.sandbox.agent_frames import MAX_HEADER_BYTES, receive, send, write_all
from quintain.sandbox.agent_lease import Lease
from quintain.sandbox.agent_output import PIPE_CHUNK_BYTES
from quintain.sandbox.agent_processes import Processes, become_agent, own_condition


class HungUp(Exception):
    """Whoever owns the box is gone."""


class Box:
    """The state of the box, and one method an operation."""

    def __init__(self, options, oom_file=None):
        self.work = options["work"]
        folders = list(options["folders"])
        self.processes = Processes(options["private"])
        self.selector = selectors.DefaultSelector()
        self.commands = Commands(
            self.processes,
            self.selector,
            self.pump,
            work=self.work,
            env=dict(os.environ, **options["env"]),
            spill=os.path.join(folders[1], ".output"),
            oom_file=oom_file,
        )
        if self.processes.private:
            folders += writable_mounts()
        self.folders = [Folder(path) for path in dict.fromkeys(map(os.path.realpath, folders))]
        self.asked_again = []
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, drain)
        self.condition = own_condition()
        self.canary = Canary(self.processes, self.folders)

    def pump(self, timeout_s):
        """Handle what is ready while a request is answered: on its stream only the owner's end or `again` may come."""
        for key, _ in self.selector.select(timeout_s):
            if key.data is not None:
                key.data(key.fileobj)
                continue
            request = receive(key.fd)
            if request is None or request[0]["op"] != "again":
                raise HungUp
            self.asked_again.append(request[0])

    def op_ping(self, request, body):
        return {"python": sys.version.split()[0], "pid": os.getpid(), "oom_kills": self.commands.oom_kills.count()}, b""

    def op_exec(self, request, body):
        answer, output = self.commands.run(request, body)
        if self.processes.private and own_condition() != self.condition:  # a same-uid process may change PID 1's
            answer["left"].append("limits, priority or CPUs of the agent were changed")
        return answer, output

    def op_read(self, request, body):
        path = os.path.join(self.work, request["path"])
        return agent_files.read(path, request["offset"], request["length"], request.get("follow", True))

    def op_write(self, request, body):
        path = os.path.join(self.work, request["path"])
        agent_files.write(path, body.all(), request["offset"], request["mode"], request["last"])
        return {}, b""

    def op_list(self, request, body):
        answer = {"entries": agent_files.list_folder(os.path.join(self.work, request["path"]), request["limit"])}
        if len(json.dumps(answer)) > MAX_HEADER_BYTES - 4096:
            raise ValueError("its names are too long for one answer")
        return answer, b""

    def op_sweep(self, request, body):
        """End every process of the box; the pids that could not be ended."""
        return {"left": self.processes.kill_all(request["timeout_s"])}, b""

    def op_reset(self, request, body):
        """Everything a trajectory can leave is removed; what could not be is named in `problems`."""
        problems = [f"process {pid} does not end" for pid in self.processes.kill_all()]
        self.commands.reset()
        for folder in self.folders:
            try:
                folder.empty()
            except OSError as error:
                problems.append(f"{folder.path}: {error}")
        if self.processes.private:
            problems += remove_ipc()
        return {"problems": problems + self.canary.problems()}, b""


def drain(fd):
    with contextlib.suppress(BlockingIOError):
        os.read(fd, PIPE_CHUNK_BYTES)


def serve(box, fd_in, fd_out, lease):
    box.selector.register(fd_in, selectors.EVENT_READ, None)
    last = {"id": 0}, b""
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
        if header["op"] == "again":
            box.asked_again.append(header)
        else:
            last = answer(box, lease, header, body)
            send(fd_out, *last)
        for again in box.asked_again:
            write_all(fd_out, again["mark"].encode())
            known = last[0]["id"] == again["id"]
            send(fd_out, *(last if known else ({"id": again["id"], "missing": True}, b"")))
        box.asked_again.clear()
        lease.renew()


def answer(box, lease, header, body):
    """Header and body of the answer to one request: whatever it asks for, the agent lives on."""
    try:
        lease.renew(header.get("timeout_s", 0.0))
        answer, data = getattr(box, "op_" + header["op"])(header, body)
    except (OSError, ValueError, TypeError, OverflowError, LookupError, AttributeError) as error:
        message = getattr(error, "strerror", None) or str(error)
        answer, data = {"error": {"errno": getattr(error, "errno", None), "message": message}}, b""
    body.drop()
    return dict(answer, id=header["id"]), data


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
    except (BrokenPipeError, EOFError, HungUp):
        pass
    finally:
        if not private:  # as PID 1 our own end takes the box with it
            box.processes.kill_all()
            for folder in box.folders:
                with contextlib.suppress(OSError):
                    folder.remove()
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(box.work))
