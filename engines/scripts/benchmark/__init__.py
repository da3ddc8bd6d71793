"""What `dualgauge bench` runs with the Python of an engine environment; imports nothing of ours.

`load` asks an engine and times its answers, `baseline` serves a model with transformers alone.
"""
