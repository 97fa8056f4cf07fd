"""The engine core's process, as the front end holds it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path

import zmq
import zmq.asyncio

from rackmount.serving.child import MOST_QUEUED
from rackmount_registry.errors import RackmountError

CODE = "import sys; sys.path[:] = {path}; from rackmount.serving.child import main; main{arguments}"
"""What the process runs. No main module is imported again, so the caller's needs no guard."""

SOCKET = "core"


class CoreProcess:
    """Starts the process, with a socket for messages and a line for signs of life.

    The socket has a file only until the process has found it, in a folder that no other user can
    enter. The process ends with `end`, with this object, with the interpreter, and when this
    process dies.

    Raises:
        RackmountError: there is no place for the socket's file.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.sndhwm = 0  # what is admitted bounds it
        self.socket.rcvhwm = MOST_QUEUED
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            try:
                self._folder = tempfile.mkdtemp(prefix="rackmount-")
                undo.callback(self.hide_socket)
                address = f"ipc://{Path(self._folder, SOCKET)}"
                self.socket.bind(address)
            except (OSError, zmq.ZMQError) as error:
                text = f"no socket for the engine core can be made: {error}"
                raise RackmountError(text) from error
            self._line, its_line = socket.socketpair()
            undo.callback(self._line.close)
            self._line.setblocking(False)
            with its_line:
                self._process = _start(address, its_line)
            self._end = weakref.finalize(self, _end, self._process, self._line, self._folder)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hide_socket(self) -> None:
        """Takes the socket's file away, once the process has found it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def has_beaten(self) -> bool:
        """Whether a sign of life came since the last call. Does not wait.

        Raises:
            EOFError: the process is gone.
        """
        try:
            if self._line.recv(4096):
                return True
        except BlockingIOError:
            return False
        except OSError:
            pass
        raise EOFError

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fate(self, patience_s: float) -> str:
        """How the process, which is gone, has ended."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return "has closed its line"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def end(self) -> None:
        """Kills the process if it still runs. May be called twice."""
        self._end()
        self._context.destroy(linger=0)


def _start(address: str, line: socket.socket) -> subprocess.Popen[bytes]:
    arguments = (address, line.fileno(), os.getpid())
    return subprocess.Popen(
        [sys.executable, "-c", CODE.format(path=sys.path, arguments=arguments)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # this process's output is its own
        pass_fds=(line.fileno(),),
        start_new_session=True,  # what is typed at a terminal goes to this process alone
    )


def _end(process: subprocess.Popen[bytes], line: socket.socket, folder: str) -> None:
    process.kill()
    process.wait()
    line.close()
    shutil.rmtree(folder, ignore_errors=True)
