"""Events on their way out: the relayer and its sinks."""
