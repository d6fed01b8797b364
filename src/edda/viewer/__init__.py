"""The web pages: runs, events, workers, and actions on them."""
