"""Completion at the shell: the script that a shell loads, and the answers that it then asks for at each TAB."""
