"""A byte stream to one command on a host, whoever carries it."""
