"""The policy language: facts in, decision out. Pure: no I/O, no clock, no globals."""
