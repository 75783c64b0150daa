"""The commands of the command line; each module is imported when its command is called."""
