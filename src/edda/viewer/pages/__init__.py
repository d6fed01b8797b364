"""The pages, by subject."""
