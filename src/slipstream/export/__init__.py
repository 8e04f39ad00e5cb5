"""Handing a measured plan to other engines: launch commands, config files, Kubernetes objects."""
