"""Shell completion: the script that a shell loads, and the answers that the script requests at each TAB."""
