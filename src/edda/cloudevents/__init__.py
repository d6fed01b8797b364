"""CloudEvents 1.0: validation, the JSON format, the HTTP binding, and webhook signatures. Without I/O and clock."""
