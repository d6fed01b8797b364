"""Whether what people look at stays quick when there is a lot of it."""
