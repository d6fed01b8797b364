"""Annotations to values and back."""
