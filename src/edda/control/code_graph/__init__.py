"""The source of a workflow as a graph, and the recorded steps found in it."""
