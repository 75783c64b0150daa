"""A byte stream to one command on a host, independent of the transport."""
