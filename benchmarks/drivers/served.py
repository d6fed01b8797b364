"""What `edda serve` serves: the database is EDDA_DB_URL, nobody waits for the events, all else is the default."""

from __future__ import annotations

from edda import EddaApp

app = EddaApp(service_name="bench")
