"""Watching acceptance in production: one definition for every engine, sequential tests, alarms with advice."""
