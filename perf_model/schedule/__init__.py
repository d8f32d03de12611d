"""The schedule of an update: the actions that it consists of, their order, and the waits between them."""
