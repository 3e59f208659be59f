"""No child outlives its supervisor: `python -m protocol.lifeline FD MODULE ARGUMENT...`.

The supervisor holds the other end of the pipe FD and never writes to it. However the
supervisor ends, the kernel closes its end, and the end-of-file ends this process at once,
whatever its loop or its native code are doing. On Linux the kernel is also asked to
kill it, which helps where a thread holds the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 70


def watch(fd: int) -> None:
    """End this process as soon as the pipe `fd` is at its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait, args=(fd,), name="lifeline", daemon=True).start()


def _wait(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    finally:
        os._exit(_EXIT_ORPHANED)


def main() -> None:
    """Watch, then run the module as if it had been started itself."""
    fd, module, *arguments = sys.argv[1:]
    watch(int(fd))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
