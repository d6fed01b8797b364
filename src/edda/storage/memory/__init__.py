"""Storage in dictionaries, for tests."""
