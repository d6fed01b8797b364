"""What is done to a system, from the outside: a module per scenario, a function that gives its figures."""
