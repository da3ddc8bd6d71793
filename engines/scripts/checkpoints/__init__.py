"""Runs inside an engine's environment, never in Dualgauge's own: makes and measures checkpoints with torch.

Started as `python -m checkpoints.<module>` with this folder's parent on PYTHONPATH, so that nothing else of
Dualgauge meets the engine's packages.
"""
