"""The program in a box that carries its connections to the owner: a port of loopback <-> frames on stdin and stdout.

    client of the box <-> 127.0.0.1:3128 <-> this <-> frames <-> owner, who decides (see `proxy`) and connects

It decides nothing, and the owner trusts nothing it says: a job runs as the same user and may take its place. It travels
as an argument (`python3 -c SOURCE`) and ends with its stdin. Standard library of Python >= 3.8 only; one thread.

    frame = kind (u8), stream (u32), length (u32), payload
    OPEN  relay -> owner: a new stream, numbers rise     DATA, END, RESET both ways     WINDOW both ways: u32 more bytes
    READY or BUSY relay -> owner, once, at the start     PING owner -> relay: answered by PONG

A stream holds at most WINDOW_BYTES that its receiver has not taken yet, so neither side needs more memory than that.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time

HOST, PORT = "127.0.0.1", 3128
FRAME = struct.Struct(">BII")
MORE = struct.Struct(">I")
OPEN, DATA, END, RESET, WINDOW, PING, PONG, READY, BUSY = range(1, 10)
MAX_PAYLOAD_BYTES = 2**15
WINDOW_BYTES = 2**17
MAX_STREAMS = 64
BIND_TRIES, BIND_PAUSE_S = 20, 0.05


class Client:
    """One connection of the box."""

    def __init__(self, number, connection):
        self.number, self.connection = number, connection
        self.window, self.out = WINDOW_BYTES, bytearray()
        self.ended = self.owner_ended = False
        self.mask = 0


class Relay:
    """All connections of the box."""

    def __init__(self, listener):
        self.listener, self.listening = listener, False
        self.clients, self.number, self.data = {}, 0, bytearray()
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, None)

    def send(self, kind, number=0, payload=b""):
        rest = memoryview(FRAME.pack(kind, number, len(payload)) + payload)
        while rest:  # may block: the owner always reads
            rest = rest[os.write(1, rest) :]

    def run(self):
        self.send(READY)
        while True:
            self.listen()
            for key, events in self.selector.select():
                if key.fd == 0:
                    data = os.read(0, 2**16)
                    if not data:
                        return
                    self.data += data
                    self.take_frames()
                elif key.fileobj is self.listener:
                    self.accept()
                elif key.data.number in self.clients:
                    self.serve(key.data, events)

    def listen(self):
        """Connections beyond the most there may be wait in the kernel's queue."""
        if (len(self.clients) < MAX_STREAMS) != self.listening:
            self.listening = not self.listening
            if self.listening:
                self.selector.register(self.listener, selectors.EVENT_READ, None)
            else:
                self.selector.unregister(self.listener)

    def accept(self):
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self.number += 1
            client = self.clients[self.number] = Client(self.number, connection)
            self.send(OPEN, self.number)
            self.update(client)

    def update(self, client):
        """Wait for what can be done with a connection, and only for that."""
        if client.ended and client.owner_ended and not client.out:
            self.drop(client)
            return
        mask = selectors.EVENT_READ if client.window and not client.ended else 0
        mask |= selectors.EVENT_WRITE if client.out else 0
        if mask == client.mask:
            return
        if not client.mask:
            self.selector.register(client.connection, mask, client)
        elif not mask:
            self.selector.unregister(client.connection)
        else:
            self.selector.modify(client.connection, mask, client)
        client.mask = mask

    def serve(self, client, events):
        try:
            if events & selectors.EVENT_WRITE and client.out:
                sent = client.connection.send(client.out[:MAX_PAYLOAD_BYTES])
                del client.out[:sent]
                self.send(WINDOW, client.number, MORE.pack(sent))
                self.finish(client)
            if events & selectors.EVENT_READ and client.window and not client.ended:
                data = client.connection.recv(min(client.window, MAX_PAYLOAD_BYTES))
                client.window -= len(data)
                client.ended = not data
                self.send(DATA if data else END, client.number, data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.send(RESET, client.number)
            self.drop(client)
            return
        self.update(client)

    def finish(self, client):
        if client.owner_ended and not client.out:
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)

    def drop(self, client):
        if client.mask:
            self.selector.unregister(client.connection)
        client.connection.close()
        del self.clients[client.number]

    def take_frames(self):
        while len(self.data) >= FRAME.size:
            kind, number, length = FRAME.unpack_from(self.data)
            if len(self.data) < FRAME.size + length:
                return
            payload = bytes(self.data[FRAME.size : FRAME.size + length])
            del self.data[: FRAME.size + length]
            if kind == PING:
                self.send(PONG)
            client = self.clients.get(number)
            if client is not None:
                self.take(client, kind, payload)

    def take(self, client, kind, payload):
        if kind == DATA:
            client.out += payload
        elif kind == WINDOW:
            client.window += MORE.unpack(payload)[0]
        elif kind == END:
            client.owner_ended = True
            self.finish(client)
        elif kind == RESET:
            self.drop(client)
            return
        self.update(client)


def bound():
    """The listening socket; None where the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for _ in range(BIND_TRIES):
        with contextlib.suppress(OSError):
            listener.bind((HOST, PORT))
            listener.listen(128)
            listener.setblocking(False)
            return listener
        time.sleep(BIND_PAUSE_S)
    return None


def main():
    listener = bound()
    if listener is None:
        os.write(1, FRAME.pack(BUSY, 0, 0))
        return
    with contextlib.suppress(BrokenPipeError):
        Relay(listener).run()
