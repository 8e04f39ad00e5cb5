"""``slipstream serve``: an engine behind HTTP."""
