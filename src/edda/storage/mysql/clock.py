"""The database's clock; UTC whatever the time zone of the server or the session."""

NOW = b"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6))"
READ_CLOCK = b"SELECT " + NOW
