"""The process of an engine core."""

import os
import shutil
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import zmq

BEAT_S = 0.5
"""Between two signs of life."""

MOST_QUEUED = 64
"""Messages on their way to a front end that does not keep up: then the engine core waits for it."""


def main(address: str, line_fd: int, parent_pid: int) -> None:
    """Runs an engine core for the front end at `address` until that lets it go, or is gone.

    Signals are the front end's business: it drains, whoever else hears them too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    folder = Path(address.removeprefix("ipc://")).parent
    line = socket.socket(fileno=line_fd)
    line.set_inheritable(False)
    threading.Thread(target=_watch, args=(line, parent_pid, folder), daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.sndhwm, peer.linger = MOST_QUEUED, 0
        peer.connect(address)
        peer.send(b"")
        # After the first sign of life: it takes seconds.
        from rackmount.serving.core_loop import serve

        is_well = serve(peer)
    if not is_well:
        os._exit(1)  # whatever it was may also hold up an end in order


def _watch(line: socket.socket, parent_pid: int, folder: Path) -> None:
    """Gives signs of life for as long as the front end is there, and ends the process with it.

    Both are looked at: the line stays open in what the front end has forked, and the kernel's own
    signal for a parent's death comes when the thread that started this process ends.
    """
    line.settimeout(BEAT_S)
    with suppress(OSError):
        while os.getppid() == parent_pid:
            line.send(b".")
            with suppress(TimeoutError):
                if not line.recv(1):
                    break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
