"""One run in memory: its loop, steps, waits, children, writes and end."""
