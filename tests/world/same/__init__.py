"""Small programs that run in the real Linux and in the simulated one, and must tell the same."""
