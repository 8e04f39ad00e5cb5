"""The command line: one file a command, imported when it is called. ``main`` knows their names."""
