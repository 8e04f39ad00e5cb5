"""The exactness audit: whether an engine's answers follow its target's law, and keep to their parameters."""
