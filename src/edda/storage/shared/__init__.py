"""What the SQL adapters share; no driver is imported here."""
