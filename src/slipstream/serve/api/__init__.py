"""HTTP: one module for each endpoint, and what they share."""
