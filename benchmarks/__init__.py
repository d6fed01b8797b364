"""Edda against its peers and against the bare database, in one run: `python -m benchmarks`.

Each system runs in processes of its own, driven over pipes (`drivers/`); this side provides fresh
databases, interleaves the systems, and reports. Modules that drivers import use the standard library only.
"""
