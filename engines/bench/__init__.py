"""Measures one model in several precisions and engines on this machine, one engine at a time."""
