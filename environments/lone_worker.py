"""`python -m environments.lone_worker url folder name`: one worker of the fault runs, in a process of its own."""

from __future__ import annotations

import sys

from faults.worker import Orders, live

from .trial import LEASE

if __name__ == "__main__":
    url, folder, name = sys.argv[1:]
    live(Orders(url, folder, name, lease=LEASE))
