"""One worker process: claims, take-over, heartbeat, watchdog, suspects, pruning."""
