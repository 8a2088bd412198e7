"""Makes the kernel look at quotas of CPU time often. Run as a file: it needs nothing but the standard library.

    python metronome.py CORE STATE_FILE OWNER

The kernel charges a task's quota when the task leaves its core, or at a tick of the clock (4 ms at 250 Hz). So a rank
with a quota of 1 ms runs for 4 ms and then stands still for several periods: not a slow processor but a stuttering one.
A process of real-time priority that wakes for an instant every millisecond makes the task leave its core that often.
It ends by itself when the state file is gone, or its owner (0: none) is.
"""

import os
import signal
import sys

BEAT_S = 1e-3
_LOOK = 200
"""Beats between two looks at whether it is still wanted."""


def main(core: str, state: str, owner: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    alarm = {signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, alarm)
    signal.setitimer(signal.ITIMER_REAL, BEAT_S, BEAT_S)
    wait = signal.sigwait
    while os.path.exists(state) and int(owner) in (0, os.getppid()):
        for _ in range(_LOOK):
            wait(alarm)


if __name__ == "__main__":
    main(*sys.argv[1:])
