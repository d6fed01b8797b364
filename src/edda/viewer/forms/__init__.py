"""Forms made from JSON schemas."""
