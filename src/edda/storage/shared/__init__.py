"""Code that the SQL databases share; no driver is imported here."""
