"""Queries and actions on runs, events and the outbox: the interface behind pages, JSON API and command line."""
