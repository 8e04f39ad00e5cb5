"""Measuring: what a pass costs, what memory can deliver, how fast answers come. Runs and records; prints nothing."""
