"""The page: what every run is doing, why it waits, and what can be done about it."""
