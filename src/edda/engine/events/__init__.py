"""Events on their way in: ingest, match paths, staged events."""
