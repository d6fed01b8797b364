"""CloudEvents 1.0: what an event may be, and how it is written in JSON and in HTTP. Pure: bytes in, records out."""
