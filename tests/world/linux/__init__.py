"""A Linux in one thread: its calls, processes, files and time, and the standard library on top of it."""
