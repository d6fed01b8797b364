"""There is no way to call other processes on this database, so they look."""

from __future__ import annotations

from edda.storage.shared.polling import PollingNews


class MySQLNews(PollingNews):
    pass
